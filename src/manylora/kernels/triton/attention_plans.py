"""What the attention kernels read of a step's rows, built on the host and sent in one copy.

Owns: how rows are cut into pieces and tiles so that a large GPU is busy. All launch sizes are decided here from
host numbers, or from the largest ones where a step is to be captured; nothing reads the device back.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from manylora.kernels.flashinfer_attention import PlannedPrompts
from manylora.kernels.ops import AttentionRows
from manylora.kernels.shapes import PageShape
from manylora.kernels.triton.decode_table import DecodeConfig, DecodeTable
from manylora.kernels.triton.plans import Ints, Table, tiles_of, upload

TILE_RECORD = 4
PIECE_RECORD = 8
PREFILL_TILE = 128
BLOCK_TOKENS = 64
MIN_PIECE_BLOCKS = 2
MIN_CHUNK = 128
CHUNK_STEP = 64
MAX_CHUNKS = 64
MORE_TILES = 8
"""Prompts of a captured step that may begin tiles of their own, beside those that its tokens fill."""


@dataclasses.dataclass(frozen=True)
class PrefillTiles:
    """Tiles of rows with several queries. ``chunk``: context slots of one split."""

    records: torch.Tensor
    num_tiles: int
    chunk: int
    splits: int


@dataclasses.dataclass(frozen=True)
class DecodePieces:
    """Pieces of rows with one query. ``places``: how many of them are joined with others."""

    records: torch.Tensor
    num_pieces: int
    places: int
    config: DecodeConfig


@dataclasses.dataclass(frozen=True)
class TritonAttentionPlan:
    """``page_table`` int32: the rows' pages, one row after the other. ``num_tokens``: those of rows.

    ``prompts``: the same rows as ``prefill``, for layers that it serves.
    """

    page_table: torch.Tensor
    prefill: PrefillTiles | None
    decode: DecodePieces | None
    num_tokens: int
    prompts: PlannedPrompts | None = None


def attention_plan(
    rows: AttentionRows, page: PageShape, device: torch.device, programs: int, decoding: DecodeTable
) -> TritonAttentionPlan:
    """One-token rows and longer ones go into launches of their own."""
    length = np.diff(rows.query_start).astype(np.int64)
    table, first_page = _ragged(rows, length, page)
    config = decoding.choice(int((length == 1).sum()))
    pieces, places = _pieces(rows, length, first_page, page.kv_heads, config.programs or programs)
    tiles = _tiles(rows, length, first_page)
    chunk, splits = _chunks(tiles, page.kv_heads, programs)
    page_table, on_device, tiles_on_device = upload([table, pieces, tiles], device)
    decode = DecodePieces(on_device, len(pieces), places, config) if len(pieces) else None
    prefill = PrefillTiles(tiles_on_device, len(tiles), chunk, splits) if len(tiles) else None
    return TritonAttentionPlan(page_table, prefill, decode, int(rows.query_start[-1]))


class FixedAttention:
    """A plan whose memory and launch sizes never change, for steps of at most so many rows and tokens.

    ``plan`` is what attention is given under capture; it stays valid with the object. ``fill`` it before each
    replay. Tokens of no row get zeros. ``num_tokens``: None where every row has one token.
    """

    def __init__(
        self,
        num_rows: int,
        max_context: int,
        page: PageShape,
        device: torch.device,
        programs: int,
        decoding: DecodeTable,
        num_tokens: int | None = None,
    ) -> None:
        config = decoding.choice(num_rows)
        self._page = page
        self._programs = config.programs or programs
        self._num_rows = num_rows
        self._max_context = max_context
        self._num_tokens = num_rows if num_tokens is None else num_tokens
        self._decoding = num_tokens is None
        self._num_pieces = num_rows + _wanted_pieces(page.kv_heads, self._programs)
        self._num_tiles = 0
        if not self._decoding:
            self._num_tiles = -(-self._num_tokens // PREFILL_TILE) + min(num_rows, MORE_TILES)
        sizes = [self._num_pieces * PIECE_RECORD, self._num_tiles * TILE_RECORD]
        most_pages = num_rows * -(-max_context // page.page_tokens)
        self._begin = sum(sizes)
        self._memory = torch.zeros(self._begin + most_pages, dtype=torch.int32, device=device)
        pieces, tiles, table = torch.split(self._memory, [*sizes, most_pages])
        prefill = None
        if not self._decoding:
            full_tiles = max(1, self._num_tokens // PREFILL_TILE)
            splits = min(MAX_CHUNKS, -(-programs // (full_tiles * page.kv_heads)))
            chunk = -(-max_context // (splits * CHUNK_STEP)) * CHUNK_STEP
            prefill = PrefillTiles(tiles, self._num_tiles, chunk, -(-max_context // chunk))
        decode = DecodePieces(pieces, self._num_pieces, self._num_pieces, config)
        # Where rows have several tokens, which of them belong to no row is not known at capture.
        self.plan = TritonAttentionPlan(table, prefill, decode, num_rows if self._decoding else -1)
        self.fill(AttentionRows(np.zeros(1, np.int32), np.zeros(0, np.int32), np.zeros((0, 1), np.int32)))

    def fill(self, rows: AttentionRows) -> None:
        """Send the rows of the next replay in one copy from pinned memory, ordered after earlier work.

        Raises ValueError for more rows, tokens or context than there is room for.
        """
        length = np.diff(rows.query_start).astype(np.int64)
        self._check(rows, length)
        table, first_page = _ragged(rows, length, self._page)
        pieces, _ = _pieces(rows, length, first_page, self._page.kv_heads, self._programs)
        records = np.zeros((self._num_pieces, PIECE_RECORD), dtype=np.int32)
        records[: len(pieces)] = pieces
        records[len(pieces) :, 0] = -1
        records[len(pieces) :, 4] = 1
        if self._decoding:
            # Tokens past the rows are rows without context.
            padding = np.arange(len(length), self._num_rows)
            records[len(pieces) : len(pieces) + len(padding), 0] = padding
        tiles = np.zeros((self._num_tiles, TILE_RECORD), dtype=np.int32)
        if not self._decoding:
            found = _tiles(rows, length, first_page)
            if len(found) > self._num_tiles:
                raise ValueError("the step has more prompts than what was captured")
            tiles[: len(found)] = found
        size = self._begin + len(table)
        host = torch.empty(size, dtype=torch.int32, pin_memory=self._memory.is_cuda)
        np.concatenate([records.reshape(-1), tiles.reshape(-1), table], out=host.numpy())
        self._memory[:size].copy_(host, non_blocking=True)

    def _check(self, rows: AttentionRows, length: Ints) -> None:
        fits = (
            len(length) <= self._num_rows
            and int(rows.query_start[-1]) <= self._num_tokens
            and int(rows.kv_len.max(initial=0)) <= self._max_context
            and not (self._decoding and (length != 1).any())
        )
        if not fits:
            raise ValueError("the step is larger than what was captured")


def _ragged(rows: AttentionRows, length: Ints, page: PageShape) -> tuple[Table, Ints]:
    """The rows' pages one after the other, and where each row's begin."""
    count = np.where(length > 0, -(-rows.kv_len.astype(np.int64) // page.page_tokens), 0)
    used = np.arange(rows.page_table.shape[1]) < count[:, None]
    return rows.page_table[used].astype(np.int32, copy=False), np.cumsum(count) - count


def _wanted_pieces(kv_heads: int, programs: int) -> int:
    return max(1, programs // kv_heads)


def _pieces(
    rows: AttentionRows, length: Ints, first_page: Ints, kv_heads: int, programs: int
) -> tuple[Table, int]:
    """Records of the pieces of rows with one query, at most ``_wanted_pieces`` more than rows; and how many
    places in memory those that are joined take."""
    chosen = np.flatnonzero(length == 1)
    context = rows.kv_len[chosen].astype(np.int64)
    blocks = -(-context // BLOCK_TOKENS)
    size = max(MIN_PIECE_BLOCKS, -(-int(blocks.sum()) // _wanted_pieces(kv_heads, programs)))
    pieces = np.maximum(1, -(-blocks // size))
    owner, number = tiles_of(pieces, 1)
    joined = np.where(pieces > 1, pieces, 0)
    records = np.zeros((len(owner), PIECE_RECORD), dtype=np.int32)
    records[:, 0] = rows.query_start[chosen][owner]
    records[:, 1] = first_page[chosen][owner]
    records[:, 2] = context[owner]
    records[:, 3] = number
    records[:, 4] = pieces[owner]
    records[:, 5] = (np.cumsum(joined) - joined)[owner]
    return records, int(joined.sum())


def _tiles(rows: AttentionRows, length: Ints, first_page: Ints) -> Table:
    """Records of the tiles of rows with several queries."""
    owner, inside = tiles_of(np.where(length > 1, length, 0), PREFILL_TILE)
    records = np.empty((len(owner), TILE_RECORD), dtype=np.int32)
    records[:, 0] = first_page[owner]
    records[:, 1] = rows.query_start[owner] + inside
    records[:, 2] = np.minimum(length[owner] - inside, PREFILL_TILE)
    records[:, 3] = rows.kv_len[owner] - length[owner] + inside
    return records


def _chunks(tiles: Table, kv_heads: int, programs: int) -> tuple[int, int]:
    """Slots of one split of a tile's context, and the most splits: equal shares of all the work, unless a row
    would then be cut too often."""
    context = tiles[:, 3].astype(np.int64) + tiles[:, 2]
    longest = int(context.max(initial=1))
    share = max(int(context.sum()) * kv_heads // programs, MIN_CHUNK, -(-longest // MAX_CHUNKS))
    chunk = -(-share // CHUNK_STEP) * CHUNK_STEP
    return chunk, -(-longest // chunk)
