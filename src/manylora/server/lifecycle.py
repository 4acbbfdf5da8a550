"""Owns a server's life, from first request to exit: the open requests, the refusal of new ones, and the end.

Knows an engine only by whether it has died.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.types import Receive

from manylora.engine.client import EngineClient
from manylora.server.connection import Connection, Uploads
from manylora.server.errors import ApiError, unavailable

logger = logging.getLogger("manylora.server")

# After the engine's death the server still answers 503 for a while, so that health checks and clients that
# arrive late learn what happened, but exits within five seconds.
_DEATH_ANSWERS_S = 2.0
_DEATH_GRACE_S = 0.5
# After an interruption a request still has its error to send.
_LAST_WORDS_S = 1.0
_HANG_UP_S = 1

# A server is gone this long after its engine has died, or after its requests had their time to drain, whatever
# hangs. The times cover the stages above and the engine's own end.
_AFTER_DEATH_S = 4.0
_AFTER_DRAIN_S = 4.5


class Disconnected(Exception):
    """The loss of a client; its request needs no answer."""


class Lifecycle:
    """The state that all requests of one app share. Used from one event loop."""

    def __init__(self) -> None:
        self._refusal: str | None = None
        self._interruption: ApiError | None = None
        self._interruptible: set[Interruptible] = set()
        self._reading: set[Interruptible] = set()
        self._end_by_s = math.inf
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
        """Return the reason why no new request is taken, or None while requests are taken."""
        return unavailable(self._refusal) if self._refusal else None

    def drain(self) -> None:
        """Take no new requests; open ones continue."""
        self._refuse(self._refusal or "the server is shutting down")

    def die(self, reason: str) -> None:
        """Refuse requests from now on, because the engine has died."""
        self._refuse(f"the engine has died: {reason}")
        self._end_within(_AFTER_DEATH_S)
        self.died.set()

    def _end_within(self, seconds: float) -> None:
        self._end_by_s = min(self._end_by_s, time.monotonic() + seconds)

    def _refuse(self, reason: str) -> None:
        self._refusal = reason
        for request in list(self._reading):
            request.interrupt(unavailable(reason))

    def interrupt_all(self, error: ApiError) -> None:
        """End every open request that can be interrupted with this error. Later requests end with it at once."""
        self._interruption = error
        self._end_within(_AFTER_DRAIN_S)
        for request in list(self._interruptible):
            request.interrupt(error)

    def left_s(self) -> float:
        """Return the time in seconds that the process may still take to end."""
        return max(0.0, min(self._end_by_s - time.monotonic(), _AFTER_DRAIN_S))

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Count a request as open during the block."""
        self._num_open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is open. Returns False if some still are after ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return self._idle.is_set()

    def interruptible(self, receive: Receive | None = None) -> Interruptible:
        """Make a block that ends early on ``interrupt_all`` and, given ``receive``, when the client disconnects.

        The request's body must have been read before: the block drops everything that ``receive`` still
        returns.
        """
        return Interruptible(self._interruptible, self._interruption, receive)

    def reading(self) -> Interruptible:
        """Make a block that waits for more of a request's body. It ends early when new requests are refused,
        since an incomplete request counts as new."""
        return Interruptible(self._reading, self.refusal(), None)


class Interruptible:
    """A block of code that an outside event can end; an exception then leaves the block.

    Works like ``asyncio.timeout``: the task is cancelled, and the cancellation becomes the exception at the
    block's end. So the block pays nothing per token.
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
        """End the block with ``reason``. The first reason counts."""
        if self._reason is None:
            self._reason = reason
            self._task.cancel()

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
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


async def _watch_engine(client: EngineClient, lifecycle: Lifecycle) -> None:
    """Wait for the engine's death, then end the requests that still hang."""
    reason = await client.wait_dead()
    logger.error("the engine has died: %s", reason)
    lifecycle.die(reason)
    # Open requests see it in their own streams; this ends those that do not.
    await asyncio.sleep(_DEATH_GRACE_S)
    lifecycle.interrupt_all(unavailable(f"the engine has died: {reason}"))


async def serve(
    app: Starlette,
    sock: socket.socket,
    client: EngineClient,
    drain_timeout_s: float,
    signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
) -> int:
    """Serve on a bound socket until one of the signals or the engine's death. Returns the exit code.

    0 after a signal: new requests are refused, and open ones drain for at most ``drain_timeout_s`` (a second
    signal ends that), then get an error. 1 after the engine died by itself. The caller closes the client. Any
    event loop works; uvloop is fastest.
    """
    lifecycle: Lifecycle = app.state.lifecycle
    limits = app.state.connection_limits
    connection: Any = functools.partial(Connection, limits, Uploads(limits.upload_bytes))
    config = uvicorn.Config(
        app, loop="none", http=connection, ws="none", lifespan="off", log_config=None, access_log=False,
        server_header=False, timeout_keep_alive=65, timeout_graceful_shutdown=_HANG_UP_S,
    )  # fmt: skip
    server = uvicorn.Server(config)
    # Without its signal handling: ours still answers 503 while requests drain.
    server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]
    with _handled(signals, lifecycle):
        watch = asyncio.create_task(_watch_engine(client, lifecycle))
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        await _first(serving, lifecycle.stopping, lifecycle.died)
        # The first event decides: a SIGTERM after the engine's death does not change the exit code.
        is_stopped = lifecycle.stopping.is_set() and not lifecycle.died.is_set()
        if is_stopped:
            await _drain(lifecycle, drain_timeout_s)
        elif lifecycle.died.is_set():
            await asyncio.sleep(_DEATH_ANSWERS_S)
        if not await lifecycle.wait_idle(_LAST_WORDS_S):
            # Clients do not read their answers. Requests end as if the clients had disconnected.
            for each in list(server.server_state.connections):
                if each.transport is not None:
                    each.transport.abort()
        server.should_exit = True
        await serving
        watch.cancel()
    return 0 if is_stopped else 1


async def _drain(lifecycle: Lifecycle, timeout_s: float) -> None:
    """Take no more requests, and end those that still run when their time is over."""
    logger.info("draining: new requests are refused, open ones have %g s", timeout_s)
    lifecycle.drain()
    idle = asyncio.create_task(lifecycle.wait_idle(timeout_s))
    await _first(idle, lifecycle.hurrying, lifecycle.died)
    idle.cancel()
    lifecycle.interrupt_all(unavailable("the server is shutting down"))


async def _first(task: asyncio.Task[None] | asyncio.Task[bool], *events: asyncio.Event) -> None:
    """Wait until the task is done or one of the events is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait([task, *waits], return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


@contextlib.contextmanager
def _handled(signals: Sequence[signal.Signals], lifecycle: Lifecycle) -> Iterator[None]:
    """Handle signals during the block, without the loop's own means: removing those restores the default, by
    which SIGTERM kills."""
    loop = asyncio.get_running_loop()
    before = {}

    def stop(number: signal.Signals) -> None:
        logger.info("%s: the server ends", number.name)
        lifecycle.stop()

    def received(number: int, frame: object) -> None:
        loop.call_soon_threadsafe(stop, signal.Signals(number))

    for number in signals:
        # Outside the main thread no handler can be set; then the caller ends the server by ``stop``.
        with contextlib.suppress(ValueError):
            before[number] = signal.signal(number, received)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
