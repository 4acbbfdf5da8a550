"""Steps that await copies on the simulated device, and what each mode does to times to the first token."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from pathlib import Path

import pytest
from manylora_lab.pricing.cold import NO_GATES, CpuRates, GateLines, fit_cpu, gate_lines
from manylora_lab.pricing.costs import DeviceCosts
from manylora_lab.pricing.profile import CpuPoint, GatePoint, load_profile, save_profile
from manylora_lab.pricing.shapes import ATTENTION_MODULES, shape_named
from manylora_lab.sim.analytical import AnalyticalCosts
from manylora_lab.sim.cold import NOTHING_COLD, ColdCosts, assumed_cold, measured_cold
from manylora_lab.sim.device import SimulatedDevice
from manylora_lab.sim.hardware import HARDWARE
from manylora_lab.sim.replay import Replay
from manylora_lab.sim.shipped import find_profile
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest

from manylora.config.cold_start import ColdStartConfig
from manylora.config.declaring import ConfigError
from manylora.config.policy import PolicyConfig
from manylora.protocol.commands import Await, CpuRows, ReadAdapter, RunStep, SequenceStart, StepRow, SwapPages
from manylora.protocol.events import StepDone
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


def test_what_gates_cost_is_paid_once_by_the_step_that_awaits() -> None:
    """The command's part only where the copy is commanded with the step; nothing by a step that awaits nothing."""
    gates = GateLines(issue=(0.001, 0.002 / PAGE_BYTES), step=(0.01, 0.0))

    def begun(is_before: bool, awaits: tuple[Await, ...], gates: GateLines) -> tuple[float, float]:
        cold = dataclasses.replace(NOTHING_COLD, gates=gates)
        device = SimulatedDevice(COSTS, PAGE_BYTES, {1: 4}, cold=cold)
        pairs = tuple((i, i) for i in range(4))
        device.obey(SwapPages(1, True, pairs, 1, 8), 0.0 if is_before else 1.0)
        found = device.obey(RunStep(1, (START,), (StepRow(1, 0, 3, 1),), 0, awaits), 1.0)
        assert found is not None
        assert isinstance(found[1], StepDone)
        return found[0], found[1].device_s - found[1].stall_s

    awaits = (Await(1, (1,)),)
    for is_before, issue_s in ((True, 0.0), (False, 0.001 + 4 * 0.002)):
        end_s, own_s = begun(is_before, awaits, gates)
        free_end_s, free_s = begun(is_before, awaits, NO_GATES)
        assert own_s == pytest.approx(free_s + 0.01)
        hidden_s = 0.004 / 8 * (not is_before)  # the copy's first group lands while its command is paid for
        assert end_s == pytest.approx(free_end_s + 0.01 + issue_s - hidden_s)
        assert begun(is_before, (), gates) == begun(is_before, (), NO_GATES)


def test_gates_of_a_profile_are_lines_over_bytes(tmp_path: Path) -> None:
    """Kept in the file; a profile without them prices gates at nothing."""
    profile = find_profile("h200-llama-2-7b")
    assert gate_lines(profile) == NO_GATES
    points = tuple(GatePoint(size, 1e-4 + 1e-10 * size, 3e-4) for size in (2**20, 2**21, 2**23))
    save_profile(dataclasses.replace(profile, gates=points), tmp_path / "gates.json")
    found = gate_lines(load_profile(tmp_path / "gates.json"))
    assert found.issue == pytest.approx((1e-4, 1e-10), rel=1e-3)
    assert found.step == pytest.approx((3e-4, 0.0), rel=1e-3)
    with pytest.raises(ConfigError, match="seconds must be more than 0"):
        GatePoint(1, 0.0, 0.0)


def test_merging_and_awaiting_do_not_go_together() -> None:
    from manylora.config.merging import MergeConfig

    config = PolicyConfig(8, 4, 20, 1, 8)
    with pytest.raises(ConfigError, match="--cold-start block does not go with --merge merged"):
        dataclasses.replace(config, cold_start=ColdStartConfig("block"), merge=MergeConfig("merged"))


# ---------------------------------------------------------------- rows of the CPU

RATES = CpuRates(step_s=0.001, byte_s=0.0, token_byte_s=0.001 / PAGE_BYTES, slice_tokens=1)
COLD = ColdCosts(RATES, num_workers=4, cores=16, beside=0.5, result_token_bytes=PAGE_BYTES)


def served(num_pages: int, cold: ColdCosts = COLD, reads: int = 0) -> tuple[SimulatedDevice, float, StepDone]:
    """A step of 3 tokens whose adapter the CPU serves: the device, when it ends, and what it says."""
    device = SimulatedDevice(COSTS, PAGE_BYTES, {1: num_pages, 2: 1}, cold=cold)
    for _ in range(reads):
        device.obey(ReadAdapter(2, (0,), "host"), 0.0)
    pairs = tuple((i, i) for i in range(num_pages))
    device.obey(SwapPages(1, True, pairs, 1, 8), 0.0)
    cpu = (CpuRows(1, (1,)),)
    answer = device.obey(RunStep(1, (START,), (StepRow(1, 0, 3, 1),), cpu=cpu), 0.0)
    assert answer is not None
    assert isinstance(answer[1], StepDone)
    return device, answer[0], answer[1]


