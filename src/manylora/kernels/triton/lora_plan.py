"""Plans a step's LoRA work: writes the tables that the kernels read, and chooses the kernels' sizes.

Owns the sizes (``LoraConfig``, stored in ``kernels/tuned/lora.json``), the cutting of segments into tiles and
of shrink's work into entries, and the layout of partial results. A table has a capacity, and the kernels read
from it how much is in use. So a launch captured in a CUDA graph serves every batch that fits.

A *tile* is a run of tokens of limited length with one adapter, or with none, where expand may have to write
zeros. Tiles with an adapter come before those without, and tiles of several tokens before those of one. An
*entry* of shrink is a tile, or as many of its tokens as shrink takes at once, together with up to BLOCKS
blocks of ROWS rank rows each, from any projection of a group. A tile's or an entry's record of WORDS int32
holds all that a program needs:

    tile   0 first token  1 tokens  2 row of ``scales``  3 unused, then for each projection of the group
           4 rank  5 position of its first B cell  6 first unit
    entry  0 first token  1 tokens  2-3 unused, then for each block
           4 rank rows in it  5 position of its first A cell  6 its unit

A *unit* is ROWS float32 partial results of one token: the block's unit u and its token t own
``[(u + t) * ROWS, (u + t + 1) * ROWS)`` of each split's plane.

Compiled loops write the tables. These have a few hundred numbers, and are written anew whenever a step's rows
or adapters change, while the device may be idle. Writing them with numpy, array by array, took five times as
long. The loops' arrays are contiguous. ``runs`` int64 [3, n] is as ``runs_of`` returns it. ``columns`` int64
[G, 3] holds the places of each group's projections among all projections, -1 where a group has fewer than
three. ``records`` is LoraSegments'.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from manylora.devices.staging import upload_buffers
from manylora.kernels.loops import loop
from manylora.kernels.ops import LoraLimits, LoraSegments, no_segments
from manylora.kernels.shapes import AdapterGeometry, ProjectionGroup
from manylora.kernels.triton.launch import Ints, Table

WORDS = 16
ROWS = 16
MOST_PROJECTIONS = 3
BLOCKS = 4
TABLE = Path(__file__).parents[1] / "tuned" / "lora.json"


# ---------------------------------------------------------------- sizes


@dataclasses.dataclass(frozen=True)
class LoraTileConfig:
    """The launch sizes of shrink and expand for one kind of tile.

    ``tile_tokens``: tokens of one matrix product in both kernels. ``expand_tokens``: tokens of one item of
    expand, which takes ``tile_tokens`` tokens at a time with the same B; 0: ``tile_tokens``.

    ``chunk``: columns of one split of a shrink; 0: several splits only where there are few entries.
    ``shrink_columns``, ``expand_columns``: columns loaded at once for a tile of one token. ``shrink_step``,
    ``expand_step``: columns loaded at once for a product on tensor cores. ``tile_columns``: columns of an
    expand item of several tokens; 0: ``expand_columns``.

    ``*_programs``: programs for each multiprocessor, which share the items; 0: one program for each item.
    ``blocks``: blocks of 16 rank rows in one entry of shrink. ``stages``: pipeline stages of shrink's loads.
    ``vector``: whether tiles of one token run without tensor cores. ``*_registers``: the limit for a thread;
    0: none.
    """

    tile_tokens: int
    chunk: int
    shrink_columns: int
    shrink_step: int
    shrink_warps: int
    shrink_programs: int
    expand_columns: int
    expand_step: int
    expand_warps: int
    expand_programs: int
    blocks: int = 1
    stages: int = 1
    vector: bool = True
    shrink_registers: int = 0
    expand_registers: int = 0
    expand_tokens: int = 0
    tile_columns: int = 0

    @property
    def item_tokens(self) -> int:
        """The largest number of tokens in one item of expand."""
        return self.expand_tokens or self.tile_tokens


@dataclasses.dataclass(frozen=True)
class Beside:
    """The settings of LoRA on a second stream beside the product; the operation that reads both adds them.

    ``product_first``: names of the groups whose product the device prefers to LoRA; for others it prefers
    LoRA. ``pdl``: whether the LoRA kernels use dependent launch.
    """

    sizes: LoraTileConfig
    product_first: tuple[str, ...] = ()
    pdl: bool = False


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """The settings of LoRA on a device, by the size and the runs of a step.

    ``short``: sizes for steps without a run of more than ``long_run`` tokens, such as decoding steps.
    ``mixed``: (largest number of tokens, sizes) for steps with longer runs, ascending. In steps larger than
    all of these, longer runs use ``long`` and the others ``short``, in separate launches. ``pdl``: whether
    kernels use dependent launch. ``beside``: (largest number of tokens, settings) for captured steps in which
    LoRA runs beside the products, ascending. ``writes_from``: in steps with long runs and at least this many
    tokens, expand writes the result and the product adds to it, instead of the other way round; 0: in no
    step.
    """

    short: LoraTileConfig
    long: LoraTileConfig
    mixed: tuple[tuple[int, LoraTileConfig], ...] = ()
    long_run: int = 128
    pdl: bool = False
    beside: tuple[tuple[int, Beside], ...] = ()
    writes_from: int = 0

    def of_mixed(self, tokens: int) -> LoraTileConfig | None:
        """Return the sizes for steps of ``tokens`` tokens with long runs; None if these are too large."""
        return next((sizes for most, sizes in self.mixed if tokens <= most), None)

    def of_beside(self, tokens: int) -> Beside | None:
        """Return how LoRA runs beside the products of captured steps of this size; None: it does not."""
        return next((how for most, how in self.beside if tokens <= most), None)


SHORT = LoraTileConfig(
    tile_tokens=16, chunk=512, shrink_columns=512, shrink_step=256, shrink_warps=4, shrink_programs=16,
    expand_columns=512, expand_step=256, expand_warps=4, expand_programs=16,
)  # fmt: skip


MIXED = dataclasses.replace(SHORT, shrink_programs=8, expand_programs=8, expand_step=128, tile_columns=256)


LONG = LoraTileConfig(
    tile_tokens=64, chunk=0, shrink_columns=128, shrink_step=128, shrink_warps=4, shrink_programs=0,
    expand_columns=128, expand_step=128, expand_warps=4, expand_programs=0,
    blocks=4, stages=3, vector=False, expand_tokens=256,
)  # fmt: skip


DEFAULT = LoraConfig(SHORT, LONG, ((2048, MIXED),))


def stored_config(device_name: str, path: Path = TABLE) -> LoraConfig | None:
    """Return the settings measured to be best on devices of this name; None for other devices.

    The file is ``{device name: LoraConfig's fields}``; missing fields have their defaults. ``mixed`` and
    ``beside`` are ``[[largest number of tokens, fields], ...]``, ascending. The ``sizes`` of an entry of
    ``beside`` hold only what differs from ``short``.
    """
    found = json.loads(path.read_text()).get(device_name) if path.is_file() else None
    if found is None:
        return None
    sizes: dict[str, Any] = {
        kind: dataclasses.replace(getattr(DEFAULT, kind), **found.get(kind, {})) for kind in ("short", "long")
    }
    if "mixed" in found:
        sizes["mixed"] = tuple(
            (most, dataclasses.replace(MIXED, **fields)) for most, fields in found["mixed"]
        )
    beside = []
    for most, how in found.get("beside", ()):
        own = dataclasses.replace(sizes["short"], **how["sizes"])
        beside.append((most, Beside(own, tuple(how["product_first"]), how["pdl"])))
    sizes["beside"] = tuple(beside)
    return dataclasses.replace(DEFAULT, **{**found, **sizes})


# ---------------------------------------------------------------- a step's work


class GroupSize(NamedTuple):
    """The numbers of records and units that one group's tables have room for."""

    tiles: int
    entries: int
    units: int


class GroupWork(NamedTuple):
    """One group's tables on the device, with room for ``size``.

    ``counts`` int32 [4]: tiles with an adapter, all tiles, entries, and tiles of several tokens with an
    adapter.
    """

    counts: torch.Tensor
    tiles: torch.Tensor
    entries: torch.Tensor
    size: GroupSize


class BatchWork(NamedTuple):
    """A batch's LoRA work, counted but not yet written.

    ``counts`` int32 [G, 4]: each group's, as in GroupWork. ``units`` int64 [G]: each group's number of units.
    """

    segments: LoraSegments
    runs: Ints
    counts: Table
    units: Ints

    def sizes(self) -> list[GroupSize]:
        """Return the sizes that exactly fit this work, by group."""
        return [
            GroupSize(max(1, tiles), max(1, entries), max(1, units))
            for (tiles, entries), units in zip(self.counts[:, 1:3].tolist(), self.units.tolist())
        ]


def runs_of(segments: LoraSegments, num_tokens: int) -> Ints:
    """Return int64 [3, n]: the first token, the number of tokens and the segment of every run in the batch.

    The segments' runs come first. Segment -1 marks a run of the base model.
    """
    runs = np.empty((3, 2 * len(segments.start) + 1), dtype=np.int64)
    count = write_runs(segments.start, segments.length, num_tokens, runs)
    return np.ascontiguousarray(runs[:, :count])


def work_of(
    segments: LoraSegments, runs: Ints, geometry: AdapterGeometry, config: LoraTileConfig
) -> BatchWork:
    """Count the work of these runs of the batch."""
    columns, _ = _columns(geometry.groups, geometry.cell_elements)
    counts, units = np.empty((len(columns), 4), dtype=np.int32), np.empty(len(columns), dtype=np.int64)
    limits = config.item_tokens, config.tile_tokens, config.blocks
    count_work(runs, segments.records, columns, *limits, counts, units)
    return BatchWork(segments, runs, counts, units)


@functools.lru_cache(maxsize=8)
def _columns(groups: tuple[ProjectionGroup, ...], cell_elements: int) -> tuple[Ints, Ints]:
    """Return, by group, the places of its projections among all, padded with -1, and the cells of a row of A.

    Arrays int64 [G, MOST_PROJECTIONS] and int64 [G], which are cached and must not be changed.
    """
    columns = np.full((len(groups), MOST_PROJECTIONS), -1)
    first = 0
    for places, group in zip(columns, groups):
        places[: len(group.projections)] = range(first, first + len(group.projections))
        first += len(group.projections)
    return columns, np.array([-(-group.in_features // cell_elements) for group in groups])


def largest_sizes(geometry: AdapterGeometry, limits: LoraLimits, config: LoraTileConfig) -> list[GroupSize]:
    """Return sizes that fit every batch within these limits, by group.

    Each run may add one tile that is not full. Runs are the segments and the gaps around them.
    """
    tokens, segments = limits.num_tokens, limits.num_rows
    tiles = min(tokens, 2 * segments + 1 + tokens // config.item_tokens)
    pieces = min(tokens, segments + tokens // config.tile_tokens)
    blocks = [len(group.projections) * -(-limits.max_rank // ROWS) for group in geometry.groups]
    return [GroupSize(tiles, pieces * count, tokens * count) for count in blocks]


class WorkBuffer:
    """The tables of one kind of tile on a device, at addresses that do not change; ``fill`` overwrites them.

    ``sizes``: each group's room. ``num_segments``: how many segments' scales fit. Raises ValueError where a
    group has more than MOST_PROJECTIONS projections.
    """

    def __init__(
        self,
        geometry: AdapterGeometry,
        config: LoraTileConfig,
        sizes: Sequence[GroupSize],
        num_segments: int,
        device: torch.device,
    ) -> None:
        if any(len(group.projections) > MOST_PROJECTIONS for group in geometry.groups):
            raise ValueError(f"LoRA kernels take {MOST_PROJECTIONS} projections a group at most")
        self.config = config
        self._columns, self._a_cells = _columns(geometry.groups, geometry.cell_elements)
        lengths = [WORDS * count for size in sizes for count in (size.tiles, size.entries)]
        begins = np.cumsum([4 * len(sizes), *lengths]).tolist()
        self._tile_places, self._entry_places = np.array(begins[:-1:2]), np.array(begins[1::2])
        self._scales_place = begins[-1]
        num_scales = num_segments * len(geometry.projections) * geometry.page.layers
        packed = torch.zeros(begins[-1] + -(-num_scales // 4) * 4, dtype=torch.int32, device=device)
        self._packed = packed
        self.scales = packed[begins[-1] :].view(torch.float32)
        self.groups: dict[str, GroupWork] = {}
        for index, (group, size) in enumerate(zip(geometry.groups, sizes, strict=True)):
            tiles, entries, end = begins[2 * index : 2 * index + 3]
            counts = packed[4 * index : 4 * index + 4]
            self.groups[group.name] = GroupWork(counts, packed[tiles:entries], packed[entries:end], size)

    def fill(self, work: BatchWork) -> None:
        """Write this work into the tables by one asynchronous copy. Raises ValueError if it does not fit."""
        segments, runs, counts, all_units = work
        for group, (_, tiles, entries, _), units in zip(self.groups.values(), counts.tolist(), all_units):
            if tiles > group.size.tiles or entries > group.size.entries or units > group.size.units:
                taken = f"{tiles} tiles, {entries} entries and {units} units"
                raise ValueError(f"{taken} of LoRA work exceed the tables' room")
        scales = segments.scales.astype(np.float32, copy=False)
        if scales.size > len(self.scales):
            raise ValueError(f"{len(scales)} segments of LoRA work exceed the tables' room")
        stage = upload_buffers(self._packed.device).stage(self._packed.numel())
        view = stage.numbers
        view[: counts.size] = counts.reshape(-1)
        sizes = self.config.item_tokens, self.config.tile_tokens, self.config.blocks
        write_tables(
            runs, segments.records, self._columns, self._a_cells, *sizes,
            view, self._tile_places, self._entry_places,
        )  # fmt: skip
        rest = view[self._scales_place :]
        if not scales.size:
            # Tiles without an adapter multiply zeros by the first segment's scale, which must be finite.
            rest[:] = 0
        rest[: scales.size].reshape(scales.shape)[...] = scales.view(np.int32)
        stage.send(self._packed)


# ---------------------------------------------------------------- plans


class TritonLoraPlan:
    """A step's LoRA tables, and how its kernels are launched.

    ``parts``: the tables of each kind of tile. ``covered``: the first ``covered`` tokens of the batch all
    have tiles, with or without an adapter; 0: only tokens with an adapter surely have them.
    ``beside``: the settings of LoRA beside the product; None: both run on one stream. ``is_first``: expand
    writes the result and the product adds to it. ``pdl``: whether kernels use dependent launch.

    With ``limits``, memory and launch sizes never change. Without any, each ``fill`` allocates new memory.
    """

    cells: torch.Tensor

    def __init__(
        self,
        config: LoraConfig,
        geometry: AdapterGeometry,
        device: torch.device,
        limits: LoraLimits | None = None,
    ) -> None:
        self.geometry = geometry
        self.align = math.gcd(geometry.alignment, 16)
        self.parts: tuple[WorkBuffer, ...] = ()
        self.covered = 0
        self.beside: Beside | None = None
        self.is_first = False
        self.pdl = config.pdl
        self._config = config
        self._device = device
        self._is_fixed = limits is not None
        self._filled: tuple[LoraSegments | None, int] | None = None
        if limits is not None:
            self._reserve(limits)

    def fill(self, segments: LoraSegments | None, num_tokens: int) -> None:
        """Implement ``LoraPlan.fill``. All ``num_tokens`` tokens get tiles where expand writes the result."""
        if self._is_fixed:
            self._refill(segments, num_tokens)
        else:
            self._make(segments, num_tokens)

    def _make(self, segments: LoraSegments | None, num_tokens: int) -> None:
        self.parts, self.covered, self.is_first = (), 0, False
        if segments is None:
            return
        config = self._config
        has_long = int(segments.length.max()) > config.long_run
        self.is_first = self._writes_first(num_tokens, has_long)
        runs = runs_of(segments, num_tokens)
        # Where expand writes the result, tokens in no segment need tiles too.
        wanted = (runs[2] >= 0) | self.is_first
        mixed, is_long = config.of_mixed(num_tokens), runs[1] > config.long_run
        chosen = [(config.short, wanted & ~is_long), (config.long, wanted & is_long)]
        if has_long and mixed is not None:
            chosen = [(mixed, wanted)]
        parts = []
        for sizes, members in chosen:
            if not members.any():
                continue
            sizes = self._for_dtype(sizes)
            work = work_of(segments, np.ascontiguousarray(runs[:, members]), self.geometry, sizes)
            part = WorkBuffer(self.geometry, sizes, work.sizes(), len(segments.start), self._device)
            part.fill(work)
            parts.append(part)
        self.cells, self.parts = segments.cells, tuple(parts)
        self.covered = num_tokens if self.is_first else 0

    def _reserve(self, limits: LoraLimits) -> None:
        """Allocate the tables for the largest step of ``limits``, and choose the sizes.

        Limits of fewer rows than tokens are for steps with prompts.
        """
        config, tokens, has_long = self._config, limits.num_tokens, limits.num_rows < limits.num_tokens
        sizes = config.short
        if has_long:
            sizes = config.of_mixed(tokens) or (config.mixed[-1][1] if config.mixed else sizes)
        self.is_first = self._writes_first(tokens, has_long)
        self.beside = None if self.is_first else config.of_beside(tokens)
        sizes = self._for_dtype(sizes if self.beside is None else self.beside.sizes)
        largest = largest_sizes(self.geometry, limits, sizes)
        self.cells = limits.cells
        self.parts = (WorkBuffer(self.geometry, sizes, largest, limits.num_rows, self._device),)
        self.covered = tokens
        self.pdl = config.pdl and (self.beside is None or self.beside.pdl)

    def _refill(self, segments: LoraSegments | None, num_tokens: int) -> None:
        if self._filled is not None and self._filled[0] is segments and self._filled[1] == num_tokens:
            return  # the tables hold this already, as they mostly do between decoding steps
        self._filled = None
        given = no_segments(self.geometry, self.cells) if segments is None else segments
        (part,) = self.parts
        # Padding gets tiles too, so that its results are defined.
        runs = runs_of(given, max(num_tokens, self.covered))
        part.fill(work_of(given, runs, self.geometry, part.config))
        self._filled = segments, num_tokens

    def _writes_first(self, num_tokens: int, has_long: bool) -> bool:
        return has_long and 0 < self._config.writes_from <= num_tokens

    def _for_dtype(self, config: LoraTileConfig) -> LoraTileConfig:
        """Return ``config``, with small tiles for float32: without tensor cores, products need more
        registers."""
        return dataclasses.replace(config, tile_tokens=16) if self.geometry.itemsize > 2 else config


# ---------------------------------------------------------------- loops that write the tables


@loop
def write_runs(start: np.ndarray, length: np.ndarray, num_tokens: int, runs: np.ndarray) -> int:
    """Write the segments and then the gaps around them into ``runs`` [3, 2 * S + 1], and return their number.

    ``start``, ``length`` int32 [S] are LoraSegments'.
    """
    count = len(start)
    found, end = count, 0
    for segment in range(count + 1):
        begin = start[segment] if segment < count else num_tokens
        if begin > end:
            runs[0, found], runs[1, found], runs[2, found] = end, begin - end, -1
            found += 1
        if segment < count:
            runs[0, segment], runs[1, segment], runs[2, segment] = begin, length[segment], segment
            end = begin + length[segment]
    return found


@loop
def count_work(
    runs: np.ndarray, records: np.ndarray, columns: np.ndarray, tile_tokens: int, entry_tokens: int, blocks: int,
    counts: np.ndarray, units: np.ndarray,
) -> None:  # fmt: skip
    """Count each group's work into ``counts`` int32 [G, 4], as in GroupWork, and ``units`` int64 [G]."""
    all_tiles, adapted, several = 0, 0, 0
    for run in range(runs.shape[1]):
        length = runs[1, run]
        tiles = -(-length // tile_tokens)
        all_tiles += tiles
        if runs[2, run] >= 0:
            adapted += tiles
            last = length - (tiles - 1) * tile_tokens
            several += (tiles - 1) * (tile_tokens > 1) + (last > 1)
    for group in range(len(columns)):
        entries, taken = 0, 0
        for run in range(runs.shape[1]):
            length, segment = runs[1, run], runs[2, run]
            if segment < 0:
                continue
            rows = 0
            for column in columns[group]:
                if column >= 0:
                    rows += -(-records[segment, column, 2] // ROWS)
            taken += rows * length
            pieces = -(-length // entry_tokens)  # of all tiles; only the last may be partial
            entries += pieces * -(-rows // blocks)
        counts[group, 0], counts[group, 1] = adapted, all_tiles
        counts[group, 2], counts[group, 3] = entries, several
        units[group] = taken


@loop
def write_tables(
    runs: np.ndarray, records: np.ndarray, columns: np.ndarray, a_cells: np.ndarray, tile_tokens: int,
    entry_tokens: int, blocks: int, words: np.ndarray, tile_places: np.ndarray, entry_places: np.ndarray,
) -> None:  # fmt: skip
    """Write each group's tiles and entries into ``words`` int32.

    They begin at the group's number in ``tile_places`` and in ``entry_places``. ``a_cells``: by group, the
    cells that a row of A takes.
    """
    for group in range(len(columns)):
        tile, entry, unit = tile_places[group], entry_places[group] - WORDS, 0
        for kind in range(4):  # with an adapter: several tokens, one; without: several, one
            for run in range(runs.shape[1]):
                segment = runs[2, run]
                if (segment < 0) != (kind >= 2):
                    continue
                for inside in range(0, runs[1, run], tile_tokens):
                    length = min(runs[1, run] - inside, tile_tokens)
                    if (length == 1) != (kind % 2 == 1):
                        continue
                    begin, first_unit = runs[0, run] + inside, unit
                    words[tile : tile + WORDS] = 0
                    words[tile], words[tile + 1] = begin, length
                    words[tile + 2] = max(segment, 0) * records.shape[1] + columns[group, 0]
                    for place in range(MOST_PROJECTIONS):
                        column, at = columns[group, place], tile + 4 + 3 * place
                        words[at + 2] = unit
                        if column >= 0 and segment >= 0:
                            rank = records[segment, column, 2]
                            words[at] = rank
                            if rank > 0:
                                words[at + 1] = records[segment, column, 1]
                            unit += -(-rank // ROWS) * length
                    tile += WORDS
                    for piece in range(0, length if segment >= 0 else 0, entry_tokens):
                        entry = _write_piece(
                            records[segment], columns[group], a_cells[group], begin + piece,
                            min(length - piece, entry_tokens), first_unit + piece, length, blocks, words, entry,
                        )  # fmt: skip


@loop
def _write_piece(
    records: np.ndarray, columns: np.ndarray, a_cells: int, begin: int, tokens: int, unit: int, length: int,
    blocks: int, words: np.ndarray, entry: int,
) -> int:  # fmt: skip
    """Write the entries of one piece of a tile into ``words`` after ``entry``; return the last one's place.

    ``length``: the tile's tokens. ``unit``: the unit of the first block of the piece's first token.
    """
    block = 0
    for column in columns:
        rank = records[column, 2] if column >= 0 else 0
        for row in range(0, rank, ROWS):
            if block % blocks == 0:
                entry += WORDS
                words[entry : entry + WORDS] = 0
                words[entry], words[entry + 1] = begin, tokens
            at = entry + 4 + 3 * (block % blocks)
            words[at] = min(rank - row, ROWS)
            words[at + 1] = records[column, 0] + row * a_cells
            words[at + 2] = unit + block * length
            block += 1
    return entry
