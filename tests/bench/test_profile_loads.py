"""Loads that cover what an engine can take, and what a log of steps and reads comes to."""

from __future__ import annotations

import math
import random

import pytest
from manylora_lab.bench.profile_loads import (
    EngineCapacity,
    answer_time_s,
    busy_load,
    crowded_load,
    make_loads,
    overhead_points,
    read_points,
    step_points,
)
from manylora_lab.bench.step_log import LoggedStep, LoggedTransfer
from manylora_lab.pricing.costs import StepWork
from manylora_lab.pricing.profile import OverheadPoint, TransferPoint

ROOM = EngineCapacity(max_seqs=64, max_len=4096, num_tokens=20_000, num_adapters=48)


def step(took_s: float, gap_s: float | None = None, rows: int = 1, **work: int) -> LoggedStep:
    numbers = dict.fromkeys(StepWork._fields, 0) | {"num_decodes": rows, "num_kv_tokens": 100 * rows} | work
    return LoggedStep(0.0, took_s, gap_s, rows, 0, StepWork(**numbers), took_s)


@pytest.mark.parametrize(
    "room",
    [ROOM, EngineCapacity(4, 64, 200, 3), EngineCapacity(128, 8192, 100_000, 0), EngineCapacity(1, 3, 3, 1)],
)
@pytest.mark.parametrize("is_quick", [True, False])
def test_loads_fit_the_room_and_reach_its_ends(room: EngineCapacity, is_quick: bool) -> None:
    loads = make_loads(room, is_quick)
    assert loads == make_loads(room, is_quick)
    assert len(set(loads)) == len(loads)
    assert {load.clients for load in loads} >= {1}
    for load in [*loads, busy_load(room), crowded_load(room, 1_000)]:
        assert load.clients <= room.max_seqs
        assert load.adapters <= min(load.clients, room.num_adapters)
        assert load.context >= 1
        assert load.reply >= 1
        if load.turns == 1:
            assert load.context + load.reply < max(room.max_len, 4)
    if room is ROOM:
        assert max(load.clients for load in loads) == 64
        assert max(load.adapters for load in loads) == 48
        assert max(load.context for load in loads) > 3900
        assert {load.turns for load in loads} == {1, 3, 8}
        assert all(8 * load.context * load.clients < 20_000 for load in loads if load.turns == 8)


def test_like_steps_become_their_mean() -> None:
    steps = [step(0.010), step(0.012, num_kv_tokens=104), step(0.020, rows=9), step(0.014)]
    short, long = step_points(steps)
    assert (short.num_decodes, short.num_steps, short.seconds) == (1, 3, 0.012)
    assert short.num_kv_tokens == 101
    assert (long.num_decodes, long.num_steps, long.seconds) == (9, 1, 0.02)
    shuffled = list(steps)
    random.Random(1).shuffle(shuffled)
    assert step_points(shuffled) == [short, long]


def test_a_stall_is_no_step_time() -> None:
    (point,) = step_points([step(0.010), step(0.010), step(0.010), step(0.900)])
    assert (point.seconds, point.num_steps) == (0.010, 3)


def test_steps_after_idling_are_apart() -> None:
    cold = step(0.03, rows=2)._replace(idle_s=0.1)
    steps = [step(0.01), cold, step(0.012), cold._replace(idle_s=math.inf), step(0.01)._replace(idle_s=0.001)]
    (warm,) = step_points(steps)
    assert (warm.num_decodes, warm.num_steps) == (1, 3)
    (after,) = step_points(steps, is_cold=True)
    assert (after.num_decodes, after.num_steps, after.seconds, after.is_held_out) == (2, 2, 0.03, False)


def test_every_fourth_batch_is_held_out() -> None:
    points = step_points([step(0.01, rows=2**level) for level in range(12)])
    assert [point.is_held_out for point in points] == [False, False, False, True] * 3


def test_gaps_count_where_a_row_went_on() -> None:
    steps = [
        step(0.01),
        step(0.01, 1e-4),
        step(0.01, 3e-4),
        step(0.01, 8e-4, rows=5),
        step(0.01, None, rows=5),
    ]
    assert [(point.num_rows, point.seconds) for point in overhead_points(steps)] == [(1, 2e-4), (5, 8e-4)]


def test_gaps_are_apart_by_the_sequences_taken_up() -> None:
    new = [step(0.01, gap_s)._replace(num_new=1) for gap_s in (6e-4, 8e-4)]
    points = overhead_points([step(0.01, 1e-4), *new, step(0.01, 3e-4)])
    assert points == [OverheadPoint(1, 2e-4, 0), OverheadPoint(1, 7e-4, 1)]


def test_an_answer_comes_so_long_after_its_step() -> None:
    steps = [step(0.5)._replace(began_s=began_s) for began_s in (1.0, 2.0, 3.0)]
    assert answer_time_s(steps, [1.503, 2.501, 3.502]) == pytest.approx(2e-3)
    assert answer_time_s(steps, []) == 0.0


def test_reads_of_a_busy_engine_replace_those_alone() -> None:
    alone = [TransferPoint(True, 100, 0.1), TransferPoint(False, 100, 0.2), TransferPoint(False, 200, 0.3)]
    seen = [LoggedTransfer(0.0, 1.0, took_s, False, 100) for took_s in (0.5, 0.7)]
    assert read_points(seen, alone) == [TransferPoint(False, 100, 0.6), TransferPoint(True, 100, 0.1)]
    assert read_points([], alone) == alone
