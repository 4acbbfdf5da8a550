"""An executor on loan to a driver: notes what every step, copy and read was and took, as the engine paid it.

Owns the log and what is to be undone when the driver ends; the executor itself stays open, for the next driver.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from manylora.pricing.costs import StepWork, prefill_pairs
from manylora.protocol import (
    AdapterChecked,
    AdapterRead,
    Ask,
    CopyDone,
    DeviceCommand,
    DeviceEvent,
    EndSequence,
    EvictAdapter,
    Executor,
    ForgetAdapter,
    ReadAdapter,
    RunStep,
    StepResult,
    SwapPages,
    ask_of,
)
from manylora.types import AdapterId, SequenceId

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


class _Issued(NamedTuple):
    """A step on its way."""

    step: RunStep
    work: StepWork
    began_s: float
    cpu_s: float


class _Begun(NamedTuple):
    """A copy or a read on its way."""

    command: SwapPages | ReadAdapter
    began_s: float


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
        self._in_flight: dict[int, _Issued] = {}
        self._issuing = 0  # a step
        self._moving: dict[Ask, _Begun] = {}
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
        """The number of steps so far."""
        return len(self._steps)

    # ------------------------------------------------------------ the door

    def connect(self, tell: Callable[[DeviceEvent], None]) -> None:
        """See Executor."""
        self._tell = tell
        self._executor.connect(self._hear)

    def obey(self, command: DeviceCommand) -> None:
        """See Executor."""
        match command:
            case RunStep():
                self._issue(command)
                return
            case EndSequence():
                self._sequences.pop(command.sequence, None)
            case ForgetAdapter():
                self._adapter_bytes.pop(command.adapter, None)
            case SwapPages() | ReadAdapter():
                self._moving[_asked(command)] = _Begun(command, self._clock())
        self._executor.obey(command)

    def wait_step(self) -> None:
        """See Executor."""
        self._executor.wait_step()

    def close(self) -> None:
        """Idempotent."""
        ends_at = self._clock() + _LANDING_S
        while self._moving and self._clock() < ends_at:
            time.sleep(0.001)
        for sequence in list(self._sequences):
            self.obey(EndSequence(sequence))
        for adapter in list(self._adapter_bytes):
            self.obey(EvictAdapter(adapter))
            self.obey(ForgetAdapter(adapter))

    # ------------------------------------------------------------ what is noted

    def _issue(self, step: RunStep) -> None:
        for start in step.starts:
            self._sequences[start.sequence] = start.adapter
        # Sequences may end while the step is on its way.
        work = work_of(step, self._sequences, self._adapter_bytes)
        self._in_flight[step.step] = _Issued(step, work, self._clock(), time.thread_time())
        self._issuing = step.step
        self._executor.obey(step)
        self._issuing = 0

    def _hear(self, answer: DeviceEvent) -> None:
        match answer:
            case StepResult():
                issued = self._in_flight.pop(answer.done.step)
                if answer.done.step != self._issuing:  # else nothing ran
                    self._note_step(issued, self._clock(), time.thread_time() - issued.cpu_s)
            case CopyDone():
                self._note_transfer(self._copies, answer, answer.copy_s)
            case AdapterRead():
                self._note_transfer(self._reads, answer, answer.read_s)
            case AdapterChecked() if answer.ok:
                self._adapter_bytes[answer.adapter] = answer.num_pages * self._page_bytes
        self._tell(answer)

    def _note_step(self, issued: _Issued, ended_s: float, cpu_s: float) -> None:
        step, work, began_s, _ = issued
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

    def _note_transfer(
        self,
        log: list[tuple[float, float, float, bool, int]],
        answer: CopyDone | AdapterRead,
        took_s: float,
    ) -> None:
        command, began_s = self._moving.pop(_asked(answer))
        waited_s = self._clock() - began_s
        if isinstance(command, SwapPages):
            to_device, num_pages = command.to_device, len(command.pairs)
        else:
            to_device, num_pages = command.tier == "device", len(command.pages)
        log.append((began_s, waited_s, took_s, to_device, num_pages * self._page_bytes))


def _asked(message: SwapPages | ReadAdapter | CopyDone | AdapterRead) -> Ask:
    asked = ask_of(message)
    assert asked is not None
    return asked


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
