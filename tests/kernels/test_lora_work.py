"""The tables of a step's LoRA work, against an account of them block by block."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.kernels.ops import LoraLimits, LoraSegments
from manylora.kernels.shapes import PageShape, Projection, ProjectionGroup, adapter_geometry
from manylora.kernels.triton.lora_plan import (
    ROWS,
    SHORT,
    WORDS,
    BatchWork,
    GroupSize,
    LoraTileConfig,
    WorkBuffer,
    largest_sizes,
    runs_of,
    work_of,
)

GROUPS = (
    ProjectionGroup("qkv", (Projection("q", 64, 64), Projection("k", 64, 32), Projection("v", 64, 32))),
    ProjectionGroup("o", (Projection("o", 32, 64),)),
    ProjectionGroup("gate_up", (Projection("gate", 64, 96), Projection("up", 64, 96))),
)
PAGE = PageShape(layers=2, page_tokens=16, kv_heads=2, head_dim=16, itemsize=2)
GEOMETRY = adapter_geometry(PAGE, (GROUPS, GROUPS))
NUM_PROJECTIONS = len(GEOMETRY.projections)
RANKS = st.sampled_from((0, 1, 8, 16, 17, 64, 100))


@st.composite
def batches(draw: st.DrawFn) -> tuple[LoraSegments, int]:
    """Segments with gaps between them, and the batch's tokens."""
    start, length, records = [], [], []
    place = 0
    for gap, tokens in draw(
        st.lists(st.tuples(st.integers(0, 3), st.sampled_from((1, 1, 1, 2, 5, 17, 40))), max_size=5)
    ):
        start.append(place + gap)
        length.append(tokens)
        place += gap + tokens
        cells = st.integers(0, 10**6)
        ranks = [draw(RANKS) for _ in range(NUM_PROJECTIONS)]
        records.append([[draw(cells), draw(cells), rank] for rank in ranks])
    segments = LoraSegments(
        np.array(start, dtype=np.int32),
        np.array(length, dtype=np.int32),
        np.array(records, dtype=np.int64).reshape(-1, NUM_PROJECTIONS, 3),
        np.zeros((len(start), NUM_PROJECTIONS, 2), dtype=np.float32),
        torch.zeros(1, dtype=torch.int64),
    )
    return segments, max(1, place + draw(st.integers(0, 3)))


class Tables(NamedTuple):
    """A group's, as kernels find them, and the units that they take."""

    counts: list[int]
    tiles: list[list[int]]
    entries: list[list[int]]
    units: int


def tables_of(
    work: BatchWork,
    config: LoraTileConfig,
    sizes: list[GroupSize],
    num_segments: int,
    before: BatchWork | None = None,
) -> dict[str, Tables]:
    """Of a buffer that has held the work of ``before``."""
    buffer = WorkBuffer(GEOMETRY, config, sizes, num_segments, torch.device("cpu"))
    if before is not None:
        buffer.fill(before)
    buffer.fill(work)
    scales = work.segments.scales
    assert buffer.scales[: scales.size].tolist() == scales.reshape(-1).tolist()
    found = {}
    for (name, group), units in zip(buffer.groups.items(), work.units.tolist(), strict=True):
        counts = group.counts.tolist()
        tiles, entries = (table.view(-1, WORDS).tolist() for table in (group.tiles, group.entries))
        found[name] = Tables(counts, tiles[: counts[1]], entries[: counts[2]], units)
    return found


@settings(deadline=None)
@given(batches(), batches(), st.sampled_from((4, 16)), st.sampled_from((1, 4)), st.sampled_from((1, 2, 4)))
def test_every_block_has_a_place(
    batch: tuple[LoraSegments, int],
    other: tuple[LoraSegments, int],
    entry_tokens: int,
    entries_a_tile: int,
    blocks: int,
) -> None:
    """Whatever a buffer held before, and however much room it has."""
    segments, num_tokens = batch
    tile_tokens = entry_tokens * entries_a_tile
    config = dataclasses.replace(SHORT, tile_tokens=entry_tokens, expand_tokens=tile_tokens, blocks=blocks)

    def of(segments: LoraSegments, num_tokens: int) -> BatchWork:
        return work_of(segments, runs_of(segments, num_tokens), GEOMETRY, config)

    def most(segments: LoraSegments, num_tokens: int) -> list[GroupSize]:
        rank = max(1, int(segments.records[:, :, 2].max(initial=0)))
        limits = LoraLimits(num_tokens, max(1, len(segments.start)), rank, segments.cells)
        return largest_sizes(GEOMETRY, limits, config)

    work, before = of(segments, num_tokens), of(*other)
    exact, largest, count = work.sizes(), most(segments, num_tokens), len(segments.start)
    tables = tables_of(work, config, exact, count)
    assert tables_of(work, config, largest, max(1, count)) == tables
    room = [GroupSize(*map(max, *pair)) for pair in zip(largest, most(*other))]
    assert tables_of(work, config, room, max(1, count, len(other[0].start)), before) == tables
    first = 0
    for group in GROUPS:
        found = tables[group.name]
        check_tiles(found, segments, num_tokens, tile_tokens, first, len(group.projections))
        check_entries(found, GEOMETRY.cells(group.in_features), entry_tokens, blocks, segments, first)
        first += len(group.projections)
    for size, most_of_it in zip(exact, largest, strict=True):
        assert all(count <= room for count, room in zip(size, most_of_it))


