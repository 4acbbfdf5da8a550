"""What the LoRA kernels are to do in a step, as tables that they read on the device.

Owns: how segments are cut into tiles and shrink's work into entries, and where partial results lie. The
tables have a capacity, and kernels read from them how much of it is in use, so a launch captured in a CUDA graph
serves every batch that fits. Launch sizes and block sizes are the launcher's.

A *tile* is a run of at most so many tokens with one adapter, or with none (expand may have to write zeros
there). Those with an adapter come first, of them those of several tokens. An *entry* of shrink is a tile, or as
many of its tokens as shrink takes at once, and up to BLOCKS blocks of ROWS rank rows each, of any projection of
a group.
Programs find all that they need in one record of WORDS int32:

    tile   0 first token  1 tokens  2 row of ``scales``  3 unused, then for each projection of the group
           4 rank  5 position of its first B cell  6 first unit
    entry  0 first token  1 tokens  2-3 unused, then for each block
           4 rank rows in it  5 position of its first A cell  6 its unit

A *unit* is ROWS float32 partial results of one token: the block's unit u and its token t own
``[(u + t) * ROWS, (u + t + 1) * ROWS)`` of each split's plane. ``lora_tables`` writes all this.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import numpy.typing as npt
import torch

from manylora.devices.staging import upload_buffers
from manylora.kernels.ops import LoraSegments
from manylora.kernels.shapes import AdapterGeometry, ProjectionGroup
from manylora.kernels.triton.lora_tables import (
    MOST_PROJECTIONS,
    ROWS,
    WORDS,
    count_work,
    write_runs,
    write_tables,
)

Ints = npt.NDArray[np.int64]
Table = npt.NDArray[np.int32]

BLOCKS = 4


@dataclasses.dataclass(frozen=True)
class GroupWork:
    """One group's tables. ``counts`` int32 [4]: tiles with an adapter, all tiles, entries, and how many of the
    tiles with an adapter have several tokens."""

    counts: torch.Tensor
    tiles: torch.Tensor
    entries: torch.Tensor
    size: GroupSize


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class BatchWork:
    """What is to be done in a batch, and how much room its tables take: ``counts`` as GroupWork has them and
    ``units``, by group. ``entry_tokens``: of which ``tile_tokens`` is a multiple. ``blocks``: how many blocks of
    rank rows share an entry (at most BLOCKS)."""

    segments: LoraSegments
    runs: Ints
    tile_tokens: int
    entry_tokens: int
    blocks: int
    counts: Table
    units: Ints

    def write(self, geometry: AdapterGeometry, words: Table, tile_places: Ints, entry_places: Ints) -> None:
        """The tables, into ``words``: of each group its tiles and its entries from these places on."""
        columns, a_cells = _columns(geometry.groups, geometry.cell_elements)
        write_tables(
            self.runs, self.segments.records, columns, a_cells, self.tile_tokens, self.entry_tokens, self.blocks,
            words, tile_places, entry_places,
        )  # fmt: skip


def runs_of(segments: LoraSegments, num_tokens: int) -> Ints:
    """int64 [3, n]: first token, tokens and segment of every run of tokens in the batch; segment -1: the base
    model's. Those of segments come first."""
    runs = np.empty((3, 2 * len(segments.start) + 1), dtype=np.int64)
    count = write_runs(segments.start, segments.length, num_tokens, runs)
    return np.ascontiguousarray(runs[:, :count])


def work_of(
    segments: LoraSegments,
    geometry: AdapterGeometry,
    runs: Ints,
    tile_tokens: int,
    entry_tokens: int,
    blocks: int,
) -> BatchWork:
    """What these runs of the batch take."""
    columns, _ = _columns(geometry.groups, geometry.cell_elements)
    counts, units = np.empty((len(columns), 4), dtype=np.int32), np.empty(len(columns), dtype=np.int64)
    count_work(runs, segments.records, columns, tile_tokens, entry_tokens, blocks, counts, units)
    return BatchWork(segments, runs, tile_tokens, entry_tokens, blocks, counts, units)


