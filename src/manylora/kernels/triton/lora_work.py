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
           4 rank  5 position of its first B cell  6 first unit  7 unused
    entry  0 first token  1 tokens  2-3 unused, then for each block
           4 rank rows in it  5 position of its first A cell  6 its unit

A *unit* is ROWS float32 partial results of one token: the block's unit u and its token t own
``[(u + t) * ROWS, (u + t + 1) * ROWS)`` of each split's plane.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from manylora.kernels.ops import LoraSegments
from manylora.kernels.shapes import AdapterGeometry

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
    adapted = segment >= 0
    arrays = {}
    first = 0
    for group in geometry.groups:
        last = first + len(group.projections)
        records = np.zeros((len(start), last - first, 3), dtype=np.int64)
        records[adapted] = segments.records[segment[adapted], first:last]
        a_cells = geometry.cells(group.in_features)
        tiles = np.zeros((len(start), WORDS), dtype=np.int32)
        tiles[:, 0], tiles[:, 1] = start, length
        tiles[:, 2] = np.maximum(segment, 0) * len(geometry.projections) + first
        # Blocks of rank rows, tile by tile and projection by projection.
        per_projection = -(-records[:, :, 2] // ROWS)
        units = per_projection * length[:, None]
        first_unit = np.cumsum(units.reshape(-1)).reshape(units.shape) - units
        for p in range(last - first):
            tiles[:, 4 + 4 * p] = records[:, p, 2]
            tiles[:, 5 + 4 * p] = np.where(records[:, p, 2] > 0, records[:, p, 1], 0)
            tiles[:, 6 + 4 * p] = first_unit[:, p]
        tile, inside = _parts(length, entry_tokens)
        entries = _entries(
            start[tile] + inside,
            np.minimum(length[tile] - inside, entry_tokens),
            length[tile],
            records[tile],
            per_projection[tile],
            first_unit[tile] + inside[:, None],
            a_cells,
            blocks,
        )
        several = int((adapted & (length > 1)).sum())
        counts = np.array([int(adapted.sum()), len(tiles), len(entries), several], dtype=np.int32)
        arrays[group.name] = GroupArrays(counts, tiles, entries, int(units.sum()))
        first = last
    return arrays


def _parts(length: Ints, most: int) -> tuple[Ints, Ints]:
    """(which run, first place in it) of every part of at most ``most`` that runs of these lengths are cut into."""
    count = -(-length // most)
    run = np.repeat(np.arange(len(count)), count)
    return run, (np.arange(len(run)) - np.repeat(np.cumsum(count) - count, count)) * most


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
    a_cells: int,
    blocks: int,
) -> Table:
    """Shrink's entries: of each piece of a tile its blocks of rank rows, ``blocks`` of them side by side.

    All arguments but the last two are by piece. ``first_unit``: of its first token's first block.
    """
    per_piece = per_projection.sum(1)
    piece = np.repeat(np.arange(len(start)), per_piece)
    pair = np.repeat(np.arange(per_projection.size), per_projection.reshape(-1))
    flat_count = per_projection.reshape(-1)
    number = np.arange(len(pair)) - np.repeat(np.cumsum(flat_count) - flat_count, flat_count)
    rank, first_cell = records[:, :, 2].reshape(-1)[pair], records[:, :, 0].reshape(-1)[pair]
    within = np.arange(len(piece)) - np.repeat(np.cumsum(per_piece) - per_piece, per_piece)
    entries_of_piece = -(-per_piece // blocks)
    entry = (np.cumsum(entries_of_piece) - entries_of_piece)[piece] + within // blocks
    place = 4 + 3 * (within % blocks)
    entries = np.zeros((int(entries_of_piece.sum()), WORDS), dtype=np.int32)
    entries[entry, 0], entries[entry, 1] = start[piece], length[piece]
    entries[entry, place] = np.minimum(rank - number * ROWS, ROWS)
    entries[entry, place + 1] = first_cell + number * ROWS * a_cells
    entries[entry, place + 2] = first_unit.reshape(-1)[pair] + number * tile_length[piece]
    return entries


@dataclasses.dataclass(frozen=True)
class GroupSize:
    """Records and units that one group's tables have room for."""

    tiles: int
    entries: int
    units: int


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Room of the tables: by group, and segments' rows of scales."""

    groups: dict[str, GroupSize]
    segments: int


def sizes_of(arrays: dict[str, GroupArrays], segments: LoraSegments) -> Sizes:
    """Exactly what these arrays take."""
    groups = {
        name: GroupSize(max(1, len(found.tiles)), max(1, len(found.entries)), max(1, found.units))
        for name, found in arrays.items()
    }
    return Sizes(groups, len(segments.start))


def largest_sizes(
    geometry: AdapterGeometry, tokens: int, segments: int, rank: int, tile_tokens: int, entry_tokens: int
) -> Sizes:
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
    return Sizes(groups, segments)


class WorkBuffer:
    """Tables on a device, at addresses that do not change. ``fill`` overwrites them."""

    def __init__(self, geometry: AdapterGeometry, sizes: Sizes, device: torch.device) -> None:
        self.geometry = geometry
        self.sizes = sizes
        self._device = device
        lengths = [4 * len(geometry.groups)]
        for group in geometry.groups:
            if len(group.projections) > MOST_PROJECTIONS:
                raise ValueError(f"LoRA kernels take {MOST_PROJECTIONS} projections a group at most")
            size = sizes.groups[group.name]
            lengths += [size.tiles * WORDS, size.entries * WORDS]
        scales = sizes.segments * len(geometry.projections) * geometry.page.layers
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
        # Pinned memory returns to torch's cache only after the copy, which torch tracks itself.
        host = torch.empty(len(self._packed), dtype=torch.int32, pin_memory=self._device.type == "cuda")
        view = host.numpy()
        for index, group in enumerate(self.geometry.groups):
            found = arrays[group.name]
            if found.units > self.sizes.groups[group.name].units:
                raise ValueError(f"{found.units} units of LoRA results exceed the tables' room")
            view[4 * index : 4 * index + 4] = found.counts
            self._place(view, 1 + 2 * index, found.tiles)
            self._place(view, 2 + 2 * index, found.entries)
        self._place(view, len(self._places) - 1, segments.scales.astype(np.float32).view(np.int32))
        self._packed.copy_(host, non_blocking=True)

    def _place(self, view: Table, part: int, table: Table) -> None:
        begin, end = self._places[part]
        if table.size > end - begin:
            raise ValueError(f"a LoRA table of {table.size} words exceeds its room of {end - begin}")
        view[begin : begin + table.size] = table.reshape(-1)
