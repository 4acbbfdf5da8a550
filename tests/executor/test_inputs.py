"""The batch that rows become, against a token-by-token account of it."""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.adapters.pack import AdapterLayout
from manylora.devices.device import Device
from manylora.executor.batch import Expected, InputBuilder, Rows, SequenceTable, StepInputs
from manylora.executor.tables import AdapterTables
from manylora.kernels.shapes import PageShape, Projection, ProjectionGroup, adapter_geometry
from manylora.protocol.commands import SequenceStart, StepRow
from manylora.types import SamplingParams

PAGE_TOKENS = 4
PAGE = PageShape(layers=2, page_tokens=PAGE_TOKENS, kv_heads=1, head_dim=8, itemsize=4)
ONLY = ProjectionGroup("only", (Projection("p", 8, 8),))
GEOMETRY = adapter_geometry(PAGE, ((ONLY,),) * PAGE.layers)
ADAPTERS = (1, 2, 3)


@dataclasses.dataclass
class Bench:
    sequences: SequenceTable
    tables: AdapterTables
    builder: InputBuilder

    def build(self, rows: list[StepRow]) -> StepInputs:
        return self.builder.build(self.sequences.rows(rows))

    def expect(self, rows: list[StepRow]) -> Expected:
        return self.sequences.expect(self.sequences.rows(rows))


def bench() -> Bench:
    sequences = SequenceTable()
    tables = AdapterTables(Device(), GEOMETRY)
    for adapter in ADAPTERS:
        put(tables, adapter)
    return Bench(sequences, tables, InputBuilder(sequences, tables, GEOMETRY))


def put(tables: AdapterTables, adapter: int, rank: int | None = None) -> None:
    """By default of its id's rank."""
    rank = rank or adapter
    records = np.array([[0, rank, rank]], dtype=np.int64)
    scales = np.full((1, PAGE.layers), adapter, dtype=np.float32)
    tables.put(adapter, AdapterLayout(2 * rank, 1, records, scales), np.arange(2 * rank))


def start(
    sequence: int,
    adapter: int,
    tokens: list[int],
    params: SamplingParams,
    num_prompt: int = 1,
    sample: int = 0,
) -> SequenceStart:
    pages = tuple(100 * sequence + i for i in range(-(-len(tokens) // PAGE_TOKENS)))
    return SequenceStart(sequence, sample, adapter, tuple(tokens), num_prompt, 0, pages, params, (7,))


def decoding(bench: Bench, adapters: list[int], length: int = 9) -> list[StepRow]:
    for sequence, adapter in enumerate(adapters):
        bench.sequences.start(start(sequence, adapter, list(range(length)), SamplingParams()))
    return [StepRow(sequence, length - 1, 1, 1) for sequence in range(len(adapters))]


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 30), st.data(), st.integers(0, 3)),
        min_size=1,
        max_size=12,
    )
)
def test_every_token_is_where_it_belongs(drawn: list[tuple[int, int, Any, int]]) -> None:
    made = bench()
    rows = []
    for sequence, (adapter, length, data, num_samples) in enumerate(drawn):
        tokens = [1000 * sequence + i for i in range(length)]
        made.sequences.start(start(sequence, adapter, tokens, SamplingParams()))
        begin = data.draw(st.integers(0, length - 1))
        rows.append(StepRow(sequence, begin, data.draw(st.integers(1, length - begin)), num_samples))
    inputs = made.build(rows)
    check_batch(inputs, rows, [adapter for adapter, *_ in drawn])


