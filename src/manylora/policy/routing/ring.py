"""Which replicas are an adapter's homes, whether they have it or not: the same ones as long as the cluster is."""

from __future__ import annotations

from bisect import bisect_right

from manylora.policy.routing.fleet import Fleet
from manylora.policy.routing.hashing import hash_number
from manylora.protocol.routing import ReplicaId
from manylora.types import AdapterId

_POINTS = 16
"""Of each replica on the ring; the more, the more even."""


class HomeRing:
    """Consistent hashing (Karger 1997): replicas stand at many points of a ring, and an adapter's homes are the
    first that follow its own point. One replica more or less changes the homes of few adapters."""

    def __init__(self) -> None:
        self._version = -1
        self._points: list[int] = []
        self._replicas: list[ReplicaId] = []

    def homes(self, view: Fleet, adapter: AdapterId, count: int) -> list[ReplicaId]:
        """The first ``count`` of the adapter's homes that are open, in their order."""
        if self._version != view.version:
            self._build(view)
        found: list[ReplicaId] = []
        replicas, up = self._replicas, view.up
        place = bisect_right(self._points, hash_number(adapter))
        for step in range(place - len(replicas), place):  # round the ring
            replica = replicas[step]
            if replica not in found and up[replica].is_open:
                found.append(replica)
                if len(found) == count:
                    break
        return found

    def _build(self, view: Fleet) -> None:
        self._version = view.version
        points = sorted(
            (hash_number((replica << 8) + point), replica) for replica in view.up for point in range(_POINTS)
        )
        self._points = [point for point, _ in points]
        self._replicas = [replica for _, replica in points]
