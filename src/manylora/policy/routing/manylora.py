"""Ours: the replica where a request costs the fewest seconds, its own and those of others."""

from __future__ import annotations

from collections.abc import Sequence

from manylora.config.routing import ManyloraParameters
from manylora.policy.routing.balance import balance
from manylora.policy.routing.cost import cheapest
from manylora.policy.routing.fleet import Fleet
from manylora.policy.routing.policy import RoutingPolicy, Wish
from manylora.policy.routing.queueing import wait_s
from manylora.policy.routing.replicas import ReplicaState
from manylora.policy.routing.requests import LiveRequest
from manylora.policy.routing.ring import HomeRing
from manylora.protocol.routing import ReplicaId
from manylora.types import BASE, AdapterId


class CheapestReplica(RoutingPolicy):
    """Looks at the adapter's homes, at replicas that have it, at those that have most of the prompt, and at the
    least loaded. An adapter has one home, and one more each time that a request finds a queue at all of them; the
    further ones are forgotten as time passes. Of equal costs the one that was looked at first has the request."""

    parameters = ManyloraParameters

    def __init__(self, parameters: ManyloraParameters) -> None:
        self._given = parameters
        self._ring = HomeRing()
        self._extra_homes: dict[AdapterId, tuple[float, float]] = {}  # how many, and at which moment
        self._balanced_s = float("-inf")

    def choose(self, view: Fleet, request: LiveRequest) -> ReplicaState | None:
        """See RoutingPolicy."""
        blocks = dict(view.prefixes.match(request.prefix, self._given.prefix_candidates))
        homes: Sequence[ReplicaId] = ()
        if request.adapter != BASE:
            homes = self._ring.homes(view, request.adapter, self.num_homes(view.now, request.adapter))
        best = cheapest(view, request, self._candidates(view, request, homes, blocks), blocks)
        if best is None:  # none of these can ever hold it
            best = next((view.up[n] for n in view.open_ids if view.fits_ever(view.up[n], request)), None)
        if best is None:
            return None
        if homes and all(wait_s(view, view.up[home], 1, 0) > self._given.home_queue_s for home in homes):
            self._extra_homes[request.adapter] = float(len(homes)), view.now
        return best

    def on_timer(self, view: Fleet) -> Sequence[Wish]:
        """See RoutingPolicy."""
        if view.now - self._balanced_s < self._given.balance_s:
            return ()
        self._balanced_s = view.now
        return balance(view, self._given.most_moves, self._given.move_gain)

    def num_homes(self, now: float, adapter: AdapterId) -> int:
        """How many homes the adapter has."""
        extra, at_s = self._extra_homes.get(adapter, (0.0, 0.0))
        if extra:
            extra *= 2.0 ** ((at_s - now) / self._given.home_half_life_s)
            if extra < 0.5:
                del self._extra_homes[adapter]
        return 1 + round(extra)

    def _candidates(
        self, view: Fleet, request: LiveRequest, homes: Sequence[ReplicaId], blocks: dict[ReplicaState, int]
    ) -> list[ReplicaState]:
        holders = view.homes(request.adapter)
        most = self._given.holder_candidates
        if len(holders) > most:  # others each time
            first = request.key[1] % len(holders)
            holders = (holders[first:] + holders[:first])[:most]
        names = dict.fromkeys((*homes, *holders, *view.by_load.least(self._given.idle_candidates)))
        up, found = view.up, list(blocks)
        for name in names:
            replica = up[name]
            if replica.is_open and replica not in blocks:
                found.append(replica)
        return found
