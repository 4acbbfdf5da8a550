"""Plans a step's attention over the paged pool and launches our Triton kernel.

A plan is built on the host and sent to the device in one copy. The module owns the block sizes and the rule
that cuts rows into tiles and pieces, so that a large GPU is busy. It chooses all launch sizes from the host's
numbers of the step, or from the largest possible ones for a captured step; it reads nothing back from the
device. Compiled loops write the tables anew for every step. The loops' arrays are contiguous, and their
arguments ``query_start``, ``kv_len`` and ``pages`` are those of an AttentionRows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from manylora.devices.staging import upload_buffers
from manylora.kernels.flashinfer_attention import PlannedPrompts, PreparedPrompts, PromptAttention
from manylora.kernels.loops import loop
from manylora.kernels.ops import AttentionLimits, AttentionRows, Scores
from manylora.kernels.shapes import PageShape
from manylora.kernels.triton.attention import attend_kernel
from manylora.kernels.triton.decode_table import AttentionTileConfig, DecodeConfig, DecodeTable
from manylora.kernels.triton.launch import LaunchCounters, Table, power_of_two, precision, upload

RECORD = 8
BLOCK_TOKENS = 64
LEAST_BLOCKS = 2
"""Blocks up to which the context of a row with one query stays whole. Such a row reads the bytes of its
context once, wherever it is cut, so even short contexts may be cut."""

LEAST_TILE_BLOCKS = 12
"""Blocks up to which the context of a tile stays whole. Joining pieces costs as much as several blocks, so
only tiles with long contexts are cut."""


class TritonAttentionPlan:
    """The device tables and launch sizes of one step's attention.

    ``page_table`` int32: the rows' pages, one row after the other. ``records`` int32 [pieces, RECORD]: the
    first ``of_prompts`` belong to rows with several queries. ``num_tokens``: how many tokens the records
    cover.

    ``tile``: the largest number of queries in a record. ``places``, ``counters``: the room that partial
    results take; 0 where no context is cut. ``prompts``: FlashInfer's plan, which serves the rows with
    several queries in layers that it can serve; None where our kernel serves all.

    With ``limits``, memory and launch sizes never change. Without any, each ``fill`` allocates new memory.
    """

    page_table: torch.Tensor
    records: torch.Tensor
    of_prompts: int
    places: int
    counters: int
    num_tokens: int
    prompts: PlannedPrompts | None

    def __init__(
        self,
        page: PageShape,
        device: torch.device,
        programs: int,
        decoding: DecodeTable,
        prompts: PreparedPrompts | PromptAttention | None = None,
        limits: AttentionLimits | None = None,
    ) -> None:
        """Reserve memory for the largest step of ``limits``.

        ``programs``: the number of programs that keep the device busy. ``prompts``: FlashInfer, which serves
        long prompts in steps without limits; None: our kernel serves all.
        """
        self._page = page
        self._device = device
        self._programs = programs
        self._decoding = decoding
        self._prompts = prompts
        self._limits = limits
        self.prompts = None
        if limits is not None:
            self._reserve(limits)
            self.fill(AttentionRows(np.zeros(1, np.int32), np.zeros(0, np.int32), np.zeros((0, 1), np.int32)))

    def fill(self, rows: AttentionRows) -> None:
        """Implement ``AttentionPlan.fill``. The copy is ordered after earlier work on the stream."""
        if self._limits is None:
            self._make(rows)
        else:
            self._refill(rows, self._limits)

    def _make(self, rows: AttentionRows) -> None:
        length = np.diff(rows.query_start)
        self._choose(int((length == 1).sum()), is_decoding=not (length > 1).any())
        self.num_tokens = int(rows.query_start[-1])
        found = self._count(rows)
        pieces = np.empty((found.records, RECORD), dtype=np.int32)
        pages = np.empty(found.pages, dtype=np.int32)
        self._write(rows, found, pieces, pages)
        self.page_table, records = upload([pages, pieces], self._device)
        self.records = records.view(-1, RECORD)
        self.of_prompts, self.places, self.counters = found.of_prompts, found.places, found.counters
        if self._prompts is not None:
            self.prompts = self._prompts.plan(rows, self._page)

    def _reserve(self, limits: AttentionLimits) -> None:
        num_tokens, num_rows, max_context = limits
        is_decoding = num_tokens == num_rows
        self._choose(num_rows, is_decoding)
        # Besides the whole tiles, each row may have a partial tile, and so may the padding.
        whole = 0 if is_decoding else num_tokens // self.tile + 1
        longest = -(-max_context // BLOCK_TOKENS)
        more = min(self._most_rows, num_rows * (-(-longest // LEAST_BLOCKS) - 1))
        more_tiles = 0
        if whole:
            more_tiles = min(self._most_tiles, (whole + num_rows) * (-(-longest // LEAST_TILE_BLOCKS) - 1))
        num_records = num_rows + whole + more + more_tiles
        most_pages = num_rows * -(-max_context // self._page.page_tokens)
        size = num_records * RECORD
        self._memory = torch.zeros(size + most_pages, dtype=torch.int32, device=self._device)
        self.page_table, self.records = self._memory[size:], self._memory[:size].view(-1, RECORD)
        self.of_prompts, self.num_tokens = 0, num_tokens
        # A tile in p > 1 pieces adds p - 1 records and needs p <= 2 * (p - 1) places for each query.
        self.places = 2 * (more + more_tiles * min(num_tokens, self.tile))
        self.counters = more + more_tiles

    def _refill(self, rows: AttentionRows, limits: AttentionLimits) -> None:
        found = self._count(rows)
        self._check(rows, found, limits)
        size = len(self.records) * RECORD
        stage = upload_buffers(self._memory.device).stage(size + found.pages)
        records, pages = stage.numbers[:size].reshape(-1, RECORD), stage.numbers[size:]
        self._write(rows, found, records, pages)
        stage.send(self._memory[: len(stage.numbers)])

    def _choose(self, num_singles: int, is_decoding: bool) -> None:
        """Choose the sizes for a step with ``num_singles`` rows of one query, and with others unless
        ``is_decoding``."""
        self.config = self._decoding.choice(num_singles)
        self.tile = 1 if is_decoding else self._decoding.tile
        # The numbers of pieces for each key head that keep the device busy.
        self._most_rows = max(1, (self.config.programs or self._programs) // self._page.kv_heads)
        self._most_tiles = max(1, self._programs // self._page.kv_heads)

    def _count(self, rows: AttentionRows) -> Pieces:
        sizes = self._page.page_tokens, self.tile, self._most_tiles, self._most_rows
        return count_pieces(rows.query_start, rows.kv_len, *sizes)

    def _write(self, rows: AttentionRows, found: Pieces, records: Table, table: Table) -> None:
        starts, pages, sizes = rows.query_start, rows.page_table, (self._page.page_tokens, self.tile)
        write_pieces(starts, rows.kv_len, pages, *sizes, found, self.num_tokens, records, table)

    def _check(self, rows: AttentionRows, found: Pieces, limits: AttentionLimits) -> None:
        """Raise ValueError where the step exceeds the limits, before anything is written."""
        padding = -(-(limits.num_tokens - int(rows.query_start[-1])) // self.tile)
        fits = (
            len(rows.kv_len) <= limits.num_rows
            and found.records + padding <= len(self.records)
            and rows.query_start[-1] <= limits.num_tokens
            and found.longest <= limits.max_context
            and (self.tile > 1 or found.single == len(rows.kv_len))
        )
        if not fits:
            raise ValueError("the step is larger than what was captured")

    def run(
        self, q: torch.Tensor, pool: torch.Tensor, layer: int, scores: Scores, counters: LaunchCounters
    ) -> torch.Tensor:
        """Compute ``Ops.attention``. All calls with the same counters must be ordered on the device. The
        first call allocates counters, so it must not be under capture."""
        num_tokens, num_heads, dim = q.shape
        q = flat_heads(q)
        # Tokens that belong to no row must be zero: uninitialised memory may hold NaN, which would spread.
        fresh = torch.empty if self.num_tokens == num_tokens else torch.zeros
        out = fresh((num_tokens, num_heads * dim), dtype=q.dtype, device=q.device)
        records, tile = self.records, self.tile
        if self.prompts is not None and self.prompts.serves(q, scores):
            # Prompts go first, because FlashInfer also writes the tokens between two prompts.
            self.prompts.run(q, pool, layer, out)
            records, tile = records[self.of_prompts :], 1
        if not len(records):
            return out
        page_tokens, kv_heads = pool.shape[3:5]
        heads = num_heads // kv_heads
        scale, window, soft_cap = scores
        sizes = _launch_sizes(q.dtype, dim, heads, tile, self.config, self._decoding.tiles)
        parts = tile // sizes["BLOCK_Q"]
        # Allocated even where no piece is joined: a pointer of another type would compile another variant.
        shape = (max(1, self.places), num_heads)
        partial = torch.empty((*shape, dim), dtype=torch.float32, device=q.device)
        statistics = torch.empty((*shape, 2), dtype=torch.float32, device=q.device)
        grid = (len(records) * parts, kv_heads)
        attend_kernel[grid if tile == 1 else grid[::-1]](
            q,
            pool,
            self.page_table,
            records,
            out,
            partial,
            statistics,
            counters.take(self.counters * parts * kv_heads, q.device),
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
        return out


class Pieces(NamedTuple):
    """The sizes of a step's tables, and how its contexts are cut.

    ``records``: all pieces; ``of_prompts``: those of rows with several queries. ``places``, ``counters``: the
    room for partial results. ``pages``: entries of the page table. ``longest``: tokens of the longest
    context. ``single``: rows with one query; ``tiles``: tiles of rows with several. ``tile_blocks``,
    ``row_blocks``: the largest number of blocks in a piece of a tile, and in a piece of a row with one query.
    """

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
    """Return how many pieces of at most ``blocks`` blocks cover ``tokens`` tokens; at least one."""
    return max(1, -(-_blocks(tokens) // blocks))


@loop
def count_pieces(
    query_start: np.ndarray, kv_len: np.ndarray, page_tokens: int, tile: int, most_tiles: int, most_rows: int
) -> Pieces:
    """Count a step's pieces and choose the largest number of blocks in one, alike for all tiles and all rows.

    Tiles are cut into at most ``most_tiles`` more pieces than there are tiles; rows with one query into at
    most ``most_rows`` more than there are such rows. Pieces of one context are of equal length, up to whole
    blocks.
    """
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
    found: Pieces, num_tokens: int, records: np.ndarray, table: np.ndarray,
) -> None:  # fmt: skip
    """Write a step's ``records`` int32 [n, RECORD] and page ``table`` int32 [found.pages].

    Records of tiles come first, the longest contexts before shorter ones; records of rows with one query
    follow, in row order. The unused records come last: tiles without context for the tokens from the last
    row's end up to ``num_tokens``, then zeros. The table holds the rows' pages, one row after the other.
    """
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
            while at > 0 and contexts[at - 1] < context:  # few tiles: an insertion sort will do
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
    records[written:] = 0
    for first in range(query_start[-1], num_tokens, tile):
        record = records[written]
        record[1], record[2], record[3], record[5] = first, min(num_tokens - first, tile), -tile, 1
        written += 1


def flat_heads(x: torch.Tensor) -> torch.Tensor:
    """Return x ``[T, heads, D]`` with each token's heads contiguous, copied only where they are not."""
    if x.stride(2) == 1 and x.stride(1) == x.shape[2]:
        return x
    return x.contiguous()


def _launch_sizes(
    dtype: torch.dtype, dim: int, heads: int, tile: int, config: DecodeConfig, tiles: AttentionTileConfig
) -> dict[str, int]:
    """Return ``attend_kernel``'s block sizes and launch options for ``heads`` query heads to a key head.

    ``config`` and ``tiles`` apply to 16-bit types and heads of at most 128 dimensions; others get fixed
    sizes. Raises ValueError where BLOCK_TOKENS is not a multiple of their blocks.
    """
    if dim > 128 or dtype == torch.float32:
        # Small blocks, which fit the registers: float32 products run without tensor cores.
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
