"""The device loop: gives the policy its events, obeys its commands, reports what came of it.

One thread owns the replica and the executor's steps. Owns no policy and no tensor; knows the real clock so
that nobody else has to.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import logging
import math
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable

from manylora.config import PolicyConfig
from manylora.engine.catalog import Catalog
from manylora.engine.client import (
    AdapterLoad,
    Delta,
    EngineDead,
    EngineStats,
    GenerationRequest,
)
from manylora.engine.journal import JournalWriter
from manylora.engine.loads import AdapterLoads
from manylora.engine.outbox import Outbox
from manylora.engine.trace import TraceWriter
from manylora.engine.watchdog import Activity, Pulse, watch
from manylora.policy.caches import adapter_pages_limit
from manylora.policy.replica import Replica
from manylora.protocol import (
    Abort,
    AdapterAdded,
    AdapterFreed,
    AdapterRead,
    AdapterRemoved,
    Arrive,
    CopyPages,
    Decided,
    Emit,
    EndSequence,
    Event,
    EvictAdapter,
    Executor,
    IssuedStep,
    ReadAdapter,
    RunStep,
    SetTimer,
    StepResult,
    SwapPages,
    Timer,
)
from manylora.types import BASE, AdapterCard, EngineInfo, Request, RequestError, RequestId

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""Steps that may fail in a row before the device is taken for broken; those that another pulled along do not
count."""

CLOSE_S = 4.0
"""How long ``close`` waits for the step in flight."""

_STOP = object()

_STATS = {field.name for field in dataclasses.fields(EngineStats)} - {"adapters"}


