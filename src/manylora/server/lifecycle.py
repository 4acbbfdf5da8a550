"""From first request to exit: which requests are open, whether new ones are taken, how a server ends.

Knows an engine only by whether it has died.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import socket
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import Receive

from manylora.engine.client import EngineClient
from manylora.server.connection import Connection
from manylora.server.errors import ApiError, unavailable

logger = logging.getLogger("manylora.server")

# After the engine's death the server still answers 503 for a while, so that health checks and clients that
# come late learn what happened, but exits well within ten seconds.
_DEATH_ANSWERS_S = 3.0
_DEATH_GRACE_S = 1.0
# After an interruption a request still has its error to send.
_LAST_WORDS_S = 2.0


class Disconnected(Exception):
    """The client has gone; nobody is left to answer."""


class Lifecycle:
    """The state that all requests of one app share. Used from one event loop."""

    def __init__(self) -> None:
        self._refusal: str | None = None
        self._interruption: ApiError | None = None
        self._interruptible: set[Interruptible] = set()
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.died = asyncio.Event()
        self.stopping = asyncio.Event()
        self.hurrying = asyncio.Event()

    def stop(self) -> None:
        """End the server: the first call lets open requests drain, a second one ends them."""
        (self.hurrying if self.stopping.is_set() else self.stopping).set()

    def refusal(self) -> ApiError | None:
        """Why no new request is taken, or None while they are."""
        return unavailable(self._refusal) if self._refusal else None

    def drain(self) -> None:
        """Take no new requests; open ones go on."""
        self._refusal = self._refusal or "the server is shutting down"

    def die(self, reason: str) -> None:
        """The engine has died."""
        self._refusal = f"the engine has died: {reason}"
        self.died.set()

    def interrupt_all(self, error: ApiError) -> None:
        """End every open request that can be interrupted with this error, and later ones at once."""
        self._interruption = error
        for request in list(self._interruptible):
            request.interrupt(error)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Counts a request as open while inside."""
        self._num_open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is open; False if some still are after ``timeout_s``."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def interruptible(self, receive: Receive | None = None) -> Interruptible:
        """A block that ends early on ``interrupt_all`` and, given ``receive``, when the client goes.

        The request's body must have been read before: whatever ``receive`` still brings is dropped.
        """
        return Interruptible(self._interruptible, self._interruption, receive)


class Interruptible:
    """Runs its block so that an outside event can end it; the exception then leaves the block.

    Works like ``asyncio.timeout``: the task is cancelled and the cancellation becomes the exception on the
    way out, so the block pays nothing per token.
    """

    def __init__(
        self, registry: set[Interruptible], interruption: Exception | None, receive: Receive | None
    ) -> None:
        self._registry = registry
        self._reason = interruption
        self._receive = receive
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        if self._reason is not None:
            raise self._reason
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._num_cancels = task.cancelling()
        self._registry.add(self)
        if self._receive is not None:
            self._watch = asyncio.create_task(self._watch_client(self._receive))

    def interrupt(self, reason: Exception) -> None:
        """End the block with ``reason``; the first one wins."""
        if self._reason is None:
            self._reason = reason
            self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._registry.discard(self)
        if self._watch is not None:
            self._watch.cancel()
        if self._reason is None:
            return
        is_ours = self._task.uncancel() <= self._num_cancels
        if is_ours and isinstance(error, asyncio.CancelledError):
            raise self._reason from None

    async def _watch_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.interrupt(Disconnected())


class _Server(uvicorn.Server):
    """uvicorn without its signal handling: ours keeps the door open for 503s while requests drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _watch_engine(client: EngineClient, lifecycle: Lifecycle) -> None:
    """Learn of the engine's death and end what it left hanging."""
    reason = await client.wait_dead()
    logger.error("the engine has died: %s", reason)
    lifecycle.die(reason)
    # Open requests learn it from their own streams; this is for those that do not.
    await asyncio.sleep(_DEATH_GRACE_S)
    lifecycle.interrupt_all(unavailable(f"the engine has died: {reason}"))


async def serve(app: FastAPI, sock: socket.socket, client: EngineClient, drain_timeout_s: float) -> int:
    """Serve on a bound socket until SIGTERM, SIGINT or the engine's death; return the exit code.

    0 after a signal: new requests are refused, open ones drain for at most ``drain_timeout_s`` (a second
    signal ends that), then get an error. 1 after the engine died by itself. The caller closes the client.
    Run under uvloop for speed; any event loop works.
    """
    lifecycle: Lifecycle = app.state.lifecycle
    connection: Any = functools.partial(Connection, app.state.connection_limits)
    config = uvicorn.Config(
        app, loop="none", http=connection, ws="none", lifespan="off", log_config=None, access_log=False,
        server_header=False, timeout_keep_alive=65, timeout_graceful_shutdown=3,
    )  # fmt: skip
    server = _Server(config)
    with _signals(lifecycle):
        watch = asyncio.create_task(_watch_engine(client, lifecycle))
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        await _first(serving, lifecycle.stopping, lifecycle.died)
        # What came first decides: a supervisor's SIGTERM to a server whose engine died does not excuse it.
        is_stopped = lifecycle.stopping.is_set() and not lifecycle.died.is_set()
        if is_stopped:
            await _drain(lifecycle, drain_timeout_s)
        elif lifecycle.died.is_set():
            await asyncio.sleep(_DEATH_ANSWERS_S)
            await lifecycle.wait_idle(_LAST_WORDS_S)
        server.should_exit = True
        await serving
        watch.cancel()
    return 0 if is_stopped else 1


async def _drain(lifecycle: Lifecycle, timeout_s: float) -> None:
    logger.info("draining: new requests are refused, open ones have %.0f s", timeout_s)
    lifecycle.drain()
    idle = asyncio.create_task(lifecycle.wait_idle(timeout_s))
    await _first(idle, lifecycle.hurrying, lifecycle.died)
    idle.cancel()
    lifecycle.interrupt_all(unavailable("the server is shutting down"))
    await lifecycle.wait_idle(_LAST_WORDS_S)


async def _first(task: asyncio.Task[None] | asyncio.Task[bool], *events: asyncio.Event) -> None:
    """Wait until the task is done or one of the events is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait([task, *waits], return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


@contextlib.contextmanager
def _signals(lifecycle: Lifecycle) -> Iterator[None]:
    """Not by the loop's own means: to remove these restores the default, by which a second SIGTERM would kill."""
    loop = asyncio.get_running_loop()
    before = {}

    def stop(number: int, frame: object) -> None:
        loop.call_soon_threadsafe(lifecycle.stop)

    for number in (signal.SIGTERM, signal.SIGINT):
        # Outside the main thread no handler can be set; then the caller ends the server by ``stop``.
        with contextlib.suppress(ValueError):
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
