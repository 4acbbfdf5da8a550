"""Replays a stream against a server from processes of their own, so that the client's work delays no request.

Whole conversations are dealt out among the processes; their clock is one (``time.monotonic`` is the machine's).
A process tells of its progress meanwhile, and of its results at its end; it ends when told to, when the server is
lost, and when this process is gone.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import gc
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Coroutine, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from manylora_lab.bench.http_client import allow_many_connections
from manylora_lab.bench.http_target import Access, HttpTarget
from manylora_lab.bench.replay import Halt, Replayed, ReplaySettings, RequestResult, replay, shown
from manylora_lab.workloads.stream import Stream

REQUESTS_PER_PROCESS = 250.0
TOKENS_PER_PROCESS = 10_000.0
"""A second, in the mean. A process is busy for 0.3 ms with a request and for 7 us with a delivery (measured on
one core of a virtual server, uvloop): both together for a seventh of its time."""
_MOST_PROCESSES = 16
_LEAD_S = 0.2
"""Between telling processes when to start, and the start."""
_Message = tuple[Any, ...]


def processes_for(stream: Stream) -> int:
    """How many send this stream well, at most one a core."""
    span_s = max(stream.duration_s, 1.0)
    tokens = sum(request.output_tokens for request in stream.requests)
    wanted = max(len(stream.requests) / span_s / REQUESTS_PER_PROCESS, tokens / span_s / TOKENS_PER_PROCESS)
    return max(1, min(math.ceil(wanted), os.cpu_count() or 1, _MOST_PROCESSES))


async def replay_apart(
    access: Access, stream: Stream, settings: ReplaySettings, count: int, halt: Halt | None = None
) -> Replayed:
    """Does what ``replay`` does, from at most ``count`` processes."""
    clients = [_Client(access, part, settings) for part in _dealt(stream, count)]
    crew = _Crew(clients, stream, settings, halt or Halt())
    try:
        return await crew.run()
    finally:
        for client in clients:
            client.end()


def _dealt(stream: Stream, count: int) -> list[Stream]:
    """Conversations in turn, each in one part."""
    turn: dict[int, int] = {}
    for request in stream.requests:
        turn.setdefault(request.conversation, len(turn) % count)
    parts = [
        tuple(request for request in stream.requests if turn[request.conversation] == number)
        for number in range(min(count, len(turn)))
    ]
    return [dataclasses.replace(stream, requests=part) for part in parts]


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """A process started meanwhile gets no interrupt from its birth on, while it imports what it needs too.

    Held back, not ignored: one that comes meanwhile reaches this process when it is over.
    """
    resource_tracker.ensure_running()  # Its first start lets interrupts through again.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Client:
    """One process, seen from here."""

    def __init__(self, access: Access, stream: Stream, settings: ReplaySettings) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_client, args=(theirs,), daemon=True)
        with _interrupts_held():
            self.process.start()
        theirs.close()
        # Not as the process' arguments: an interrupt would be lost while a long stream waits for it to listen.
        self.send((access, stream, dataclasses.replace(settings, show=None)))
        self.done = self.failed = 0

    def send(self, message: Any) -> None:
        try:
            self.connection.send(message)
        except OSError:
            pass  # It has ended, as its reader finds out.

    def end(self) -> None:
        """Now, whatever it does."""
        self.connection.close()
        self.process.kill()
        self.process.join()


class _Crew:
    """All processes of one replay."""

    def __init__(self, clients: list[_Client], stream: Stream, settings: ReplaySettings, halt: Halt) -> None:
        self._clients = clients
        self._halt = halt
        self._tell = shown(stream, settings.show)
        self._results: list[RequestResult] = []
        self._start_s = 0.0
        # One for each, and each waits in its own pipe.
        self._threads = concurrent.futures.ThreadPoolExecutor(len(clients))

    async def run(self) -> Replayed:
        halting = asyncio.create_task(self._pass_on_the_halt())
        try:
            await self._all(self._wait_ready)
            self._start_s = time.monotonic() + _LEAD_S
            for client in self._clients:
                client.send(self._start_s)
            await self._all(self._follow)
        finally:
            halting.cancel()
            self._threads.shutdown(wait=False)
        self._results.sort(key=lambda result: result.arrival_s)
        return Replayed(self._results, self._halt.reason)

    async def _all(self, work: Any) -> None:
        await asyncio.gather(*(self._or_its_end(client, work(client)) for client in self._clients))

    async def _or_its_end(self, client: _Client, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except (EOFError, OSError):
            await asyncio.to_thread(client.process.join)
            self._halt.call(f"a client process ended with {client.process.exitcode}; its results are lost")

    async def _heard(self, client: _Client) -> _Message:
        message: _Message = await asyncio.get_running_loop().run_in_executor(
            self._threads, client.connection.recv
        )
        return message

    async def _wait_ready(self, client: _Client) -> None:
        assert await self._heard(client) == ("ready",)

    async def _follow(self, client: _Client) -> None:
        """Waits until its results are there."""
        while True:
            match await self._heard(client):
                case ("progress", done, failed):
                    client.done, client.failed = done, failed
                    if self._tell is not None and client is self._clients[0]:
                        done = sum(client.done for client in self._clients)
                        failed = sum(client.failed for client in self._clients)
                        self._tell(time.monotonic() - self._start_s, done, failed)
                case ("ended", results, reason):
                    self._results += results
                    if reason is not None:
                        self._halt.call(reason)
                    return

    async def _pass_on_the_halt(self) -> None:
        reason = await self._halt.wait()
        for client in self._clients:
            client.send(reason)


# ---------------------------------------------------------------- in the other process


def _client(connection: Connection) -> None:
    """The other process' whole life. An interrupt is for the process that started it, which tells."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    allow_many_connections()
    try:
        access, stream, settings = connection.recv()
    except EOFError:
        return  # The parent process is gone: there is none to tell.
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_replay_as_told(connection, access, stream, settings))


async def _replay_as_told(
    connection: Connection, access: Access, stream: Stream, settings: ReplaySettings
) -> None:
    loop = asyncio.get_running_loop()
    start: asyncio.Future[float] = loop.create_future()
    halt = Halt()

    def listen() -> None:
        try:
            start_s = connection.recv()
            if isinstance(start_s, str):  # halted before it began
                loop.call_soon_threadsafe(halt.call, start_s)
                start_s = time.monotonic()
            loop.call_soon_threadsafe(start.set_result, start_s)
            loop.call_soon_threadsafe(halt.call, connection.recv())
        except (EOFError, OSError):
            os._exit(1)  # The parent process is gone: there is none to tell.
        except RuntimeError:
            pass  # The loop is closed: all was over when the halt came.

    gc.collect()
    gc.freeze()  # The stream is not to be looked through again and again.
    threading.Thread(target=listen, daemon=True).start()
    connection.send(("ready",))
    start_s = await start
    target = HttpTarget(access)
    done = await replay(
        target, stream, settings, halt, start_s,
        lambda _elapsed_s, done, failed: connection.send(("progress", done, failed)),
    )  # fmt: skip
    await target.close()
    connection.send(("ended", done.results, done.error))


def _loop_factory() -> Any:
    """uvloop's, which does with half the time for each token; None: asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
