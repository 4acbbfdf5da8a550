"""An engine in a child process, as an EngineClient: this side of the wire."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator

from manylora.config.declaring import ConfigError
from manylora.config.sections import EngineSettings
from manylora.engine import client, wire
from manylora.engine.client import Delta, EngineBusy, EngineDead, EngineSilent, EngineStats, GenerationRequest
from manylora.engine.mailboxes import MAX_WAITING_BYTES, Mailboxes
from manylora.engine.watchdog import Judge, Pulse, tick_s
from manylora.engine.wire import open_stream
from manylora.processes import LEAST_EFFORT, effort
from manylora.protocol.executor import AdapterError
from manylora.reports import AdapterUse
from manylora.types import AdapterCard, EngineInfo, RequestId

MAX_UNSENT_BYTES = 64 * 2**20
"""The most bytes of calls that the engine has not read yet. Past them a new call gets EngineBusy."""

ANSWER_S = 10.0
"""After this long a silence fails the calls that wait for an answer."""

FLUSH_S = 1.0
"""The time in which the engine must read the last messages before the end."""


class RemoteEngine:
    """A client of ``engine.service`` over a connected socket. Create it with ``connect``."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        info: EngineInfo,
        step_timeout_s: float,
        pid: int,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self.info = info
        self._step_timeout_s = step_timeout_s
        self._pid = pid
        self._effort = 0.0
        self._idle_s = 0.0  # for which it has neither said nor done anything
        self._pulse: Pulse | None = None  # that has come and has not been looked at
        self._mailboxes = Mailboxes(MAX_WAITING_BYTES)
        self._calls: dict[int, asyncio.Future[wire.Answer]] = {}
        self._loads: dict[int, list[AdapterUse]] = {}  # that came before the answers to their calls
        self._call_ids = itertools.count()
        self._stats: asyncio.Task[wire.Answer] | None = None
        self._closing = False
        self._listener = asyncio.create_task(self._listen())
        self._watcher = asyncio.create_task(self._watch())

    @classmethod
    async def connect(cls, sock: socket.socket, settings: EngineSettings) -> RemoteEngine:
        """Send the settings and wait until the engine at the other end is ready.

        Raise ConfigError if the user's settings are at fault, EngineDead if the engine has ended.
        """
        reader, writer = await open_stream(sock)
        writer.write(wire.frame(wire.Start(settings)))
        match await wire.read_from_engine(reader):
            case wire.EngineReady(info, pid):
                return cls(reader, writer, info, settings.step_timeout_s, pid)
            case wire.Failed(message, is_user_error):
                writer.close()
                raise ConfigError(message) if is_user_error else EngineDead(message)
            case _:
                writer.close()
                raise EngineDead("the engine process ended while it was starting")

    async def _listen(self) -> None:
        reason = "the engine process died"
        while (message := await wire.read_from_engine(self._reader)) is not None:
            match message:
                case wire.Deltas(deltas):
                    self._mailboxes.dispatch(deltas)
                case wire.Loads(call, loads):
                    self._loads.setdefault(call, []).extend(loads)
                case wire.Beat(pulse):
                    self._pulse = pulse
                case wire.Answer(id=call):
                    if message.stats is not None:
                        loads = tuple(self._loads.pop(call, ()))
                        message.stats = message.stats.with_adapters(loads)
                    future = self._calls.pop(call, None)
                    if future is not None and not future.done():
                        future.set_result(message)
                case wire.Failed(text):
                    reason = text
                case _:
                    pass  # start-up messages have no meaning here
        self._die("the engine was closed" if self._closing else reason)

    async def _watch(self) -> None:
        """Take the engine for dead when it hangs; until then no call waits for a silent one."""
        judge = Judge(self._step_timeout_s)
        while True:
            await asyncio.sleep(tick_s(self._step_timeout_s))
            pulse, self._pulse = self._pulse, None
            # An engine that compiles sends no pulse, but takes CPU time.
            if pulse is not None:
                self._idle_s = 0.0
            elif (now := effort([self._pid])) - self._effort > LEAST_EFFORT:
                self._effort, self._idle_s = now, 0.0
            else:
                self._idle_s += tick_s(self._step_timeout_s)
            reason = judge.look(pulse)
            if reason is not None:
                self._die(reason)
                return
            if judge.silent_s > ANSWER_S:
                self._fail_calls(EngineSilent(f"the engine has said nothing for {judge.silent_s:.0f} s"))

    def why_unready(self) -> str | None:
        if self._mailboxes.dead is not None:
            return str(self._mailboxes.dead)
        return f"no sign of the engine for {self._idle_s:.0f} s" if self._idle_s > client.SILENT_S else None

    def _die(self, reason: str) -> None:
        self._watcher.cancel()
        self._mailboxes.die(reason)
        self._fail_calls(EngineDead(reason))

    def _fail_calls(self, error: Exception) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        self._calls.clear()

    def _send(self, message: wire.ToEngine) -> None:
        # Not awaited, for a request is submitted on the call itself; ``_check_room`` bounds what is unsent.
        self._writer.write(wire.frame(message))

    def _check_room(self) -> None:
        """Raise EngineBusy if too much is unsent; not for messages that end something."""
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            raise EngineBusy("the engine takes in no more requests at the moment; try again later")

    async def _call(self, what: str, name: str = "", path: str = "") -> wire.Answer:
        if self._mailboxes.dead is not None:
            raise self._mailboxes.dead
        self._check_room()
        call = wire.Call(next(self._call_ids), what, name, path)
        future = self._calls[call.id] = asyncio.get_running_loop().create_future()
        self._send(call)
        try:
            answer: wire.Answer = await future
        except asyncio.CancelledError:
            if self._calls.pop(call.id, None) is not None:
                self._send(wire.DropCall(call.id))
            raise
        if answer.status:
            raise AdapterError(answer.message, answer.status)
        return answer

    def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        self._check_room()
        return self._mailboxes.open(request, lambda asked: self._send(wire.Submit(asked)), self.abort)

    def abort(self, request: RequestId, sample: int | None = None, reason: str = "abort") -> None:
        if self._mailboxes.dead is None:
            self._send(wire.Cancel(request, sample, reason))

    async def add_adapter(self, name: str, path: str) -> AdapterCard:
        return (await self._call("add", name, path)).cards[0]

    async def remove_adapter(self, name: str) -> None:
        await self._call("remove", name)

    async def adapters(self) -> tuple[AdapterCard, ...]:
        return (await self._call("adapters")).cards

    async def stats(self) -> EngineStats:
        # One question at a time, however many ask: an engine that stands still is not left a heap of them.
        if self._stats is None or self._stats.done():
            self._stats = asyncio.create_task(self._call("stats"))
            self._stats.add_done_callback(lambda done: done.cancelled() or done.exception())
        stats = (await asyncio.shield(self._stats)).stats
        assert stats is not None  # a stats call is answered by stats or by an error
        return stats

    async def wait_dead(self) -> str:
        return await self._mailboxes.wait_dead()

    async def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._writer.close()  # the engine takes the end of the stream as the word to end
        # Of several callers none may cancel the listener for the others.
        if not (await asyncio.wait([self._listener], timeout=FLUSH_S))[0]:
            self._writer.transport.abort()  # the engine does not read what was sent before
            await asyncio.wait([self._listener])