def check_batch(inputs: StepInputs, rows: list[StepRow], adapters: list[int]) -> None:
    order = sorted(range(len(rows)), key=lambda i: (adapters[i], rows[i].num_tokens > 1, i))
    expected = [
        (rows[i].sequence, p) for i in order for p in range(rows[i].start, rows[i].start + rows[i].num_tokens)
    ]
    batch = inputs
    assert batch.token_ids.tolist() == [1000 * s + p for s, p in expected]
    assert batch.positions.tolist() == [p for _, p in expected]
    assert batch.slots.tolist() == [
        (100 * s + p // PAGE_TOKENS) * PAGE_TOKENS + p % PAGE_TOKENS for s, p in expected
    ]
    numbers = (
        batch.token_ids,
        batch.positions,
        batch.slots,
        batch.layout.sample_index,
        batch.layout.pending_index,
    )
    assert {array.dtype for array in numbers} == {np.dtype(np.int64)}

    attention = batch.attention
    assert np.diff(attention.query_start).tolist() == [rows[i].num_tokens for i in order]
    assert attention.query_start.dtype == attention.kv_len.dtype == attention.page_table.dtype == np.int32
    for where, i in enumerate(order):
        end = rows[i].start + rows[i].num_tokens
        assert attention.kv_len[where] == end
        pages = attention.page_table[where, : -(-end // PAGE_TOKENS)].tolist()
        assert pages == [100 * rows[i].sequence + n for n in range(len(pages))]

    sampled = [i for i in order if rows[i].num_samples]
    assert inputs.layout.sampled_rows.tolist() == sampled
    assert [expected[t] for t in batch.layout.sample_index.tolist()] == [
        (rows[i].sequence, rows[i].start + rows[i].num_tokens - 1) for i in sampled
    ]

    of_token = [adapters[i] for i in order for _ in range(rows[i].num_tokens)]
    if not any(of_token):
        assert batch.layout.lora is None
        return
    assert batch.layout.lora is not None
    covered = [0] * len(of_token)
    for begin, length, records, scales in zip(
        batch.layout.lora.start, batch.layout.lora.length, batch.layout.lora.records, batch.layout.lora.scales
    ):
        adapter = int(records[0, 2])
        assert (scales == adapter).all()
        covered[begin : begin + length] = [adapter] * length
    assert covered == of_token
    assert len(batch.layout.lora.start) == len(set(of_token) - {0}), "one segment an adapter"


def test_samples_of_a_row() -> None:
    made = bench()
    plain = SamplingParams(n=3)
    penalised = SamplingParams(repetition_penalty=1.5)
    made.sequences.start(start(0, 0, [5, 6, 7, 8], plain, num_prompt=2, sample=4))
    made.sequences.start(start(1, 0, [5, 6, 7, 8], penalised, num_prompt=3))
    inputs = made.build([StepRow(0, 3, 1, 3), StepRow(1, 2, 2, 1)])
    assert inputs.sampled is not None
    first, second = inputs.sampled
    assert first.samples == ((4, 2), (5, 2), (6, 2))
    assert first.stop_ids == (7,)
    assert second.samples == ((0, 1),)
    assert second.prompt_ids.tolist() == [5, 6, 7]
    assert list(second.output_ids) == [8]


def test_segments_are_kept_until_something_changes() -> None:
    made = bench()
    rows = decoding(made, [1, 2, 2])
    segments = made.build(rows).layout.lora
    made.sequences.settle(made.expect(rows), [1, 2, 3])
    later = [row._replace(start=row.start + 1) for row in rows]
    assert made.build(later).layout.lora is segments
    fewer = made.build(later[:2]).layout.lora
    assert fewer is not segments
    put(made.tables, 3)
    assert made.build(later[:2]).layout.lora is not fewer, "the cell table has changed"


def test_a_token_that_is_not_known_yet_is_named_by_its_entry() -> None:
    made = bench()
    rows = decoding(made, [2, 0])
    inputs = made.build(rows)
    expected = made.expect(rows)
    later = [row._replace(start=row.start + 1) for row in rows]
    late = made.build(later)
    assert (
        (-late.token_ids).tolist()
        == inputs.layout.pending_index.tolist()
        == late.layout.pending_index.tolist()
    )
    assert len(set(late.token_ids.tolist())) == 2
    assert 0 not in late.token_ids, "entry 0 is nobody's"
    made.sequences.settle(expected, [71, 72])
    assert made.build(later).token_ids.tolist() == [72, 71], "the base model's row comes first"


def test_tokens_that_do_not_exist() -> None:
    made = bench()
    (row,) = decoding(made, [0])
    after = row._replace(start=row.start + 1)
    with pytest.raises(ValueError, match="does not have"):
        made.build([after])
    expected = made.expect([row])
    made.build([after])
    made.sequences.forget(expected)
    with pytest.raises(ValueError, match="does not have"):
        made.build([after])
    with pytest.raises(ValueError, match="negative"):
        made.sequences.start(start(9, 0, [5, -1], SamplingParams()))


def test_what_a_sequence_drew_is_not_its_successors() -> None:
    made = bench()
    (row,) = decoding(made, [0])
    expected = made.expect([row])
    made.sequences.end(row.sequence)
    made.sequences.start(start(7, 0, list(range(12)), SamplingParams()))
    made.sequences.settle(expected, [1234])
    (slot,) = made.sequences.rows([row._replace(sequence=7)]).composition.slots
    assert made.sequences.tokens[slot, :12].tolist() == list(range(12))
    assert made.sequences.lengths[slot] == 12


def test_an_adapter_that_is_not_resident() -> None:
    made = bench()
    rows = decoding(made, [1, 9])
    with pytest.raises(KeyError):
        made.build(rows)


# ---------------------------------------------------------------- what is kept from step to step


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(("step", "step", "step", "start", "end", "again", "put", "page")),
        st.integers(0, 10**6),
    ),
    max_size=30,
)


@settings(deadline=None)
@given(OPERATIONS, st.integers(0, 2**32 - 1))
def test_what_was_built_before_never_shows(operations: list[tuple[str, int]], seed: int) -> None:
    """Each step equals what a builder that has seen no step before makes of it, pending tokens settled or not."""
    rng = random.Random(seed)
    made = bench()
    running: dict[int, int] = {}  # computed tokens of each sequence
    flying: list[tuple[Expected, int]] = []
    for operation, value in [("start", 0), ("start", 1), *operations]:
        if operation == "start":
            sequence = rng.choice([n for n in range(9) if n not in running] or [-1])
            if sequence < 0:
                continue
            length = 1 + value % 9
            params = SamplingParams(temperature=float(value % 5 == 0))
            made.sequences.start(start(sequence, value % 4, [value % 97] * length, params))
            running[sequence] = 0
        elif operation == "end" and running:
            sequence = rng.choice(list(running))
            del running[sequence]
            made.sequences.end(sequence)
        elif operation == "put":
            put(made.tables, 1 + value % 3, 1 + value % 7)
        elif operation == "again" and running:
            # Another sequence of the same id, as far as the one before.
            sequence = rng.choice(list(running))
            length = int(made.sequences.lengths[made.sequences._sequences[sequence].slot])
            made.sequences.end(sequence)
            made.sequences.start(start(sequence, value % 4, [value % 97] * length, SamplingParams()))
        elif operation == "page" and running:
            change = StepRow(rng.choice(list(running)), 0, 1, 0, ((value % 4, 9000 + value % 50),))
            made.sequences.update_pages([change], [])
        elif operation == "step" and running:
            rows = some_rows(made, running, value)
            inputs = made.build(rows)
            fresh = InputBuilder(made.sequences, made.tables, GEOMETRY).build(fresh_rows(made, rows))
            assert_equal(inputs, fresh)
            flying.append((made.expect(rows), sum(row.num_samples for row in rows)))
            for row in rows:
                running[row.sequence] = row.start + row.num_tokens
        if flying and value % 3 == 0:
            expected, count = flying.pop(0)
            made.sequences.settle(expected, [value % 89] * count)


def some_rows(made: Bench, running: dict[int, int], value: int) -> list[StepRow]:
    """All sequences or, now and then, the first ones; each computes all that it has, or a token of it."""
    chosen = list(running)[: None if value % 4 else 1 + value % len(running)]
    rows = []
    for sequence in chosen:
        slot = made.sequences._sequences[sequence].slot
        left = int(made.sequences.lengths[slot]) - running[sequence]
        count = 1 if value % 5 == 0 else left
        rows.append(StepRow(sequence, running[sequence], count, int(count == left)))
    return rows


def fresh_rows(made: Bench, rows: list[StepRow]) -> Rows:
    """As the table's own, from nothing that it remembers."""
    table = copy.copy(made.sequences)
    table._composition = None
    return table.rows(rows)


def assert_equal(found: StepInputs, wanted: StepInputs) -> None:
    for name in ("token_ids", "positions", "slots"):
        assert getattr(found, name).tolist() == getattr(wanted, name).tolist(), name
    for name in ("sample_index", "pending_index", "sampled_rows"):
        assert getattr(found.layout, name).tolist() == getattr(wanted.layout, name).tolist(), name
    for name in ("query_start", "kv_len", "page_table"):
        assert getattr(found.attention, name).tolist() == getattr(wanted.attention, name).tolist(), name
    lora, wanted_lora = found.layout.lora, wanted.layout.lora
    assert (lora is None) == (wanted_lora is None)
    if lora is not None and wanted_lora is not None:
        for name in ("start", "length", "records", "scales"):
            assert getattr(lora, name).tolist() == getattr(wanted_lora, name).tolist(), name
    assert (found.sampled is None) == (wanted.sampled is None)
    for a, b in zip(found.sampled or (), wanted.sampled or ()):
        assert (a.params, a.samples, a.stop_ids) == (b.params, b.samples, b.stop_ids)


def test_decoding_steps_share_their_composition() -> None:
    made = bench()
    rows = decoding(made, [1, 0, 2])
    first = made.sequences.rows(rows).composition
    made.expect(rows)
    later = [row._replace(start=row.start + 1) for row in rows]
    assert made.sequences.rows(later).composition is first
    assert made.build(later).attention.query_start is made.build(later).attention.query_start
    made.sequences.end(rows[0].sequence)
    assert made.sequences.rows(later[1:]).composition is not first
    with pytest.raises(KeyError):
        made.sequences.rows(later)


def test_only_greedy_rows_need_no_sampler() -> None:
    made = bench()
    greedy = SamplingParams(temperature=0.0)
    for sequence, params in enumerate(
        [greedy, greedy, dataclasses.replace(greedy, logprobs=0), dataclasses.replace(greedy, min_tokens=3)]
    ):
        made.sequences.start(start(sequence, 0, [5, 6, 7], params))
    rows = [StepRow(sequence, 2, 1, 1) for sequence in range(4)]
    assert made.build(rows[:2]).sampled is None
    assert made.build([rows[0], rows[1]._replace(num_samples=2)]).sampled is not None
    for other in rows[2:]:
        assert made.build([rows[0], other]).sampled is not None
        assert made.build([rows[0], other._replace(num_samples=0)]).sampled is None, "it draws nothing"
