"""From a step's rows to what a forward pass and the sampler read, on the host.

Owns the order of the batch: rows of one adapter side by side, the base model's first, decoding rows of an
adapter before its prompt chunks; and which rows need an adapter beside the weights. Works with numpy; nothing
here loops over tokens. What follows from the composition alone is worked out once for all steps that share it.
Does not send anything to a device and does not run anything.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from manylora.executor.sampler import SampledRow
from manylora.executor.scoring import ScoredTokens
from manylora.executor.sequences import Composition, Rows, SequenceTable
from manylora.executor.tables import AdapterTables
from manylora.kernels.ops import AttentionRows, LoraSegments
from manylora.kernels.shapes import AdapterGeometry
from manylora.types import BASE, AdapterId


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class StepInputs:
    """One step of T tokens, M of whose rows draw.

    ``token_ids`` int64 [T]: a negative one, -i, is entry i of the device's pending tokens. ``positions`` (as
    rows of the rotary tables),
    ``slots`` int64 [T]; ``sample_index`` int64 [M]: the tokens whose logits are wanted; ``pending_index`` int64
    [M]: the entries of the pending tokens where the draws go. ``sampled[i]`` draws from row i of the logits, for
    the step's row ``sampled_rows[i]`` (int64 [M]); ``sampled`` is None where each row draws its most likely token
    once and nothing else is asked. ``lora`` is the same object as in the step before where nothing has changed,
    and ``lora_adapters`` are those of its segments. ``scored``: the tokens whose logits tell of a prompt, if any.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    sample_index: np.ndarray
    pending_index: np.ndarray
    attention: AttentionRows
    lora: LoraSegments | None
    sampled: list[SampledRow] | None
    sampled_rows: np.ndarray
    lora_adapters: tuple[AdapterId, ...] = ()
    scored: ScoredTokens | None = None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Layout:
    """A batch without its positions, for a composition and a version of the adapters' tables.

    By row, in batch order: ``order`` (which row of the step), ``slots`` in the table, ``counts`` of tokens. By
    token: its row's place in the batch (``row``) and slot, its own place ``inside`` the row, and the row of the
    rotary tables where its sequence's begin (``rotary``).
    """

    composition: Composition
    version: int
    order: np.ndarray
    slots: np.ndarray
    counts: np.ndarray
    row: np.ndarray
    token_slots: np.ndarray
    inside: np.ndarray
    rotary: np.ndarray
    query_start: np.ndarray
    sample_index: np.ndarray
    pending_index: np.ndarray
    sampled_rows: np.ndarray
    is_greedy: bool
    may_score: bool
    lora: LoraSegments | None
    lora_adapters: tuple[AdapterId, ...]


