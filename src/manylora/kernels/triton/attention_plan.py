"""Attention over the paged pool by our Triton kernel: plans of a step's rows, and the kernel's launch.

A plan is built on the host and sent in one copy. Owns: how rows are cut into tiles and pieces so that a large
GPU is busy, and block sizes. All launch sizes are decided here from host numbers, or from the largest ones where
a step is to be captured; nothing reads the device back. Compiled loops write the tables, which are made anew for
every step: their arrays are contiguous; ``query_start``, ``kv_len`` and ``pages`` are an AttentionRows' own.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np
import torch

from manylora.devices.staging import upload_buffers
from manylora.kernels.flashinfer_attention import ComingPrompts, PlannedPrompts, PromptAttention
from manylora.kernels.loops import loop
from manylora.kernels.ops import AttentionRoom, AttentionRows
from manylora.kernels.shapes import PageShape
from manylora.kernels.triton.attention import attend_kernel
from manylora.kernels.triton.decode_table import AttentionTileConfig, DecodeConfig, DecodeTable
from manylora.kernels.triton.launch import LaunchCounters, Table, power_of_two, precision, upload

RECORD = 8
BLOCK_TOKENS = 64
LEAST_BLOCKS = 2
"""The least blocks in a piece of a row with one query, which costs the bytes of its context wherever it is cut."""

LEAST_TILE_BLOCKS = 12
"""The least blocks in a piece of a tile: joining costs as much as some, so only tiles of long contexts are cut."""


class TritonAttentionPlan:
    """``page_table`` int32: the rows' pages, one row after the other. ``records`` int32 [pieces, RECORD], of which
    the first ``of_prompts`` belong to rows with several queries. ``num_tokens``: all that the records are of.

    ``tile``: the most queries of a record; ``places``, ``counters``: what partial results take, 0: there are none.
    ``prompts``: serves rows with several queries too, in some layers.

    With a ``room`` memory and launch sizes never change. Without, each ``fill`` takes memory of its own.
    """

    page_table: torch.Tensor
    records: torch.Tensor
    of_prompts: int
    tile: int
    places: int
    counters: int
    config: DecodeConfig
    num_tokens: int
    prompts: PlannedPrompts | None

    def __init__(
        self,
        page: PageShape,
        device: torch.device,
        programs: int,
        decoding: DecodeTable,
        prompts: ComingPrompts | PromptAttention | None = None,
        room: AttentionRoom | None = None,
    ) -> None:
        """``prompts``: for steps without a room."""
        self._page = page
        self._device = device
        self._programs = programs
        self._decoding = decoding
        self._prompts = prompts
        self._room = room
        self.prompts = None
        if room is not None:
            self._reserve(room)
            self.fill(AttentionRows(np.zeros(1, np.int32), np.zeros(0, np.int32), np.zeros((0, 1), np.int32)))

    def fill(self, rows: AttentionRows) -> None:
        """As ``AttentionPlan.fill``; what is sent is ordered after earlier work."""
        if self._room is None:
            self._make(rows)
        else:
            self._refill(rows, self._room)

    def _make(self, rows: AttentionRows) -> None:
        length = np.diff(rows.query_start)
        self.config = self._decoding.choice(int((length == 1).sum()))
        self.tile = self._decoding.tile if (length > 1).any() else 1
        wanted = _Wanted.of(self._page.kv_heads, self.config, self._programs)
        found = _counted(rows, self._page, self.tile, wanted)
        pieces = np.empty((found.records, RECORD), dtype=np.int32)
        pages = np.empty(found.pages, dtype=np.int32)
        _write(rows, self._page, self.tile, found, pieces, pages)
        self.page_table, records = upload([pages, pieces], self._device)
        self.records = records.view(-1, RECORD)
        self.of_prompts, self.places, self.counters = found.of_prompts, found.places, found.counters
        self.num_tokens = int(rows.query_start[-1])
        if self._prompts is not None:
            self.prompts = self._prompts.plan(rows, self._page)

    def _reserve(self, room: AttentionRoom) -> None:
        num_tokens, num_rows, max_context = room
        is_decoding = num_tokens == num_rows
        self.config = self._decoding.choice(num_rows)
        self._wanted = wanted = _Wanted.of(self._page.kv_heads, self.config, self._programs)
        self.tile = 1 if is_decoding else self._decoding.tile
        # Each row's last tile, and the padding's, may be any part of one.
        whole = 0 if is_decoding else num_tokens // self.tile + 1
        longest = -(-max_context // BLOCK_TOKENS)
        more = min(wanted.rows, num_rows * (-(-longest // LEAST_BLOCKS) - 1))
        more_tiles = (
            min(wanted.tiles, (whole + num_rows) * (-(-longest // LEAST_TILE_BLOCKS) - 1)) if whole else 0
        )
        num_records = num_rows + whole + more + more_tiles
        most_pages = num_rows * -(-max_context // self._page.page_tokens)
        size = num_records * RECORD
        self._memory = torch.zeros(size + most_pages, dtype=torch.int32, device=self._device)
        self.page_table, self.records = self._memory[size:], self._memory[:size].view(-1, RECORD)
        self.of_prompts, self.num_tokens = 0, num_tokens
        # A tile in pieces has at least one more than a whole one.
        self.places = 2 * (more + more_tiles * min(num_tokens, self.tile))
        self.counters = more + more_tiles

    def _refill(self, rows: AttentionRows, room: AttentionRoom) -> None:
        found = _counted(rows, self._page, self.tile, self._wanted)
        self._check(rows, found, room)
        size = len(self.records) * RECORD
        stage = upload_buffers(self._memory.device).stage(size + found.pages)
        records, pages = stage.numbers[:size].reshape(-1, RECORD), stage.numbers[size:]
        _write(rows, self._page, self.tile, found, records[: found.records], pages)
        write_rest(records[found.records :], rows.query_start[-1], room.num_tokens, self.tile)
        stage.send(self._memory[: len(stage.numbers)])

    def _check(self, rows: AttentionRows, found: Pieces, room: AttentionRoom) -> None:
        """Nothing is written where there is no room."""
        padding = -(-(room.num_tokens - int(rows.query_start[-1])) // self.tile)
        fits = (
            len(rows.kv_len) <= room.num_rows
            and found.records + padding <= len(self.records)
            and rows.query_start[-1] <= room.num_tokens
            and found.longest <= room.max_context
            and (self.tile > 1 or found.single == len(rows.kv_len))
        )
        if not fits:
            raise ValueError("the step is larger than what was captured")


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """Pieces that keep the device busy, of rows with one query and of tiles of others."""

    rows: int
    tiles: int

    @classmethod
    def of(cls, kv_heads: int, config: DecodeConfig, programs: int) -> _Wanted:
        return cls(max(1, (config.programs or programs) // kv_heads), max(1, programs // kv_heads))


def _counted(rows: AttentionRows, page: PageShape, tile: int, wanted: _Wanted) -> Pieces:
    return count_pieces(rows.query_start, rows.kv_len, page.page_tokens, tile, wanted.tiles, wanted.rows)


def _write(
    rows: AttentionRows, page: PageShape, tile: int, found: Pieces, records: Table, pages: Table
) -> None:
    write_pieces(
        rows.query_start, rows.kv_len, rows.page_table, page.page_tokens, tile, found, records, pages
    )


class Pieces(NamedTuple):
    """Of a step: its records, and how many of them are of rows with several queries; places and counters of
    partial results; pages; the longest context, and how many rows have one query. Tiles of the others, and of how
    many blocks the pieces of a tile and of a row with one query are."""

    records: int
    of_prompts: int
    places: int
    counters: int
    pages: int
    longest: int
    single: int
    tiles: int
    tile_blocks: int
    row_blocks: int


@loop
def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


@loop
def _num_pieces(tokens: int, blocks: int) -> int:
    """Of a context of so many tokens, by so many blocks."""
    return max(1, -(-_blocks(tokens) // blocks))


@loop
def count_pieces(
    query_start: np.ndarray, kv_len: np.ndarray, page_tokens: int, tile: int, most_tiles: int, most_rows: int
) -> Pieces:
    """All contexts are cut into equal shares, of at least so many blocks; into at most ``most_tiles`` more pieces
    than there are tiles, ``most_rows`` more than rows with one query."""
    pages, longest, single, tiles, of_tiles, of_rows = 0, 0, 0, 0, 0, 0
    for row in range(len(kv_len)):
        length = query_start[row + 1] - query_start[row]
        longest = max(longest, kv_len[row])
        if length > 0:
            pages += -(-kv_len[row] // page_tokens)
        if length == 1:
            single += 1
            of_rows += _blocks(kv_len[row])
        else:
            for inside in range(0, length, tile):
                tiles += 1
                of_tiles += _blocks(kv_len[row] - length + min(inside + tile, length))
    tile_blocks = max(LEAST_TILE_BLOCKS, -(-of_tiles // most_tiles))
    row_blocks = max(LEAST_BLOCKS, -(-of_rows // most_rows))
    records, of_prompts, places, counters = 0, 0, 0, 0
    for row in range(len(kv_len)):
        length = query_start[row + 1] - query_start[row]
        for inside in range(0, length, tile):
            queries = min(length - inside, tile)
            blocks = row_blocks if length == 1 else tile_blocks
            pieces = _num_pieces(kv_len[row] - length + inside + queries, blocks)
            records += pieces
            if length > 1:
                of_prompts += pieces
            if pieces > 1:
                places += queries * pieces
                counters += 1
    return Pieces(
        records, of_prompts, places, counters, pages, longest, single, tiles, tile_blocks, row_blocks
    )  # fmt: skip


@loop
def write_pieces(
    query_start: np.ndarray, kv_len: np.ndarray, pages: np.ndarray, page_tokens: int, tile: int,
    found: Pieces, records: np.ndarray, table: np.ndarray,
) -> None:  # fmt: skip
    """``records`` int32 [found.records, RECORD]: those of tiles of rows with several queries, of the longest
    contexts first, then those of rows with one, in their order. ``table`` int32
    [found.pages]: the rows' pages, one row after the other."""
    first_page = np.empty(len(kv_len), dtype=np.int64)
    place = 0
    for row in range(len(kv_len)):
        first_page[row] = place
        if query_start[row + 1] > query_start[row]:
            for page in range(-(-kv_len[row] // page_tokens)):
                table[place] = pages[row, page]
                place += 1
    rows = np.empty(found.tiles, dtype=np.int64)
    insides, contexts = np.empty_like(rows), np.empty_like(rows)
    number = 0
    for row in range(len(kv_len)):
        length = query_start[row + 1] - query_start[row]
        for inside in range(0, length if length > 1 else 0, tile):
            at, context = number, kv_len[row] - length + inside
            while at > 0 and contexts[at - 1] < context:  # they are few
                rows[at], insides[at], contexts[at] = rows[at - 1], insides[at - 1], contexts[at - 1]
                at -= 1
            rows[at], insides[at], contexts[at] = row, inside, context
            number += 1
    written, shared, joined = 0, 0, 0
    for number in range(found.tiles + len(kv_len)):
        if number < found.tiles:
            row, inside, blocks = rows[number], insides[number], found.tile_blocks
        else:
            row, inside, blocks = number - found.tiles, 0, found.row_blocks
            if query_start[row + 1] - query_start[row] != 1:
                continue
        begin = query_start[row] + inside
        queries = min(query_start[row + 1] - begin, tile)
        context = kv_len[row] - (query_start[row + 1] - begin)
        pieces = _num_pieces(context + queries, blocks)
        for piece in range(pieces):
            record = records[written]
            record[0], record[1], record[2], record[3] = first_page[row], begin, queries, context
            record[4], record[5], record[6], record[7] = piece, pieces, shared, joined
            written += 1
        if pieces > 1:
            shared += queries * pieces
            joined += 1


@loop
def write_rest(records: np.ndarray, begin: int, num_tokens: int, tile: int) -> None:
    """Into records that no row needs: tiles without context for the tokens from ``begin`` on, and zeros."""
    records[:] = 0
    for number, first in enumerate(range(begin, num_tokens, tile)):
        record = records[number]
        record[1], record[2], record[3], record[5] = first, min(num_tokens - first, tile), -tile, 1


def flat_heads(x: torch.Tensor) -> torch.Tensor:
    """x ``[T, heads, D]`` with each token's heads side by side: itself, or a copy where it must be."""
    if x.stride(2) == 1 and x.stride(1) == x.shape[2]:
        return x
    return x.contiguous()


class PagedAttention:
    """Attention on one device. Calls must be ordered on the device: they share counters.

    ``programs``: how many programs keep the device busy. ``prompts``: serves long ones in steps that are not
    captured, if given.
    """

    def __init__(
        self,
        programs: int,
        decoding: DecodeTable | None = None,
        prompts: ComingPrompts | PromptAttention | None = None,
    ) -> None:
        self._programs = programs
        self._decoding = decoding or DecodeTable()
        self._prompts = prompts
        self._counters = LaunchCounters()

    def close(self) -> None:
        """Idempotent."""
        if isinstance(self._prompts, ComingPrompts):
            self._prompts.close()

    def plan(self, page: PageShape, device: torch.device, room: AttentionRoom | None) -> TritonAttentionPlan:
        return TritonAttentionPlan(page, device, self._programs, self._decoding, self._prompts, room)

    def __call__(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        plan: TritonAttentionPlan,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> torch.Tensor:
        """Computes ``Ops.attention``. The first call takes memory for counters: not under capture."""
        num_tokens, heads, dim = q.shape
        q = flat_heads(q)
        # Tokens of no row must not carry NaN onwards.
        fresh = torch.empty if plan.num_tokens == num_tokens else torch.zeros
        out = fresh((num_tokens, heads * dim), dtype=q.dtype, device=q.device)
        records, tile = plan.records, plan.tile
        if plan.prompts is not None and plan.prompts.serves(q, scale, window, soft_cap):
            # First: some write what lies between them too.
            plan.prompts.run(q, pool, layer, out)
            records, tile = records[plan.of_prompts :], 1
        if len(records):
            self._attend(q, pool, layer, plan, records, tile, scale, window, soft_cap, out)
        return out

    def _attend(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        plan: TritonAttentionPlan,
        records: torch.Tensor,
        tile: int,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        out: torch.Tensor,
    ) -> None:
        _, num_heads, dim = q.shape
        page_tokens, kv_heads = pool.shape[3:5]
        heads = num_heads // kv_heads
        sizes = _launch_sizes(q.dtype, dim, heads, tile, plan.config, self._decoding.tiles)
        parts = tile // sizes["BLOCK_Q"]
        # Also where nothing is joined: a pointer of another type would be another kernel to compile.
        shape = (max(1, plan.places), num_heads)
        partial = torch.empty((*shape, dim), dtype=torch.float32, device=q.device)
        statistics = torch.empty((*shape, 2), dtype=torch.float32, device=q.device)
        grid = (len(records) * parts, kv_heads)
        attend_kernel[grid if tile == 1 else grid[::-1]](
            q,
            pool,
            plan.page_table,
            records,
            out,
            partial,
            statistics,
            self._counters.take(plan.counters * parts * kv_heads, q.device),
            q.stride(0),
            layer * pool.stride(1),
            pool.stride(2),
            pool.stride(0),
            pool.stride(3),
            (scale if soft_cap is None else soft_cap) * math.log2(math.e),
            0.0 if soft_cap is None else scale / soft_cap,
            window or 0,
            HEADS=heads,
            HEADS_PADDED=power_of_two(heads),
            DIM=dim,
            DIM_PADDED=max(16, power_of_two(dim)),
            PAGE_TOKENS=page_tokens,
            TILE=tile,
            WINDOWED=window is not None,
            CAPPED=soft_cap is not None,
            PRECISION=precision(q.dtype),
            **sizes,
        )


def _launch_sizes(
    dtype: torch.dtype, dim: int, heads: int, tile: int, config: DecodeConfig, tiles: AttentionTileConfig
) -> dict[str, int]:
    """``attend_kernel``'s, for ``heads`` to a key head; ``config`` and ``tiles`` where they are for such heads."""
    if dim > 128 or dtype == torch.float32:
        # Blocks that fit the registers: float32 products run without tensor cores.
        block, rows = (16, 16) if dtype == torch.float32 else (32, 64)
        config, tiles = DecodeConfig(block, 4, 2), AttentionTileConfig(rows, block, 4, 2, None)
    if BLOCK_TOKENS % config.block_n or BLOCK_TOKENS % tiles.block_n:
        raise ValueError(f"pieces are whole blocks of {BLOCK_TOKENS}: {config} or {tiles} cannot take them")
    sizes = {
        "BLOCK_Q": min(tile, max(1, tiles.rows // power_of_two(heads))),
        "BLOCK_N": config.block_n,
        "STAGES": config.stages,
        "TILE_BLOCK_N": tiles.block_n,
        "TILE_STAGES": tiles.stages,
    }
    if tile == 1:
        return sizes | {"num_warps": config.warps, "num_stages": config.stages}
    limit = {"maxnreg": tiles.registers} if tiles.registers else {}
    return sizes | {"num_warps": tiles.warps, "num_stages": tiles.stages} | limit