def test_the_cpu_waits_for_no_copy() -> None:
    """Three workers have a token each: a page's product takes 1 ms; the step hides half of its own 8."""
    _, end_s, done = served(4)
    own_s = done.device_s - done.stall_s
    assert done.cpu_s == pytest.approx(0.004)
    assert done.cpu_workers == 4
    # Results, 3 MiB, take turns with the copy, which has 4.
    assert done.stall_s == pytest.approx(0.001 + 0.004 + 2 * 0.003 - 0.5 * own_s)
    assert end_s == pytest.approx(own_s + done.stall_s)
    _, _, slow = served(4000)
    assert slow.stall_s - done.stall_s == pytest.approx(3.996, rel=0.01), "more bytes, whatever the copy does"


def test_cores_are_shared_with_reads_and_bounded() -> None:
    few = dataclasses.replace(COLD, num_workers=1)
    assert served(4, few)[2].cpu_s == pytest.approx(3 * 0.004)
    small = dataclasses.replace(COLD, cores=4)
    assert served(4, small)[2].cpu_s == pytest.approx(0.004)
    assert served(4, small, reads=2)[2].cpu_s == pytest.approx(3 * 0.004), "one core is left"


def test_results_hold_up_the_copies_after_them() -> None:
    device, _, _ = served(4)
    after = device.obey(SwapPages(2, True, ((0, 9),), None, 8), 0.0)
    assert after is not None
    assert after[0] == pytest.approx(0.004 + 0.003 + 0.001)


def test_a_short_prompt_over_a_slow_link() -> None:
    """Every request has an adapter of its own, of rank 64; the CPU answers before its copy has landed. ``auto``
    begins layer by layer where that is sooner."""
    ttft_s = {}
    for mode in ("wait", "layerwise", "cpu", "auto"):
        replay = short_prompts(mode)
        ttft_s[mode] = statistics.fmean(outcome.ttft_s for outcome in replay.outcomes)
    assert ttft_s["cpu"] < 0.9 * ttft_s["layerwise"] < ttft_s["wait"]
    assert ttft_s["layerwise"] <= ttft_s["auto"] < ttft_s["wait"], (
        "it waits until it has seen what copies take"
    )
    counters = replay.report().counters
    assert counters.cold_starts.get("layerwise/host", 0) > 5
    # Of those that are asked for at once, to be warm, reads take turns that nobody foresees.
    before = replay.counters_at_start
    took_s = counters.cold_answer_s - before.cold_answer_s
    assert counters.cold_answer_expected_s - before.cold_answer_expected_s == pytest.approx(took_s, rel=0.25)


def short_prompts(mode: str) -> Replay:
    shape = shape_named("llama-2-7b")
    requests = tuple(StreamRequest(1.0 * n, n, n, 0, (Piece(n, 16),), 2) for n in range(20))
    stream = Stream("cold", requests, (64,) * 20)
    costs = AnalyticalCosts(shape, HARDWARE["a10"])
    cold = assumed_cold(shape, ATTENTION_MODULES, HARDWARE["a10"])
    page_bytes = shape.page_bytes(16)
    pages = [shape.adapter_pages(64, 16)] * 20
    config = PolicyConfig(
        2 * pages[0] + 64, 16, 200, 8, 512, 20 * pages[0], page_bytes,
        cold_start=ColdStartConfig(mode, num_workers=8 if mode == "cpu" else 0),
    )  # fmt: skip
    cold = dataclasses.replace(cold, num_workers=config.cold_start.num_workers)
    replay = Replay(stream, config, costs, pages, copy_limit=10**9, cold=cold)
    replay.run()
    return replay


def test_cpu_lines_are_found_again_and_older_profiles_have_none() -> None:
    points = [
        CpuPoint(tokens, size, workers, 2e-5 + size * (1e-10 + -(-tokens // workers) * 2e-12), place % 4 == 3)
        for place, (tokens, size, workers) in enumerate(
            itertools.product((4, 16, 64, 256), (10**6, 10**7), (1, 4))
        )
    ]
    line = fit_cpu(points)
    assert (line.fixed_s, line.byte_s, line.token_byte_s) == pytest.approx((2e-5, 1e-10, 2e-12), rel=1e-3)
    assert line.held_out.mean < 0.01
    old = find_profile("h200-llama-2-7b")
    assert measured_cold(old) is None
    new = dataclasses.replace(
        old, cpu_products=tuple(points), handover_s=1e-5, num_products=128, cores=16,
    )  # fmt: skip
    cold = measured_cold(new)
    assert cold is not None
    assert cold.rates.step_s == pytest.approx(128 * 3e-5, rel=1e-3)
    assert cold.cores == 16
