"""What the attention kernel reads of a step's rows, built on the host and sent in one copy.

Owns: how rows are cut into tiles and pieces so that a large GPU is busy. All launch sizes are decided here from
host numbers, or from the largest ones where a step is to be captured; nothing reads the device back.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from manylora.devices.staging import upload_buffers
from manylora.kernels.flashinfer_attention import PlannedPrompts
from manylora.kernels.ops import AttentionRows
from manylora.kernels.shapes import PageShape
from manylora.kernels.triton.decode_table import DecodeConfig, DecodeTable
from manylora.kernels.triton.plans import Ints, Table, tiles_of, upload

RECORD = 8
BLOCK_TOKENS = 64
LEAST_BLOCKS = 2
"""The least blocks in a piece of a row with one query, which costs the bytes of its context wherever it is cut."""

LEAST_TILE_BLOCKS = 12
"""The least blocks in a piece of a tile: joining costs as much as some, so only tiles of long contexts are cut."""

SPREAD = 0.5
"""Over which part of a captured step's other pieces its tiles are spread: tiles calculate while others read."""

_NO_TILES: Table = np.zeros((0, 4), dtype=np.int32)


@dataclasses.dataclass(frozen=True)
class TritonAttentionPlan:
    """``page_table`` int32: the rows' pages, one row after the other. ``records`` int32 [pieces, RECORD], of which
    the first ``of_prompts`` belong to rows with several queries. ``num_tokens``: all that the records are of.

    ``tile``: the most queries of a record; ``places``, ``counters``: what partial results take, 0: there are none.
    ``prompts``: serves rows with several queries too, in some layers.
    """

    page_table: torch.Tensor
    records: torch.Tensor
    of_prompts: int
    tile: int
    places: int
    counters: int
    config: DecodeConfig
    num_tokens: int
    prompts: PlannedPrompts | None = None


def attention_plan(
    rows: AttentionRows, page: PageShape, device: torch.device, programs: int, decoding: DecodeTable
) -> TritonAttentionPlan:
    length = np.diff(rows.query_start).astype(np.int64)
    table, first_page = _ragged(rows, length, page)
    config = decoding.choice(int((length == 1).sum()))
    tile = decoding.tile if (length > 1).any() else 1
    wanted = _Wanted.of(page.kv_heads, config, programs)
    cut = _cut(_tiles(rows, length, first_page, tile), _single_tiles(rows, length, first_page), wanted)
    page_table, records = upload([table, cut.records], device)
    return TritonAttentionPlan(
        page_table,
        records.view(-1, RECORD),
        cut.of_prompts,
        tile,
        cut.places,
        cut.counters,
        config,
        int(rows.query_start[-1]),
    )


