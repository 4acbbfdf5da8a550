"""Runs a process of a cluster (``python -m manylora.cluster.children FD``): its start, its tasks and its end.

Its starter sends it a ``Launch`` over FD, one end of a socket pair, and the child reports that it runs. The
end of the stream means that the other side is gone: a child then ends by itself, and soon. This module does
not know what the processes do.
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
"""Exit code of a process whose settings cannot work. It has served nothing."""
FENCED = 3
"""Exit code of a replica whose lease has ended or that the router refuses. It counts as no crash."""
ORPHAN_S = 7.0
"""How long a replica goes on serving its running requests after the supervisor's end."""


class Launch(msgspec.Struct, tag=True):
    """The first message to a child: which process of which cluster it is.

    ``router``: the address at which the router listens; ``model``: the model's digest; ``secret``: the
    cluster's secret; ``host``: the address to listen on; ``descriptor``: the socket that a router or a front
    end listens on; ``takes_over``: for a router, whether another one has run before; ``listings``: the
    registry of that earlier router; ``last_adapter``: the highest version number that it gave.
    """

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
    """The process that has started this one, as this one sees it."""

    def report(self, message: messages.FromChild) -> None:
        """Send a message to the starter, or drop it where the starter is gone."""

    def watch(self, stopped: Callable[[], None], orphaned: Callable[[], None]) -> None:
        """Have ``stopped`` called when the process is to stop, and ``orphaned`` when its starter is gone. The
        calls come on a thread of their own. Call this on the event loop; from then on it answers the
        starter's questions."""


class PairedStarter:
    """A starter at the other end of a socket pair."""

    def __init__(self, descriptor: int) -> None:
        self._sock = socket.socket(fileno=descriptor)
        self._sending = threading.Lock()

    def report(self, message: messages.FromChild) -> None:
        """See Starter."""
        with contextlib.suppress(OSError), self._sending:
            self._sock.sendall(frame(message))

    def watch(self, stopped: Callable[[], None], orphaned: Callable[[], None]) -> None:
        """Watch the socket pair (see Starter). The process may outlive its starter from now on. Where the
        starter ends while this process is stopped by a signal, the process continues, so that it can end
        itself."""
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
        """Read the next message. Returns None where the starter is gone."""
        return receive_message(self._sock, _to_child)


def end_after(seconds: float, code: int = 1) -> None:
    """End the process after this time, even where something hangs."""

    def end() -> None:
        time.sleep(seconds)
        log.warning("the supervisor is gone, and so is this process")
        leave(code)

    threading.Thread(target=end, name="manylora-end", daemon=True).start()


before_leaving: list[Callable[[int], None]] = []
"""Functions that ``leave`` calls with the exit code."""


def leave(code: int) -> None:
    """End this process now, even where something hangs. ``before_leaving`` runs first."""
    for call in before_leaving:
        call(code)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


class Tasks:
    """The tasks of one owner on its event loop, kept alive. ``over``: set once a task has ended by an error, which
    is in the log; the owner may set it, too."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.over = asyncio.Event()

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
            self.over.set()


def run(launch: Launch, starter: Starter) -> int:
    """Run the process of the launch's role until it ends, and return the exit code."""
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
    """Run the process for which the starter at the other end of ``descriptor`` asks, and return the exit code."""
    # A terminal sends these to the whole group, and the supervisor decides when its processes end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    configure_logging()
    starter = PairedStarter(descriptor)
    launch = starter.read()
    return run(launch, starter) if isinstance(launch, Launch) else 1


if __name__ == "__main__":
    from manylora.cluster import children  # the same module object that all other modules import

    children.leave(children.main(int(sys.argv[1])))
