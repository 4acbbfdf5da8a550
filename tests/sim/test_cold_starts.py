"""Steps that await copies on the simulated device, and what each mode does to times to the first token."""

from __future__ import annotations

import dataclasses

import pytest
from manylora_lab.sim.device import SimulatedDevice

from manylora.config import ColdStartConfig, PolicyConfig
from manylora.pricing.costs import DeviceCosts
from manylora.protocol import Await, RunStep, SequenceStart, StepRow, SwapPages
from manylora.types import SamplingParams

PAGE_BYTES = 2**20
COSTS = DeviceCosts(step_base_s=0.008, copy_base_s=0.0, copy_bytes_s=PAGE_BYTES / 0.001)
START = SequenceStart(1, 0, 1, (1, 2, 3), 3, 0, (0,), SamplingParams(max_tokens=2), ())


def ended(num_pages: int, groups: int, copy_limit: int | None = None) -> tuple[float, float, float]:
    """A copy and a step that awaits it: when either ends, and how long the step stood still."""
    device = SimulatedDevice(COSTS, PAGE_BYTES, {1: num_pages}, copy_limit=copy_limit)
    copy = device.obey(SwapPages(1, True, tuple((i, i) for i in range(num_pages)), 1, groups), 0.0)
    step = device.obey(RunStep(1, (START,), (StepRow(1, 0, 3, 1),), 0, (Await(1, (1,)),)), 0.0)
    assert copy is not None
    assert step is not None
    return copy[0], step[0], step[1].stall_s  # type: ignore[union-attr]


def test_a_step_ends_by_the_groups_that_come_last() -> None:
    plain_s = ended(0, 8)[1]
    assert plain_s >= 0.008
    copy_s, step_s, stall_s = ended(4, 8)  # faster than the step: all but the first group is hidden
    assert copy_s == pytest.approx(0.004)
    assert stall_s == pytest.approx(0.004 / 8, rel=0.01)
    assert step_s == pytest.approx(plain_s + stall_s, rel=0.01)
    copy_s, step_s, stall_s = ended(64, 8)  # slower: the last group and its layers come after the copy
    assert step_s == pytest.approx(copy_s + (step_s - stall_s) / 8, rel=0.01)


def test_one_group_is_the_whole_copy() -> None:
    copy_s, step_s, stall_s = ended(4, 1)
    assert stall_s == pytest.approx(copy_s)
    assert step_s > copy_s


def test_a_limit_is_the_rate_of_copies() -> None:
    assert ended(4, 8, copy_limit=PAGE_BYTES * 100)[0] == pytest.approx(0.04)


def test_merging_and_awaiting_do_not_go_together() -> None:
    from manylora.config import ConfigError, MergeConfig

    config = PolicyConfig(8, 4, 20, 1, 8)
    with pytest.raises(ConfigError, match="--cold-start block does not go with --merge merged"):
        dataclasses.replace(config, cold_start=ColdStartConfig("block"), merge=MergeConfig("merged"))
