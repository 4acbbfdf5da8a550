"""Runs a machine: gives it its events, has its commands carried out, on one thread.

Owns the clock, the inbox, the timer, the thread and its end. Knows nothing of what events and commands mean: that
is the machine's ports' business.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from manylora.engine.client import EngineDead
from manylora.engine.journal import JournalWriter
from manylora.engine.watchdog import Activity, Pulse, watch
from manylora.protocol import Event, Machine, SetTimer, Timer

log = logging.getLogger(__name__)

CLOSE_S = 4.0
"""How long ``close`` waits for the step in flight."""

CLOSED = "the engine was closed"

Routes = Mapping[type, Callable[[Any, float], object]]
"""What carries out each kind of command, given the command and the moment at which it was commanded."""

_STOP = object()


class Ports(Protocol):
    """What a machine is connected to: brings it events and carries out its commands. All but ``abandon`` and
    ``preparation_s`` belongs to the loop's thread, and is not called after ``close``."""

    def routes(self) -> Routes:
        """The routes of every kind of command but SetTimer, which is the loop's own."""

    def take(self, item: Any) -> Iterable[Event]:
        """What the machine is to be told of something that came into the inbox, perhaps later."""

    def drained(self) -> Iterable[Event]:
        """What it is to be told now that the inbox is empty."""

    @property
    def is_busy(self) -> bool:
        """Whether there is something to wait for that ends by itself, such as a step on its way."""

    def wait(self) -> None:
        """Wait until the oldest of that has ended."""

    def ended(self) -> Iterable[Event]:
        """What the machine is to be told of that end; asked for when it knows of all that came before."""

    def flush(self) -> None:
        """A round has ended: send what was held back until then."""

    @property
    def preparation_s(self) -> float:
        """Seconds spent on compiling and capturing so far: no step is late because of them. From any thread."""

    def abandon(self, error: EngineDead) -> None:
        """The loop has ended: fail whatever waits for it. May be called more than once, from any thread."""

    def close(self, *, frees: bool = True) -> None:
        """Give back what the ports hold; without ``frees`` memory is left to the system, as the process ends."""


class Loop:
    """One machine and its ports, on a thread. Public methods may be called from any thread."""

    def __init__(
        self,
        machine: Machine,
        ports: Ports,
        inbox: queue.SimpleQueue[object],
        *,
        clock: Callable[[], float],
        journal: JournalWriter | None = None,
    ) -> None:
        """``inbox``: what the ports put their news into."""
        self._machine = machine
        self._ports = ports
        self._inbox = inbox
        self._clock = clock
        self._journal = journal
        self._routes: Routes = {**ports.routes(), SetTimer: self._set_timer}
        self._timer_at: float | None = None
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
        self._frees = True

    # ------------------------------------------------------------ life

    @property
    def end(self) -> str | None:
        """Why the loop has ended; None while it goes on."""
        return self._end

    @property
    def backlog(self) -> int:
        """How many things are in the inbox."""
        return self._inbox.qsize()

    def run(self, died: Callable[[str], None], limit_s: float | None = None) -> None:
        """Start the loop's thread; ``died`` is called with the reason if the loop ends by itself.

        With ``limit_s`` another thread gives the loop up where a piece of its work takes longer.
        """
        self._died = died
        self._thread = threading.Thread(target=self._run, name="manylora-driver", daemon=True)
        self._thread.start()
        if limit_s is not None:
            self._watchdog = watch(self, limit_s)

    def pulse(self) -> Pulse:
        """What the loop is doing now."""
        return Pulse(self._activity.work, self._ports.preparation_s)

    def close(self, *, frees: bool = True) -> None:
        """End the loop after the step in flight and close the ports. Idempotent; every caller waits for the end.

        A step that does not end within ``CLOSE_S`` is left behind on the loop's thread, which frees everything if
        it ever ends. Does nothing in a process that was forked off the loop's: no thread of it is there. Without
        ``frees`` files are closed and memory is left to the system: for a process that ends next, which has it
        back sooner so than by unpinning and freeing it piece by piece.
        """
        if os.getpid() != self._pid:
            return
        self._frees = frees
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
        self._end = self._end or CLOSED
        self.abandon()

    def give_up(self, reason: str) -> None:
        """The loop hangs: from now on it counts as dead, whatever it does when it gets on. From any thread but its
        own."""
        if self._end is None:
            self._is_lost = True
            self._die(reason)
            self.abandon()

    def _die(self, reason: str) -> None:
        self._end = reason
        self._died(reason)

    def abandon(self) -> None:
        """Fail whatever waits for something that the loop, now ended, will never say."""
        self._ports.abandon(EngineDead(self._end or "the engine has ended"))

    def _free(self) -> None:
        """The loop has ended, or never began: give everything back, once."""
        with self._freeing:
            if self._is_free:
                return
            self._is_free = True
            self._end = self._end or CLOSED
            self.abandon()
            # First what has been written: to free memory may take seconds, which a process that ends may not have.
            if self._journal is not None:
                self._journal.close()
            self._ports.close(frees=self._frees)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while self._end is None and self._round():
                self._ports.flush()
        except Exception as error:  # a bug, or a broken device: nothing can be trusted after it
            log.exception("the engine's loop failed")
            if self._end is None:
                self._die(f"the engine failed: {error}")
        self._end = self._end or CLOSED
        self._activity.rest()
        self._has_ended.set()
        self.abandon()
        self.is_closing.wait()
        self._free()

    def _round(self) -> bool:
        """The end of what is on its way or the first thing to come in; all that has come in by then, the timer if
        it is due, and only then that end, so that what is begun next knows of it all. False: told to stop."""
        has_waited = self._ports.is_busy
        item = None
        if has_waited:
            self._activity.begin()
            self._ports.wait()
        else:
            self._activity.rest()
            item = self._next()
        while item is not None or not self._inbox.empty():
            if item is None:
                item = self._inbox.get_nowait()
            if item is _STOP:
                return False
            self._feed(self._ports.take(item))
            item = None
            if self._inbox.empty():
                self._feed(self._ports.drained())
        # Last before that end: where a first step has just been issued, that is in the next round.
        is_last = has_waited or not self._ports.is_busy
        if is_last and self._timer_at is not None and self._clock() >= self._timer_at:
            self._timer_at = None
            self._feed((Timer(),))
        if has_waited:
            self._feed(self._ports.ended())
        return True

    def _next(self) -> object | None:
        """The next thing to come in; None where the timer is due first."""
        if self._timer_at is None:
            return self._inbox.get()
        try:
            return self._inbox.get(timeout=max(self._timer_at - self._clock(), 0.0))
        except queue.Empty:
            return None

    def _feed(self, events: Iterable[Event]) -> None:
        """Tell the machine, and have each command carried out before the next event is asked for."""
        for event in events:
            self._activity.begin()
            now = self._clock()
            if self._journal is not None:
                self._journal.record(event, now)
            commands = self._machine.handle(event, now)
            if self._journal is not None:
                self._journal.answered(commands)
            routes = self._routes
            for command in commands:
                routes[type(command)](command, now)

    def _set_timer(self, command: SetTimer, now: float) -> None:
        self._timer_at = command.at
