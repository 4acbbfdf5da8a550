"""Presents N ranks to the driver as one executor.

Owns the ranks' processes from when they accept commands until they have ended, the order of commands, and the
agreement of their answers. A step has ended when all ranks have ended it with the same outcome. A read or a
copy is done when all ranks report it, and fails on all ranks where it fails on one. Any sign that the ranks
differ ends them all. Holds no tensor.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from manylora.adapters.pack import pretended_layout
from manylora.adapters.registry import Registry
from manylora.executor.merging import ELSEWHERE
from manylora.executor.ranks import wire
from manylora.executor.reading import Inspections
from manylora.executor.worker import unheard
from manylora.kernels.shapes import AdapterGeometry
from manylora.processes import is_stopped
from manylora.protocol import commands, events
from manylora.protocol.executor import DeviceEvent, ExecutorLost, ExecutorState, StepResult
from manylora.types import AdapterId, CopyId

_log = logging.getLogger(__name__)

END_S = 2.0
"""The seconds that ranks have to end after the command ``End``, before they are killed."""

FAILED_STEP_S = 10.0
"""The seconds in which a step that failed on one rank must end on all ranks. After that, the other ranks are
taken to wait for exchanges that the failed rank will not make."""


LOOK_S = 0.5
"""The seconds between two looks at the ranks."""
STOPPED_LOOKS = 10
"""A process found stopped this many times in a row is lost. Looks are counted, not seconds: where all
processes are stopped together, the process that looks is stopped too."""


_Landed = events.AdapterRead | events.CopyDone | events.SwitchDone


class RanksLost(RuntimeError):
    """The error that a rank has ended, or differs from the others."""


@dataclasses.dataclass(eq=False)
class RankProcess:
    """A rank's process and the channel to it."""

    rank: int
    process: subprocess.Popen[bytes]
    channel: wire.Channel


