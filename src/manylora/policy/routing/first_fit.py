"""Each request to the first replica with room (what CaraServe §7.5 calls Punica's)."""

from __future__ import annotations

from manylora.config.routing import BatchParameters
from manylora.policy.routing.fleet import Fleet
from manylora.policy.routing.policy import RoutingPolicy
from manylora.policy.routing.replicas import ReplicaState
from manylora.policy.routing.requests import LiveRequest


class FirstFit(RoutingPolicy):
    """The lowest id with fewer than ``max_batch`` sequences and enough free pages. Looks at all before it."""

    name = "first-fit"
    parameters = BatchParameters

    def __init__(self, parameters: BatchParameters) -> None:
        self._max_batch = parameters.max_batch

    def choose(self, view: Fleet, request: LiveRequest) -> ReplicaState | None:
        """See RoutingPolicy."""
        for name in view.open_ids:
            replica = view.up[name]
            if (
                replica.rows < self._max_batch
                and replica.has_room(request)
                and view.fits_ever(replica, request)
            ):
                return replica
        return None
