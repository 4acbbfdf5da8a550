"""Compiled loops that write what the attention kernel reads of a step: which rows are cut into which pieces.

``attention_plans`` says what the numbers mean and has them sent. They are made anew for every step. Arrays are
contiguous; ``query_start``, ``kv_len`` and ``pages`` are an AttentionRows' own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from manylora.kernels.loops import loop

RECORD = 8
BLOCK_TOKENS = 64
LEAST_BLOCKS = 2
"""The least blocks in a piece of a row with one query, which costs the bytes of its context wherever it is cut."""

LEAST_TILE_BLOCKS = 12
"""The least blocks in a piece of a tile: joining costs as much as some, so only tiles of long contexts are cut."""


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
