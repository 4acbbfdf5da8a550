"""What every step, copy and read of an engine was and took, as the engine paid it. Owns the log."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from manylora.protocol.commands import (
    Ask,
    DeviceCommand,
    EndSequence,
    ForgetAdapter,
    ReadAdapter,
    RunStep,
    SwapPages,
    ask_of,
)
from manylora.protocol.events import AdapterRead, CopyDone
from manylora.protocol.executor import AdapterChecked, DeviceEvent, Executor, StepResult
from manylora.types import AdapterId, SequenceId
from manylora_lab.bench.lending import LentExecutor
from manylora_lab.pricing.costs import StepWork, prefill_pairs

_Timing = tuple[float, float, float | None]
_Work = tuple[int, ...]


class LoggedStep(NamedTuple):
    """One step. ``began_s``: on ``time.monotonic``; ``took_s``: of the call, as the engine's loop saw it,
    but for what the step stood still for copies and the CPU.

    ``gap_s``: since the end of the step before; None where no row of that one went on, so that the engine may
    have waited for work. ``num_new``: sequences that it took up. ``idle_s``: since the end of the step before,
    whatever that was; infinite for the first. ``ranks``: the sum of the ranks of the rows' adapters, and the
    largest of them times the rows.
    """

    began_s: float
    took_s: float
    gap_s: float | None
    num_rows: int
    num_new: int
    work: StepWork
    cpu_s: float
    idle_s: float = 0.0
    ranks: tuple[int, int] = (0, 0)


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


class _Issued(NamedTuple):
    """A step on its way."""

    step: RunStep
    work: StepWork
    began_s: float
    cpu_s: float
    ranks: tuple[int, int]


class _Begun(NamedTuple):
    """A copy or a read on its way."""

    command: SwapPages | ReadAdapter
    began_s: float


class StepLogger(LentExecutor):
    """Notes what every step, copy and read was and took."""

    def __init__(
        self, executor: Executor, page_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(executor)
        self._page_bytes = page_bytes
        self._clock = clock
        self._adapter_bytes: dict[AdapterId, int] = {}
        self._adapter_ranks: dict[AdapterId, int] = {}
        self._adapter_of: dict[SequenceId, AdapterId] = {}
        self._before: set[SequenceId] = set()
        self._in_flight: dict[int, _Issued] = {}
        self._issuing = 0  # a step
        self._begun: dict[Ask, _Begun] = {}
        # Plain tuples of numbers: the garbage collector looks through anything else again and again.
        self._steps: list[tuple[_Timing, tuple[int, int], _Work, float, float, tuple[int, int], float]] = []
        self._copies: list[tuple[float, float, float, bool, int]] = []
        self._reads: list[tuple[float, float, float, bool, int]] = []

    def log(self) -> StepLog:
        """All so far."""
        return StepLog(
            [
                LoggedStep(began_s, took_s - stall_s, gap_s, *counts, StepWork(*work), cpu_s, idle_s, ranks)
                for (began_s, took_s, gap_s), counts, work, cpu_s, idle_s, ranks, stall_s in self._steps
            ],
            [LoggedTransfer(*copy) for copy in self._copies],
            [LoggedTransfer(*read) for read in self._reads],
        )

    @property
    def num_steps(self) -> int:
        """The number of steps so far."""
        return len(self._steps)

    def begins(self, command: DeviceCommand) -> None:
        """See LentExecutor."""
        match command:
            case RunStep():
                for start in command.starts:
                    self._adapter_of[start.sequence] = start.adapter
                # Sequences may end while the step is on its way.
                work = work_of(command, self._adapter_of, self._adapter_bytes)
                ranks = self._ranks_of(command)
                self._in_flight[command.step] = _Issued(
                    command, work, self._clock(), time.thread_time(), ranks
                )
                self._issuing = command.step
            case EndSequence():
                self._adapter_of.pop(command.sequence, None)
            case ForgetAdapter():
                self._adapter_bytes.pop(command.adapter, None)
                self._adapter_ranks.pop(command.adapter, None)
            case SwapPages() | ReadAdapter():
                self._begun[ask_of(command)] = _Begun(command, self._clock())

    def has_begun(self, command: DeviceCommand) -> None:
        """See LentExecutor."""
        if isinstance(command, RunStep):
            self._issuing = 0

    def says(self, event: DeviceEvent) -> None:
        """See LentExecutor."""
        match event:
            case StepResult():
                issued = self._in_flight.pop(event.done.step)
                if event.done.step != self._issuing:  # else nothing ran
                    cpu_s = time.thread_time() - issued.cpu_s
                    self._note_step(issued, self._clock(), cpu_s, event.done.stall_s)
            case CopyDone():
                self._note_transfer(self._copies, event, event.copy_s)
            case AdapterRead():
                self._note_transfer(self._reads, event, event.read_s)
            case AdapterChecked() if event.ok:
                self._adapter_bytes[event.adapter] = event.num_pages * self._page_bytes
                self._adapter_ranks[event.adapter] = event.rank

    def _ranks_of(self, step: RunStep) -> tuple[int, int]:
        ranks = [self._adapter_ranks.get(self._adapter_of[row.sequence], 0) for row in step.rows]
        return sum(ranks), len(ranks) * max(ranks, default=0)

    def _note_step(self, issued: _Issued, ended_s: float, cpu_s: float, stall_s: float) -> None:
        step, work, began_s, _, ranks = issued
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
        counts = len(step.rows), len(step.starts)
        self._steps.append((timing, counts, tuple(work), cpu_s, idle_s, ranks, stall_s))

    def _note_transfer(
        self,
        log: list[tuple[float, float, float, bool, int]],
        event: CopyDone | AdapterRead,
        took_s: float,
    ) -> None:
        command, began_s = self._begun.pop(ask_of(event))
        waited_s = self._clock() - began_s
        if isinstance(command, SwapPages):
            to_device, num_pages = command.to_device, len(command.pairs)
        else:
            to_device, num_pages = command.tier == "device", len(command.pages)
        log.append((began_s, waited_s, took_s, to_device, num_pages * self._page_bytes))


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
