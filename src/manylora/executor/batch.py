"""Keeps the running sequences, and builds a step's batch as arrays on the host, without a loop over tokens.

Owns each sequence's tokens, page table and parameters. It records which tokens only the device knows so far,
since a step may be issued before the previous step's tokens have arrived. Owns the order of the batch: rows
of one adapter are adjacent, the base model's rows come first, and an adapter's decoding rows precede its
prompt chunks. Also decides which rows need an adapter beyond the weights. Results that depend on the
composition alone are computed once for all steps that share it. Does not send anything to a device and does
not run anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from manylora.config.sections import MOST_SEQS
from manylora.executor.sampling import Bias, SampledRow, ScoredTokens, has_penalties, is_greedy
from manylora.executor.tables import AdapterTables
from manylora.kernels.ops import AttentionRows, LoraSegments
from manylora.kernels.shapes import AdapterGeometry
from manylora.protocol import commands
from manylora.types import BASE, AdapterId, SamplingParams, SequenceId

_FIRST_SLOTS = 16
_FIRST_TOKENS = 256
_FIRST_PAGES = 16

PENDING_ENTRIES = 2 * MOST_SEQS
"""The length of the device's array of pending tokens. Entry 0 belongs to no sequence."""

_NONE = np.zeros(0, dtype=np.int32)

