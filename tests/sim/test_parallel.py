"""Costs of tensor parallelism: against numbers worked out by hand, S-LoRA's formula, and one card."""

from __future__ import annotations

import itertools

import pytest
from manylora_lab.pricing.costs import StepWork
from manylora_lab.pricing.shapes import ALL_MODULES, ATTENTION_MODULES, ModelShape, shape_named
from manylora_lab.sim.analytical import AnalyticalCosts
from manylora_lab.sim.hardware import Hardware, Interconnect, hardware_named
from manylora_lab.sim.parallel import ParallelCosts, adapter_pages, held_shape

from manylora.config.declaring import ConfigError
from manylora.config.sections import LORA_SHARDINGS, LoraSharding

LINK = Interconnect("a round one", 1e-5, 1e9)
CARD = Hardware("round", 10**9, 1e9, 1e12, 1e8, "made up", 1.0, 1.0, 1.0, 0.5, interconnect=LINK)
SMALL = ModelShape("small", 2, 8, 4, 2, 4, 16, 100, itemsize=2)
"""Modules of a layer: q 8x16, k 8x8, v 8x8, o 16x8, three of 8x16."""


def work_of(shape: ModelShape, rank: int, modules: tuple[str, ...], tokens: int = 3) -> StepWork:
    num_bytes = shape.adapter_bytes(rank, modules)
    return StepWork(tokens, 0, 10 * tokens, num_bytes, 1, 0, tokens * num_bytes)


def test_an_interconnect_by_hand() -> None:
    assert LINK.all_gather_s(4000, 4) == pytest.approx(1e-5 + 3e-6)
    assert LINK.all_reduce_s(4000, 4) == pytest.approx(1e-5 + 6e-6)
    assert LINK.all_reduce_s(4000, 1) == 1e-5


@pytest.mark.parametrize("cards", [2, 4])
def test_the_bases_exchanges(cards: int) -> None:
    """2 (N - 1) T h / N numbers after attention and the MLP of 2 layers, and of the embeddings: 5 exchanges."""
    held = held_shape(SMALL, cards)
    work = StepWork(3, 4, 30)
    alone = AnalyticalCosts(held, CARD, cards).step_s(work)
    exchanged = 5 * (1e-5 + 2 * (cards - 1) / cards * 7 * 8 * 2 / 1e9)
    assert ParallelCosts(SMALL, CARD, cards).step_s(work) - alone == pytest.approx(exchanged)


@pytest.mark.parametrize(
    ("modules", "factor", "exchanges"),
    [(ATTENTION_MODULES, 5, 2), (ALL_MODULES, 9, 4), (("down_proj",), 2, 1)],
)
@pytest.mark.parametrize("rank", [1, 8, 33])
def test_sharded_adapters_exchange_what_s_lora_says(
    modules: tuple[str, ...], factor: int, exchanges: int, rank: int
) -> None:
    """§6.2: 5 (N - 1) T r / N numbers a layer for q, k, v and o; 9 for all seven; one exchange a group."""
    cards, tokens = 2, 3
    work = work_of(SMALL, rank, modules, tokens)
    costs = ParallelCosts(SMALL, CARD, cards, modules)
    silent = ParallelCosts(SMALL, CARD, cards, modules, lora_communicates=False)
    numbers = factor * (cards - 1) * tokens * rank / cards
    expected = SMALL.layers * (exchanges * LINK.base_s + numbers * SMALL.itemsize / LINK.bytes_s)
    assert costs.step_s(work) - silent.step_s(work) == pytest.approx(expected)
    assert ParallelCosts(SMALL, CARD, cards, modules, "replicated").step_s(work) == silent.step_s(work)
    base = work._replace(adapter_bytes=0, num_adapters=0, adapter_token_bytes=0)
    assert costs.step_s(base) == silent.step_s(base)


def test_one_card_exchanges_nothing() -> None:
    work = work_of(SMALL, 8, ATTENTION_MODULES)
    assert ParallelCosts(SMALL, CARD, 1).step_s(work) == AnalyticalCosts(SMALL, CARD).step_s(work)
    assert held_shape(SMALL, 1) == SMALL


def test_keys_and_values_lie_on_several_cards_where_their_heads_are_fewer() -> None:
    four = held_shape(SMALL, 4)
    assert four.kv_heads == 4
    assert four.kv_token_bytes == 2 * SMALL.kv_token_bytes
    # k and v, of 8 x 8 each, are held twice.
    assert four.layer_parameters - SMALL.layer_parameters == 2 * 2 * 64
    assert ParallelCosts(SMALL, CARD, 4).pool_bytes() == int(0.9 * 4e9) - four.weight_bytes


def test_heads_that_cannot_be_shared_out_are_refused_with_what_works() -> None:
    with pytest.raises(ConfigError, match="shared by 1, 2, 4, not by 3"):
        held_shape(SMALL, 3)
    with pytest.raises(ConfigError, match="shared by 1, 2, 4, 13, 26, 52, not by 8"):
        held_shape(shape_named("llama-30b"), 8)
    with pytest.raises(ConfigError, match="is not described"):
        ParallelCosts(shape_named("llama-2-7b"), hardware_named("fastlibra-npu"), 2)
    for base_s, bytes_s in ((-1.0, 1.0), (0.0, 0.0)):
        with pytest.raises(ConfigError):
            Interconnect("x", base_s, bytes_s)


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3-8b", "llama-2-70b"])
def test_pages_of_an_adapter(name: str) -> None:
    """Sharded: as on one card, where no head is held twice. Replicated: by hand, of q, k, v and o at rank 16."""
    shape = shape_named(name)
    for rank, modules, cards in itertools.product((8, 64), (ATTENTION_MODULES, ALL_MODULES), (1, 2, 4)):
        alone = shape.adapter_pages(rank, 16, modules)
        assert adapter_pages(shape, cards, "sharded", rank, 16, modules) == alone
        assert adapter_pages(shape, cards, "replicated", rank, 16, modules) >= alone
    h, q, kv = shape.hidden, shape.heads * 128, shape.kv_heads * 128
    held_by_two = 16 * shape.layers * 2 * (3 * 2 * h + q + 2 * kv + q + 2 * h)
    found = adapter_pages(shape, 2, "replicated", 16, 16, ATTENTION_MODULES)
    assert found == -(-held_by_two // shape.page_bytes(16))


@pytest.mark.parametrize("sharding", LORA_SHARDINGS)
def test_more_never_takes_less_and_more_cards_take_less(sharding: LoraSharding) -> None:
    shape, card = shape_named("llama-2-70b"), hardware_named("a100-80")
    loads = [(1, 0, 8), (4, 0, 64), (4, 50, 64, 0, 0, 1000), (4, 50, 64, 10**8, 1, 1000, 54 * 10**8)]
    for cards in (2, 4, 8):
        seconds = [
            ParallelCosts(shape, card, cards, sharding=sharding).step_s(StepWork(*load)) for load in loads
        ]
        assert seconds == sorted(seconds)
    long = StepWork(8, 2000, 40000, 10**8, 1, 10**6, 2008 * 10**8)
    taken = [ParallelCosts(shape, card, cards, sharding=sharding).step_s(long) for cards in (1, 2, 4, 8)]
    assert taken == sorted(taken, reverse=True)
    # Less than ideally: exchanges stay.
    assert taken[1] > AnalyticalCosts(shape, card, 2).step_s(long)
