"""A log of steps, copies and reads, and how it varies about the costs fitted to it."""

from __future__ import annotations

import random
import statistics

import pytest
from manylora_lab.bench.profile_spread import copy_drag, spread_of
from manylora_lab.bench.step_log import LoggedStep, LoggedTransfer, StepLog
from manylora_lab.pricing.costs import DeviceCosts, Spread, StepWork

COSTS = DeviceCosts(0.01, 0.0, 0.0, 0.0, copy_bytes_s=1e6, copy_base_s=0.0, read_bytes_s=1e6, read_base_s=0.0)


def step(took_s: float, began_s: float = 0.0, num_prefill: int = 0) -> LoggedStep:
    return LoggedStep(began_s, took_s, None, 1, 0, StepWork(1, num_prefill, 10), took_s)


def test_factors_are_of_the_mean_by_kind_of_step() -> None:
    source = random.Random(0)
    decodes = [step(0.02 * source.choice((0.5, 1.5))) for _ in range(1000)]
    prefills = [step(0.01 * source.uniform(0.9, 1.1), num_prefill=5) for _ in range(1000)]
    cold = [step(0.03)._replace(idle_s=1.0) for _ in range(1000)]
    stalls = [step(1.0) for _ in range(100)]
    found = spread_of(StepLog([*decodes, *cold, *prefills, *stalls]), StepLog(), COSTS)
    assert sorted(set(found.decodes)) == pytest.approx([0.5, 1.5], rel=0.05)
    assert statistics.fmean(found.decodes) == pytest.approx(1.0, rel=1e-3), "the level is the fit's"
    assert len(set(found.prefills)) == len(found.prefills)
    assert (min(found.prefills), max(found.prefills)) == pytest.approx((0.9, 1.1), abs=0.01)
    assert statistics.fmean(found.prefills) == pytest.approx(1.0, rel=1e-3)
    assert not found.reads
    assert not found.landings


def test_reads_are_compared_with_those_of_their_size() -> None:
    reads = [
        LoggedTransfer(0.0, 9.0, size * 1e-6 * factor, False, size)
        for size in (100, 900)
        for factor in (1, 3)
    ] * 10
    found = spread_of(StepLog(reads=reads), StepLog(), COSTS)
    assert sorted(set(found.reads)) == pytest.approx([0.5, 1.5])


def test_a_landing_is_of_a_copy_to_the_device_that_found_its_lane_free() -> None:
    copies = []
    for number in range(100):
        free = LoggedTransfer(number, 0.003, 0.001, True, 1000)
        queued = LoggedTransfer(number + 0.001, 0.5, 0.001, True, 1000)
        out = LoggedTransfer(number + 0.6, 0.3, 0.001, False, 1000)
        copies += [queued, out, free]
    found = spread_of(StepLog(), StepLog(copies=copies), COSTS)
    assert found.landings == pytest.approx([0.002] * len(found.landings))
    assert found.landings


@pytest.mark.parametrize("drag", [0.0, 0.7, 1.5])
def test_a_drag_is_what_a_second_of_copies_takes_of_the_steps_beside(drag: float) -> None:
    """An engine a fifth slower than its costs say; every third step begins with a copy of some size."""
    source = random.Random(1)
    steps, copies, now = [], [], 0.0
    for number in range(600):
        took_s = 0.012
        if number % 3 == 0:
            size = source.randint(500, 3000)
            copies.append(LoggedTransfer(now, 0.004, size * 1e-6, bool(source.randrange(2)), size))
            took_s += drag * size * 1e-6
        steps.append(step(took_s, now, num_prefill=source.randrange(2)))
        now += took_s + 0.001
    assert copy_drag(StepLog(steps, copies), COSTS) == pytest.approx(drag, abs=1e-3)
    # Of twenty there are too few.
    assert copy_drag(StepLog(steps[:40], copies), COSTS) == 0.0


def test_too_few_say_nothing() -> None:
    assert spread_of(StepLog([step(0.01)] * 19), StepLog(), COSTS) == Spread()
