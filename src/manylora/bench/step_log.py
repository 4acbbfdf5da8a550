"""An executor on loan to a driver: notes what every step, copy and read was and took, as the engine paid it.

Owns the log and what is to be undone when the driver ends; the executor itself stays open, for the next driver.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from manylora.protocol import (
    AdapterRead,
    CopyDone,
    Executor,
    IssuedStep,
    ReadAdapter,
    RunStep,
    StepResult,
    SwapPages,
)
from manylora.sim.costs import StepWork, prefill_pairs
from manylora.types import AdapterId, PageId, SequenceId

_LANDING_S = 60.0

_Timing = tuple[float, float, float | None]
_Work = tuple[int, ...]


class LoggedStep(NamedTuple):
    """One step. ``began_s``: on ``time.monotonic``; ``took_s``: of the call, as the engine's loop saw it.

    ``gap_s``: since the end of the step before; None where no row of that one went on, so that the engine may
    have waited for work. ``num_new``: sequences that it took up. ``idle_s``: since the end of the step before,
    whatever that was; infinite for the first.
    """

    began_s: float
    took_s: float
    gap_s: float | None
    num_rows: int
    num_new: int
    work: StepWork
    cpu_s: float
    idle_s: float = 0.0


class LoggedTransfer(NamedTuple):
    """One copy, or one read of an adapter. ``began_s``: when it was asked for; ``waited_s``: until its answer;
    ``took_s``: of that what the lane or the reader says that it worked."""

    began_s: float
    waited_s: float
    took_s: float
    to_device: bool
    num_bytes: int


@dataclasses.dataclass
class StepLog:
    """What happened, in order of the ends."""

    steps: list[LoggedStep] = dataclasses.field(default_factory=list)
    copies: list[LoggedTransfer] = dataclasses.field(default_factory=list)
    reads: list[LoggedTransfer] = dataclasses.field(default_factory=list)


class LentExecutor:
    """``protocol.Executor`` that hands on to ``executor``. ``close`` waits for transfers and forgets what the
    driver's run left behind."""

    def __init__(
        self, executor: Executor, page_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._executor = executor
        self._page_bytes = page_bytes
        self._clock = clock
        self._adapter_bytes: dict[AdapterId, int] = {}
        self._sequences: dict[SequenceId, AdapterId] = {}
        self._before: set[SequenceId] = set()
        self._num_asked = 0
        # Plain tuples of numbers: the garbage collector looks through anything else again and again.
        self._steps: list[tuple[_Timing, tuple[int, int], _Work, float, float]] = []
        self._copies: list[tuple[float, float, float, bool, int]] = []
        self._reads: list[tuple[float, float, float, bool, int]] = []

    def log(self) -> StepLog:
        """All so far."""
        return StepLog(
            [
                LoggedStep(*timing, *counts, StepWork(*work), cpu_s, idle_s)
                for timing, counts, work, cpu_s, idle_s in self._steps
            ],
            [LoggedTransfer(*copy) for copy in self._copies],
            [LoggedTransfer(*read) for read in self._reads],
        )

    @property
    def num_steps(self) -> int:
        """So far."""
        return len(self._steps)

    # ------------------------------------------------------------ what is noted

    def issue_step(self, step: RunStep) -> IssuedStep:
        """See Executor."""
        for start in step.starts:
            self._sequences[start.sequence] = start.adapter
        # Sequences may end while the step is on its way.
        work = work_of(step, self._sequences, self._adapter_bytes)
        began_s, cpu_s = self._clock(), time.thread_time()
        issued = self._executor.issue_step(step)
        if issued.has_failed:
            return issued  # nothing ran

        def finish() -> StepResult:
            result = issued.wait()
            self._note(step, work, began_s, self._clock(), time.thread_time() - cpu_s)
            return result

        return IssuedStep(finish)

    def _note(self, step: RunStep, work: StepWork, began_s: float, ended_s: float, cpu_s: float) -> None:
        rows = {row.sequence for row in step.rows}
        gap_s, idle_s = None, math.inf
        if self._steps:
            before_began_s, before_took_s, _ = self._steps[-1][0]
            # A step that was issued while the one before it ran begins when that ends.
            began_s = max(began_s, before_began_s + before_took_s)
            idle_s = began_s - before_began_s - before_took_s
            if not self._before.isdisjoint(rows):
                gap_s = idle_s
        self._before = rows
        timing = (began_s, ended_s - began_s, gap_s)
        self._steps.append((timing, (len(step.rows), len(step.starts)), tuple(work), cpu_s, idle_s))

    def swap_pages(self, command: SwapPages, done: Callable[[CopyDone], None]) -> None:
        """See Executor."""
        began_s = self._clock()
        size = len(command.pairs) * self._page_bytes
        self._num_asked += 1

        def landed(answer: CopyDone) -> None:
            waited_s = self._clock() - began_s
            self._copies.append((began_s, waited_s, answer.copy_s, command.to_device, size))
            done(answer)

        self._executor.swap_pages(command, landed)

    def read_adapter(self, command: ReadAdapter, done: Callable[[AdapterRead], None]) -> None:
        """See Executor."""
        began_s = self._clock()
        size = len(command.pages) * self._page_bytes
        to_device = command.tier == "device"
        self._num_asked += 1

        def landed(answer: AdapterRead) -> None:
            waited_s = self._clock() - began_s
            self._reads.append((began_s, waited_s, answer.read_s, to_device, size))
            done(answer)

        self._executor.read_adapter(command, landed)

    # ------------------------------------------------------------ what is handed on

    def end_sequence(self, sequence: SequenceId) -> None:
        """See Executor."""
        self._sequences.pop(sequence, None)
        self._executor.end_sequence(sequence)

    def copy_pages(self, pairs: tuple[tuple[PageId, PageId], ...]) -> None:
        """See Executor."""
        self._executor.copy_pages(pairs)

    def evict_adapter(self, adapter: AdapterId) -> None:
        """See Executor."""
        self._executor.evict_adapter(adapter)

    def add_adapter(self, adapter: AdapterId, path: str) -> tuple[int, int]:
        """See Executor."""
        num_pages, rank = self._executor.add_adapter(adapter, path)
        self._adapter_bytes[adapter] = num_pages * self._page_bytes
        return num_pages, rank

    def verify_adapter(self, adapter: AdapterId) -> None:
        """See Executor."""
        self._executor.verify_adapter(adapter)

    def remove_adapter(self, adapter: AdapterId) -> None:
        """See Executor."""
        self._adapter_bytes.pop(adapter, None)
        self._executor.remove_adapter(adapter)

    @property
    def host_pages_pinned(self) -> int:
        """See Executor."""
        return self._executor.host_pages_pinned

    @property
    def preparation_s(self) -> float:
        """See Executor."""
        return self._executor.preparation_s

    def close(self) -> None:
        """Idempotent."""
        ends_at = self._clock() + _LANDING_S
        while len(self._copies) + len(self._reads) < self._num_asked and self._clock() < ends_at:
            time.sleep(0.001)
        for sequence in list(self._sequences):
            self.end_sequence(sequence)
        for adapter in list(self._adapter_bytes):
            self.evict_adapter(adapter)
            self.remove_adapter(adapter)


def work_of(
    step: RunStep, adapters: Mapping[int, AdapterId], adapter_bytes: Mapping[AdapterId, int]
) -> StepWork:
    """The batch's numbers; ``adapters``: of each sequence."""
    decodes = prefill = pairs = kv = token_bytes = 0
    distinct = set()
    for sequence, first, num_tokens, _, _ in step.rows:
        kv += first + num_tokens
        if num_tokens == 1:
            decodes += 1
        else:
            prefill += num_tokens
            pairs += prefill_pairs(first, num_tokens)
        adapter = adapters[sequence]
        if adapter in adapter_bytes:
            distinct.add(adapter)
            token_bytes += num_tokens * adapter_bytes[adapter]
    size = sum(adapter_bytes[adapter] for adapter in distinct)
    return StepWork(decodes, prefill, kv, size, len(distinct), pairs, token_bytes)
