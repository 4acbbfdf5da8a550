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
from manylora.kernels.triton.plans import Ints, Table, power_of_two, tiles_of, upload

RECORD = 8
PREFILL_TILE = 128
BLOCK_TOKENS = 64
MIN_PIECE_BLOCKS = 2
MIN_CHUNK = 128
CHUNK_STEP = 64
MAX_CHUNKS = 64
_SIZES = 4
"""Numbers, one of which is used: what follows begins at a multiple of 16 bytes."""

MORE_TILES = 8
"""Prompts of a captured step that may begin tiles of their own, beside those that its tokens fill."""


@dataclasses.dataclass(frozen=True)
class PrefillTiles:
    """Pieces of tiles of rows with several queries.

    ``records`` int32 [pieces, RECORD]; ``joined`` int32 [power of two, RECORD]: the first of each tile that has
    several; ``sizes`` int32 [1 or more]: context slots of a piece; ``places``: what partial results take, 0: there
    are none.
    """

    records: torch.Tensor
    joined: torch.Tensor
    sizes: torch.Tensor
    places: int


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
    tiles = _cut(_tiles(rows, length, first_page), page.kv_heads, programs)
    arrays = [table, pieces, tiles.records, tiles.joined, tiles.sizes]
    page_table, on_device, records, joined, sizes = upload(arrays, device)
    decode = DecodePieces(on_device, len(pieces), places, config) if len(pieces) else None
    prefill = None
    if len(tiles.records):
        prefill = PrefillTiles(records.view(-1, RECORD), joined.view(-1, RECORD), sizes, tiles.places)
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
        most_more = num_rows * (-(-max_context // (MIN_PIECE_BLOCKS * BLOCK_TOKENS)) - 1)
        self._num_pieces = num_rows + min(_wanted_pieces(page.kv_heads, self._programs), most_more)
        self._kv_heads, self._prefill_programs = page.kv_heads, programs
        self._most_tiles = self._num_tiles = self._num_joined = most_places = 0
        if not self._decoding:
            self._most_tiles = -(-self._num_tokens // PREFILL_TILE) + min(num_rows, MORE_TILES)
            most_more = self._most_tiles * (-(-max_context // MIN_CHUNK) - 1)
            more = min(_wanted_pieces(page.kv_heads, programs), most_more)
            self._num_tiles = self._most_tiles + more
            self._num_joined = power_of_two(min(more, self._most_tiles))
            # Each piece beside a tile's first one has at most a whole tile's tokens.
            most_places = self._num_tokens + more * min(self._num_tokens, PREFILL_TILE) if more else 0
        counts = [self._num_pieces, self._num_tiles, self._num_joined]
        most_pages = num_rows * -(-max_context // page.page_tokens)
        lengths = [*(count * RECORD for count in counts), _SIZES]
        self._begin = sum(lengths)
        self._memory = torch.zeros(self._begin + most_pages, dtype=torch.int32, device=device)
        pieces, tiles, joined, sizes, table = torch.split(self._memory, [*lengths, most_pages])
        prefill = None
        if not self._decoding:
            prefill = PrefillTiles(tiles.view(-1, RECORD), joined.view(-1, RECORD), sizes, most_places)
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
        records = np.zeros((self._num_pieces, RECORD), dtype=np.int32)
        records[: len(pieces)] = pieces
        records[len(pieces) :, 0] = -1
        records[len(pieces) :, 4] = 1
        if self._decoding:
            # Tokens past the rows are rows without context.
            padding = np.arange(len(length), self._num_rows)
            records[len(pieces) : len(pieces) + len(padding), 0] = padding
        parts = [records, *self._prompts(rows, length, first_page), table]
        size = self._begin + len(table)
        host = torch.empty(size, dtype=torch.int32, pin_memory=self._memory.is_cuda)
        np.concatenate([part.reshape(-1) for part in parts], out=host.numpy())
        self._memory[:size].copy_(host, non_blocking=True)

    def _prompts(self, rows: AttentionRows, length: Ints, first_page: Ints) -> list[Table]:
        """Records, joined ones and sizes, as long as there is room for them."""
        records = np.zeros((self._num_tiles, RECORD), dtype=np.int32)
        joined = np.zeros((self._num_joined, RECORD), dtype=np.int32)
        sizes = np.ones(_SIZES, dtype=np.int32)
        if not self._decoding:
            tiles = _tiles(rows, length, first_page)
            if len(tiles) > self._most_tiles:
                raise ValueError("the step has more prompts than what was captured")
            cut = _cut(tiles, self._kv_heads, self._prefill_programs)
            records[: len(cut.records)] = cut.records
            joined[: len(cut.joined)] = cut.joined
            sizes[:1] = cut.sizes
        return [records, joined, sizes]

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
    records = np.zeros((len(owner), RECORD), dtype=np.int32)
    records[:, 0] = rows.query_start[chosen][owner]
    records[:, 1] = first_page[chosen][owner]
    records[:, 2] = context[owner]
    records[:, 3] = number
    records[:, 4] = pieces[owner]
    records[:, 5] = (np.cumsum(joined) - joined)[owner]
    return records, int(joined.sum())


def _tiles(rows: AttentionRows, length: Ints, first_page: Ints) -> Table:
    """The first four numbers of the records of rows with several queries, a tile each."""
    owner, inside = tiles_of(np.where(length > 1, length, 0), PREFILL_TILE)
    records = np.empty((len(owner), 4), dtype=np.int32)
    records[:, 0] = first_page[owner]
    records[:, 1] = rows.query_start[owner] + inside
    records[:, 2] = np.minimum(length[owner] - inside, PREFILL_TILE)
    records[:, 3] = rows.kv_len[owner] - length[owner] + inside
    return records


@dataclasses.dataclass(frozen=True)
class _Cut:
    """``PrefillTiles`` on the host; ``joined`` is filled up with records of no tokens."""

    records: Table
    joined: Table
    sizes: Table
    places: int


def _cut(tiles: Table, kv_heads: int, programs: int) -> _Cut:
    """Cut the tiles' contexts into equal shares of all the work, unless a row would then be cut too often: at most
    ``_wanted_pieces`` more pieces than tiles."""
    tokens, context = tiles[:, 2].astype(np.int64), tiles[:, 3].astype(np.int64) + tiles[:, 2]
    longest = int(context.max(initial=1))
    share = max(-(-int(context.sum()) * kv_heads // programs), MIN_CHUNK, -(-longest // MAX_CHUNKS))
    chunk = -(-share // CHUNK_STEP) * CHUNK_STEP
    pieces = -(-context // chunk)
    owner, number = tiles_of(pieces, 1)
    places = np.where(pieces > 1, tokens * pieces, 0)
    records = np.zeros((len(owner), RECORD), dtype=np.int32)
    records[:, :4] = tiles[owner]
    records[:, 4] = number
    records[:, 5] = pieces[owner]
    records[:, 6] = (np.cumsum(places) - places)[owner] + np.where(pieces > 1, tokens, 0)[owner] * number
    first = records[(records[:, 4] == 0) & (records[:, 5] > 1)]
    joined = np.zeros((power_of_two(len(first)), RECORD), dtype=np.int32)
    joined[: len(first)] = first
    return _Cut(records, joined, np.array([chunk], dtype=np.int32), int(places.sum()))
