"""Each request to the replica with the fewest (CaraServe §7.5)."""

from __future__ import annotations

from manylora.policy.routing.fleet import Fleet
from manylora.policy.routing.policy import RoutingPolicy
from manylora.policy.routing.replicas import ReplicaState
from manylora.policy.routing.requests import LiveRequest


class MostIdle(RoutingPolicy):
    """The least running and waiting sequences; of equal ones the lowest id."""

    name = "most-idle"

    def choose(self, view: Fleet, request: LiveRequest) -> ReplicaState | None:
        """See RoutingPolicy."""
        for name in view.by_load.ascending():
            replica = view.up[name]
            if view.fits_ever(replica, request):
                return replica
        return None
