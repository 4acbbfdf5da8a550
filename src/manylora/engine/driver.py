"""An engine: a replica on a thread, its ports, and what others ask of it.

Owns the clock, the inbox, the timer, the thread and its end, and the order of a round. Does not know what
events and commands mean: that is the business of the replica and its ports.
"""

from __future__ import annotations

import concurrent.futures
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from manylora.config.policy import PolicyConfig
from manylora.engine.client import Delta, EngineDead, EngineStats, GenerationRequest
from manylora.engine.journal import JournalWriter, TraceWriter
from manylora.engine.ports import EnginePorts, Routes
from manylora.engine.watchdog import Activity, Judge, Pulse, tick_s
from manylora.policy.replica import Replica
from manylora.protocol import commands, events
from manylora.protocol.executor import Executor
from manylora.reports import AdapterUse
from manylora.types import AdapterCard, AdapterId, EngineInfo, RequestId

log = logging.getLogger(__name__)

CLOSE_S = 4.0
"""How long ``close`` waits for the step in flight."""

CLOSED = "the engine was closed"

_STOP = object()
_Answer = TypeVar("_Answer")


class Driver:
    """Runs one replica on one executor. Public methods may be called from any thread."""

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
        """``step_timeout_s``: an engine whose step takes longer is taken for lost where it is watched."""
        self.info = info
        self.step_timeout_s = step_timeout_s
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._ports = EnginePorts(config, executor, info, self.inbox, clock, trace)
        self.catalog = self._ports.catalog
        self._machine: commands.Machine = Replica(config)
        self._clock = clock
        self._journal = journal
        self._routes: Routes = {**self._ports.routes(), commands.SetTimer: self._set_timer}
        self._timer_at: float | None = None
        self._activity = Activity()
        self._thread: threading.Thread | None = None
        self._watchdog: threading.Thread | None = None
        self._pid = os.getpid()
        self.end: str | None = None
        """The reason of the loop's end; None while it goes on."""
        self._is_lost = False
        self._is_closing = threading.Event()
        self._has_ended = threading.Event()  # the loop; what it holds is freed after that
        self._freeing = threading.Lock()
        self._is_free = False
        self._frees = True

    # ------------------------------------------------------------ life

    def start(
        self, deliver: Callable[[list[Delta]], None], died: Callable[[str], None], *, is_watched: bool = False
    ) -> None:
        """Start the loop's thread, and with ``is_watched`` one that gives the loop up where a step takes longer
        than ``step_timeout_s``.

        ``deliver`` is called on the loop's thread with the news of each round; ``died`` with the reason if the
        loop ends by itself.
        """
        self._ports.deliver, self._died = deliver, died
        self._thread = threading.Thread(target=self._run, name="manylora-driver", daemon=True)
        self._thread.start()
        if is_watched:
            self._watchdog = threading.Thread(target=self._watch, name="manylora-watchdog", daemon=True)
            self._watchdog.start()

    def _watch(self) -> None:
        """Give the loop up when it hangs; end when it is to be closed."""
        judge = Judge(self.step_timeout_s)
        while not self._is_closing.wait(tick_s(self.step_timeout_s)):
            reason = judge.look(self.pulse())
            if reason is not None:
                self._give_up(reason)
                return

    def pulse(self) -> Pulse:
        """Return the present work of the loop."""
        return Pulse(self._activity.work, self._ports.preparation_s)

    def close(self, *, frees: bool = True) -> None:
        """End the loop after the step in flight and close the ports. Idempotent; every caller waits for the
        end.

        A step that does not end within ``CLOSE_S`` is left behind on the loop's thread, which frees everything
        if it ever ends. Does nothing in a process that was forked off the loop's: no thread of it is there.
        Without ``frees`` files are closed and memory is left to the system: for a process that ends next, which
        has it back sooner so than by unpinning and freeing it piece by piece.
        """
        if os.getpid() != self._pid:
            return
        self._frees = frees
        self._is_closing.set()
        self.inbox.put(_STOP)
        if self._thread is None:
            self._free()
        elif self._thread is not threading.current_thread():
            if self._has_ended.wait(0.0 if self._is_lost else CLOSE_S):
                self._thread.join()
            else:
                log.warning("the step in flight does not end: its thread is left behind")
        if self._watchdog is not None:
            self._watchdog.join()
        self.end = self.end or CLOSED
        self.abandon()

    def _give_up(self, reason: str) -> None:
        """Take a loop that hangs for dead, whatever it does later. From any thread but its own."""
        if self.end is None:
            self._is_lost = True
            self._die(reason)
            self.abandon()

    def _die(self, reason: str) -> None:
        self.end = reason
        self._died(reason)

    def abandon(self) -> None:
        """Fail every call that waits for the loop, which has ended."""
        self._ports.abandon(EngineDead(self.end or "the engine has ended"))

    def _free(self) -> None:
        """Free everything, once, after the loop has ended or if it never began."""
        with self._freeing:
            if self._is_free:
                return
            self._is_free = True
            self.end = self.end or CLOSED
            self.abandon()
            # First what has been written: to free memory may take seconds, which a process that ends may not have.
            if self._journal is not None:
                self._journal.close()
            self._ports.close(frees=self._frees)

    # ------------------------------------------------------------ requests, adapters, reports

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; an unknown adapter is answered by a Delta with status 404."""
        self.inbox.put(request)

    def abort(self, request: RequestId, sample: int | None, reason: str) -> None:
        self.inbox.put(events.Abort(request, sample, reason))

    def withdraw(self, request: RequestId, attempt: int = 0) -> None:
        """Release an attempt at a request for another engine; ignore an unknown one.

        Its open samples end as RELEASED after the tokens of the steps in flight.
        """
        self.inbox.put(events.Release(request, attempt))

    def keep(self, adapter: AdapterId, is_pinned: bool) -> None:
        """Keep a copy of the version on the device, or stop that; see ``PinAdapter``."""
        self.inbox.put(events.PinAdapter(adapter, is_pinned))

    def add_adapter(
        self, name: str, path: str, *, verify: bool = True, adapter: AdapterId | None = None
    ) -> AdapterCard:
        """Check and serve an adapter; reads its files on the caller's thread. Raises AdapterError, and
        EngineDead.

        Without ``verify`` only headers are read: for thousands of adapters at start-up. ``adapter``: the
        version's id, where others number versions; never given twice, whatever became of the first one.
        """
        if self.end is not None:
            raise EngineDead(self.end)
        return self.catalog.add(name, path, verify, adapter)

    def remove_adapter(self, name: str, version: AdapterId | None = None) -> concurrent.futures.Future[None]:
        """Stop serving a name, or a version, at once; the future is done when nothing of it is left."""
        return self._unless_ended(self.catalog.remove(name, version))

    def adapters(self) -> tuple[AdapterCard, ...]:
        return self.catalog.cards()

    def stats(self) -> concurrent.futures.Future[EngineStats]:
        """Take a snapshot between two steps. Its ``adapters`` are empty: ``adapter_uses`` has them."""
        return self._unless_ended(self._ports.ask_stats())

    def status(self, is_full: bool = False) -> concurrent.futures.Future[commands.Status]:
        """Take a status for a router between two steps: changes since the last call, or all if ``is_full``.

        One caller at a time, or changes go to another.
        """
        return self._unless_ended(self._ports.ask_status(is_full))

    def adapter_uses(self) -> tuple[AdapterUse, ...]:
        """Return every served adapter as of the newest snapshot. O(adapters), none of it on the loop."""
        return self._ports.adapter_uses()

    def _unless_ended(self, asked: concurrent.futures.Future[_Answer]) -> concurrent.futures.Future[_Answer]:
        """Return the future of a question that was just asked; fail it if the loop has ended."""
        if self.end is not None:
            self.abandon()
        return asked

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while self.end is None and self._round():
                self._ports.flush()
        except Exception as error:  # a bug, or a broken device: nothing can be trusted after it
            log.exception("the engine's loop failed")
            if self.end is None:
                self._die(f"the engine failed: {error}")
        self.end = self.end or CLOSED
        self._activity.rest()
        self._has_ended.set()
        self.abandon()
        self._is_closing.wait()
        self._free()

    def _round(self) -> bool:
        """Wait for the oldest step or the first item; feed all items, a due timer, and last the step's end.

        So the next step is composed with all news. Return False to stop.
        """
        has_waited = self._ports.is_busy
        item = None
        if has_waited:
            self._activity.begin()
            self._ports.wait()
        else:
            self._activity.rest()
            item = self._next()
        while item is not None or not self.inbox.empty():
            if item is None:
                item = self.inbox.get_nowait()
            if item is _STOP:
                return False
            self._feed(self._ports.take(item))
            item = None
            if self.inbox.empty():
                self._feed(self._ports.drained())
        # The timer is last before that end; if a first step was just issued, it is in the next round.
        is_last = has_waited or not self._ports.is_busy
        if is_last and self._timer_at is not None and self._clock() >= self._timer_at:
            self._timer_at = None
            self._feed((events.Timer(),))
        if has_waited:
            self._feed(self._ports.ended())
        return True

    def _next(self) -> object | None:
        """Return the next item; None if the timer is due first."""
        if self._timer_at is None:
            return self.inbox.get()
        try:
            return self.inbox.get(timeout=max(self._timer_at - self._clock(), 0.0))
        except queue.Empty:
            return None

    def _feed(self, happened: Iterable[events.Event]) -> None:
        """Give each event to the machine, and carry out its commands before the next event."""
        for event in happened:
            self._activity.begin()
            now = self._clock()
            if self._journal is not None:
                self._journal.record(event, now)
            decided = self._machine.handle(event, now)
            if self._journal is not None:
                self._journal.answered(decided)
            routes = self._routes
            for command in decided:
                routes[type(command)](command, now)

    def _set_timer(self, command: commands.SetTimer, now: float) -> None:
        self._timer_at = command.at
