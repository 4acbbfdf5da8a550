"""The requests that wait at the router: the queue, and the quarantine of requests that may kill replicas.

Owns the order of waiting requests, first come, first served. Each quarantined request is served alone, by a
replica that is reserved for it. Does not know who blamed it.
"""

from __future__ import annotations

import heapq

from manylora.protocol.routing import ReplicaId
from manylora.router.fleet import Fleet
from manylora.router.replicas import ReplicaState
from manylora.router.requests import LiveRequest
from manylora.types import RequestId


class RouterQueue:
    """A queue by arrival: a heap with lazy deletion. A request leaves it by leaving ``waiting``."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], LiveRequest]] = []
        self.waiting: dict[RequestId, LiveRequest] = {}

    def put(self, request: LiveRequest) -> None:
        self.waiting[request.id] = request
        heapq.heappush(self._heap, (request.key, request))

    def first(self) -> LiveRequest | None:
        """Return the oldest request, if any."""
        while self._heap:
            request = self._heap[0][1]
            if self.waiting.get(request.id) is request:
                return request
            heapq.heappop(self._heap)
        return None


CLEARED_TOKENS = 4
"""The tokens that a quarantined request generates alone; if the replica still lives, it gets others again. To
wait for whole answers would hold up all others when replicas die under full load."""


class Quarantine:
    """The requests that may run only alone on a replica.

    A request takes an empty replica. If there is none, the one with the least load gets no other requests until
    it is empty. ``waiting``: the requests that have not got their replica yet.
    """

    def __init__(self) -> None:
        self.waiting: dict[RequestId, LiveRequest] = {}
        self._reserved: dict[RequestId, ReplicaId] = {}

    def replica_for(self, fleet: Fleet, request: LiveRequest) -> ReplicaState | None:
        """Reserve a replica for the request; return it once it is empty, else None."""
        found = fleet.up[self._reserved[request.id]] if request.id in self._reserved else None
        if found is not None and (found.drains_from_s is not None or not fleet.fits_ever(found, request)):
            self.leave(fleet, request)
            found = None
        if found is None:
            can = [fleet.up[name] for name in fleet.open_ids if fleet.fits_ever(fleet.up[name], request)]
            if not can:
                return None
            found = min(can, key=lambda replica: (replica.rows, replica.id))
            self._reserved[request.id] = found.id
            fleet.reserve(found, True)
        return None if found.requests or found.is_suspect else found

    def leave(self, fleet: Fleet, request: LiveRequest) -> None:
        """Give up the request's reservation: the replica may get others again."""
        reserved = self._reserved.pop(request.id, None)
        if reserved is not None and reserved in fleet.up:
            fleet.reserve(fleet.up[reserved], False)

    def is_cleared(self, request: LiveRequest) -> bool:
        """Return whether the request has a reserved replica that has survived it so far."""
        return request.id in self._reserved and request.num_new >= CLEARED_TOKENS

    def lose(self, replica: ReplicaState) -> None:
        """Drop the reservation of a replica that is down."""
        for name in [name for name, reserved in self._reserved.items() if reserved == replica.id]:
            del self._reserved[name]
