"""Costs by assumed rates and by arithmetic: against numbers worked out by hand, and never less for more."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from manylora_lab.pricing.costs import DeviceCosts, StepCosts, StepWork, prefill_pairs
from manylora_lab.pricing.shapes import ALL_MODULES, SHAPES, ModelShape, shape_named
from manylora_lab.sim.analytical import AnalyticalCosts
from manylora_lab.sim.hardware import HARDWARE, Hardware, hardware_named

from manylora.config.declaring import ConfigError

ROOT = Path(__file__).parents[2]
ROUND = Hardware("round", 10**9, 1e9, 1e12, 1e8, "made up", 1.0, 1.0, 1.0, 0.5)
"""A byte takes a nanosecond, a million FLOPs a microsecond, and a byte to the host 10 nanoseconds;
adapters are read at half the rate."""

SMALL = ModelShape("small", 2, 8, 2, 1, 4, 16, 100, itemsize=2)
"""Modules of a layer: q 8x8, k 8x4, v 8x4, o 8x8, three of 8x16: 576 numbers. KV: 2 x 2 x 4 numbers a token."""


def costs_of(cards: int = 1, hardware: Hardware = ROUND, shape: ModelShape = SMALL) -> AnalyticalCosts:
    return AnalyticalCosts(shape, hardware, cards, launch_s=0.0)


def test_the_shape_by_hand() -> None:
    assert SMALL.layer_parameters == 2 * 576
    assert SMALL.weight_bytes == 2 * (1152 + 2 * 800)
    assert SMALL.kv_token_bytes == 2 * 2 * 4 * 2
    assert SMALL.adapter_bytes(3) == 3 * 2 * ((8 + 8) + (8 + 4) + (8 + 4) + (8 + 8)) * 2
    assert SMALL.adapter_bytes(1, ["down_proj"]) == 2 * (16 + 8) * 2
    assert SMALL.adapter_pages(3, 4) == -(-672 // 128)


def test_a_decoding_step_is_bound_by_bytes() -> None:
    # Layers and logits' matrix 2 x (1152 + 800) bytes; 3 rows of 10 positions; an adapter of 672 bytes.
    expected = (3904 + 30 * 32 + 2 * 672) * 1e-9
    assert costs_of().step_s(StepWork(3, 0, 30, 672, 1, 0, 3 * 672)) == pytest.approx(expected)


def test_a_large_prefill_is_bound_by_arithmetic() -> None:
    tokens, pairs, adapter = 10**6, 5 * 10**6, 672
    flops = 2 * tokens * 1152 + 4 * 2 * 2 * 4 * pairs + 2 * tokens * (adapter / 2)
    expected = flops / 1e12 + tokens * 32e-9
    assert costs_of().step_s(
        StepWork(0, tokens, tokens, adapter, 1, pairs, tokens * adapter)
    ) == pytest.approx(expected)


def test_cards_share_all_but_the_launch() -> None:
    load = (3, 500, 4000, 672, 1, 1000, 503 * 672)
    alone = AnalyticalCosts(SMALL, ROUND, 1, launch_s=1e-3)
    four = AnalyticalCosts(SMALL, ROUND, 4, launch_s=1e-3)
    assert four.step_s(StepWork(*load)) - 1e-3 == pytest.approx((alone.step_s(StepWork(*load)) - 1e-3) / 4)
    assert four.pool_bytes() == int(0.9 * 4e9) - SMALL.weight_bytes
    assert four.copy_s(10**6) - 20e-6 == pytest.approx(10**6 * 1e-8 / 4)


def test_efficiencies_and_the_engines_time_count() -> None:
    half = Hardware("half", 10**9, 1e9, 1e12, 1e8, "made up", 0.5, 0.5, 0.5, 0.25)
    assert costs_of(hardware=half).step_s(StepWork(1, 0, 1, 0)) == pytest.approx(
        2 * costs_of().step_s(StepWork(1, 0, 1, 0))
    )
    assert costs_of(hardware=half).copy_s(0) == 20e-6
    assert AnalyticalCosts(SMALL, ROUND, between_s=1e-4).overhead_s(5, 1) == 1e-4
    assert costs_of().read_s(9 * 10**8) == pytest.approx(1e-3 + 1.0)


def recorded(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((ROOT / "docs" / "results" / name).read_text())
    return record


def decoding_steps() -> Iterator[tuple[str, dict[str, Any], StepWork]]:
    """Of the engine on an H200: the model, what was measured, what the step had to do."""
    record = recorded("h200_steps.json")
    for name, found in record["shapes"].items():
        for step in found["steps"]:
            batch, shape = step["batch"], SHAPES[name]
            adapters = {"none": 0, "distinct r16": batch, "identical r16": 1}[step["lora"]]
            adapter_bytes = adapters * shape.adapter_bytes(16, ALL_MODULES)
            yield name, step, StepWork(batch, 0, batch * record["context"], adapter_bytes, adapters)


def test_steps_on_an_h200_take_about_what_the_engine_took() -> None:
    """Captured ones, whose launch costs nothing; by the assumed efficiencies of the data sheet's rates."""
    for name, step, work in decoding_steps():
        costs = AnalyticalCosts(SHAPES[name], hardware_named("h200"), launch_s=0.0)
        assert costs.step_s(work) == pytest.approx(step["gpu_ms"] * 1e-3, rel=0.22), step


