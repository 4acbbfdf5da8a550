"""The door to N ranks, which are one executor to the driver.

Owns their processes from when they obey until they are gone, the order of commands, and the agreement of their
answers: a step has ended when all ranks have ended it alike, a read or a copy is done when all report it, and
fails on all where it fails on one. Whatever shows that ranks are no longer alike ends them all. Holds no tensor.
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
from manylora.executor.ranks.wire import (
    Channel,
    End,
    ForgetCopies,
    Learn,
    Pretend,
    RankFailed,
    RankStatus,
    StepAnswer,
    framed,
)
from manylora.executor.reading import Inspections
from manylora.executor.worker import unheard
from manylora.kernels.shapes import AdapterGeometry
from manylora.processes import is_stopped
from manylora.protocol import commands, events
from manylora.protocol.executor import DeviceEvent, ExecutorLost, ExecutorState, StepResult
from manylora.types import AdapterId, CopyId

_log = logging.getLogger(__name__)

END_S = 2.0
"""What ranks have to end in when they are told to."""

FAILED_STEP_S = 10.0
"""A step that failed on one rank has failed on all by then, or others wait for that one's exchanges."""


LOOK_S = 0.5
STOPPED_LOOKS = 10
"""A process that was stopped at so many looks in a row is lost. Looks, not seconds: where all processes are
stopped together, the one that looks is, too."""


class RanksLost(RuntimeError):
    """A rank is gone, or not like the others."""


@dataclasses.dataclass(eq=False)
class RankProcess:
    """A rank's process and the channel to it."""

    rank: int
    process: subprocess.Popen[bytes]
    channel: Channel

    def kill(self) -> None:
        """End it, whatever it does."""
        self.process.kill()