@pytest.mark.parametrize("less", ["tiles", "entries", "units", "segments"])
def test_work_without_room_is_refused_before_anything_is_written(less: str) -> None:
    """A table that does not fit would overwrite the next one."""
    records = np.array([[[7, 9, 20]] * NUM_PROJECTIONS] * 2)
    start, length = np.array([0, 5], np.int32), np.array([4, 1], np.int32)
    scales = np.ones((2, NUM_PROJECTIONS, 2), np.float32)
    segments = LoraSegments(start, length, records, scales, torch.zeros(1, dtype=torch.int64))
    work = work_of(segments, runs_of(segments, 6), GEOMETRY, SHORT)
    sizes = work.sizes()
    if less != "segments":
        sizes[1] = sizes[1]._replace(**{less: getattr(sizes[1], less) - 1})
    buffer = WorkBuffer(GEOMETRY, SHORT, sizes, 2 - (less == "segments"), torch.device("cpu"))
    with pytest.raises(ValueError, match="room"):
        buffer.fill(work)
    assert not any(group.tiles.any() or group.entries.any() for group in buffer.groups.values())


def segment_of(segments: LoraSegments, token: int) -> int:
    """-1: the token has no adapter."""
    for i, (begin, length) in enumerate(zip(segments.start.tolist(), segments.length.tolist())):
        if begin <= token < begin + length:
            return i
    return -1


def check_tiles(
    found: Tables, segments: LoraSegments, num_tokens: int, tile_tokens: int, first: int, count: int
) -> None:
    adapted, all_tiles, entries, several = found.counts
    assert (all_tiles, entries) == (len(found.tiles), len(found.entries))
    covered: list[int] = []
    units: list[int] = []
    for number, tile in enumerate(found.tiles):
        begin, tokens, scale_row = tile[:3]
        assert 1 <= tokens <= tile_tokens
        (segment,) = {segment_of(segments, token) for token in range(begin, begin + tokens)}
        assert (segment >= 0) == (number < adapted)
        if segment >= 0:
            assert (tokens > 1) == (number < several)
        covered.extend(range(begin, begin + tokens))
        for p in range(count):
            rank, b_cell, unit = tile[4 + 3 * p : 7 + 3 * p]
            if segment < 0:
                assert rank == 0
                continue
            assert scale_row == segment * NUM_PROJECTIONS + first
            assert rank == segments.records[segment, first + p, 2]
            if rank:
                assert b_cell == segments.records[segment, first + p, 1]
                units.extend(range(unit, unit + -(-rank // ROWS) * tokens))
    assert sorted(covered) == list(range(num_tokens))
    assert units == list(range(found.units)), "each partial result has a place of its own, tile by tile"


def check_entries(
    found: Tables, a_cells: int, entry_tokens: int, blocks: int, segments: LoraSegments, first: int
) -> None:
    """Each unit is computed once, from the rank rows that its tile expects there."""
    wanted: dict[int, Any] = {}
    for tile in found.tiles:
        begin, tokens = tile[:2]
        segment = segment_of(segments, begin)
        for p in range(3):
            rank, _, unit = tile[4 + 3 * p : 7 + 3 * p]
            for number in range(-(-rank // ROWS)):
                a_cell = segments.records[segment, first + p, 0] + number * ROWS * a_cells
                rows = min(ROWS, rank - number * ROWS)
                for token in range(tokens):
                    wanted[unit + number * tokens + token] = (begin + token, rows, a_cell)
    computed = {}
    for entry in found.entries:
        begin, tokens = entry[:2]
        assert 1 <= tokens <= entry_tokens
        used = [entry[place : place + 3] for place in range(4, 16, 3) if entry[place]]
        assert 1 <= len(used) <= blocks
        for rows, a_cell, unit in used:
            for token in range(tokens):
                assert unit + token not in computed
                computed[unit + token] = (begin + token, rows, a_cell)
    assert computed == wanted