@functools.lru_cache(maxsize=8)
def _columns(groups: tuple[ProjectionGroup, ...], cell_elements: int) -> tuple[Ints, Ints]:
    """Of each group: the places of its projections among all, filled up with -1; and the cells that a row of A
    takes. Not to be changed."""
    columns = np.full((len(groups), MOST_PROJECTIONS), -1)
    first = 0
    for places, group in zip(columns, groups):
        places[: len(group.projections)] = range(first, first + len(group.projections))
        first += len(group.projections)
    return columns, np.array([-(-group.in_features // cell_elements) for group in groups])


@dataclasses.dataclass(frozen=True)
class GroupSize:
    """Records and units that one group's tables have room for."""

    tiles: int
    entries: int
    units: int


@dataclasses.dataclass(frozen=True)
class TableSizes:
    """Room of the tables: by group, and segments' rows of scales."""

    groups: dict[str, GroupSize]
    segments: int


def sizes_of(work: BatchWork, geometry: AdapterGeometry) -> TableSizes:
    """Exactly what this work takes."""
    room = zip(geometry.groups, work.counts.tolist(), work.units.tolist(), strict=True)
    groups = {
        group.name: GroupSize(max(1, tiles), max(1, entries), max(1, units))
        for group, (_, tiles, entries, _), units in room
    }
    return TableSizes(groups, len(work.segments.start))


def largest_sizes(
    geometry: AdapterGeometry,
    tokens: int,
    segments: int,
    rank: int,
    tile_tokens: int,
    entry_tokens: int,
) -> TableSizes:
    """Room for every batch of so many tokens and segments with adapters up to the rank.

    A run may begin a tile that is not full; runs are the segments and the gaps around them.
    """
    tiles = min(tokens, 2 * segments + 1 + tokens // tile_tokens)
    pieces = min(tokens, segments + tokens // entry_tokens)
    blocks = -(-rank // ROWS)
    groups = {}
    for group in geometry.groups:
        count = len(group.projections)
        groups[group.name] = GroupSize(tiles, pieces * count * blocks, tokens * count * blocks)
    return TableSizes(groups, segments)


class WorkBuffer:
    """Tables on a device, at addresses that do not change. ``fill`` overwrites them."""

    def __init__(self, geometry: AdapterGeometry, sizes: TableSizes, device: torch.device) -> None:
        self.geometry = geometry
        self.sizes = sizes
        lengths = [4 * len(geometry.groups)]
        for group in geometry.groups:
            if len(group.projections) > MOST_PROJECTIONS:
                raise ValueError(f"LoRA kernels take {MOST_PROJECTIONS} projections a group at most")
            size = sizes.groups[group.name]
            lengths += [size.tiles * WORDS, size.entries * WORDS]
        scales = sizes.segments * len(geometry.projections) * geometry.page.layers
        lengths.append(-(-scales // 4) * 4)
        ends = np.cumsum(lengths).tolist()
        places = list(zip([0, *ends], ends))
        self._scales_place = places[-1]
        self._tile_places, self._entry_places = (
            np.array([begin for begin, _ in places[part:-1:2]]) for part in (1, 2)
        )
        self._room = [sizes.groups[group.name] for group in geometry.groups]
        self._packed = torch.zeros(ends[-1], dtype=torch.int32, device=device)
        parts = [self._packed[begin:end] for begin, end in places]
        self.scales = parts[-1].view(torch.float32)
        self.groups = {
            group.name: GroupWork(
                counts=parts[0][4 * index : 4 * index + 4],
                tiles=parts[1 + 2 * index],
                entries=parts[2 + 2 * index],
                size=sizes.groups[group.name],
            )
            for index, group in enumerate(geometry.groups)
        }

    def fill(self, work: BatchWork) -> None:
        """Make this the tables' contents, by one asynchronous copy. Raises ValueError where it does not fit."""
        segments = work.segments
        for (_, tiles, entries, _), units, room in zip(work.counts.tolist(), work.units.tolist(), self._room):
            if tiles > room.tiles or entries > room.entries or units > room.units:
                taken = f"{tiles} tiles, {entries} entries and {units} units"
                raise ValueError(f"{taken} of LoRA work exceed the tables' room")
        scales = segments.scales.astype(np.float32, copy=False)
        begin, end = self._scales_place
        if scales.size > end - begin:
            raise ValueError(f"{len(scales)} segments of LoRA work exceed the tables' room")
        stage = upload_buffers(self._packed.device).stage(self._packed.numel())
        view = stage.numbers
        view[: work.counts.size] = work.counts.reshape(-1)
        work.write(self.geometry, view, self._tile_places, self._entry_places)
        if not scales.size:
            # Tiles without an adapter multiply their zeros by the first segment's: it must be a number.
            view[begin:end] = 0
        view[begin : begin + scales.size].reshape(scales.shape)[...] = scales.view(np.int32)
        stage.send(self._packed)