Undo = list[tuple[int, int, int]]
"""Former entries of page tables, in the order of their changes: (slot, index, page)."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Sequence:
    """The state of a sequence outside the table's arrays. ``slot``: its row in every array. ``drawing``:
    updated in each step that needs it."""

    slot: int
    sample: int
    num_prompt_tokens: int
    has_penalties: bool
    drawing: SampledRow


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Composition:
    """The sequences of a step, with each row's slot and numbers of tokens and samples, as int64 [R].

    ``drawing``: the rows that draw tokens, ascending; ``sampled_sequences``: the sequences of these rows.
    Decoding steps share one object until a sequence starts, ends or changes its number of tokens or samples.
    Results that depend on the object alone can therefore be reused.
    """

    sequences: tuple[SequenceId, ...]
    slots: np.ndarray
    counts: np.ndarray
    num_samples: np.ndarray
    drawing: np.ndarray
    sampled_sequences: tuple[SequenceId, ...]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Rows:
    """A step's rows, one array for each field. ``starts`` int64 [R]: each row's first position."""

    composition: Composition
    starts: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Expected:
    """The tokens that a step will sample, one for each row that draws: their slots, the slots' ``owners``,
    and their positions (``ends``)."""

    slots: np.ndarray
    owners: np.ndarray
    ends: np.ndarray


class SequenceTable:
    """The running sequences of the executor, in arrays with one row for each slot.

    ``tokens`` int32 [slots, width]: prompt and generated tokens. A token that is sampled but not known yet is
    -i, where i is the slot's entry among the device's pending tokens (slot + 1). ``lengths`` int64 [slots]:
    the number of tokens, pending ones included. ``pages`` int32 [slots, width]: page tables; entries beyond a
    sequence's own are stale but valid ids. ``adapters`` int64 [slots]. ``rotary`` int64 [slots]: the row of
    the rotary tables for the sequence's position 0. ``greedy`` bool [slots]: ``is_greedy`` of the parameters.
    ``scored`` int64 [slots, 2]: the first position whose next prompt token is scored from the logits, and the
    end of these positions; both 0 where none is scored. ``owners`` int64 [slots]: a number of the slot's
    sequence, never used twice; 0 in a free slot. The arrays are replaced when they grow, so read the
    attributes again in every step.
    """

    def __init__(self) -> None:
        self._sequences: dict[SequenceId, _Sequence] = {}
        self._free: list[int] = list(range(_FIRST_SLOTS - 1, -1, -1))
        self.tokens: np.ndarray = np.zeros((_FIRST_SLOTS, _FIRST_TOKENS), dtype=np.int32)
        self.pages: np.ndarray = np.zeros((_FIRST_SLOTS, _FIRST_PAGES), dtype=np.int32)
        self.adapters: np.ndarray = np.zeros(_FIRST_SLOTS, dtype=np.int64)
        self.lengths: np.ndarray = np.zeros(_FIRST_SLOTS, dtype=np.int64)
        self.greedy: np.ndarray = np.zeros(_FIRST_SLOTS, dtype=np.bool_)
        self.rotary: np.ndarray = np.zeros(_FIRST_SLOTS, dtype=np.int64)
        self.scored: np.ndarray = np.zeros((_FIRST_SLOTS, 2), dtype=np.int64)
        self.owners: np.ndarray = np.zeros(_FIRST_SLOTS, dtype=np.int64)
        self._num_started = 0
        self._composition: Composition | None = None
        self._composition_columns: tuple[object, ...] = ()

    def __contains__(self, sequence: SequenceId) -> bool:
        return sequence in self._sequences

    def start(self, start: commands.SequenceStart) -> None:
        """Add a sequence. Raises ValueError, without any change to the sequences, where it is running already
        or has a negative token, or where no more slots can be added."""
        if start.sequence in self._sequences:
            raise ValueError(f"sequence {start.sequence} is running already")
        tokens = np.array(start.tokens, dtype=np.int32)
        if tokens.min(initial=0) < 0:
            raise ValueError(f"sequence {start.sequence} has a negative token")
        self.tokens = _widened(self.tokens, len(start.tokens))
        self.pages = _widened(self.pages, len(start.pages))
        if not self._free:
            self._add_slots()
        slot = self._free.pop()
        self.tokens[slot, : len(tokens)] = tokens
        self.pages[slot, : len(start.pages)] = start.pages
        self.adapters[slot] = start.adapter
        self.lengths[slot] = len(tokens)
        self.rotary[slot] = start.first_rotary_row
        params = start.params
        self.greedy[slot] = is_greedy(params)
        is_asked = params.prompt_logprobs is not None
        self.scored[slot] = (start.num_scored, start.num_prompt_tokens - 1) if is_asked else 0
        self._num_started += 1
        self.owners[slot] = self._num_started
        self._composition = None
        self._sequences[start.sequence] = _Sequence(
            slot=slot,
            sample=start.sample,
            num_prompt_tokens=start.num_prompt_tokens,
            has_penalties=has_penalties(params),
            drawing=SampledRow(params, _NONE, _NONE, start.stop_ids, (), self._bias_of(params)),
        )

    def _bias_of(self, params: SamplingParams) -> Bias | None:
        """Return the ``Bias`` of another running sample of the same request, so that samples share it. Return
        None where there is no such sample or the request has no logit_bias."""
        if not params.logit_bias:
            return None
        rows = (held.drawing for held in self._sequences.values())
        return next((row.bias for row in rows if row.params is params), None)

    def end(self, sequence: SequenceId) -> None:
        """Remove a sequence and free its slot. Unknown sequences are ignored."""
        held = self._sequences.pop(sequence, None)
        if held is not None:
            self._free.append(held.slot)
            self.owners[held.slot] = 0
            self._composition = None

    def rows(self, rows: Sequence[commands.StepRow]) -> Rows:
        """Convert a step's rows (at least one) to arrays. Raises KeyError for an unknown sequence."""
        sequences, starts, *others, _ = zip(*rows)
        columns = (sequences, *others)
        if self._composition is None or columns != self._composition_columns:
            places = [self._sequences[sequence].slot for sequence in sequences]
            slots, counts, num_samples = (np.array(column, dtype=np.int64) for column in (places, *others))
            drawing = np.flatnonzero(num_samples)
            draw_all = len(drawing) == len(sequences)
            sampled = sequences if draw_all else tuple(sequences[row] for row in drawing.tolist())
            self._composition = Composition(sequences, slots, counts, num_samples, drawing, sampled)
            self._composition_columns = columns
        return Rows(self._composition, np.array(starts, dtype=np.int64))

    def update_pages(self, rows: Iterable[commands.StepRow], undo: Undo) -> None:
        """Apply the rows' changes to the page tables, and append the former entries to ``undo``."""
        for row in rows:
            if row.pages:
                slot = self._sequences[row.sequence].slot
                self.pages = _widened(self.pages, max(index for index, _ in row.pages) + 1)
                for index, page in row.pages:
                    undo.append((slot, index, int(self.pages[slot, index])))
                    self.pages[slot, index] = page

    def undo(self, changes: Undo) -> None:
        """Reverse changes to the page tables."""
        for slot, index, page in reversed(changes):
            self.pages[slot, index] = page

    def expect(self, rows: Rows) -> Expected:
        """Append a pending token to each sequence that draws; ``settle`` replaces it. A row that draws always
        reaches the end of its sequence."""
        composition, drawing = rows.composition, rows.composition.drawing
        slots, ends = composition.slots[drawing], (rows.starts + composition.counts)[drawing]
        self.tokens = _widened(self.tokens, int(ends.max(initial=-1)) + 1)
        self.tokens[slots, ends] = -(slots + 1)
        self.lengths[slots] = ends + 1
        return Expected(slots, self.owners[slots], ends)

    def settle(self, expected: Expected, tokens: Sequence[int]) -> None:
        """Replace the expected pending tokens by the sampled ones. Skip sequences that have ended since."""
        lives = self.owners[expected.slots] == expected.owners
        sampled = np.array(tokens, dtype=np.int32)
        self.tokens[expected.slots[lives], expected.ends[lives]] = sampled[lives]

    def forget(self, expected: Expected) -> None:
        """Remove the expected tokens of a failed step. Skip sequences that have ended since."""
        lives = self.owners[expected.slots] == expected.owners
        self.lengths[expected.slots[lives]] = expected.ends[lives]

    def sampled_row(self, sequence: SequenceId, end: int, num_samples: int) -> SampledRow:
        """Return the sampler's input for a row that draws ``num_samples`` tokens at position ``end``. It is
        valid until the next call for the same sequence."""
        held = self._sequences[sequence]
        drawing, sample = held.drawing, held.sample
        position = end - held.num_prompt_tokens
        drawing.samples = tuple((sample + i, position) for i in range(num_samples))
        if held.has_penalties:
            known = self.tokens[held.slot, :end]
            drawing.prompt_ids = known[: held.num_prompt_tokens]
            drawing.output_ids = known[held.num_prompt_tokens :]
        return drawing

    def num_top(self, sequence: SequenceId) -> int:
        """Return how many alternatives to each prompt token the sequence's request asks for."""
        return self._sequences[sequence].drawing.params.prompt_logprobs or 0

    def _add_slots(self) -> None:
        old = len(self.adapters)
        if 2 * old >= PENDING_ENTRIES:
            raise ValueError(f"more than {old} sequences run at once")
        self.tokens = _doubled(self.tokens)
        self.pages = _doubled(self.pages)
        self.adapters = _doubled(self.adapters)
        self.lengths = _doubled(self.lengths)
        self.greedy = _doubled(self.greedy)
        self.rotary = _doubled(self.rotary)
        self.scored = _doubled(self.scored)
        self.owners = _doubled(self.owners)
        self._free.extend(range(2 * old - 1, old - 1, -1))


