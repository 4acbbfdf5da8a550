"""Costs by assumed rates and by arithmetic: against numbers worked out by hand, and never less for more."""

from __future__ import annotations

import itertools

import pytest

from manylora.config import ConfigError
from manylora.sim.analytical import AnalyticalCosts
from manylora.sim.costs import DeviceCosts, StepCosts, StepWork, prefill_pairs
from manylora.sim.hardware import HARDWARE, Hardware, hardware_named
from manylora.sim.shapes import ALL_MODULES, SHAPES, ModelShape, shape_named

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


def test_a_7b_model_on_an_h200_takes_about_what_was_measured() -> None:
    # docs/results/h200.md: 64 requests of 128 to 384 positions, a mean step of 9.6 ms with some prefill.
    costs = AnalyticalCosts(SHAPES["llama-2-7b"], hardware_named("h200"))
    assert costs.step_s(StepWork(64, 0, 64 * 256, 0)) == pytest.approx(9.6e-3, rel=0.15)
    # The same place: 64 adapters of ranks 8 to 64 on all modules make it 16.8 ms.
    adapters = 16 * sum(SHAPES["llama-2-7b"].adapter_bytes(rank, ALL_MODULES) for rank in (8, 16, 32, 64))
    assert costs.step_s(StepWork(64, 0, 64 * 256, adapters, 64)) == pytest.approx(16.8e-3, rel=0.15)
    # benchmarks/sensitivity.py assumes 22 us a prefill token, from the same machine.
    assert (costs.step_s(StepWork(0, 4000, 4000, 0)) - 3e-3) / 4000 == pytest.approx(22e-6, rel=0.15)


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
        lambda: AnalyticalCosts(SMALL, ROUND, 3),
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
