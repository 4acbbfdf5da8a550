"""A front end's link to one epoch of a replica. Keeps what is sent before the link is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from manylora.cluster import messages
from manylora.cluster.link import Credentials, Hello, Link, LinkError, redial

DIAL_S = 2.0
"""A replica that cannot be reached for so long is not there."""

_from_replica = msgspec.msgpack.Decoder(messages.ToFrontendFromReplica)


class ReplicaLink:
    """Dials at once. ``hear`` gets each message; ``is_lost``: it could not be had, or has ended."""

    def __init__(
        self,
        endpoint: messages.Endpoint,
        credentials: Credentials,
        hello: Hello,
        hear: Callable[[Any], None],
        lost: Callable[[ReplicaLink], None],
    ) -> None:
        self.endpoint = endpoint
        self.is_lost = False
        self._credentials = credentials
        self._hello = hello
        self._hear = hear
        self._lost = lost
        self._unsent: list[msgspec.Struct] = []
        self._link: Link | None = None
        self._calls: dict[int, asyncio.Future[messages.Stats]] = {}
        self._num_calls = 0
        self._task = asyncio.get_running_loop().create_task(self._follow())

    def send(self, message: msgspec.Struct) -> None:
        """Dropped where the link is lost."""
        if self._link is not None:
            self._link.send(message)
        elif not self.is_lost:
            self._unsent.append(message)

    async def stats(self, timeout_s: float) -> messages.Stats | None:
        """The engine's snapshot; None where none comes in time."""
        self._num_calls += 1
        call = self._num_calls
        future = self._calls[call] = asyncio.get_running_loop().create_future()
        self.send(messages.AskStats(call))
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            return None
        finally:
            del self._calls[call]

    def close(self) -> None:
        """The replica of this epoch is down, whatever it still says."""
        self.is_lost = True
        self._task.cancel()
        if self._link is not None:
            self._link.abort()

    async def _follow(self) -> None:
        link = await self._dial()
        if link is not None:
            self._link = link
            for unsent in self._unsent:
                link.send(unsent)
            while (message := await link.receive()) is not None:
                if isinstance(message, messages.Stats):
                    future = self._calls.get(message.call)
                    if future is not None and not future.done():
                        future.set_result(message)
                else:
                    self._hear(message)
        self._unsent.clear()
        self.is_lost = True
        self._lost(self)

    async def _dial(self) -> Link | None:
        address = self.endpoint.host, self.endpoint.port
        try:
            link = await redial(address, self._credentials, self._hello, _from_replica, most_s=DIAL_S)
        except LinkError:
            return None
        if link.epoch == self.endpoint.epoch:
            return link
        link.abort()
        return None