class TritonFixedAttention:
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
        self._wanted = wanted = _Wanted.of(page.kv_heads, config, programs)
        self._num_rows = num_rows
        self._max_context = max_context
        self._num_tokens = num_rows if num_tokens is None else num_tokens
        self._tile = 1 if num_tokens is None else decoding.tile
        # Each row's last tile, and the padding's, may be any part of one.
        whole = 0 if num_tokens is None else self._num_tokens // self._tile + 1
        longest = -(-max_context // BLOCK_TOKENS)
        more = min(wanted.rows, num_rows * (-(-longest // LEAST_BLOCKS) - 1))
        more_tiles = (
            min(wanted.tiles, (whole + num_rows) * (-(-longest // LEAST_TILE_BLOCKS) - 1)) if whole else 0
        )
        self._num_records = num_rows + whole + more + more_tiles
        # A tile in pieces has at least one more than a whole one.
        places = 2 * (more + more_tiles * min(self._num_tokens, self._tile))
        most_pages = num_rows * -(-max_context // page.page_tokens)
        size = self._num_records * RECORD
        self._memory = torch.zeros(size + most_pages, dtype=torch.int32, device=device)
        self.plan = TritonAttentionPlan(
            self._memory[size:],
            self._memory[:size].view(-1, RECORD),
            0,
            self._tile,
            places,
            more + more_tiles,
            config,
            self._num_tokens,
        )
        self.fill(AttentionRows(np.zeros(1, np.int32), np.zeros(0, np.int32), np.zeros((0, 1), np.int32)))

    def fill(self, rows: AttentionRows) -> None:
        """Send the rows of the next replay in one copy, ordered after earlier work.

        Raises ValueError for more rows, tokens or context than there is room for.
        """
        length = (rows.query_start[1:] - rows.query_start[:-1]).astype(np.int64)
        self._check(rows, length)
        table, first_page = _ragged(rows, length, self._page)
        # Decoding steps are many and short: nothing is asked of them about tiles.
        several = _NO_TILES if self._tile == 1 else _tiles(rows, length, first_page, self._tile)
        cut = _cut(several, _single_tiles(rows, length, first_page), self._wanted)
        found = cut.records
        if 0 < cut.of_prompts < len(found):
            found = found[_spread(cut.of_prompts, len(found) - cut.of_prompts)]
        begin, size = int(rows.query_start[-1]), self._num_records * RECORD
        stage = upload_buffers(self._memory.device).stage(size + len(table))
        numbers = stage.numbers
        numbers[size:] = table
        records = numbers[:size].reshape(-1, RECORD)
        records[: len(found)] = found
        records[len(found) :] = 0
        if begin < self._num_tokens:
            padding = self._padding(begin)
            records[len(found) : len(found) + len(padding)] = padding
        stage.send(self._memory[: len(numbers)])

    def _padding(self, begin: int) -> Table:
        """Records of tiles without context, from this token on."""
        first = np.arange(begin, self._num_tokens, self._tile)
        records = np.zeros((len(first), RECORD), dtype=np.int32)
        records[:, 1] = first
        records[:, 2] = np.minimum(self._num_tokens - first, self._tile)
        records[:, 3] = -self._tile
        records[:, 5] = 1
        return records

    def _check(self, rows: AttentionRows, length: Ints) -> None:
        fits = (
            len(length) <= self._num_rows
            and int(rows.query_start[-1]) <= self._num_tokens
            and int(rows.kv_len.max(initial=0)) <= self._max_context
            and not (self._tile == 1 and (length != 1).any())
        )
        if not fits:
            raise ValueError("the step is larger than what was captured")


def _ragged(rows: AttentionRows, length: Ints, page: PageShape) -> tuple[Table, Ints]:
    """The rows' pages one after the other, and where each row's begin."""
    count = np.where(length > 0, -(-rows.kv_len.astype(np.int64) // page.page_tokens), 0)
    used = np.arange(rows.page_table.shape[1]) < count[:, None]
    return rows.page_table[used].astype(np.int32, copy=False), count.cumsum() - count


def _tiles(rows: AttentionRows, length: Ints, first_page: Ints, tile: int) -> Table:
    """The first four numbers of the records of tiles of rows with several queries, those of the longest contexts
    first."""
    owner, inside = tiles_of(np.where(length > 1, length, 0), tile)
    tiles = np.empty((len(owner), 4), dtype=np.int32)
    tiles[:, 0] = first_page[owner]
    tiles[:, 1] = rows.query_start[owner] + inside
    tiles[:, 2] = np.minimum(length[owner] - inside, tile)
    tiles[:, 3] = rows.kv_len[owner] - length[owner] + inside
    return tiles[np.argsort(-tiles[:, 3], kind="stable")] if len(tiles) > 1 else tiles


def _single_tiles(rows: AttentionRows, length: Ints, first_page: Ints) -> Table:
    """The same of the rows with one query, in their order."""
    (owner,) = (length == 1).nonzero()
    tiles = np.empty((len(owner), 4), dtype=np.int32)
    tiles[:, 0] = first_page[owner]
    tiles[:, 1] = rows.query_start[owner]
    tiles[:, 2] = 1
    tiles[:, 3] = rows.kv_len[owner] - 1
    return tiles


def _spread(tiles: int, others: int) -> Ints:
    """An order of so many records of tiles and then others, some of each, in which they begin side by side."""
    places = [np.arange(tiles) * (SPREAD / tiles), np.arange(others) / others]
    return np.argsort(np.concatenate(places), kind="stable")


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """Pieces that keep the device busy, of rows with one query and of tiles of others."""

    rows: int
    tiles: int

    @classmethod
    def of(cls, kv_heads: int, config: DecodeConfig, programs: int) -> _Wanted:
        return cls(max(1, (config.programs or programs) // kv_heads), max(1, programs // kv_heads))


@dataclasses.dataclass(frozen=True)
class _Cut:
    """The arrays of a ``TritonAttentionPlan``, on the host."""

    records: Table
    of_prompts: int
    places: int
    counters: int


def _cut(several: Table, single: Table, wanted: _Wanted) -> _Cut:
    """Records of the pieces of tiles of rows with several queries, then of rows with one."""
    of_prompts = 0
    if len(several):
        tiles, pieces = several, _num_pieces(several, wanted.tiles, LEAST_TILE_BLOCKS)
        of_prompts = int(pieces.sum())
        if len(single):
            of_single = _num_pieces(single, wanted.rows, LEAST_BLOCKS)
            tiles, pieces = np.concatenate([tiles, single]), np.concatenate([pieces, of_single])
    else:
        tiles, pieces = single, _num_pieces(single, wanted.rows, LEAST_BLOCKS)
    if len(tiles) and pieces.max() == 1:  # as in most steps
        records = np.zeros((len(tiles), RECORD), dtype=np.int32)
        records[:, :4] = tiles
        records[:, 5] = 1
        return _Cut(records, of_prompts, 0, 0)
    owner, number = tiles_of(pieces, 1)
    joined = pieces > 1
    places = np.where(joined, tiles[:, 2] * pieces, 0)
    records = np.zeros((len(owner), RECORD), dtype=np.int32)
    records[:, :4] = tiles[owner]
    records[:, 4] = number
    records[:, 5] = pieces[owner]
    records[:, 6] = (np.cumsum(places) - places)[owner]
    records[:, 7] = (np.cumsum(joined) - joined)[owner]
    return _Cut(records, of_prompts, int(places.sum()), int(joined.sum()))


def _num_pieces(tiles: Table, wanted: int, least: int) -> Ints:
    """Into how many pieces each tile's context is cut: equal shares of all work, of at least so many blocks; at
    most ``wanted`` more pieces than tiles."""
    blocks = -(-(tiles[:, 3] + tiles[:, 2]).astype(np.int64) // BLOCK_TOKENS)
    size = max(least, -(-int(blocks.sum()) // wanted))
    return np.maximum(1, -(-blocks // size))
