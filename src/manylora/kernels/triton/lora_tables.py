"""Compiled loops that write the tables of a step's LoRA work; ``lora_work`` says what is in them.

The tables are some hundred numbers, made anew whenever a step's rows or adapters change, when the device may have
nothing else to do: in numpy, array by array, that took five times as long. Arrays are contiguous. ``runs`` int64
[3, n]: as ``runs_of`` gives them. ``columns`` int64 [G, 3]: the places of each group's projections among all, -1
where it has fewer. ``records``: LoraSegments'.
"""

from __future__ import annotations

import numpy as np

from manylora.kernels.loops import loop

WORDS = 16
ROWS = 16
MOST_PROJECTIONS = 3


@loop
def write_runs(start: np.ndarray, length: np.ndarray, num_tokens: int, runs: np.ndarray) -> int:
    """The segments, int32 [S], and then the gaps between them and behind them, into ``runs`` [3, 2 * S + 1]; how
    many there are."""
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
    """``counts`` int32 [G, 4], as GroupWork has them, and ``units`` int64 [G]."""
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
            pieces = -(-length // entry_tokens)  # of all tiles, which are whole ones but for the last
            entries += pieces * -(-rows // blocks)
        counts[group, 0], counts[group, 1] = adapted, all_tiles
        counts[group, 2], counts[group, 3] = entries, several
        units[group] = taken


@loop
def write_tables(
    runs: np.ndarray, records: np.ndarray, columns: np.ndarray, a_cells: np.ndarray, tile_tokens: int,
    entry_tokens: int, blocks: int, words: np.ndarray, tile_places: np.ndarray, entry_places: np.ndarray,
) -> None:  # fmt: skip
    """Into ``words`` int32: each group's tiles from its ``tile_places`` on, its entries from its ``entry_places``.
    ``a_cells``: by group, the cells that a row of A takes."""
    for group in range(len(columns)):
        tile, entry, unit = tile_places[group], entry_places[group] - WORDS, 0
        for kind in range(4):  # several tokens with an adapter, one, several without, one
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
    """The entries of a piece of a tile, which has ``length`` tokens, into ``words`` behind ``entry``; the place of
    the last one. ``unit``: of the piece's first token's first block."""
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
