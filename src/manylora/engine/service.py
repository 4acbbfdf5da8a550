"""The engine's side of the wire: runs in the child process, between the socket and the driver."""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from manylora.engine import wire
from manylora.engine.client import EngineStats
from manylora.engine.driver import Driver
from manylora.engine.watchdog import Pulse, tick_s
from manylora.protocol.executor import AdapterError
from manylora.types import AdapterCard

log = logging.getLogger(__name__)

LOADS_A_MESSAGE = 256
"""Adapters in one message: encoding one holds the GIL, for which the step loop waits meanwhile."""


MAX_UNSENT = 1024
"""The most messages that wait to be written, one a round. Then the step loop waits."""

MAX_BACKLOG = 1024
"""The most items in the inbox. Then no more messages are read, and the server has to wait."""

MAX_LOADS = 1024
"""The most adapters that wait to be read."""

_LOOK_AGAIN_S = 0.005


class Sender:
    """A writer of messages from any thread, in the order given, on a thread of its own.

    So neither encoding nor a short pause of the server delays a step. A server that does not read for long
    holds up the engine, so that memory does not fill.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._pulse: Callable[[], Pulse] | None = None
        self._beat_every_s = math.inf
        self._beat_at_s = math.inf
        self._unsent: collections.deque[Iterable[wire.ToServer] | None] = collections.deque()
        self._changed = threading.Condition()
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="manylora-sender", daemon=True)
        self._thread.start()

    def send(self, message: wire.ToServer) -> None:
        """Queue a message; waits while MAX_UNSENT are queued. Dropped where the server is gone."""
        self.send_all((message,))

    def send_all(self, messages: Iterable[wire.ToServer] | None) -> None:
        """Queue messages that the sender's thread makes, each in its turn. None: it ends after them."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._unsent) < MAX_UNSENT or self._has_ended)
            if not self._has_ended:
                self._unsent.append(messages)
                self._changed.notify_all()

    def beat(self, every_s: float, pulse: Callable[[], Pulse]) -> None:
        """Send ``pulse()`` at intervals from now on.

        The sender's thread makes the beats, so that they do not pile up before a server that does not read.
        """
        self._pulse, self._beat_every_s = pulse, every_s
        self._beat_at_s = time.monotonic()
        self.send(wire.Beat(pulse()))

    def close(self) -> None:
        """Send what is queued, then stop."""
        self.send_all(None)
        self._thread.join()

    def _next(self) -> Iterable[wire.ToServer] | None:
        """Return the next messages of the queue, or a beat that is due first."""
        left_s = self._beat_at_s - time.monotonic()
        with self._changed:
            timeout_s = None if math.isinf(left_s) else left_s
            if left_s > 0 and self._changed.wait_for(lambda: self._unsent, timeout_s):
                if len(self._unsent) == MAX_UNSENT:
                    self._changed.notify_all()
                return self._unsent.popleft()
        assert self._pulse is not None  # a beat is due
        self._beat_at_s = time.monotonic() + self._beat_every_s
        return (wire.Beat(self._pulse()),)

    def _run(self) -> None:
        try:
            while (messages := self._next()) is not None:
                for message in messages:
                    self._sock.sendall(wire.frame(message))
        except OSError:
            return  # the server is gone; the reading side ends the process
        except Exception:
            # No message would reach the server after this one: it notices an end at least.
            log.exception("a message could not be sent: the engine ends")
            self._sock.shutdown(socket.SHUT_RDWR)
        finally:
            with self._changed:
                self._has_ended = True
                self._unsent.clear()
                self._changed.notify_all()


def serve(sock: socket.socket, sender: Sender, driver: Driver) -> int:
    """Serve until the server goes away (0) or the loop dies (1).

    Close the driver and free no memory, since the process ends next.
    """
    died = threading.Event()

    def on_death(reason: str) -> None:
        died.set()
        sender.send(wire.Failed(reason))
        sender.close()
        sock.shutdown(socket.SHUT_RDWR)  # wakes the reading loop below

    driver.start(lambda deltas: sender.send(wire.Deltas(deltas)), on_death)
    sender.send(wire.EngineReady(driver.info, os.getpid()))
    sender.beat(tick_s(driver.step_timeout_s), driver.pulse)
    loads: dict[int, concurrent.futures.Future[AdapterCard]] = {}

    def loaded(call: int, done: concurrent.futures.Future[AdapterCard]) -> None:
        loads.pop(call)
        if not done.cancelled():
            sender.send(_answer_of(call, done))

    # Adapters are checked beside the loop, one at a time, so that many loads do not crowd out the rest.
    loader = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="manylora-adapters")
    while (message := wire.read_from_server(sock)) is not None:
        match message:
            case wire.Submit(request):
                driver.submit(request)
            case wire.Cancel(request_id, sample, reason):
                driver.abort(request_id, sample, reason)
            case wire.Call(call, "add") if len(loads) >= MAX_LOADS:
                sender.send(wire.Answer(call, 429, f"{MAX_LOADS} adapters wait to be read; try again later"))
            case wire.Call(call, "add", name, path):
                future = loads[call] = loader.submit(driver.add_adapter, name, path)
                future.add_done_callback(functools.partial(loaded, call))
            case wire.Call():
                _answer(message, driver, sender)
            case wire.DropCall(call):
                if (withdrawn := loads.get(call)) is not None:
                    withdrawn.cancel()  # does nothing to one that has begun
            case wire.Start():
                raise AssertionError("an engine starts once")
        while driver.inbox.qsize() >= MAX_BACKLOG and not died.wait(_LOOK_AGAIN_S):
            pass
    loader.shutdown(wait=False, cancel_futures=True)  # nothing waits for a load any more
    driver.close(frees=False)
    return 1 if died.is_set() else 0


def _answer(call: wire.Call, driver: Driver, sender: Sender) -> None:
    """Begin a call; its Answer follows, perhaps much later."""
    match call.what:
        case "remove":
            try:
                future = driver.remove_adapter(call.name)
            except AdapterError as error:
                sender.send(wire.Answer(call.id, error.status, str(error)))
                return
            future.add_done_callback(lambda done: sender.send(_answer_of(call.id, done)))
        case "adapters":
            sender.send(wire.Answer(call.id, cards=driver.adapters()))
        case _:
            stats = driver.stats()
            stats.add_done_callback(lambda done: sender.send_all(_stats_answer(call.id, done, driver)))


def _answer_of(call: int, done: concurrent.futures.Future[Any]) -> wire.Answer:
    """Return the answer to a call that gives a card, stats or nothing."""
    error = done.exception()
    if error is not None:
        return wire.Answer(call, error.status if isinstance(error, AdapterError) else 503, str(error))
    match done.result():
        case AdapterCard() as card:
            return wire.Answer(call, cards=(card,))
        case stats:
            return wire.Answer(call, stats=stats)


def _stats_answer(
    call: int, done: concurrent.futures.Future[EngineStats], driver: Driver
) -> Iterator[wire.ToServer]:
    loads = driver.adapter_uses() if done.exception() is None else ()
    for first in range(0, len(loads), LOADS_A_MESSAGE):
        yield wire.Loads(call, loads[first : first + LOADS_A_MESSAGE])
    yield _answer_of(call, done)
