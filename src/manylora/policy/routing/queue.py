"""Requests that no replica has: first come, first served, by the moment at which each first came."""

from __future__ import annotations

import heapq

from manylora.policy.routing.requests import LiveRequest
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
