"""Punica's scheduler (§5): the largest working set that has room, and the newest request leaves a full one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from manylora.config.routing import BatchParameters
from manylora.policy.routing.fleet import Fleet
from manylora.policy.routing.policy import Relocation, RoutingPolicy, Wish
from manylora.policy.routing.replicas import ReplicaState
from manylora.policy.routing.requests import LiveRequest


class Punica(RoutingPolicy):
    """Route (§5.1): of the replicas with fewer than ``max_batch`` sequences and enough free pages that with most
    sequences, of equal ones the highest id; else the queue. Enough is for the tokens so far and a page to grow
    into, not for all that may come, or memory would never run out. Evict (§5.3): where a replica has no page left,
    its newest request is withdrawn and routed like a new one."""

    parameters: ClassVar[type[BatchParameters]] = BatchParameters
    handover = "drop"

    def __init__(self, parameters: BatchParameters) -> None:
        self._max_batch = parameters.max_batch
        self._evicted: dict[
            int, tuple[int, int]
        ] = {}  # by replica: epoch and seq of the report that was answered

    def choose(self, view: Fleet, request: LiveRequest) -> ReplicaState | None:
        """See RoutingPolicy."""
        for name in view.by_load.descending(self._max_batch):
            replica = view.up[name]
            if replica.has_room(request) and view.fits_ever(replica, request):
                return replica
        return None

    def on_timer(self, view: Fleet) -> Sequence[Wish]:
        """One request leaves each replica that has reported anew that it is out of pages."""
        wishes: list[Wish] = []
        for replica in view.up.values():
            report = replica.epoch, replica.seq
            if not replica.is_exhausted or self._evicted.get(replica.id) == report:
                continue
            newest = replica.movable()
            if len(newest) > 1:
                self._evicted[replica.id] = report
                first = newest[0]
                wishes.append(Relocation(first.id, first.attempt, replica.id, None, "memory", is_forced=True))
        return wishes
