"""dLoRA without its reactive part: adapters are placed ahead of bursts, and a request goes where it waits
least."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from manylora.config.routing import DloraParameters
from manylora.policy.routing.fleet import Fleet
from manylora.policy.routing.placement import Placement
from manylora.policy.routing.policy import RoutingPolicy, Wish
from manylora.policy.routing.queueing import QueueBySteps, load_s
from manylora.policy.routing.replicas import ReplicaState
from manylora.policy.routing.requests import LiveRequest


class DloraProactive(RoutingPolicy):
    """Dispatch (§5.2): the replica at which the request is pending for the shortest time, loading its adapter and
    queueing; of equal ones the lowest id."""

    parameters: ClassVar[type[DloraParameters]] = DloraParameters

    def __init__(self, parameters: DloraParameters) -> None:
        self._placement = Placement(parameters)
        self._queue = QueueBySteps()

    def choose(self, view: Fleet, request: LiveRequest) -> ReplicaState | None:
        """See RoutingPolicy."""
        self._placement.saw(request, view.now)
        can = self.candidates(view, request)
        return min(can, key=lambda replica: self.pending_s(view, replica, request), default=None)

    def candidates(self, view: Fleet, request: LiveRequest) -> list[ReplicaState]:
        """Open replicas that can hold the request."""
        return [view.up[name] for name in view.open_ids if view.fits_ever(view.up[name], request)]

    def pending_s(self, view: Fleet, replica: ReplicaState, request: LiveRequest) -> float:
        """Seconds until the request would run there."""
        loads_s = load_s(replica, request.adapter, request.adapter_pages)
        return loads_s + self._queue.seconds(view, replica)

    def on_timer(self, view: Fleet) -> Sequence[Wish]:
        """See RoutingPolicy."""
        return self._placement.on_timer(view)
