"""Punica's scheduler, which also empties the smallest replica where others have room for all of it.

The paper says that requests are moved to consolidate (§1, §3), and not how; the rule here is ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from manylora.config.routing import ConsolidateParameters
from manylora.policy.routing.fleet import Fleet
from manylora.policy.routing.policy import Relocation, Wish
from manylora.policy.routing.punica import Punica
from manylora.policy.routing.replicas import ReplicaState


class PunicaConsolidate(Punica):
    """Every ``interval_s`` the replica with the fewest requests gives them all, newest first, to replicas with
    more, if all find room there; not again for ``cooldown_s`` with either side."""

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
        """Moves of all requests of a replica; none where one of them cannot move."""
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