def test_bytes_over_the_measured_bandwidth_are_the_measured_floor() -> None:
    """Of the device that the steps ran on, by the bandwidth of the same command; no step took less."""
    bytes_s = recorded("h200_steps.json")["bandwidth_bytes_per_s"]
    device = Hardware("that device", 10**12, bytes_s, 1e18, 1e18, "its own bandwidth", 1.0, 1.0, 1.0, 1.0)
    for name, step, work in decoding_steps():
        floor_s = AnalyticalCosts(SHAPES[name], device, launch_s=0.0).step_s(work)
        assert floor_s == pytest.approx(step["floor_ms"] * 1e-3, rel=0.05), step
        assert floor_s < step["gpu_ms"] * 1e-3 < 1.5 * floor_s


def test_prompts_on_an_h200_take_about_what_the_engine_took() -> None:
    (run,) = [run for run in recorded("h200_aims.json")["runs"] if "prefill" in run]
    (found,) = [row for row in run["prefill"] if row["kind"] is None]
    costs = AnalyticalCosts(SHAPES["llama-2-7b"], hardware_named("h200"), launch_s=0.0)
    work = StepWork(0, 8000, 8000, 0, 0, 4 * prefill_pairs(0, 2000))
    assert 8000 / costs.step_s(work) == pytest.approx(found["tokens_per_s"], rel=0.2)


MORE = (
    (1, 0, 8, 0, 0, 0, 0), (4, 0, 32, 0, 0, 0, 0), (4, 0, 64, 0, 0, 0, 0), (4, 0, 64, 100, 1, 0, 400),
    (4, 50, 64, 100, 1, 0, 400), (4, 50, 64, 100, 1, 1000, 400), (4, 50, 64, 100, 1, 1000, 5400),
    (4, 500, 64, 100, 1, 1000, 5400), (4, 500, 64, 300, 3, 1000, 5400),
)  # fmt: skip


@pytest.mark.parametrize("costs", [DeviceCosts(), costs_of(), costs_of(2)], ids=["assumed", "one", "two"])
def test_more_never_takes_less(costs: StepCosts) -> None:
    seconds = [costs.step_s(StepWork(*load)) for load in MORE]
    assert all(less <= more for less, more in itertools.pairwise(seconds))
    assert seconds[0] < seconds[-1]
    assert costs.copy_s(10) < costs.copy_s(10**9)
    assert costs.read_s(10) < costs.read_s(10**9)
    assert costs.reads_at_once >= 1


@pytest.mark.parametrize("name", HARDWARE)
def test_every_shape_is_faster_on_more_cards(name: str) -> None:
    for shape in SHAPES.values():
        seconds = [
            costs_of(cards, hardware_named(name), shape).step_s(StepWork(8, 100, 4000, 0))
            for cards in (1, 2, 4)
        ]
        assert seconds == sorted(seconds, reverse=True)


def test_prefill_pairs() -> None:
    assert prefill_pairs(0, 3) == 1 + 2 + 3
    assert prefill_pairs(5, 2) == 6 + 7


def test_what_cannot_be_is_refused() -> None:
    for wrong in (
        lambda: AnalyticalCosts(SMALL, ROUND, 0),
        lambda: AnalyticalCosts(SMALL, ROUND, launch_s=-1.0),
        lambda: AnalyticalCosts(SMALL, ROUND, read_bytes_s=0.0),
        lambda: AnalyticalCosts(SHAPES["llama-3-70b"], hardware_named("a10")).pool_bytes(),
        lambda: costs_of().pool_bytes(1.5),
        lambda: shape_named("llama-9"),
        lambda: SMALL.adapter_bytes(0),
        lambda: SMALL.adapter_bytes(1, ["fc1"]),
    ):
        with pytest.raises(ConfigError):
            wrong()
