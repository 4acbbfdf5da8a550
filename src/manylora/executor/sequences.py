"""Running sequences as columns of arrays, so that a step's inputs are gathered without a loop over tokens.

Owns each sequence's tokens, page table and parameters, and which tokens only the device knows so far: a step
may be issued before the tokens of the step before it have arrived. Does not know batches or adapters' pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from manylora.executor.sampler import SampledRow
from manylora.protocol import SequenceStart, StepRow
from manylora.types import PageId, SequenceId

_FIRST_SLOTS = 16
_FIRST_TOKENS = 256
_FIRST_PAGES = 16

LATE_ENTRIES = 2**16
"""Length of the device's array of late tokens. Entry 0 is nobody's."""

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


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    """Tokens that a step will have drawn, one for each of its sampling rows: who and where."""

    sequences: list[tuple[SequenceId, _Sequence]]
    ends: np.ndarray


class SequenceTable:
    """The sequences that the executor has been told of.

    ``tokens`` int32 [slots, width]: prompt and generated; a token that has been drawn but is not known yet is
    -i, where i is the slot's entry among the device's late tokens (slot + 1). ``lengths`` int64 [slots]: how many
    tokens there are, late ones included. ``pages`` int32 [slots, width]: page tables; entries past a sequence's
    own are stale but valid ids. ``adapters`` int64 [slots]. The arrays are replaced when they grow: read them
    anew every step.
    """

    def __init__(self) -> None:
        self._sequences: dict[SequenceId, _Sequence] = {}
        self._free: list[int] = list(range(_FIRST_SLOTS - 1, -1, -1))
        self.tokens: np.ndarray = np.zeros((_FIRST_SLOTS, _FIRST_TOKENS), dtype=np.int32)
        self.pages: np.ndarray = np.zeros((_FIRST_SLOTS, _FIRST_PAGES), dtype=np.int32)
        self.adapters: np.ndarray = np.zeros(_FIRST_SLOTS, dtype=np.int64)
        self.lengths: np.ndarray = np.zeros(_FIRST_SLOTS, dtype=np.int64)

    def __contains__(self, sequence: SequenceId) -> bool:
        return sequence in self._sequences

    def start(self, start: SequenceStart) -> None:
        """Take a sequence up. Raises ValueError when it is running already; then nothing has changed."""
        if start.sequence in self._sequences:
            raise ValueError(f"sequence {start.sequence} is running already")
        if min(start.tokens, default=0) < 0:
            raise ValueError(f"sequence {start.sequence} has a negative token")
        self.tokens = _widened(self.tokens, len(start.tokens))
        self.pages = _widened(self.pages, len(start.pages))
        if not self._free:
            self._add_slots()
        slot = self._free.pop()
        self.tokens[slot, : len(start.tokens)] = start.tokens
        self.pages[slot, : len(start.pages)] = start.pages
        self.adapters[slot] = start.adapter
        self.lengths[slot] = len(start.tokens)
        params = start.params
        self._sequences[start.sequence] = _Sequence(
            slot=slot,
            sample=start.sample,
            num_prompt_tokens=start.num_prompt_tokens,
            has_penalties=bool(
                params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
            ),
            drawing=SampledRow(params, _NONE, _NONE, start.stop_ids, ()),
        )

    def end(self, sequence: SequenceId) -> None:
        """Forget a sequence (unknown ones are ignored)."""
        held = self._sequences.pop(sequence, None)
        if held is not None:
            self._free.append(held.slot)

    def slots(self, rows: Iterable[StepRow]) -> list[int]:
        """The rows' slots. Raises KeyError for an unknown sequence."""
        sequences = self._sequences
        return [sequences[row.sequence].slot for row in rows]

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

    def expect(self, rows: list[StepRow]) -> Expected:
        """Each row, which reaches the end of its sequence, draws a token; it stays late until ``settle``."""
        sequences = [(row.sequence, self._sequences[row.sequence]) for row in rows]
        ends = np.array([row.start + row.num_tokens for row in rows], dtype=np.int64)
        slots = np.array([held.slot for _, held in sequences], dtype=np.int64)
        self.tokens = _widened(self.tokens, int(ends.max(initial=-1)) + 1)
        self.tokens[slots, ends] = -(slots + 1)
        self.lengths[slots] = ends + 1
        return Expected(sequences, ends)

    def settle(self, expected: Expected, tokens: list[int]) -> None:
        """These were the tokens; sequences that have ended meanwhile are passed over."""
        for (sequence, held), end, token in zip(expected.sequences, expected.ends.tolist(), tokens):
            if self._sequences.get(sequence) is held:
                self.tokens[held.slot, end] = token

    def forget(self, expected: Expected) -> None:
        """There are no such tokens: the step failed."""
        for (sequence, held), end in zip(expected.sequences, expected.ends.tolist()):
            if self._sequences.get(sequence) is held:
                self.lengths[held.slot] = end

    def sampled_row(self, row: StepRow) -> SampledRow:
        """What the sampler must know of a row that draws tokens at its end. Valid until the next call for
        the same sequence."""
        held = self._sequences[row.sequence]
        drawing, sample = held.drawing, held.sample
        end = row.start + row.num_tokens
        position = end - held.num_prompt_tokens
        if row.num_samples == 1:
            drawing.samples = ((sample, position),)
        else:
            drawing.samples = tuple((sample + i, position) for i in range(row.num_samples))
        if held.has_penalties:
            known = self.tokens[held.slot, :end]
            drawing.prompt_ids = known[: held.num_prompt_tokens]
            drawing.output_ids = known[held.num_prompt_tokens :]
        return drawing

    def _set_pages(self, slot: int, changes: tuple[tuple[int, PageId], ...], undo: Undo) -> None:
        self.pages = _widened(self.pages, max(index for index, _ in changes) + 1)
        for index, page in changes:
            undo.append((slot, index, int(self.pages[slot, index])))
            self.pages[slot, index] = page

    def _add_slots(self) -> None:
        old = len(self.adapters)
        if 2 * old >= LATE_ENTRIES:
            raise ValueError(f"more than {old} sequences run at once")
        self.tokens = np.concatenate((self.tokens, np.zeros_like(self.tokens)))
        self.pages = np.concatenate((self.pages, np.zeros_like(self.pages)))
        self.adapters = np.concatenate((self.adapters, np.zeros_like(self.adapters)))
        self.lengths = np.concatenate((self.lengths, np.zeros_like(self.lengths)))
        self._free.extend(range(2 * old - 1, old - 1, -1))


def _widened(array: np.ndarray, width: int) -> np.ndarray:
    """The array with at least ``width`` columns: itself, or a copy twice as wide or more."""
    if width <= array.shape[1]:
        return array
    wider = np.zeros((len(array), max(width, 2 * array.shape[1])), dtype=array.dtype)
    wider[:, : array.shape[1]] = array
    return wider