class InputBuilder:
    """Builds one step's inputs at a time."""

    def __init__(self, sequences: SequenceTable, tables: AdapterTables, geometry: AdapterGeometry) -> None:
        self._sequences = sequences
        self._tables = tables
        self._page_tokens = geometry.page.page_tokens
        self._lora_key: tuple[int, bytes, bytes, bytes] | None = None
        self._lora: LoraSegments | None = None
        self._layout: _Layout | None = None

    def build(self, rows: Rows) -> StepInputs:
        """Inputs for rows whose sequences and page tables are up to date.

        Raises KeyError where a sequence's adapter is not resident, ValueError where a row computes tokens that do
        not exist.
        """
        table, page_tokens = self._sequences, self._page_tokens
        layout = self._layout_of(rows.composition)
        starts = rows.starts[layout.order]
        ends = starts + layout.counts
        if (ends > table.lengths[layout.slots]).any():
            raise ValueError("a row computes tokens that its sequence does not have")
        positions = starts[layout.row] + layout.inside
        page, offset = np.divmod(positions, page_tokens)
        width = -(-int(ends.max()) // page_tokens)
        return StepInputs(
            token_ids=table.tokens[layout.token_slots, positions].astype(np.int64),
            positions=positions + layout.rotary,
            slots=table.pages[layout.token_slots, page].astype(np.int64) * page_tokens + offset,
            sample_index=layout.sample_index,
            pending_index=layout.pending_index,
            attention=AttentionRows(
                query_start=layout.query_start,
                kv_len=ends.astype(np.int32),
                page_table=table.pages[layout.slots, :width],
            ),
            lora=layout.lora,
            sampled=None if layout.is_greedy else self._sampled(rows, layout.sampled_rows.tolist()),
            sampled_rows=layout.sampled_rows,
            lora_adapters=layout.lora_adapters,
            scored=self._scored(layout, starts, ends) if layout.may_score else None,
        )

    def _scored(self, layout: _Layout, starts: np.ndarray, ends: np.ndarray) -> ScoredTokens | None:
        table, slots = self._sequences, layout.slots
        begins = np.maximum(starts, table.scored[slots, 0])
        counts = np.minimum(ends, table.scored[slots, 1]) - begins
        rows = np.flatnonzero(counts > 0)
        if len(rows) == 0:
            return None
        index, targets, runs = [], [], []
        for row in rows.tolist():
            begin, count = int(begins[row]), int(counts[row])
            index.append(layout.query_start[row] + begin - starts[row] + np.arange(count))
            targets.append(table.tokens[slots[row], begin + 1 : begin + 1 + count])
            sequence = layout.composition.sequences[layout.order[row]]
            runs.append((sequence, count, table.num_top(sequence)))
        tokens = np.concatenate(index), np.concatenate(targets)
        return ScoredTokens(np.stack(tokens, dtype=np.int64), tuple(runs))

    def _sampled(self, rows: Rows, chosen: list[int]) -> list[SampledRow]:
        composition = rows.composition
        ends, counts = (rows.starts + composition.counts).tolist(), composition.num_samples.tolist()
        return [
            self._sequences.sampled_row(composition.sequences[row], ends[row], counts[row]) for row in chosen
        ]

    def _layout_of(self, composition: Composition) -> _Layout:
        layout = self._layout
        if layout is None or layout.composition is not composition or layout.version != self._tables.version:
            layout = self._layout = self._lay_out(composition)
        return layout

    def _lay_out(self, composition: Composition) -> _Layout:
        adapters = self._sequences.adapters[composition.slots]
        order = np.lexsort((composition.counts > 1, adapters))
        slots, counts = composition.slots[order], composition.counts[order]
        ends = counts.cumsum()
        first = ends - counts
        row = np.arange(len(order)).repeat(counts)
        drawing = np.flatnonzero(composition.num_samples[order])
        lora, lora_adapters = self._segments(adapters[order], first, ends)
        draws_once = composition.num_samples[composition.drawing] == 1
        return _Layout(
            composition=composition,
            version=self._tables.version,
            order=order,
            slots=slots,
            counts=counts,
            row=row,
            token_slots=slots[row],
            inside=np.arange(len(row)) - first[row],
            rotary=self._sequences.rotary[slots[row]],
            query_start=np.concatenate((first[:1], ends)).astype(np.int32),
            sample_index=ends[drawing] - 1,
            pending_index=slots[drawing] + 1,
            sampled_rows=order[drawing],
            is_greedy=bool(self._sequences.greedy[slots[drawing]].all() and draws_once.all()),
            may_score=bool(self._sequences.scored[slots].any()),
            lora=lora,
            lora_adapters=lora_adapters,
        )

    def _segments(
        self, adapters: np.ndarray, first: np.ndarray, ends: np.ndarray
    ) -> tuple[LoraSegments | None, tuple[AdapterId, ...]]:
        """The runs of equal ``adapters`` among sorted rows, with these, but for those that the weights are right
        for: the merged adapter's, where one is, else the base model's. Raises ValueError where others stand beside
        the merged adapter's."""
        edges = np.flatnonzero(np.concatenate(([True], adapters[1:] != adapters[:-1])))
        start = first[edges]
        length = (np.concatenate((start[1:], ends[-1:])) - start).astype(np.int32)
        others = adapters[edges] != self._tables.merged
        edges, start, length = edges[others], start[others], length[others]
        if len(edges) == 0:
            return None, ()
        if self._tables.merged != BASE:
            raise ValueError(f"the step has rows of others than the merged adapter {self._tables.merged}")
        names = adapters[edges].tolist()
        rows = self._tables.rows(names)
        key = (self._tables.version, start.tobytes(), length.tobytes(), rows.tobytes())
        if key != self._lora_key:
            records, scales = self._tables.entries(rows)
            self._lora = LoraSegments(start.astype(np.int32), length, records, scales, self._tables.cells)
            self._lora_key = key
        return self._lora, tuple(names)
