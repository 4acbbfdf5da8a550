"""What is asked for ahead of products: the parts of weights that they begin with, each once; and where."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from manylora.kernels.triton.ahead import (
    TABLE,
    Ask,
    Early,
    Key,
    Place,
    WeightsAhead,
    asking,
    run_of,
    stored_asks,
)
from manylora.kernels.triton.products import BUCKETS, LinearConfig, Products

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MULTIPROCESSORS = 7
LINE_BYTES = 128


@triton.jit
def note_runs(ask, places, lengths, BLOCK: tl.constexpr):
    """What ``ask_ahead`` asks for, written down; grid (blocks,)."""
    _, runs, tile_rows, distance, inputs, run = ask
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place, length = run_of(item, runs, tile_rows, distance, inputs, run)
    tl.store(places + item, place)
    tl.store(lengths + item, length)


def asked(ask: Ask) -> list[tuple[int, int]]:
    """(place, length) of every run, in elements of the weight."""
    blocks = ask[1] // 16 + 2  # and more than there are, which must be empty
    places = torch.zeros(blocks * 16, dtype=torch.int64, device=DEVICE)
    lengths = torch.zeros(blocks * 16, dtype=torch.int32, device=DEVICE)
    note_runs[(blocks,)](ask, places, lengths, BLOCK=16)
    return sorted((place, n) for place, n in zip(places.tolist(), lengths.tolist()) if n)


def begun(config: LinearConfig | None, inputs: int, outputs: int) -> list[int]:
    """Where programs begin, by going through their steps one by one: of each row that they read first."""
    if config is None:
        return [row * inputs for row in range(outputs)]
    tile_steps = inputs // config.block_k
    steps = outputs // config.block_n * tile_steps
    share = -(-steps // (config.programs * MULTIPROCESSORS))
    found = []
    for begin in range(0, steps, share):
        tile, step = divmod(begin, tile_steps)
        rows = range(tile * config.block_n, (tile + 1) * config.block_n)
        found += [row * inputs + step * config.block_k for row in rows]
    return sorted(found)


def weight(outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(outputs, inputs, dtype=dtype, device=DEVICE)


def ahead_of(second: torch.Tensor, early: Early, config: LinearConfig | None = None) -> WeightsAhead:
    """With the first of two products just begun, the other's weight being ``second``; both are known."""
    shape = (16, second.shape[1], second.shape[0])
    made = Products({} if config is None else {shape: config}, MULTIPROCESSORS)
    ahead = WeightsAhead(made, {(False, shape): early})
    first = weight(32, 16)
    for passing in (first, second, first):
        ahead.begin(passing, is_adapted=False)
    return ahead


@pytest.mark.parametrize(
    "config",
    [None, LinearConfig(16, 64, 1, 4, 3), LinearConfig(32, 32, 3, 4, 3), LinearConfig(32, 32, 1, 4, 3)],
)
@pytest.mark.parametrize(("inputs", "outputs"), [(96, 64), (1024, 96), (192, 288)])
@pytest.mark.parametrize("num_bytes", [2**13, 2**16, 2**20])
def test_runs_are_what_the_products_programs_begin_with(
    config: LinearConfig | None, inputs: int, outputs: int, num_bytes: int
) -> None:
    second = weight(outputs, inputs)
    ask = ahead_of(second, Early("small", num_bytes), config).ask("small", weight(5, 16))
    assert ask is not None
    assert ask[0] is second
    assert all(number % 16 == 0 for number in ask[1:]), "or kernels are compiled again"
    runs = asked(ask)
    fits = config is None or (inputs % config.block_k == 0 and outputs % config.block_n == 0)
    if runs:
        assert [place for place, _ in runs] == begun(config if fits else None, inputs, outputs)
    size = 2 * sum(length for _, length in runs)
    assert size <= num_bytes
    assert runs or num_bytes < LINE_BYTES * ask[1]
    for place, length in runs:
        assert place // inputs == (place + length - 1) // inputs, "no run leaves its row"
        assert place * 2 % 16 == length * 2 % 16 == 0


def test_enough_bytes_are_the_whole_weight() -> None:
    ask = ahead_of(weight(64, 128), Early("small", 2**30)).ask("small", weight(5, 16))
    assert ask is not None
    assert asked(ask) == [(row * 128, 128) for row in range(64)]


