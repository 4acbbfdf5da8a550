"""Each request to any replica, by a hash of its id and attempt."""

from __future__ import annotations

from manylora.policy.routing.fleet import Fleet
from manylora.policy.routing.hashing import hash_text
from manylora.policy.routing.policy import RoutingPolicy
from manylora.policy.routing.replicas import ReplicaState
from manylora.policy.routing.requests import LiveRequest


class RandomReplica(RoutingPolicy):
    """All open replicas are equally likely; where one can never hold the request, the next by id has it."""

    name = "random"

    def choose(self, view: Fleet, request: LiveRequest) -> ReplicaState | None:
        """See RoutingPolicy."""
        count = len(view.open_ids)
        first = hash_text(request.id, request.attempt)
        for offset in range(count):
            replica = view.up[view.open_ids[(first + offset) % count]]
            if view.fits_ever(replica, request):
                return replica
        return None