def _doubled(array: np.ndarray) -> np.ndarray:
    """Return a copy of the array with as many rows of zeros appended."""
    return np.concatenate((array, np.zeros_like(array)))


def _widened(array: np.ndarray, width: int) -> np.ndarray:
    """Return an array with at least ``width`` columns: the array itself, or a copy at least twice as wide."""
    if width <= array.shape[1]:
        return array
    wider = np.zeros((len(array), max(width, 2 * array.shape[1])), dtype=array.dtype)
    wider[:, : array.shape[1]] = array
    return wider


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Layout:
    """The parts of a batch that do not depend on positions, for one composition and one version of the
    adapters' tables. M rows draw.

    For each row, in batch order: ``order`` (its place in the step), ``slots`` in the table, ``counts`` of
    tokens. For each token: its row's place in the batch (``row``), that row's slot (``token_slots``), the
    token's place ``inside`` the row, and the row of the rotary tables for its sequence's position 0
    (``rotary``). ``sample_index`` int64 [M]: the tokens whose logits are wanted. ``pending_index`` int64 [M]:
    the entries of the pending tokens that receive the draws. ``sampled_rows`` int64 [M]: the step's rows that
    draw. ``is_greedy``: whether each of them draws its most likely token once and asks for nothing else.

    ``lora`` is the same object as in the previous step where nothing has changed; ``lora_adapters``: the
    adapters of its segments, in order. ``head``: the same segments with their projections of the output head;
    None where no adapter of the step changes it.
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
    head: LoraSegments | None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class StepInputs:
    """The inputs of one step with T tokens.

    ``token_ids`` int64 [T]: a negative id -i stands for entry i of the device's pending tokens. ``positions``
    int64 [T]: rows of the rotary tables. ``slots`` int64 [T]: the tokens' places in the pool, page times page
    size plus offset. ``sampled[i]`` draws from row i of the logits, for row ``sampled_rows[i]`` of the step;
    None where the layout ``is_greedy``. ``scored``: the prompt tokens to score, if any.
    """

    layout: Layout
    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    attention: AttentionRows
    sampled: list[SampledRow] | None
    scored: ScoredTokens | None


class InputBuilder:
    """A builder of step inputs, which reuses the layout while composition and adapters stay the same."""

    def __init__(self, sequences: SequenceTable, tables: AdapterTables, geometry: AdapterGeometry) -> None:
        self._sequences = sequences
        self._tables = tables
        self._page_tokens = geometry.page.page_tokens
        self._num_layer_projections = geometry.num_layer_projections
        self._lora_key: tuple[int, bytes, bytes, bytes] | None = None
        self._lora: LoraSegments | None = None
        self._head: LoraSegments | None = None
        self._layout: Layout | None = None

    def build(self, rows: Rows) -> StepInputs:
        """Build the inputs for rows whose sequences and page tables are up to date.

        Raises KeyError where a sequence's adapter is not resident. Raises ValueError where a row computes
        tokens that do not exist, or where rows of other adapters accompany the merged adapter's.
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
            layout=layout,
            token_ids=table.tokens[layout.token_slots, positions].astype(np.int64),
            positions=positions + layout.rotary,
            slots=table.pages[layout.token_slots, page].astype(np.int64) * page_tokens + offset,
            attention=AttentionRows(
                query_start=layout.query_start,
                kv_len=ends.astype(np.int32),
                page_table=table.pages[layout.slots, :width],
            ),
            sampled=None if layout.is_greedy else self._sampled(rows, layout.sampled_rows.tolist()),
            scored=self._scored(layout, starts, ends) if layout.may_score else None,
        )

    def _scored(self, layout: Layout, starts: np.ndarray, ends: np.ndarray) -> ScoredTokens | None:
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

    def _layout_of(self, composition: Composition) -> Layout:
        layout = self._layout
        if layout is None or layout.composition is not composition or layout.version != self._tables.version:
            layout = self._layout = self._lay_out(composition)
        return layout

    def _lay_out(self, composition: Composition) -> Layout:
        adapters = self._sequences.adapters[composition.slots]
        order = np.lexsort((composition.counts > 1, adapters))
        slots, counts = composition.slots[order], composition.counts[order]
        ends = counts.cumsum()
        first = ends - counts
        row = np.arange(len(order)).repeat(counts)
        drawing = np.flatnonzero(composition.num_samples[order])
        lora, lora_adapters = self._segments(adapters[order], first, ends)
        draws_once = composition.num_samples[composition.drawing] == 1
        return Layout(
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
            head=None if lora is None else self._head,
        )

    def _segments(
        self, adapters: np.ndarray, first: np.ndarray, ends: np.ndarray
    ) -> tuple[LoraSegments | None, tuple[AdapterId, ...]]:
        """Return the runs of equal ``adapters`` among sorted rows, and the adapters of these runs. Leave out
        the run that the weights already serve: the merged adapter's, or the base model's where none is
        merged. Raises ValueError where an adapter is merged and there are rows of others."""
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
            whole = LoraSegments(start.astype(np.int32), length, records, scales, self._tables.cells)
            self._lora, self._head = whole.part(0, self._num_layer_projections), None
            if records[:, self._num_layer_projections :, 2].any():
                self._head = whole.part(self._num_layer_projections, records.shape[1])
            self._lora_key = key
        return self._lora, tuple(names)
