"""The memory that the engine and its CPU workers share: rows of a step, results, and how far each is.

Owns where things lie in it. Does not know what is computed. Numbers that both sides read and write are whole words
of 8 bytes, each written by one side only: those of the head by the engine, those of a worker by this worker. Words
are written in the order of the program, which processors with a strong memory order (x86) keep.
"""

from __future__ import annotations

import dataclasses
import mmap
import os

import numpy as np

_LINE_WORDS = 8
"""A cache line: no worker's words share one with another's."""
_ALIGNMENT = 4096
_FOR_EVER = 2**62


@dataclasses.dataclass(frozen=True, slots=True)
class BoardShape:
    """``num_tokens``: rows of a step at most. ``in_features``, ``out_features``: the widest input and output.
    ``dtype``: of the rows and of adapters, by its name in torch; results are float32."""

    num_workers: int
    num_tokens: int
    in_features: int
    out_features: int
    dtype: str

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def rows_at(self) -> int:
        """Where the rows begin, in bytes."""
        return _aligned(8 * _LINE_WORDS * (1 + self.num_workers))

    @property
    def results_at(self) -> int:
        return self.rows_at + _aligned(self.num_tokens * self.in_features * self.itemsize)

    @property
    def num_bytes(self) -> int:
        return self.results_at + _aligned(self.num_tokens * self.out_features * 4)


class Board:
    """A mapping of it. ``posted``: jobs that the engine has laid out so far, of all steps. Of each worker
    ``done``: jobs that it has computed or left, ``busy_ns``: how long its jobs took, both of all steps;
    ``step``: the last step that it has nothing more to do with. A device may post in the engine's place."""

    def __init__(self, descriptor: int, shape: BoardShape) -> None:
        self.shape = shape
        # The views below keep the mapping.
        memory = mmap.mmap(descriptor, shape.num_bytes)
        self.memory = np.frombuffer(memory, np.uint8)
        """All of it, for a device that reads and writes it too."""
        words = np.frombuffer(memory, np.int64, _LINE_WORDS * (1 + shape.num_workers)).reshape(
            -1, _LINE_WORDS
        )
        self.posted_word = words[0, :1]
        self.trial_word = words[0, 2:3]
        """Says nothing to anyone."""
        self.done_words = words[1:]
        """Int64 [workers, ...], of which the first ones are ``done``."""
        self._head = words[0]
        self._done, self._busy_ns, self._step = words[1:, 0], words[1:, 1], words[1:, 2]
        kind = np.dtype(np.float32 if shape.itemsize == 4 else np.uint16)
        self._rows = np.frombuffer(memory, kind, shape.num_tokens * shape.in_features, shape.rows_at)
        size = shape.num_tokens * shape.out_features
        self._results = np.frombuffer(memory, np.float32, size, shape.results_at)

    def rows(self, num_tokens: int, features: int) -> np.ndarray:
        """``[num_tokens, features]``: float32, or 16-bit numbers as they lie in memory (uint16)."""
        return self._rows[: num_tokens * features].reshape(num_tokens, features)

    def results(self, num_tokens: int, features: int) -> np.ndarray:
        """float32 ``[num_tokens, features]``."""
        return self._results[: num_tokens * features].reshape(num_tokens, features)

    # ------------------------------------------------------------ the engine's words

    @property
    def posted(self) -> int:
        return int(self._head[0])

    def post(self, count: int) -> None:
        self._head[0] = count

    @property
    def abandoned(self) -> int:
        """The last step whose jobs are worth nothing any more, whatever was not done of them."""
        return int(self._head[1])

    def abandon(self, step: int) -> None:
        self._head[1] = step

    # ------------------------------------------------------------ a worker's words

    def done(self, worker: int) -> int:
        return int(self._done[worker])

    def note_done(self, worker: int, count: int) -> None:
        self._done[worker] = count

    def release(self, worker: int) -> None:
        """Of one that is dead: nothing waits for it any more."""
        self._done[worker] = _FOR_EVER

    def busy_ns(self, worker: int) -> int:
        return int(self._busy_ns[worker])

    def note_busy(self, worker: int, nanoseconds: int) -> None:
        self._busy_ns[worker] += nanoseconds

    def step(self, worker: int) -> int:
        return int(self._step[worker])

    def note_step(self, worker: int, step: int) -> None:
        self._step[worker] = step


def new_board(shape: BoardShape) -> tuple[int, Board]:
    """Its descriptor, for other processes, and a mapping. The system frees it with the last of both."""
    descriptor = os.memfd_create("manylora-assist")
    os.truncate(descriptor, shape.num_bytes)
    return descriptor, Board(descriptor, shape)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
