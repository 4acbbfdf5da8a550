"""The tables of a step's attention, against an account of them row by row."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.kernels.triton.attention_plan import (
    BLOCK_TOKENS,
    LEAST_BLOCKS,
    LEAST_TILE_BLOCKS,
    RECORD,
    Pieces,
    count_pieces,
    write_pieces,
)

Step = list[tuple[int, int]]
"""By row: queries, and tokens of its context."""
steps = st.lists(
    st.tuples(st.sampled_from((0, 1, 1, 1, 2, 16, 17, 200)), st.sampled_from((0, 1, 50, 900, 5000))),
    max_size=8,
).map(lambda rows: [(queries, queries + before) for queries, before in rows])


def made(
    step: Step, page_tokens: int, tile: int, most: tuple[int, int]
) -> tuple[Pieces, list[list[int]], list[int], np.ndarray]:
    """What is counted, the records, the table of pages, and the rows' pages that it is of."""
    starts = np.array([0, *itertools.accumulate(queries for queries, _ in step)], dtype=np.int32)
    contexts = np.array([context for _, context in step], dtype=np.int32)
    width = max((-(-context // page_tokens) for _, context in step), default=0) + 1
    pages = np.random.default_rng(len(step)).integers(0, 10**6, (len(step), width)).astype(np.int32)
    found = count_pieces(starts, contexts, page_tokens, tile, *most)
    records = np.empty((found.records, RECORD), dtype=np.int32)
    table = np.empty(found.pages, dtype=np.int32)
    write_pieces(starts, contexts, pages, page_tokens, tile, found, int(starts[-1]), records, table)
    return found, records.tolist(), table.tolist(), pages


@settings(deadline=None)
@given(steps, st.sampled_from((1, 16)), st.sampled_from((16, 64)), st.sampled_from(((1, 1), (16, 132))))
def test_every_query_has_its_context_in_pieces_of_its_own(
    step: Step, page_tokens: int, tile: int, most: tuple[int, int]
) -> None:
    found, records, table, pages = made(step, page_tokens, tile, most)
    wanted, place, first_page = {}, 0, 0
    for row, (queries, context) in enumerate(step):
        for inside in range(0, queries, tile):
            taken = min(queries - inside, tile)
            wanted[place + inside] = (first_page, taken, context - queries + inside)
        place += queries
        if queries:
            count = -(-context // page_tokens)
            assert table[first_page : first_page + count] == pages[row, :count].tolist()
            first_page += count
    assert found.pages == first_page == len(table)
    assert found.longest == max((context for _, context in step), default=0)
    assert found.single == sum(queries == 1 for queries, _ in step)

    pieces: dict[int, list[list[int]]] = {}
    for record in records:
        pieces.setdefault(record[1], []).append(record)
    assert {first: (each[0][0], *each[0][2:4]) for first, each in pieces.items()} == wanted
    places: list[int] = []
    counters: list[int] = []
    for each in pieces.values():
        count = len(each)
        assert [record[4:6] for record in each] == [[number, count] for number in range(count)]
        assert all(record[:4] + record[6:] == each[0][:4] + each[0][6:] for record in each)
        if count > 1:
            _, _, queries, before, *_, shared, counter = each[0]
            least = LEAST_BLOCKS if queries == 1 else LEAST_TILE_BLOCKS
            assert (count - 1) * least < -(-(before + queries) // BLOCK_TOKENS), "no piece is without work"
            places.extend(range(shared, shared + count * queries))
            counters.append(counter)
    assert sorted(places) == list(range(found.places)), "each partial result has a place of its own"
    assert sorted(counters) == list(range(found.counters))

    of_prompts = [record for record in records if of_several(record, step)]
    others = [record for record in records if not of_several(record, step)]
    assert len(of_prompts) == found.of_prompts
    assert [-record[3] for record in of_prompts] == sorted(-record[3] for record in of_prompts)
    assert [record[1] for record in others] == sorted(record[1] for record in others)
    assert records == of_prompts + others


def of_several(record: list[int], step: Step) -> bool:
    """Whether the record is of a row with several queries."""
    ends = list(itertools.accumulate(queries for queries, _ in step))
    row = next(row for row, end in enumerate(ends) if record[1] < end)
    return step[row][0] > 1


@settings(deadline=None)
@given(st.integers(0, 100), st.integers(0, 100), st.sampled_from((1, 16, 64)), st.integers(0, 5))
def test_tokens_of_no_row_have_tiles_without_context(begin: int, more: int, tile: int, room: int) -> None:
    """And what no token needs is nothing."""
    count = -(-more // tile)
    records = np.full((count + room, RECORD), 77, dtype=np.int32)
    starts, nothing = np.array([begin], np.int32), np.zeros(0, np.int32)
    found = count_pieces(starts, nothing, 16, tile, 1, 1)
    assert found.records == 0
    pages = np.zeros((0, 1), np.int32)
    write_pieces(starts, nothing, pages, 16, tile, found, begin + more, records, nothing)
    tokens: list[int] = []
    for first_page, first, queries, before, number, pieces, shared, counter in records[:count].tolist():
        assert (first_page, number, shared, counter) == (0, 0, 0, 0)
        assert pieces == 1
        assert before + queries <= 0, "it reads no key"
        tokens.extend(range(first, first + queries))
    assert tokens == list(range(begin, begin + more))
    assert not records[count:].any()
