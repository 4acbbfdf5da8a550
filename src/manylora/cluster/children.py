"""A process of a cluster (``python -m manylora.cluster.children FD``): its beginning, its tasks and its end.

Its starter sends over FD, one end of a socket pair, what it is to be; it answers that it runs. The stream's end
means that the other side is gone: a child ends then, by itself and soon. Does not know what the processes do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec

from manylora.cluster import messages
from manylora.config.cluster import ClusterOptions
from manylora.config.declaring import ConfigError, naming_what_is_missing
from manylora.config.sections import EngineSettings, HttpSettings
from manylora.engine.wire import Failed, frame, receive_message
from manylora.processes import at_parents_end
from manylora.progress import configure_logging
from manylora.types import BASE, AdapterId, EngineInfo

log = logging.getLogger(__name__)

REFUSED = 2
"""Exit code of a process whose settings cannot work: it has served nothing."""
FENCED = 3
"""Exit code of a replica that must not serve any more: no death of its own."""
ORPHAN_S = 7.0
"""After the supervisor's end a replica serves what runs for so long."""


class Launch(msgspec.Struct, tag=True):
    """The first message: which process of which cluster this is. ``router``: where the router listens; ``model``:
    the model's digest; ``secret``: the cluster's; ``host``: what to listen on; ``descriptor``: of the socket that
    a router or a front end listens on; ``takes_over``: of a router, another has run before; ``listings``: what
    that one had in the registry; ``last_adapter``: the highest version that it gave."""

    role: str
    id: int
    epoch: int
    engine: EngineSettings
    http: HttpSettings
    cluster: ClusterOptions
    folder: str
    secret: bytes
    router: tuple[str, int]
    model: str
    host: str = "127.0.0.1"
    info: EngineInfo | None = None
    descriptor: int = -1
    takes_over: bool = False
    listings: list[messages.Listing] = []
    last_adapter: AdapterId = BASE


_to_child = msgspec.msgpack.Decoder(Launch | messages.ToChild)


class Starter(Protocol):
    """The process that has started this one, as it sees it."""

    def report(self, message: messages.FromChild) -> None:
        """Send a message; drop it where the starter is gone."""

    def watch(self, stopped: Callable[[], None], orphaned: Callable[[], None]) -> None:
        """Have these called, on a thread of its own, when the process is told to stop, and when it has no starter
        any more. To be called on the event loop, which answers the starter's questions from then on."""


class PairedStarter:
    """A starter at the other end of a socket pair."""

    def __init__(self, descriptor: int) -> None:
        self._sock = socket.socket(fileno=descriptor)
        self._sending = threading.Lock()

    def report(self, message: messages.FromChild) -> None:
        """See Starter."""
        try:
            with self._sending:
                self._sock.sendall(frame(message))
        except OSError:
            pass

    def watch(self, stopped: Callable[[], None], orphaned: Callable[[], None]) -> None:
        """See Starter. The process may outlive its starter from now on: where it is stopped at that one's end, it
        goes on, so that it ends itself."""
        at_parents_end(signal.SIGCONT)
        loop = asyncio.get_running_loop()
        threading.Thread(
            target=self._watch, args=(loop, stopped, orphaned), name="manylora-starter", daemon=True
        ).start()

    def _watch(
        self, loop: asyncio.AbstractEventLoop, stopped: Callable[[], None], orphaned: Callable[[], None]
    ) -> None:
        while (message := self.read()) is not None:
            if isinstance(message, messages.StopChild):
                stopped()
            else:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self.report, messages.Pong())
        orphaned()

    def read(self) -> Any | None:
        """Read the next message; None where the starter is gone."""
        return receive_message(self._sock, _to_child)


def end_after(seconds: float, code: int = 1) -> None:
    """End the process after this time, whatever hangs."""

    def end() -> None:
        time.sleep(seconds)
        log.warning("the supervisor is gone, and so is this process")
        leave(code)

    threading.Thread(target=end, name="manylora-end", daemon=True).start()


_before_leaving: list[Callable[[int], None]] = []


def call_before_leaving(call: Callable[[int], None]) -> None:
    """Have this called with the exit code when the process ends by ``leave``."""
    _before_leaving.append(call)


def leave(code: int) -> None:
    """End this process now: nothing that hangs keeps it."""
    for call in _before_leaving:
        call(code)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def ignore_signals_of_terminals() -> None:
    """A terminal signals the whole group; the supervisor decides when its processes end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


class Tasks:
    """The tasks of one owner on its event loop, kept alive. ``one_failed``: one has ended by an error, which is in
    the log."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.one_failed = asyncio.Event()

    def __len__(self) -> int:
        """Count the tasks that have not ended."""
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begin a task."""
        task = asyncio.get_running_loop().create_task(work, name=getattr(work, "__qualname__", None))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        """Cancel all tasks."""
        for task in self._tasks:
            task.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s has failed", task.get_name(), exc_info=error)
            self.one_failed.set()


def run(launch: Launch, starter: Starter) -> int:
    """Be the process of the launch's role until it ends; return the exit code."""
    try:
        return _run(launch, starter)
    except ConfigError as error:
        starter.report(Failed(str(error), is_user_error=True))
        return REFUSED


@naming_what_is_missing()
def _run(launch: Launch, starter: Starter) -> int:
    run: Callable[[Launch, Any], int]
    if launch.role == messages.REPLICA:
        from manylora.cluster.replica import run
    elif launch.role == messages.FRONTEND:
        from manylora.cluster.frontend import run
    elif launch.role == messages.RAY:
        from manylora.cluster.ray_driver import run
    else:
        from manylora.cluster.routing import run
    return run(launch, starter)


def main(descriptor: int) -> int:
    """Be the process that the starter at the other end of ``descriptor`` asks for; return the exit code."""
    ignore_signals_of_terminals()
    configure_logging()
    starter = PairedStarter(descriptor)
    launch = starter.read()
    return run(launch, starter) if isinstance(launch, Launch) else 1


if __name__ == "__main__":
    from manylora.cluster import children  # the one that all others import

    children.leave(children.main(int(sys.argv[1])))
