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
from manylora.kernels.triton.attention_tables import (
    BLOCK_TOKENS,
    LEAST_BLOCKS,
    LEAST_TILE_BLOCKS,
    RECORD,
    Pieces,
    count_pieces,
    write_pieces,
    write_rest,
)
from manylora.kernels.triton.decode_table import DecodeConfig, DecodeTable
from manylora.kernels.triton.plans import Table, upload


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
    length = np.diff(rows.query_start)
    config = decoding.choice(int((length == 1).sum()))
    tile = decoding.tile if (length > 1).any() else 1
    found = _counted(rows, page, tile, _Wanted.of(page.kv_heads, config, programs))
    pieces = np.empty((found.records, RECORD), dtype=np.int32)
    pages = np.empty(found.pages, dtype=np.int32)
    _write(rows, page, tile, found, pieces, pages)
    page_table, records = upload([pages, pieces], device)
    return TritonAttentionPlan(
        page_table,
        records.view(-1, RECORD),
        found.of_prompts,
        tile,
        found.places,
        found.counters,
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
        found = _counted(rows, self._page, self._tile, self._wanted)
        self._check(rows, found)
        size = self._num_records * RECORD
        stage = upload_buffers(self._memory.device).stage(size + found.pages)
        records, pages = stage.numbers[:size].reshape(-1, RECORD), stage.numbers[size:]
        _write(rows, self._page, self._tile, found, records[: found.records], pages)
        write_rest(records[found.records :], rows.query_start[-1], self._num_tokens, self._tile)
        stage.send(self._memory[: len(stage.numbers)])

    def _check(self, rows: AttentionRows, found: Pieces) -> None:
        """Nothing is written where there is no room."""
        padding = -(-(self._num_tokens - int(rows.query_start[-1])) // self._tile)
        fits = (
            len(rows.kv_len) <= self._num_rows
            and found.records + padding <= self._num_records
            and rows.query_start[-1] <= self._num_tokens
            and found.longest <= self._max_context
            and (self._tile > 1 or found.single == len(rows.kv_len))
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
