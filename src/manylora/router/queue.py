"""The requests that wait at the router: the queue, and the quarantine of requests that may kill replicas.

Owns the order of waiting requests, first come, first served. Each quarantined request is served alone, by a
replica that is reserved for it. Does not know who blamed it.
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
    """A queue by arrival: a heap with lazy deletion."""

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
        """Return the oldest request, if any."""
        while self._heap:
            request = self._heap[0][1]
            if self._waiting.get(request.id) is request:
                return request
            heapq.heappop(self._heap)
        return None


CLEARED_TOKENS = 4
"""The tokens that a quarantined request generates alone; if the replica still lives, it gets others again. To
wait for whole answers would hold up all others when replicas die under full load."""


class Quarantine:
    """The requests that may run only alone on a replica.

    A request takes an empty replica. If there is none, the one with the least load gets no other requests until
    it is empty.
    """

    def __init__(self) -> None:
        self._waiting: dict[RequestId, LiveRequest] = {}
        self._reserved: dict[RequestId, ReplicaId] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: LiveRequest) -> bool:
        return self._waiting.get(request.id) is request

    def put(self, request: LiveRequest) -> None:
        """Add a request, to wait for a replica of its own."""
        self._waiting[request.id] = request

    def remove(self, request: LiveRequest) -> None:
        """Remove a waiting request; its reservation stays."""
        del self._waiting[request.id]

    def waiting(self) -> Iterable[LiveRequest]:
        """Return the waiting requests, oldest first."""
        return sorted(self._waiting.values(), key=lambda request: request.key)

    def replica_for(self, fleet: Fleet, request: LiveRequest) -> ReplicaState | None:
        """Reserve a replica for the request; return it once it is empty, else None."""
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
        """Give up the request's reservation: the replica may get others again."""
        reserved = self._reserved.pop(request.id, None)
        if reserved is not None and reserved in fleet.up:
            fleet.release(fleet.up[reserved])

    def is_cleared(self, request: LiveRequest) -> bool:
        """Return whether the request has a reserved replica that has survived it so far."""
        return request.id in self._reserved and request.num_new >= CLEARED_TOKENS

    def lose(self, replica: ReplicaState) -> None:
        """Drop the reservation of a replica that is down."""
        for name in [name for name, reserved in self._reserved.items() if reserved == replica.id]:
            del self._reserved[name]