@dataclasses.dataclass
class _Meters:
    adapter_read_s: float = 0.0
    adapter_read_failures: int = 0
    host_pages_pinned: int = 0
    steps: int = 0
    step_s: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class Driver:
    """Runs one replica on one executor. Public methods may be called from any thread.

    ``deliver`` is called on the loop's thread with the news of each round; ``died`` with the reason if the
    loop ends by itself.
    """

    def __init__(
        self,
        config: PolicyConfig,
        executor: Executor,
        info: EngineInfo,
        *,
        journal: JournalWriter | None = None,
        trace: TraceWriter | None = None,
        step_timeout_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = info
        self.step_timeout_s = step_timeout_s
        """A loop whose step takes longer is taken for lost where it is watched."""
        self._executor = executor
        self._clock = clock
        self._start_s = clock()
        self._journal = journal
        self._trace = trace
        self._replica = Replica(config)
        # A request needs a page beside its adapter's.
        limit = min(adapter_pages_limit(config), config.num_pages - 1)
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._catalog = Catalog(executor, self._inbox.put, config.num_pages, limit)
        self._loads = AdapterLoads(self._catalog)
        self._outbox = Outbox(clock)
        self._meters = _Meters()
        self._arrived: collections.deque[Request] = collections.deque()  # and not yet told of
        self._more_follow = False  # after the last of them, at once
        self._in_flight: collections.deque[IssuedStep] = collections.deque()  # oldest first
        self._asked: set[concurrent.futures.Future[EngineStats]] = set()
        self._timer_at: float | None = None
        self._failed_steps = 0
        self._activity = Activity()
        self._thread: threading.Thread | None = None
        self._watchdog: threading.Thread | None = None
        self._pid = os.getpid()
        self._end: str | None = None
        self._is_lost = False
        self.is_closing = threading.Event()
        self._has_ended = threading.Event()  # the loop; what it holds is freed after that
        self._freeing = threading.Lock()
        self._is_free = False

    # ------------------------------------------------------------ life

    def start(
        self,
        deliver: Callable[[list[Delta]], None],
        died: Callable[[str], None],
        *,
        is_watched: bool = False,
    ) -> None:
        """Start the loop's thread, and with ``is_watched`` one that gives the loop up where a step takes longer
        than ``step_timeout_s``."""
        self._deliver = deliver
        self._died = died
        self._thread = threading.Thread(target=self._run, name="manylora-driver", daemon=True)
        self._thread.start()
        if is_watched:
            self._watchdog = watch(self, self.step_timeout_s)

    def close(self) -> None:
        """End the loop after the step in flight and free the executor. Idempotent; every caller waits for the end.

        A step that does not end within ``CLOSE_S`` is left behind on the loop's thread, which frees everything if
        it ever ends. Does nothing in a process that was forked off the loop's: no thread of it is there.
        """
        if os.getpid() != self._pid:
            return
        self.is_closing.set()
        self._inbox.put(_STOP)
        if self._thread is None:
            self._free()
        elif self._thread is not threading.current_thread():
            if self._has_ended.wait(0.0 if self._is_lost else CLOSE_S):
                self._thread.join()
            else:
                log.warning("the step in flight does not end: its thread is left behind")
        if self._watchdog is not None:
            self._watchdog.join()
        self._end = self._end or "the engine was closed"
        self._abandon()

    def give_up(self, reason: str) -> None:
        """The loop hangs: from now on the engine is dead, whatever the loop does when it gets on. From any thread
        but the loop's."""
        if self._end is None:
            self._is_lost = True
            self._die(reason)
            self._abandon()

    def pulse(self) -> Pulse:
        """What the loop is doing now."""
        return Pulse(self._activity.work, self._executor.preparation_s)

    def _die(self, reason: str) -> None:
        self._end = reason
        self._died(reason)

    def _free(self) -> None:
        """The loop has ended, or never began: give everything back, once."""
        with self._freeing:
            if self._is_free:
                return
            self._is_free = True
            self._end = self._end or "the engine was closed"
            self._abandon()
            self._executor.close()
            for file in (self._journal, self._trace):
                if file is not None:
                    file.close()

    # ------------------------------------------------------------ what others ask

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; an unknown adapter is answered by a Delta with status 404."""
        self._inbox.put(request)

    @property
    def backlog(self) -> int:
        """How many things others asked for that the loop has not looked at."""
        return self._inbox.qsize()

    def abort(self, request: RequestId, sample: int | None, reason: str) -> None:
        self._inbox.put(Abort(request, sample, reason))

    def add_adapter(self, name: str, path: str, *, verify: bool = True) -> AdapterCard:
        """Check and serve an adapter; reads its files on the caller's thread. Raises AdapterError, and EngineDead.

        Without ``verify`` only headers are read: for thousands of adapters at start-up.
        """
        if self._end is not None:
            raise EngineDead(self._end)
        return self._catalog.add(name, path, verify)

    def remove_adapter(self, name: str) -> concurrent.futures.Future[None]:
        """Stop serving a name at once; the future is done when nothing of it is left."""
        freed = self._catalog.remove(name)
        self._abandon_if_ended()
        return freed

    def adapters(self) -> tuple[AdapterCard, ...]:
        return self._catalog.cards()

    def stats(self) -> concurrent.futures.Future[EngineStats]:
        """A snapshot taken between two steps. ``adapters`` is empty there: ``adapter_loads`` has them."""
        future: concurrent.futures.Future[EngineStats] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()  # A cancelled one cannot be answered: the loop would end of it.
        # Not only in the inbox: a loop may take it from there and hang before it answers.
        self._asked.add(future)
        future.add_done_callback(self._asked.discard)
        self._inbox.put(future)
        self._abandon_if_ended()
        return future

    def adapter_loads(self) -> tuple[AdapterLoad, ...]:
        """Every served adapter at the moment of the newest snapshot. O(adapters), none of it on the loop."""
        return self._loads.all()

    def _abandon_if_ended(self) -> None:
        """Somebody waits for what was just put into the inbox, and the loop may have ended a moment ago."""
        if self._end is not None:
            self._abandon()

    # ------------------------------------------------------------ the loop

    def _run(self) -> None:
        try:
            while self._end is None and self._round():
                self._flush()
                if self._trace is not None:
                    self._trace.flush()
        except Exception as error:  # a bug, or a broken device: nothing can be trusted after it
            log.exception("the engine's loop failed")
            if self._end is None:
                self._die(f"the engine failed: {error}")
        self._end = self._end or "the engine was closed"
        self._activity.rest()
        self._has_ended.set()
        self._abandon()
        self.is_closing.wait()
        self._free()

    def _abandon(self) -> None:
        """Answer those who wait for something that the loop, now ended, will never say."""
        error = EngineDead(self._end or "the engine has ended")
        self._catalog.fail_leaving(error)
        for future in list(self._asked):
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # answered at this very moment
                future.set_exception(error)

    def _round(self) -> bool:
        """The oldest step's end or the first thing to come in; all that has come in by then, the timer if it is
        due, and only then that the step has ended, so that the next one knows of it all. False: told to stop."""
        item = result = None
        if self._in_flight:
            self._activity.begin()
            result = self._in_flight.popleft().wait()
        else:
            self._activity.rest()
            item = self._wait()
        while item is not None or not self._inbox.empty():
            if item is None:
                item = self._inbox.get_nowait()
            if item is _STOP:
                return False
            self._take(item)
            item = None
            if self._inbox.empty() and not self._more_follow:
                self._tell_arrived()
        # Last before a step's end: where a first step has just been issued, that is in the next round.
        is_last = result is not None or not self._in_flight
        if is_last and self._timer_at is not None and self._clock() >= self._timer_at:
            self._timer_at = None
            self._feed(Timer())
        if result is not None:
            self._steps_ended(result)
        return True

    def _wait(self) -> object | None:
        """The next thing to come in; None where the timer is due first."""
        if self._timer_at is None:
            return self._inbox.get()
        try:
            return self._inbox.get(timeout=max(self._timer_at - self._clock(), 0.0))
        except queue.Empty:
            return None

    def _take(self, item: object) -> None:
        if isinstance(item, GenerationRequest):
            self._open(item)
            return
        self._tell_arrived()
        if isinstance(item, concurrent.futures.Future):
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # this loop was given up meanwhile
                item.set_result(self._stats())
        else:
            if isinstance(item, AdapterAdded):
                self._loads.add(item.adapter, item.num_pages)
            elif isinstance(item, AdapterRemoved):
                self._loads.drop(item.adapter)
            elif isinstance(item, AdapterRead):
                self._meters.adapter_read_s += item.read_s
                self._meters.adapter_read_failures += not item.ok
            self._feed(item)  # type: ignore[arg-type]  # the rest of the inbox are events

    def _open(self, asked: GenerationRequest) -> None:
        adapter = BASE if asked.adapter is None else self._catalog.lookup(asked.adapter)
        eos_ids = () if asked.params.ignore_eos else self.info.eos_ids
        stop_ids = tuple(dict.fromkeys((*eos_ids, *asked.params.stop_token_ids)))
        params = asked.params
        if params.seed is None:
            # Chosen here, outside the policy, so that the journal knows it and a replay draws the same.
            params = dataclasses.replace(params, seed=secrets.randbits(63))
        self._more_follow = asked.more
        request = Request(asked.id, adapter or BASE, asked.prompt, params, stop_ids, asked.cache_scope)
        error = None
        if self._outbox.is_live(asked.id):
            error = RequestError(400, f"request id {asked.id!r} is already in use")
        elif adapter is None:
            error = RequestError(404, f"The model `{asked.adapter}` does not exist.", "model")
        if error is not None:
            self._outbox.refuse(request, asked.serial, error)
            return
        self._outbox.open(request, asked.stream, asked.serial)
        self._meters.prompt_tokens += len(asked.prompt)
        self._arrived.append(request)

    def _tell_arrived(self) -> None:
        """All that have come since the last other event, the policy being told that they come together."""
        self._more_follow = False
        while self._arrived:
            request = self._arrived.popleft()
            self._feed(Arrive(request, more=bool(self._arrived)))

    def _feed(self, event: Event) -> None:
        self._activity.begin()
        now = self._clock()
        if self._journal is not None:
            self._journal.record(event, now)
        commands = self._replica.handle(event, now)
        if self._journal is not None:
            self._journal.answered(commands)
        for command in commands:
            match command:
                case Emit():  # first, for there are most of them
                    self._outbox.note(command)
                case RunStep():
                    # Where the device is the caller's own processor, issuing is running.
                    self._flush()
                    self._in_flight.append(self._executor.issue_step(command))
                case EndSequence():
                    self._executor.end_sequence(command.sequence)
                case CopyPages():
                    self._executor.copy_pages(command.pairs)
                case SwapPages():
                    self._executor.swap_pages(command, self._inbox.put)
                case ReadAdapter():
                    self._executor.read_adapter(command, self._inbox.put)
                case EvictAdapter():
                    self._executor.evict_adapter(command.adapter)
                case SetTimer():
                    self._timer_at = command.at
                case AdapterFreed():
                    self._catalog.freed(command.adapter)
                case Decided():
                    if self._trace is not None:
                        label = self._catalog.label(command.adapter)
                        self._trace.write(command, label, now - self._start_s)
                case _:
                    self._outbox.note(command)

    def _steps_ended(self, oldest: StepResult) -> None:
        """The oldest step's end, and with it that of the next one where it is known to have failed: a step started
        in between would rely on it and fail too, and so would the one after that, without end."""
        results = [oldest]
        while self._in_flight and self._in_flight[0].has_failed:
            results.append(self._in_flight.popleft().wait())
        if any(result.done.ok for result in results):
            self._failed_steps = 0
        # Of those that end together one failed by itself.
        self._failed_steps += not results[-1].done.ok
        for number, result in enumerate(results, 1):
            self._step_ended(result, more=number < len(results))

    def _step_ended(self, result: StepResult, more: bool) -> None:
        done = result.done
        self._meters.steps += 1
        self._meters.step_s += done.device_s
        self._meters.generated_tokens += sum(len(tokens) for _, tokens in done.tokens)
        if not done.ok:
            log.error("step %d failed: %s", done.step, done.error)
            if self._failed_steps >= MAX_FAILED_STEPS:
                raise RuntimeError(f"{self._failed_steps} steps in a row failed: {done.error}")
        self._outbox.logprobs = result.logprobs
        self._feed(dataclasses.replace(done, more=True) if more else done)

    def _flush(self) -> None:
        deltas = self._outbox.collect()
        if deltas:
            self._deliver(deltas)

    def _stats(self) -> EngineStats:
        """Snapshot, counters and meters have the names that their fields have here."""
        snapshot = self._replica.snapshot("changed")
        self._loads.update(snapshot.adapters)
        base = snapshot.adapters[0]
        self._meters.host_pages_pinned = self._executor.host_pages_pinned
        sources = (snapshot, self._replica.counters, self._meters)
        return EngineStats(
            base_running=base.running,
            base_waiting=base.waiting,
            **{name: getattr(source, name) for source in sources for name in _STATS if hasattr(source, name)},
        )
