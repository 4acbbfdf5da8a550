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
           4 rank  5 position of its first B cell  6 first unit  7 rank row at which the second scale begins
    entry  0 first token  1 tokens  2-3 unused, then for each block
           4 rank rows in it  5 position of its first A cell  6 its unit

A *unit* is ROWS float32 partial results of one token: the block's unit u and its token t own
``[(u + t) * ROWS, (u + t + 1) * ROWS)`` of each split's plane.
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

Ints = npt.NDArray[np.int64]
Table = npt.NDArray[np.int32]

WORDS = 16
ROWS = 16
BLOCKS = 4
MOST_PROJECTIONS = 3


@dataclasses.dataclass(frozen=True)
class GroupWork:
    """One group's tables. ``counts`` int32 [4]: tiles with an adapter, all tiles, entries, and how many of the
    tiles with an adapter have several tokens."""

    counts: torch.Tensor
    tiles: torch.Tensor
    entries: torch.Tensor
    size: GroupSize


@dataclasses.dataclass(frozen=True)
class GroupArrays:
    """The same on the host: ``tiles`` [n, WORDS], ``entries`` [m, WORDS]; ``units`` that they take."""

    counts: Table
    tiles: Table
    entries: Table
    units: int


def runs_of(segments: LoraSegments, num_tokens: int) -> tuple[Ints, Ints, Ints]:
    """(start, length, segment) of every run of tokens in the batch; segment -1: the base model's."""
    start = segments.start.astype(np.int64)
    end = start + segments.length
    gap_start = np.concatenate(([0], end))
    gap_length = np.concatenate((start, [num_tokens])) - gap_start
    keep = gap_length > 0
    return (
        np.concatenate((start, gap_start[keep])),
        np.concatenate((segments.length.astype(np.int64), gap_length[keep])),
        np.concatenate((np.arange(len(start)), np.full(int(keep.sum()), -1))),
    )


def work_arrays(
    segments: LoraSegments,
    geometry: AdapterGeometry,
    runs: tuple[Ints, Ints, Ints],
    tile_tokens: int,
    entry_tokens: int,
    blocks: int,
) -> dict[str, GroupArrays]:
    """Each group's tables for these runs.

    ``entry_tokens``: of which ``tile_tokens`` is a multiple. ``blocks``: how many blocks of rank rows share an
    entry (at most BLOCKS).
    """
    start, length, segment = _tiles(runs, tile_tokens)
    # All groups at once: [group, tile, projection]. Tiles without an adapter, and the projections that a group has
    # fewer than others, find a record of zeros at the end.
    columns, first, a_cells = _columns(geometry.groups, geometry.cell_elements)
    count, num_projections = segments.records.shape[:2]
    padded = np.zeros((count + 1, num_projections + 1, 4), dtype=np.int64)
    padded[:count, :num_projections] = segments.records
    records = padded.take(segment, axis=0).take(columns, axis=1).swapaxes(0, 1)
    rank = records[..., 2]
    per_projection = (rank + (ROWS - 1)) // ROWS
    # Blocks of rank rows, tile by tile and projection by projection.
    units = per_projection * length[:, None]
    last_unit = units.reshape(len(columns), -1).cumsum(axis=1)
    first_unit = last_unit.reshape(units.shape) - units
    tiles = np.zeros((len(columns), len(start), WORDS), dtype=np.int32)
    tiles[:, :, 0], tiles[:, :, 1] = start, length
    tiles[:, :, 2] = np.maximum(segment, 0) * num_projections + first[:, None]
    words = tiles.reshape(len(columns), len(start), 1 + MOST_PROJECTIONS, 4)[:, :, 1:]
    words[..., 0], words[..., 1], words[..., 2] = rank, records[..., 1] * (rank > 0), first_unit
    words[..., 3] = records[..., 3]

    num_adapted = int(np.count_nonzero(segment >= 0))
    tile, inside = _parts(length[:num_adapted], entry_tokens)
    entries = _entries(
        start[tile] + inside,
        np.minimum(length[tile] - inside, entry_tokens),
        length[tile],
        records[:, tile],
        per_projection[:, tile],
        first_unit[:, tile] + inside[:, None],
        a_cells,
        blocks,
    )
    several = int(np.count_nonzero(length[:num_adapted] > 1))
    num_units = last_unit[:, -1].tolist() if len(start) else [0] * len(columns)
    return {
        group.name: GroupArrays(
            np.array([num_adapted, len(start), len(entries[i]), several], dtype=np.int32),
            tiles[i],
            entries[i],
            num_units[i],
        )
        for i, group in enumerate(geometry.groups)
    }