def told(ahead: WeightsAhead, place: Place, tokens: int = 5) -> torch.Tensor | None:
    ask = ahead.ask(place, weight(tokens, 16))
    return ask[0] if ask is not None and asking(ask, 1) else None


def test_each_product_is_asked_for_after_the_one_before() -> None:
    """In the order in which they passed first; the first of all is never asked for."""
    weights = [weight(64, 128) for _ in range(4)]
    ahead = WeightsAhead(Products({}, 1), {(False, (16, 128, 64)): Early("small", 2**20)})
    for current in weights:
        ahead.begin(current, is_adapted=False)
        assert told(ahead, "small") is None, "what follows is not known yet"
    for current, following in zip(weights, [*weights[1:], None]):
        ahead.begin(current, is_adapted=False)
        assert told(ahead, "small") is following
        assert told(ahead, "attention") is told(ahead, "beside") is None
        assert told(ahead, "small", tokens=17) is None, "another bucket"
    # A step that leaves products out (of prompts, say) changes nothing.
    ahead.begin(weights[3], is_adapted=False)
    ahead.begin(weights[0], is_adapted=False)
    assert told(ahead, "small") is weights[1]


def test_adapters_between_two_products_have_choices_of_their_own() -> None:
    shape = (16, 128, 64)
    choices: dict[Key, Early] = {(False, shape): Early("small", 2**20), (True, shape): Early("beside", 2**20)}
    ahead = WeightsAhead(Products({}, 1), choices)
    first, second = weight(64, 128), weight(64, 128)
    for passing in (first, second):
        ahead.begin(passing, is_adapted=True)
    expected: list[tuple[bool, Place, Place]] = [(False, "small", "beside"), (True, "beside", "small")]
    for is_adapted, place, other in expected:
        ahead.begin(first, is_adapted)
        assert told(ahead, place) is second
        assert told(ahead, other) is None


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(weight(64, 128, torch.float32), id="float32"),
        pytest.param(weight(64, 256)[:, :128], id="strided"),
        pytest.param(weight(64, 120), id="rows-of-no-whole-lines"),
        pytest.param(weight(1, 64 * 128 + 1)[0, 1:].view(64, 128), id="unaligned"),
    ],
)
def test_weights_that_cannot_be_asked_for(second: torch.Tensor) -> None:
    assert told(ahead_of(second, Early("small", 2**20)), "small") is None


def test_without_choices_kernels_are_told_nothing() -> None:
    ahead = WeightsAhead(Products({}, 1))
    for passing in (weight(64, 128), weight(64, 128)):
        ahead.begin(passing, is_adapted=False)
    assert ahead.ask("small", weight(5, 16)) is None
    assert asking(None, 7) == 0


def test_kernels_are_told_alike_whether_there_is_something_to_ask_for_or_not() -> None:
    """They are compiled before the order of products is known, and not again when it is."""
    ahead = WeightsAhead(Products({}, 1), {(False, (16, 128, 64)): Early("small", 2**20)})
    x = weight(5, 16)
    for passing in (weight(64, 128), weight(64, 128)):
        before = ahead.ask("small", x)
        ahead.begin(passing, is_adapted=False)
        assert before is not None
        assert [type(part) for part in before] == [torch.Tensor, *[int] * 5]
        assert before[1] == 0
    assert ahead.ask("small", weight(BUCKETS[-1] + 1, 16)) is None


def test_the_stored_table(tmp_path: Path) -> None:
    row = {"adapted": True, "tokens": 32, "in": 64, "out": 96, "place": "beside", "num_bytes": 4096}
    path = tmp_path / "ahead.json"
    path.write_text(json.dumps({"Some GPU": [row]}))
    assert stored_asks("Some GPU", path) == {(True, (32, 64, 96)): Early("beside", 4096)}
    assert stored_asks("Another", path) == stored_asks("Some GPU", tmp_path / "missing") == {}


def test_the_shipped_table() -> None:
    """Of what exists, and never more than half of the cache."""
    names = json.loads(TABLE.read_text()) if TABLE.is_file() else {}
    for name in names:
        for (_, (tokens, _, _)), early in stored_asks(name).items():
            assert tokens in BUCKETS
            assert early.place in ("small", "attention", "beside")
            assert 0 < early.num_bytes <= 32 * 2**20
