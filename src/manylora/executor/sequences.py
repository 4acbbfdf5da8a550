"""Running sequences as columns of arrays, so that a step's inputs are gathered without a loop over tokens.

Owns each sequence's tokens, page table and parameters, and which tokens only the device knows so far: a step
may be issued before the tokens of the step before it have arrived. Does not know batches or adapters' pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from manylora.config import MOST_SEQS
from manylora.executor.sampler import Bias, SampledRow, is_greedy
from manylora.protocol import SequenceStart, StepRow
from manylora.types import PageId, SamplingParams, SequenceId

_FIRST_SLOTS = 16
_FIRST_TOKENS = 256
_FIRST_PAGES = 16

PENDING_ENTRIES = 2 * MOST_SEQS
"""Length of the device's array of pending tokens. Entry 0 belongs to no sequence."""

_NONE = np.zeros(0, dtype=np.int32)

Undo = list[tuple[int, int, int]]
"""Entries of page tables as they were: (slot, index, page)."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Sequence:
    """A sequence beside its arrays. ``slot``: its row in all of them. ``drawing`` is filled in every step."""

    slot: int
    sample: int
    num_prompt_tokens: int
    has_penalties: bool
    drawing: SampledRow


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Composition:
    """The sequences of a step and their numbers of tokens: by row, int64 [R] but for ``sequences``.

    ``drawing``: the rows that draw, ascending; ``sampled_sequences``: their sequences. Decoding steps share one
    object until a sequence starts or ends or takes another part, so what follows from it alone need not be
    computed again.
    """

    sequences: tuple[SequenceId, ...]
    slots: np.ndarray
    counts: np.ndarray
    num_samples: np.ndarray
    drawing: np.ndarray
    sampled_sequences: tuple[SequenceId, ...]

    @staticmethod
    def of(
        sequences: tuple[SequenceId, ...], slots: np.ndarray, counts: np.ndarray, num_samples: np.ndarray
    ) -> Composition:
        drawing = np.flatnonzero(num_samples)
        draw_all = len(drawing) == len(sequences)
        sampled_sequences = sequences if draw_all else tuple(sequences[row] for row in drawing.tolist())
        return Composition(sequences, slots, counts, num_samples, drawing, sampled_sequences)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Rows:
    """A step's rows as columns. ``starts`` int64 [R]: each row's first position."""

    composition: Composition
    starts: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Expected:
    """Tokens that a step will have sampled, one for each row that draws: in which slots, whose, and where."""

    slots: np.ndarray
    owners: np.ndarray
    ends: np.ndarray


class SequenceTable:
    """The sequences that the executor has been told of.

    ``tokens`` int32 [slots, width]: prompt and generated; a token that has been sampled but is not known yet is
    -i, where i is the slot's entry among the device's pending tokens (slot + 1). ``lengths`` int64 [slots]: how
    many tokens there are, pending ones included. ``pages`` int32 [slots, width]: page tables; entries past a
    sequence's own are stale but valid ids. ``adapters`` int64 [slots]. ``rotary`` int64 [slots]: the row of the
    rotary tables of a sequence's position 0. ``greedy`` bool [slots]: ``is_greedy`` of its parameters. ``scored``
    int64 [slots, 2]: from which position on, and before which, the logits are to tell how probable the prompt's
    next token is; 0 and 0 where they are not. ``owners`` int64 [slots]: a number of the slot's sequence, never
    given twice; 0 in a free slot.
    The arrays are replaced when they grow: read them anew every step.
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

    def start(self, start: SequenceStart) -> None:
        """Take a sequence up. Raises ValueError when it is running already; then nothing has changed."""
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
            has_penalties=bool(
                params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
            ),
            drawing=SampledRow(params, _NONE, _NONE, start.stop_ids, (), self._bias_of(params)),
        )

    def _bias_of(self, params: SamplingParams) -> Bias | None:
        """What another sample of the same request has already, if any."""
        if not params.logit_bias:
            return None
        rows = (held.drawing for held in self._sequences.values())
        return next((row.bias for row in rows if row.params is params), None)

    def end(self, sequence: SequenceId) -> None:
        """Forget a sequence (unknown ones are ignored)."""
        held = self._sequences.pop(sequence, None)
        if held is not None:
            self._free.append(held.slot)
            self.owners[held.slot] = 0
            self._composition = None

    def rows(self, rows: Sequence[StepRow]) -> Rows:
        """The rows (at least one) as columns. Raises KeyError for an unknown sequence."""
        sequences, starts, *others, _ = zip(*rows)
        columns = (sequences, *others)
        if self._composition is None or columns != self._composition_columns:
            held = self._sequences
            slots = [held[sequence].slot for sequence in sequences]
            arrays = (np.array(column, dtype=np.int64) for column in (slots, *others))
            self._composition, self._composition_columns = Composition.of(sequences, *arrays), columns
        return Rows(self._composition, np.array(starts, dtype=np.int64))

    def update_pages(self, rows: Iterable[StepRow], undo: Undo) -> None:
        """Carry the rows' changes into the page tables; ``undo`` receives what was there before."""
        for row in rows:
            if row.pages:
                slot = self._sequences[row.sequence].slot
                self._set_pages(slot, row.pages, undo)

    def undo(self, changes: Undo) -> None:
        """Take page table changes back."""
        for slot, index, page in reversed(changes):
            self.pages[slot, index] = page

    def expect(self, rows: Rows) -> Expected:
        """Each row that draws reaches the end of its sequence and adds a token, which is pending until
        ``settle``."""
        composition, drawing = rows.composition, rows.composition.drawing
        slots, ends = composition.slots[drawing], (rows.starts + composition.counts)[drawing]
        self.tokens = _widened(self.tokens, int(ends.max(initial=-1)) + 1)
        self.tokens[slots, ends] = -(slots + 1)
        self.lengths[slots] = ends + 1
        return Expected(slots, self.owners[slots], ends)

    def settle(self, expected: Expected, tokens: Sequence[int]) -> None:
        """These were the tokens; sequences that have ended meanwhile are passed over."""
        lives = self.owners[expected.slots] == expected.owners
        sampled = np.array(tokens, dtype=np.int32)
        self.tokens[expected.slots[lives], expected.ends[lives]] = sampled[lives]

    def forget(self, expected: Expected) -> None:
        """There are no such tokens: the step failed."""
        lives = self.owners[expected.slots] == expected.owners
        self.lengths[expected.slots[lives]] = expected.ends[lives]

    def sampled_row(self, sequence: SequenceId, end: int, num_samples: int) -> SampledRow:
        """What the sampler must know of a row that draws ``num_samples`` tokens at ``end``. Valid until the next
        call for the same sequence."""
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
        """How many alternatives to a prompt's token the sequence's request asks for."""
        return self._sequences[sequence].drawing.params.prompt_logprobs or 0

    def _set_pages(self, slot: int, changes: tuple[tuple[int, PageId], ...], undo: Undo) -> None:
        self.pages = _widened(self.pages, max(index for index, _ in changes) + 1)
        for index, page in changes:
            undo.append((slot, index, int(self.pages[slot, index])))
            self.pages[slot, index] = page

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
    """The array with as many rows of zeros after its own."""
    return np.concatenate((array, np.zeros_like(array)))


def _widened(array: np.ndarray, width: int) -> np.ndarray:
    """The array with at least ``width`` columns: itself, or a copy twice as wide or more."""
    if width <= array.shape[1]:
        return array
    wider = np.zeros((len(array), max(width, 2 * array.shape[1])), dtype=array.dtype)
    wider[:, : array.shape[1]] = array
    return wider
