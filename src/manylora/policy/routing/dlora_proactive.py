"""dLoRA without its reactive part: adapters are placed ahead of bursts, and a request goes where it waits
least."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from manylora.config.routing import DloraParameters
from manylora.policy.routing.fleet import Fleet
from manylora.policy.routing.placement import Placement
from manylora.policy.routing.policy import RoutingPolicy, Wish
from manylora.policy.routing.queueing import QueueBySteps, load_s, queue_by_batches_s
from manylora.policy.routing.replicas import ReplicaState
from manylora.policy.routing.requests import LiveRequest
from manylora.protocol.routing import ON_DEVICE


class DloraProactive(RoutingPolicy):
    """Dispatch (§5.2): the replica at which the request is pending for the shortest time, loading its adapter and
    queueing; of equal ones the lowest id. With ``queue_estimate: authors`` only replicas that have the adapter, or
    one that no request uses and that another replica has too, as in the authors' code."""

    name = "dlora-proactive"
    parameters: ClassVar[type[DloraParameters]] = DloraParameters

    def __init__(self, parameters: DloraParameters) -> None:
        self._given = parameters
        self._placement = Placement(parameters)
        self._queue = QueueBySteps()

    def choose(self, view: Fleet, request: LiveRequest) -> ReplicaState | None:
        """See RoutingPolicy."""
        self._placement.saw(request, view.now)
        can = [view.up[name] for name in view.open_ids if view.fits_ever(view.up[name], request)]
        if self._given.queue_estimate == "authors":
            can = [replica for replica in can if self._is_candidate(view, replica, request)] or can
        return min(can, key=lambda replica: self._pending_s(view, replica, request), default=None)

    def on_timer(self, view: Fleet) -> Sequence[Wish]:
        """See RoutingPolicy."""
        return self._placement.on_timer(view)

    def _pending_s(self, view: Fleet, replica: ReplicaState, request: LiveRequest) -> float:
        if self._given.queue_estimate == "authors":
            is_there = replica.tier_of(request.adapter) == ON_DEVICE
            bytes_in = 0 if is_there else request.adapter_pages * replica.facts.page_bytes
            return bytes_in / self._given.load_bytes_s + queue_by_batches_s(replica, self._given)
        loads_s = load_s(replica, request.adapter, request.adapter_pages)
        return loads_s + self._queue.seconds(view, replica)

    def _is_candidate(self, view: Fleet, replica: ReplicaState, request: LiveRequest) -> bool:
        if replica.id in self._placement.homes(view, request.adapter):
            return True
        idle = (each for each in replica.residency if each not in replica.adapters)
        return any(len(view.homes(each)) > 1 for each in idle)