class StoppedProcesses:
    """A watch over processes, to find one that is stopped and stays stopped. It reads the system's process
    state, so a process busy with a compilation or a long prompt, or on a loaded machine, is not mistaken for
    a stopped one. Call ``look`` every ``LOOK_S`` seconds."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._stopped = [0] * len(pids)

    def look(self) -> int | None:
        """Look at every process once. Return the place of a lost one, or None."""
        for place, pid in enumerate(self._pids):
            self._stopped[place] = self._stopped[place] + 1 if is_stopped(pid) else 0
        return next((place for place, looks in enumerate(self._stopped) if looks >= STOPPED_LOOKS), None)


@dataclasses.dataclass(slots=True)
class _Step:
    """A step that is in flight, or has ended and has not been reported. ``answers``: the answers so far, by
    rank. ``failed_s``: the time of its first failed answer (``time.monotonic``)."""

    step: int
    began: float
    answers: dict[int, wire.StepAnswer] = dataclasses.field(default_factory=dict)
    failed_s: float | None = None

    def has_ended(self, count: int) -> bool:
        return len(self.answers) == count


class RankedExecutor:
    """The ``protocol.Executor`` of several ranks.

    ``step_timeout_s``: the longest time of a step, not counting the ranks' compiling; after that the ranks
    are lost. ``geometry``: the first rank's adapter geometry; ``num_pages``: the pages of the device's pool.
    """

    def __init__(
        self,
        ranks: Sequence[RankProcess],
        registry: Registry,
        inspections: Inspections,
        step_timeout_s: float,
        geometry: AdapterGeometry,
        num_pages: int,
    ) -> None:
        self._geometry = geometry
        self._num_pages = num_pages
        self._ranks = ranks
        self._status = [wire.RankStatus() for _ in ranks]
        self._registry = registry
        self._inspections = inspections
        self._step_timeout_s = step_timeout_s
        self._report: Callable[[DeviceEvent], None] = unheard
        self._writing = threading.Lock()
        self._changed = threading.Condition()
        self._steps: collections.deque[_Step] = collections.deque()  # oldest first
        self._answers: dict[commands.Ask, dict[int, _Landed]] = {}
        # Adapters that only some ranks have brought to the device; they are evicted before the next command.
        self._evictions: collections.deque[AdapterId] = collections.deque()
        # The adapters that commands in flight bring to the device.
        self._brings: dict[commands.Ask, AdapterId] = {}
        self._awaitable: set[CopyId] = set()  # copies in flight that steps may await
        # Awaitable copies answered since the last step's end, and those answered in the interval before; each
        # with whether it went well.
        self._answered: list[tuple[CopyId, bool]] = []
        self._answered_before: list[tuple[CopyId, bool]] = []
        self._lost: str | None = None
        self._is_closing = False
        self._ended_s = 0.0
        self._stop_watching = threading.Event()
        self._threads = [
            threading.Thread(target=self._listen, name="manylora-ranks", daemon=True),
            threading.Thread(target=self._watch, name="manylora-ranks-watch", daemon=True),
        ]

    # ------------------------------------------------------------ the Executor protocol

    def connect(self, report: Callable[[DeviceEvent], None]) -> None:
        self._report = report
        for thread in self._threads:
            if thread.ident is None:
                thread.start()

    def obey(self, command: commands.DeviceCommand) -> None:
        match command:
            case commands.ReportState():
                pinned = min(one.pages_pinned for one in self._status)
                preparation_s = max(one.preparation_s for one in self._status)
                traffic = tuple(one.traffic for one in self._status)
                self._report(ExecutorState(pinned, preparation_s, traffic))
                return
            case commands.InspectAdapter():
                found = self._inspections.inspect(command)
                if found.ok:
                    spec = self._inspections.spec(command.adapter)
                    self._write(wire.Learn(command.adapter, spec.to_json()))
                self._report(found)
                return
            case commands.VerifyAdapter():
                self._report(self._inspections.verify(command))
                return
            case commands.ForgetAdapter():
                self._inspections.forget(command.adapter)
            case commands.SwapPages() if command.groups:
                self._awaitable.add(command.copy)
            case commands.ReadAdapter(tier="device") | commands.SwapPages(to_device=True):
                if command.adapter is not None:
                    self._brings[commands.ask_of(command)] = command.adapter
            case commands.RunStep():
                with self._changed:
                    self._steps.append(_Step(command.step, time.perf_counter()))
        self._write(command)

    def pretend_adapter(self, adapter: AdapterId, rank: int) -> bool:
        """Enter an adapter of scale 0 on all ranks, without pages of its own, until it is evicted. Return
        False where the pool has no room for an adapter of this rank."""
        if pretended_layout(rank, self._geometry).num_pages > self._num_pages:
            return False
        self._write(wire.Pretend(adapter, rank))
        return True

    def flush(self) -> None:
        """Do nothing, since the ranks begin every command at once."""

    def wait_step(self) -> None:
        with self._changed:
            if not self._steps:
                return
            step = self._steps[0]
            self._changed.wait_for(lambda: self._lost or step.has_ended(len(self._ranks)))
            self._check()
            self._steps.popleft()
            # The same rule as in ``Arrivals.step_ended``. It is applied here because a rank does not know when
            # the others have answered.
            forgotten, self._answered_before = self._answered_before, self._answered
            self._answered = []
        if forgotten:
            self._write(wire.ForgetCopies(tuple(forgotten)))
        self._report(self._result(step))

    def close(self, *, frees: bool = True) -> None:
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            is_lost = self._lost is not None
            self._changed.notify_all()
        self._stop_watching.set()
        if not is_lost:
            with contextlib.suppress(RanksLost):
                self._write(wire.End())
            ends_s = time.monotonic() + END_S
            for rank in self._ranks:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.process.wait(max(0.0, ends_s - time.monotonic()))
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join()
        for rank in self._ranks:
            rank.channel.close()
        self._answers.clear()
        self._registry.close()

    # ------------------------------------------------------------ commands

    def _write(self, command: object) -> None:
        """Send a command to every rank, after the evictions that the listening thread has requested. That
        thread sends nothing itself, so a blocked send never stops it from reading the ranks' messages."""
        with self._writing:
            while self._evictions:
                self._send(commands.EvictAdapter(self._evictions.popleft()))
            self._send(command)

    def _send(self, command: object) -> None:
        self._check()
        frame = wire.framed(command)
        for rank in self._ranks:
            try:
                rank.channel.send_framed(frame)
            except OSError:
                self._lose(f"rank {rank.rank} has died")
                self._check()

    def _check(self) -> None:
        """Raise RanksLost where the ranks are lost."""
        if self._lost is not None:
            raise RanksLost(self._lost)

    # ------------------------------------------------------------ answers

    def _listen(self) -> None:
        """Receive all ranks' messages until the last rank has ended."""
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.channel.sock, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    speaker: RankProcess = key.data
                    messages = speaker.channel.arrived()
                    if messages is None:
                        selector.unregister(key.fileobj)
                        self._lose(f"rank {speaker.rank} has died")
                        continue
                    for message in messages:
                        self._receive(speaker.rank, message)

    def _receive(self, rank: int, message: object) -> None:
        match message:
            case wire.RankStatus():
                self._status[rank] = message
            case wire.StepAnswer():
                self._status[rank] = message.status
                self._receive_step(rank, message)
            case events.AdapterRead() | events.CopyDone() | events.SwitchDone():
                self._receive_landed(rank, message)
            case wire.RankFailed():
                self._lose(f"rank {rank} failed: {message.message}")
            case _:
                self._lose(f"rank {rank} said what is not expected of it: {type(message).__name__}")

    def _receive_step(self, rank: int, answer: wire.StepAnswer) -> None:
        with self._changed:
            reason: str | None
            step = next((step for step in self._steps if step.step == answer.step), None)
            if step is None or rank in step.answers:
                reason = f"rank {rank} has ended step {answer.step}, which it was not told to run"
            else:
                step.answers[rank] = answer
                reason = self._why_unlike(step, rank)
            if reason is None:
                self._changed.notify_all()
        if reason is not None:
            self._lose(reason)

    def _why_unlike(self, step: _Step, rank: int) -> str | None:
        answer = step.answers[rank]
        if not answer.ok:
            error = "" if answer.result is None else answer.result.done.error
            if answer.num_exchanges:
                return f"step {step.step} failed on rank {rank} after exchanges had begun: {error}"
            step.failed_s = step.failed_s or time.monotonic()
        first = next(iter(step.answers.values()))
        if answer.done != first.done:
            return f"the ranks disagree about step {step.step}"
        return None

    def _result(self, step: _Step) -> StepResult:
        result = next(answer.result for answer in step.answers.values() if answer.result is not None)
        now = time.perf_counter()
        seconds, self._ended_s = now - max(step.began, self._ended_s), now
        answers = step.answers.values()
        invalid = sorted({sequence for answer in answers for sequence in answer.invalid})
        done: events.StepDone = dataclasses.replace(
            result.done,
            device_s=seconds,
            invalid=tuple(invalid),
            stall_s=max(answer.stall_s for answer in answers),
        )
        return StepResult(done, result.logprobs, result.prompt_logprobs)

    def _receive_landed(self, rank: int, answer: _Landed) -> None:
        """Collect the ranks' answers to a read, a copy or a switch, and report one answer once all have
        arrived.

        Where a read or a copy has failed on some ranks, request the adapter's eviction from the others before
        the report, since the policy may then give its pages away. A failed copy that steps may await is
        undone later, by ForgetCopies, when no step awaits it any more.
        """
        ask = commands.ask_of(answer)
        answers = self._answers.setdefault(ask, {})
        answers[rank] = answer
        if len(answers) < len(self._ranks):
            return
        del self._answers[ask]
        brought = self._brings.pop(ask, None)
        every = [answers[rank] for rank in range(len(self._ranks))]
        worst = next((one for one in every if not one.ok), every[0])
        if not worst.ok and brought is not None and any(one.ok for one in every):
            self._evictions.append(brought)
        if isinstance(worst, events.AdapterRead):
            reads = [one for one in every if isinstance(one, events.AdapterRead)]
            self._report(dataclasses.replace(worst, read_s=max(one.read_s for one in reads)))
        elif isinstance(worst, events.SwitchDone):
            self._report_switch([one for one in every if isinstance(one, events.SwitchDone)])
        else:
            slowest = max(one.copy_s for one in every if isinstance(one, events.CopyDone))
            self._report(dataclasses.replace(worst, copy_s=slowest))
            if worst.copy in self._awaitable:
                self._awaitable.remove(worst.copy)
                with self._changed:
                    self._answered.append((worst.copy, worst.ok))

    def _report_switch(self, every: list[events.SwitchDone]) -> None:
        """Report the ranks' answers to a switch as one. The ranks restore their weights together, so
        different outcomes mean that a rank's weights are lost, and the ranks with it."""
        if len({one.ok for one in every}) > 1:
            wrong = next(one for one in every if not one.ok)
            self._lose(f"switch {wrong.switch} failed on some ranks: {wrong.error}")
            return
        first = next((one for one in every if one.error != ELSEWHERE), every[0])
        self._report(dataclasses.replace(first, switch_s=max(one.switch_s for one in every)))

    # ------------------------------------------------------------ trouble

    def _lose(self, reason: str) -> None:
        """Kill all ranks and report that the executor is lost. Nothing can be trusted any more, and the ranks
        might wait for each other without end."""
        with self._changed:
            if self._lost is not None or self._is_closing:
                return
            self._lost = reason
            for rank in self._ranks:
                rank.process.kill()
            self._changed.notify_all()
        _log.error("the ranks are lost: %s", reason)
        self._report(ExecutorLost(reason))

    def _watch(self) -> None:
        """Watch for ranks that are stopped and for steps that do not end, until the executor is closed."""
        watch = StoppedProcesses([rank.process.pid for rank in self._ranks])
        prepared_s = looked_s = 0.0
        busy_s, number = 0.0, None
        looked_s = time.monotonic()
        while not self._stop_watching.wait(LOOK_S):
            stopped = watch.look()
            if stopped is not None:
                self._lose(f"rank {self._ranks[stopped].rank} has been stopped")
            now, spent_s = time.monotonic(), max(one.preparation_s for one in self._status)
            # Leave out time in which this process did not run, since it shows nothing about the ranks.
            passed_s = min(now - looked_s, 2 * LOOK_S) - (spent_s - prepared_s)
            looked_s, prepared_s = now, spent_s
            with self._changed:
                step = next((step for step in self._steps if not step.has_ended(len(self._ranks))), None)
            if step is None or step.step != number:
                busy_s, number = 0.0, None if step is None else step.step
                continue
            busy_s += max(0.0, passed_s)
            if busy_s > self._step_timeout_s:
                self._lose(f"step {step.step} has not ended within {self._step_timeout_s:g} s")
            elif step.failed_s is not None and now - step.failed_s > FAILED_STEP_S:
                self._lose(f"step {step.step} failed on some ranks and has not ended on others")