@functools.lru_cache(maxsize=8)
def _columns(groups: tuple[ProjectionGroup, ...], cell_elements: int) -> tuple[Ints, Ints, Ints]:
    """Of each group: the places of its projections among all, filled up with -1; the first of them; and the cells
    that a row of A takes. Not to be changed."""
    columns = np.full((len(groups), MOST_PROJECTIONS), -1)
    first = 0
    for places, group in zip(columns, groups):
        places[: len(group.projections)] = range(first, first + len(group.projections))
        first += len(group.projections)
    a_cells = np.array([-(-group.in_features // cell_elements) for group in groups])
    return columns, columns[:, 0], a_cells


def _parts(length: Ints, most: int) -> tuple[Ints, Ints]:
    """(which run, first place in it) of every part of at most ``most`` that runs of these lengths are cut into."""
    count = -(-length // most)
    run = np.arange(len(count)).repeat(count)
    return run, (np.arange(len(run)) - (count.cumsum() - count)[run]) * most


def _tiles(runs: tuple[Ints, Ints, Ints], tile_tokens: int) -> tuple[Ints, Ints, Ints]:
    """(start, length, segment) of every tile, in the tables' order."""
    run_start, run_length, run_segment = runs
    run, inside = _parts(run_length, tile_tokens)
    length = np.minimum(run_length[run] - inside, tile_tokens)
    segment = run_segment[run]
    order = np.argsort(2 * (segment < 0) + (length == 1), kind="stable")
    return (run_start[run] + inside)[order], length[order], segment[order]


def _entries(
    start: Ints,
    length: Ints,
    tile_length: Ints,
    records: Ints,
    per_projection: Ints,
    first_unit: Ints,
    a_cells: Ints,
    blocks: int,
) -> list[Table]:
    """Shrink's entries, by group: of each piece of a tile its blocks of rank rows, ``blocks`` side by side.

    The first three are by piece, the next three by group, piece and projection, ``a_cells`` by group.
    ``first_unit``: of a piece's first token's first block.
    """
    num_groups, num_pieces, num_projections = per_projection.shape
    # By block, and by the pair of a piece and a projection that it is of: all groups one after the other.
    count = per_projection.reshape(-1)
    pair = np.arange(len(count)).repeat(count)
    number = np.arange(len(pair)) - (count.cumsum() - count)[pair]
    piece = pair // num_projections
    per_piece = per_projection.sum(axis=2).reshape(-1)
    within = np.arange(len(pair)) - (per_piece.cumsum() - per_piece)[piece]
    of_piece = -(-per_piece // blocks)
    entry = (of_piece.cumsum() - of_piece)[piece] + within // blocks
    owner = np.arange(len(of_piece)).repeat(of_piece) % max(num_pieces, 1)
    entries = np.zeros((len(owner), WORDS), dtype=np.int32)
    entries[:, 0], entries[:, 1] = start[owner], length[owner]
    words, place = entries.reshape(-1), entry * WORDS + 4 + 3 * (within % blocks)
    words[place] = np.minimum(records[..., 2].reshape(-1)[pair] - number * ROWS, ROWS)
    row_cells = a_cells.repeat(num_pieces * num_projections)[pair]
    words[place + 1] = records[..., 0].reshape(-1)[pair] + number * ROWS * row_cells
    words[place + 2] = first_unit.reshape(-1)[pair] + number * tile_length[piece % max(num_pieces, 1)]
    ends = of_piece.reshape(num_groups, num_pieces).sum(axis=1).cumsum().tolist()
    return [entries[begin:end] for begin, end in zip([0, *ends], ends)]


@dataclasses.dataclass(frozen=True)
class GroupSize:
    """Records and units that one group's tables have room for."""

    tiles: int
    entries: int
    units: int


@dataclasses.dataclass(frozen=True)
class TableSizes:
    """Room of the tables: by group, and segments' rows of scales. ``num_scales``: of a projection, 1 where no
    record has the second."""

    groups: dict[str, GroupSize]
    segments: int
    num_scales: int


def sizes_of(arrays: dict[str, GroupArrays], segments: LoraSegments) -> TableSizes:
    """Exactly what these arrays take."""
    groups = {
        name: GroupSize(max(1, len(found.tiles)), max(1, len(found.entries)), max(1, found.units))
        for name, found in arrays.items()
    }
    return TableSizes(groups, len(segments.start), 2 if segments.has_second_scales else 1)


def largest_sizes(
    geometry: AdapterGeometry,
    tokens: int,
    segments: int,
    rank: int,
    tile_tokens: int,
    entry_tokens: int,
    num_scales: int = 1,
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
    return TableSizes(groups, segments, num_scales)


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
        scales = sizes.segments * len(geometry.projections) * sizes.num_scales * geometry.page.layers
        lengths.append(-(-scales // 4) * 4)
        ends = np.cumsum(lengths).tolist()
        self._places = list(zip([0, *ends], ends))
        self._packed = torch.zeros(ends[-1], dtype=torch.int32, device=device)
        parts = [self._packed[begin:end] for begin, end in self._places]
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

    def fill(self, segments: LoraSegments, arrays: dict[str, GroupArrays]) -> None:
        """Make these the tables' contents, by one asynchronous copy. Raises ValueError where they do not fit."""
        if segments.has_second_scales and self.sizes.num_scales == 1:
            raise ValueError("a LoRA plan for one scale a projection has no room for a second")
        stage = upload_buffers(self._packed.device).stage(self._packed.numel())
        view = stage.numbers
        for index, group in enumerate(self.geometry.groups):
            found = arrays[group.name]
            if found.units > self.sizes.groups[group.name].units:
                raise ValueError(f"{found.units} units of LoRA results exceed the tables' room")
            view[4 * index : 4 * index + 4] = found.counts
            self._place(view, 1 + 2 * index, found.tiles)
            self._place(view, 2 + 2 * index, found.entries)
        scales = segments.scales[:, :, : self.sizes.num_scales].astype(np.float32, copy=False)
        if not scales.size:
            # Tiles without an adapter multiply their zeros by the first segment's: it must be a number.
            view[slice(*self._places[-1])] = 0
        self._place(view, len(self._places) - 1, scales.view(np.int32))
        stage.send(self._packed)

    def _place(self, view: Table, part: int, table: Table) -> None:
        begin, end = self._places[part]
        if table.size > end - begin:
            raise ValueError(f"a LoRA table of {table.size} words exceeds its room of {end - begin}")
        view[begin : begin + table.size].reshape(table.shape)[...] = table