class StoppedProcesses:
    """Looks at processes, every ``LOOK_S``, for one that is stopped and stays so. So it is told from one that is
    busy: no compilation, no long prompt and no loaded machine looks like it."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._stopped = [0] * len(pids)

    def look(self) -> int | None:
        """Which of them is lost, by its place."""
        for place, pid in enumerate(self._pids):
            self._stopped[place] = self._stopped[place] + 1 if is_stopped(pid) else 0
        return next((place for place, looks in enumerate(self._stopped) if looks >= STOPPED_LOOKS), None)


@dataclasses.dataclass(slots=True)
class _Step:
    """A step on its way, or ended, and not told of yet."""

    step: int
    began: float
    answers: dict[int, StepAnswer] = dataclasses.field(default_factory=dict)
    failed_s: float | None = None

    def has_ended(self, count: int) -> bool:
        return len(self.answers) == count


class RankedExecutor:
    """``protocol.Executor`` on several ranks.

    ``step_timeout_s``: a step that takes longer, without the time that ranks spend on compiling, is lost with
    them. ``geometry``: of the first rank; ``num_pages``: of the device's pool.
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
        self._status = [RankStatus() for _ in ranks]
        self._registry = registry
        self._inspections = inspections
        self._step_timeout_s = step_timeout_s
        self._tell: Callable[[DeviceEvent], None] = unheard
        self._writing = threading.Lock()
        self._changed = threading.Condition()
        self._steps: collections.deque[_Step] = collections.deque()  # oldest first
        self._answers: dict[commands.Ask, dict[int, events.AdapterRead | events.CopyDone | events.SwitchDone]] = {}
        # Adapters that some ranks have brought and others have not: evicted before the next command.
        self._evictions: collections.deque[AdapterId] = collections.deque()
        self._brings: dict[commands.Ask, AdapterId] = {}  # what commands on their way bring to the device
        self._awaitable: set[CopyId] = set()  # on their way: steps may await them
        # Of those since the last step's end, and since the one before: which went well.
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

    # ------------------------------------------------------------ the door

    def connect(self, tell: Callable[[DeviceEvent], None]) -> None:
        """See Executor."""
        self._tell = tell
        for thread in self._threads:
            if thread.ident is None:
                thread.start()

    def obey(self, command: commands.DeviceCommand) -> None:
        """See Executor."""
        match command:
            case commands.ReportState():
                self._report_state()
                return
            case commands.InspectAdapter():
                found = self._inspections.inspect(command)
                if found.ok:
                    spec = self._inspections.spec(command.adapter)
                    self._write(Learn(command.adapter, spec.to_json()))
                self._tell(found)
                return
            case commands.VerifyAdapter():
                self._tell(self._inspections.verify(command))
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
        """See Worker."""
        if pretended_layout(rank, self._geometry).num_pages > self._num_pages:
            return False
        self._write(Pretend(adapter, rank))
        return True

    def flush(self) -> None:
        """See Executor. Ranks put nothing off."""

    def wait_step(self) -> None:
        """See Executor."""
        with self._changed:
            if not self._steps:
                return
            step = self._steps[0]
            self._changed.wait_for(lambda: self._lost or step.has_ended(len(self._ranks)))
            self._check()
            self._steps.popleft()
            # As for one rank (``Coming.step_ended``), which alone does not know when others have answered.
            forgotten, self._answered_before = self._answered_before, self._answered
            self._answered = []
        if forgotten:
            self._write(ForgetCopies(tuple(forgotten)))
        self._tell(self._result(step))

    def close(self, *, frees: bool = True) -> None:
        """See Executor."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            is_lost = self._lost is not None
            self._changed.notify_all()
        self._stop_watching.set()
        if not is_lost:
            with contextlib.suppress(RanksLost):
                self._write(End())
            ends_s = time.monotonic() + END_S
            for rank in self._ranks:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.process.wait(max(0.0, ends_s - time.monotonic()))
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.process.wait()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join()
        for rank in self._ranks:
            rank.channel.close()
        for ask in list(self._answers):
            self._answers.pop(ask)
        self._registry.close()

    # ------------------------------------------------------------ commands

    def _write(self, command: object) -> None:
        """Send a command to every rank, after the evictions that the listening thread asks for. That thread sends
        nothing itself, so it never keeps a rank from being heard."""
        with self._writing:
            while self._evictions:
                self._send(commands.EvictAdapter(self._evictions.popleft()))
            self._send(command)

    def _send(self, command: object) -> None:
        self._check()
        frame = framed(command)
        for rank in self._ranks:
            try:
                rank.channel.send_framed(frame)
            except OSError:
                self._lose(f"rank {rank.rank} has died")
                self._check()

    def _check(self) -> None:
        """Raises RanksLost where the ranks are."""
        if self._lost is not None:
            raise RanksLost(self._lost)

    def _report_state(self) -> None:
        self._tell(
            ExecutorState(
                host_pages_pinned=min(one.pages_pinned for one in self._status),
                preparation_s=max(one.preparation_s for one in self._status),
                traffic=tuple(one.traffic for one in self._status),
            )
        )

    # ------------------------------------------------------------ answers

    def _listen(self) -> None:
        """Hear all ranks until the last has ended."""
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
                        self._hear(speaker.rank, message)

    def _hear(self, rank: int, message: object) -> None:
        match message:
            case RankStatus():
                self._status[rank] = message
            case StepAnswer():
                self._status[rank] = message.status
                self._hear_step(rank, message)
            case events.AdapterRead() | events.CopyDone() | events.SwitchDone():
                self._hear_landed(rank, message)
            case RankFailed():
                self._lose(f"rank {rank} failed: {message.message}")
            case _:
                self._lose(f"rank {rank} said what is not expected of it: {type(message).__name__}")

    def _hear_step(self, rank: int, answer: StepAnswer) -> None:
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
        spoilt = sorted({sequence for answer in answers for sequence in answer.spoilt})
        done: events.StepDone = dataclasses.replace(
            result.done,
            device_s=seconds,
            spoilt=tuple(spoilt),
            stall_s=max(answer.stall_s for answer in answers),
        )
        return StepResult(done, result.logprobs, result.prompt_logprobs)

    def _hear_landed(self, rank: int, answer: events.AdapterRead | events.CopyDone | events.SwitchDone) -> None:
        """One that fails on one rank is undone on all before the policy, which may give its pages away, hears
        it; a copy that steps may await when none does any more."""
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
            self._tell(dataclasses.replace(worst, read_s=max(one.read_s for one in reads)))
        elif isinstance(worst, events.SwitchDone):
            self._tell_switched([one for one in every if isinstance(one, events.SwitchDone)])
        else:
            slowest = max(one.copy_s for one in every if isinstance(one, events.CopyDone))
            self._tell(dataclasses.replace(worst, copy_s=slowest))
            if worst.copy in self._awaitable:
                self._awaitable.remove(worst.copy)
                with self._changed:
                    self._answered.append((worst.copy, worst.ok))

    def _tell_switched(self, every: list[events.SwitchDone]) -> None:
        """Ranks restore their weights together; one whose weights are lost says so where others may not."""
        if len({one.ok for one in every}) > 1:
            wrong = next(one for one in every if not one.ok)
            self._lose(f"switch {wrong.switch} failed on some ranks: {wrong.error}")
            return
        first = next((one for one in every if one.error != ELSEWHERE), every[0])
        self._tell(dataclasses.replace(first, switch_s=max(one.switch_s for one in every)))

    # ------------------------------------------------------------ trouble

    def _lose(self, reason: str) -> None:
        """Nothing can be trusted any more: end all ranks, whose waiting for each other would not end, and say
        so."""
        with self._changed:
            if self._lost is not None or self._is_closing:
                return
            self._lost = reason
            for rank in self._ranks:
                rank.kill()
            self._changed.notify_all()
        _log.error("the ranks are lost: %s", reason)
        self._tell(ExecutorLost(reason))

    def _watch(self) -> None:
        """See ranks that are stopped, and steps that do not end."""
        watch = StoppedProcesses([rank.process.pid for rank in self._ranks])
        prepared_s = looked_s = 0.0
        busy_s, number = 0.0, None
        looked_s = time.monotonic()
        while not self._stop_watching.wait(LOOK_S):
            stopped = watch.look()
            if stopped is not None:
                self._lose(f"rank {self._ranks[stopped].rank} has been stopped")
            now, spent_s = time.monotonic(), max(one.preparation_s for one in self._status)
            # Time in which this process itself did not run says nothing of the ranks.
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
