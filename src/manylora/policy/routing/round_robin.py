"""Each request to the next replica."""

from __future__ import annotations

from typing import Any

from manylora.policy.routing.fleet import Fleet
from manylora.policy.routing.policy import RoutingPolicy
from manylora.policy.routing.replicas import ReplicaState
from manylora.policy.routing.requests import LiveRequest


class RoundRobin(RoutingPolicy):
    """In the order of ids; one that can never hold the request is passed over."""

    def __init__(self, parameters: Any) -> None:
        self._last = -1

    def choose(self, view: Fleet, request: LiveRequest) -> ReplicaState | None:
        """See RoutingPolicy."""
        last = self._last
        for _ in view.open_ids:
            replica = view.next_open(last)
            if view.fits_ever(replica, request):
                self._last = replica.id
                return replica
            last = replica.id
        return None
