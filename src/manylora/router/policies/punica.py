"""Routes as Punica (§5): to the fullest replica with room; the newest request leaves a replica without pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from manylora.config.routing import BatchParameters, ConsolidateParameters
from manylora.router.fleet import Fleet
from manylora.router.policies.policy import Relocation, RoutingPolicy, Wish
from manylora.router.replicas import ReplicaState
from manylora.router.requests import LiveRequest


class Punica(RoutingPolicy):
    """A policy that fills the replicas one after another.

    Route (§5.1): take the replica with the most sequences among those with fewer than ``max_batch`` and
    enough free pages; among equal replicas the highest id wins. Where there is none, the request waits in the
    queue. Enough pages means room for the tokens so far and one page to grow into. With room for the whole
    reply, memory would never run out. Evict (§5.3): where a replica has no page left, its newest request is
    withdrawn and routed like a new one.
    """

    parameters: ClassVar[type[BatchParameters]] = BatchParameters
    handover = "drop"

    def __init__(self, parameters: BatchParameters) -> None:
        self._max_batch = parameters.max_batch
        self._evicted: dict[
            int, tuple[int, int]
        ] = {}  # by replica: the epoch and seq of the report that was acted on

    def choose(self, view: Fleet, request: LiveRequest) -> ReplicaState | None:
        """See RoutingPolicy."""
        for name in view.by_load.descending(self._max_batch):
            replica = view.up[name]
            if replica.has_room(request) and view.fits_ever(replica, request):
                return replica
        return None

    def on_timer(self, view: Fleet) -> Sequence[Wish]:
        """Move one request from each replica that has reported again that it is out of pages."""
        wishes: list[Wish] = []
        for replica in view.up.values():
            report = replica.epoch, replica.report.seq
            if not replica.report.is_exhausted or self._evicted.get(replica.id) == report:
                continue
            newest = replica.movable()
            if len(newest) > 1:
                self._evicted[replica.id] = report
                first = newest[0]
                wishes.append(Relocation(first.id, first.attempt, replica.id, None, "memory", is_forced=True))
        return wishes


class PunicaConsolidate(Punica):
    """A policy that also empties small replicas.

    Every ``interval_s``, the replica with the fewest requests gives all its requests, newest first, to
    replicas with more, if all find room there. Neither side takes part again for ``cooldown_s``.
    """

    parameters = ConsolidateParameters

    def __init__(self, parameters: ConsolidateParameters) -> None:
        super().__init__(parameters)
        self._interval_s = parameters.interval_s
        self._cooldown_s = parameters.cooldown_s
        self._looked_s = float("-inf")
        self._moved_s: dict[int, float] = {}

    def on_timer(self, view: Fleet) -> Sequence[Wish]:
        """See RoutingPolicy."""
        wishes = list(super().on_timer(view))
        if wishes or view.now - self._looked_s < self._interval_s:
            return wishes
        self._looked_s = view.now
        smallest = next((view.up[n] for n in view.by_load.ascending() if view.up[n].requests), None)
        if smallest is None or self._rests(view, smallest):
            return wishes
        return self._emptied(view, smallest)

    def _emptied(self, view: Fleet, source: ReplicaState) -> list[Wish]:
        """Plan the moves of all requests of a replica. Returns none where one request cannot move."""
        newest = source.movable()
        if len(newest) < len(source.requests):
            return []
        larger = [view.up[name] for name in view.by_load.descending(self._max_batch)]
        larger = [each for each in larger if each.rows > source.rows and not self._rests(view, each)]
        rows = {each.id: each.rows for each in larger}
        pages = {each.id: each.free_pages for each in larger}
        wishes: list[Wish] = []
        sides = [source.id]
        for request in newest:
            for target in larger:
                needed = target.pages_for(request)
                has_room = rows[target.id] < self._max_batch and needed <= pages[target.id]
                if has_room and view.fits_ever(target, request):
                    rows[target.id] += request.samples
                    pages[target.id] -= needed
                    sides.append(target.id)
                    wishes.append(
                        Relocation(
                            request.id, request.attempt, source.id, target.id, "consolidate", is_forced=True
                        )
                    )
                    break
            else:
                return []
        self._moved_s.update(dict.fromkeys(sides, view.now))
        return wishes

    def _rests(self, view: Fleet, replica: ReplicaState) -> bool:
        return view.now - self._moved_s.get(replica.id, float("-inf")) < self._cooldown_s
