"""Requests that the router holds: those that no replica has, and those that run alone.

Owns the order of those that wait, first come, first served; and which requests may have killed replicas: each of
them is served alone, by a replica that is kept free for it. Does not know what they are blamed for.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from manylora.protocol.routing import ReplicaId
from manylora.router.fleet import Fleet
from manylora.router.replicas import ReplicaState
from manylora.router.requests import LiveRequest
from manylora.types import RequestId


class RouterQueue:
    """A heap that forgets late: what was taken out leaves when it comes to the front."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], LiveRequest]] = []
        self._waiting: dict[RequestId, LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: LiveRequest) -> bool:
        return self._waiting.get(request.id) is request

    def put(self, request: LiveRequest) -> None:
        self._waiting[request.id] = request
        heapq.heappush(self._heap, (request.key, request))

    def remove(self, request: LiveRequest) -> None:
        del self._waiting[request.id]

    def first(self) -> LiveRequest | None:
        """The oldest; None where none waits."""
        while self._heap:
            request = self._heap[0][1]
            if self._waiting.get(request.id) is request:
                return request
            heapq.heappop(self._heap)
        return None


CLEARED_TOKENS = 4
"""What a request computes alone: a replica that has not died by then gets others beside it. Whole answers, one
after the other, would keep all others waiting where replicas are killed under full load."""


class Quarantine:
    """A request takes a replica that is empty; where none is, the one with the least load gets no others, until it
    is."""

    def __init__(self) -> None:
        self._waiting: dict[RequestId, LiveRequest] = {}
        self._reserved: dict[RequestId, ReplicaId] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: LiveRequest) -> bool:
        return self._waiting.get(request.id) is request

    def put(self, request: LiveRequest) -> None:
        """It waits for a replica of its own."""
        self._waiting[request.id] = request

    def remove(self, request: LiveRequest) -> None:
        """It waits no more; what is kept for it stays so."""
        del self._waiting[request.id]

    def waiting(self) -> Iterable[LiveRequest]:
        """Those that wait, oldest first."""
        return sorted(self._waiting.values(), key=lambda request: request.key)

    def replica_for(self, fleet: Fleet, request: LiveRequest) -> ReplicaState | None:
        """An empty replica, now kept for the request; None where there is none yet."""
        reserved = self._reserved.get(request.id)
        if reserved is not None:
            replica = fleet.up[reserved]
            if replica.drains_from_s is not None or not fleet.fits_ever(replica, request):
                self.leave(fleet, request)
                reserved = None
        if reserved is None:
            can = [fleet.up[name] for name in fleet.open_ids if fleet.fits_ever(fleet.up[name], request)]
            if not can:
                return None
            found = min(can, key=lambda replica: (replica.rows, replica.id))
            self._reserved[request.id] = found.id
            fleet.reserve(found)
        else:
            found = fleet.up[reserved]
        return None if found.requests or found.is_suspect else found

    def leave(self, fleet: Fleet, request: LiveRequest) -> None:
        """The request needs no replica of its own any more: others may have what was kept for it."""
        reserved = self._reserved.pop(request.id, None)
        if reserved is not None and reserved in fleet.up:
            fleet.release(fleet.up[reserved])

    def is_cleared(self, request: LiveRequest) -> bool:
        """Whether a replica is kept for the request that has shown to survive it: others may have what is left."""
        return request.id in self._reserved and request.num_new >= CLEARED_TOKENS

    def lose(self, replica: ReplicaState) -> None:
        """The replica is down."""
        for name in [name for name, reserved in self._reserved.items() if reserved == replica.id]:
            del self._reserved[name]
