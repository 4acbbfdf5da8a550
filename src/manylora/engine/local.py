"""An engine on a thread of this process, as an EngineClient."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from manylora.engine.client import Delta, EngineStats, GenerationRequest
from manylora.engine.driver import Driver
from manylora.engine.mailboxes import Mailboxes
from manylora.types import AdapterCard, RequestId


class LocalEngine:
    """Must be created inside the event loop that uses it; another may once that one is closed. Owns the
    driver."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.info = driver.info
        self._loop = asyncio.get_running_loop()
        self._mailboxes = Mailboxes()
        driver.start(self._deliver, self._died, is_watched=True)

    def _deliver(self, deltas: list[Delta]) -> None:
        self._on_loop(self._mailboxes.dispatch, deltas)

    def _died(self, reason: str) -> None:
        self._on_loop(self._mailboxes.die, reason)

    def _on_loop(self, call: Callable[[Any], None], argument: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, argument)
        except RuntimeError:
            pass  # the loop was closed first: no coroutine is left to hear of it

    def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        # Deliver to this loop from now on: each ``asyncio.run`` of a script brings its own.
        loop = asyncio.get_running_loop()
        if loop is not self._loop and not self._loop.is_closed():
            raise RuntimeError("the engine serves another event loop, which is still open")
        self._loop = loop
        return self._mailboxes.open(request, self._driver.submit, self.abort)

    def abort(self, request: RequestId, sample: int | None = None, reason: str = "abort") -> None:
        self._driver.abort(request, sample, reason)

    async def add_adapter(self, name: str, path: str) -> AdapterCard:
        return await asyncio.to_thread(self._driver.add_adapter, name, path)

    async def remove_adapter(self, name: str) -> None:
        await asyncio.wrap_future(self._driver.remove_adapter(name))

    async def adapters(self) -> tuple[AdapterCard, ...]:
        return self._driver.adapters()

    async def stats(self) -> EngineStats:
        stats = await asyncio.wrap_future(self._driver.stats())
        return stats.with_adapters(self._driver.adapter_uses())

    def why_unready(self) -> str | None:
        return None if self._mailboxes.dead is None else str(self._mailboxes.dead)

    async def wait_dead(self) -> str:
        return await self._mailboxes.wait_dead()

    async def close(self) -> None:
        await asyncio.to_thread(self._driver.close)
        self.disconnect("the engine was closed")

    def disconnect(self, reason: str) -> None:
        """End every open request with EngineDead; the driver is, or is being, closed by other means."""
        self._mailboxes.die(reason)
