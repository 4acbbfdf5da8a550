"""Mailboxes of deltas for the iterators that wait for them, inside one event loop.

A local and a remote engine client share them. They do not know where the engine is.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import math
from collections.abc import AsyncIterator, Callable

from manylora.engine.client import Delta, EngineBusy, EngineDead, GenerationRequest
from manylora.types import InvalidRequest, RequestId

MAX_WAITING_BYTES = 256 * 2**20
"""The most memory of all waiting requests in a front end's process; the engine keeps about as much of them.
Prompts of 6 million tokens fit, such as 3,000 of 2,000 tokens each; 10,000 requests with 65,536 stop ids each
would take 26 GB."""

_SAMPLE_BYTES = 1024
_ID_BYTES = 40  # an int, and its place in a tuple
_BIAS_BYTES = 150  # an int and a float in a tuple, and the place of that one
_STOP_CHAR_BYTES = 8  # with what is prepared to find it


def _size_bytes(request: GenerationRequest) -> int:
    """Estimate the memory that a request takes while it waits."""
    params = request.params
    num_ids = len(request.prompt) + len(params.stop_token_ids)
    return (
        _SAMPLE_BYTES * params.n
        + _ID_BYTES * num_ids
        + _BIAS_BYTES * len(params.logit_bias)
        + _STOP_CHAR_BYTES * sum(map(len, params.stop))
    )


class _Box:
    """The deltas of one request that have not been read, for one reader at a time.

    asyncio.Queue, which lets many wait, takes as long for a token as all the rest of the token's way.
    """

    def __init__(self, waiting_bytes: int) -> None:
        """``waiting_bytes``: the request's, until its first delta."""
        self.waiting_bytes = waiting_bytes
        self._items: collections.deque[Delta | EngineDead] = collections.deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, item: Delta | EngineDead) -> None:
        self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> Delta | EngineDead:
        while not self._items:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._items.popleft()


class DeltaStream:
    """The deltas of one request. It is no generator: closing it before the first delta must abort as well."""

    def __init__(self, request: GenerationRequest, box: _Box, closed: Callable[[bool], None]) -> None:
        self._box = box
        self._num_open = request.params.n - len(request.closed)
        self._closed = closed

    def __aiter__(self) -> DeltaStream:
        return self

    async def __anext__(self) -> Delta:
        if self._num_open == 0:
            await self.aclose()
            raise StopAsyncIteration
        item = await self._box.get()
        if isinstance(item, EngineDead):
            self._num_open = 0
            raise item
        if item.finish_reason is not None:
            # A refusal (a client's error) comes once, for all samples.
            is_refusal = item.error is not None and item.error.status < 500
            self._num_open = 0 if is_refusal else self._num_open - 1
        return item

    async def aclose(self) -> None:
        """Abort what still runs. Idempotent."""
        is_open, self._num_open = self._num_open > 0, 0
        self._closed(is_open)


class Mailboxes:
    """The boxes of open requests. All methods run on the event loop's thread.

    Boxes are found by a serial that each request gets. An id is free again once its stream was read to the end
    or closed; later deltas of the old request never reach the next one of that id.
    """

    def __init__(self, max_waiting_bytes: float = math.inf) -> None:
        """Make empty mailboxes. A request is refused while others of ``max_waiting_bytes`` wait."""
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes = 0
        self._boxes: dict[int, _Box] = {}
        self._open_ids: set[RequestId] = set()
        self._serials = itertools.count(1)
        self.dead: EngineDead | None = None
        self._death: asyncio.Event = asyncio.Event()

    def open(
        self,
        request: GenerationRequest,
        submit: Callable[[GenerationRequest], None],
        abort: Callable[[RequestId], None],
    ) -> AsyncIterator[Delta]:
        """Submit at once and return the request's deltas; closing them early aborts it."""
        if self.dead is not None:
            raise self.dead
        if request.id in self._open_ids:
            raise InvalidRequest(f"request id {request.id!r} is already in use")
        if self._waiting_bytes >= self._max_waiting_bytes:
            raise EngineBusy(f"requests that wait take {self._waiting_bytes >> 20} MiB; try again later")
        asked = dataclasses.replace(request, serial=next(self._serials))
        box = self._boxes[asked.serial] = _Box(_size_bytes(asked))
        self._waiting_bytes += box.waiting_bytes
        self._open_ids.add(asked.id)
        submit(asked)
        return DeltaStream(asked, box, lambda is_open: self._close(asked, is_open, abort))

    def _close(self, asked: GenerationRequest, is_open: bool, abort: Callable[[RequestId], None]) -> None:
        box = self._boxes.pop(asked.serial, None)
        if box is None:
            return
        self._waiting_bytes -= box.waiting_bytes
        self._open_ids.remove(asked.id)
        if is_open and self.dead is None:
            abort(asked.id)

    def dispatch(self, deltas: list[Delta]) -> None:
        """Put each delta into its request's box; drop deltas of closed requests."""
        for delta in deltas:
            box = self._boxes.get(delta.serial)
            if box is not None:
                self._waiting_bytes -= box.waiting_bytes
                box.waiting_bytes = 0
                box.put(delta)

    def die(self, reason: str) -> None:
        """End every open request with EngineDead, and every later one."""
        if self.dead is not None:
            return
        self.dead = EngineDead(reason)
        self._death.set()
        for box in self._boxes.values():
            box.put(self.dead)

    async def wait_dead(self) -> str:
        """Return the reason once ``die`` has been called."""
        await self._death.wait()
        return str(self.dead)
