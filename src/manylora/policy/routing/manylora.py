"""Ours: the replica where a request costs the fewest seconds, its own and those of others."""

from __future__ import annotations

from collections.abc import Sequence

from manylora.config.routing import ManyloraParameters
from manylora.policy.routing.balance import balance
from manylora.policy.routing.fleet import Fleet
from manylora.policy.routing.policy import RoutingPolicy, Wish
from manylora.policy.routing.queueing import load_s, wait_s
from manylora.policy.routing.replicas import ReplicaState
from manylora.policy.routing.requests import LiveRequest
from manylora.policy.routing.ring import HomeRing
from manylora.protocol.routing import BLOCK_TOKENS, ReplicaId
from manylora.types import BASE, AdapterId


class CheapestReplica(RoutingPolicy):
    """Looks at the adapter's homes, at replicas that have it, at those that have most of the prompt, and at the
    least loaded. An adapter has one home, and one more each time that a request finds a queue at all of them; the
    further ones are forgotten as time passes. Of equal costs the one that was looked at first has the request."""

    name = "manylora"
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
            homes = self._ring.homes(view, request.adapter, self._num_homes(view, request.adapter))
        best, least_s = None, float("inf")
        for replica in self._candidates(view, request, homes, blocks):
            if not view.fits_ever(replica, request):
                continue
            cost_s = self.cost_s(view, replica, request, blocks.get(replica, 0))
            if cost_s < least_s:
                best, least_s = replica, cost_s
        if best is None:
            return next((view.up[n] for n in view.open_ids if view.fits_ever(view.up[n], request)), None)
        if homes and all(wait_s(view, view.up[home], 1, 0) > self._given.home_queue_s for home in homes):
            self._extra_homes[request.adapter] = float(len(homes)), view.now
        return best

    def on_timer(self, view: Fleet) -> Sequence[Wish]:
        """See RoutingPolicy."""
        if view.now - self._balanced_s < self._given.balance_s:
            return ()
        self._balanced_s = view.now
        return balance(view, self._given.most_moves, self._given.move_gain)

    def cost_s(self, view: Fleet, replica: ReplicaState, request: LiveRequest, num_blocks: int) -> float:
        """Seconds until its first token, and those by which it makes all that run there slower, itself included,
        and what is lost with the pages that it pushes out."""
        rows, samples = replica.rows, request.samples
        tokens = request.num_tokens
        computed = max(tokens - num_blocks * BLOCK_TOKENS, 1)
        pages = replica.pages_for(request)
        loads_s = load_s(replica, request.adapter, request.adapter_pages)
        is_new = request.adapter != BASE and request.adapter not in replica.adapters
        most = replica.facts.max_seqs
        before, after = min(rows, most), min(rows + samples, most)
        num_adapters, adapter_pages = len(replica.adapters), replica.adapter_pages
        now_s = replica.step_s(before, replica.kv_tokens, num_adapters, adapter_pages)
        then_s = replica.step_s(
            after,
            replica.kv_tokens + tokens * samples,
            num_adapters + is_new,
            adapter_pages + is_new * request.adapter_pages,
        )
        harm_s = (after * then_s - before * now_s) * view.remaining_tokens(request)
        pushed_out = min(max(pages - replica.spare_pages, 0), pages)
        return (
            wait_s(view, replica, samples, pages)
            + computed * replica.token_s
            + loads_s
            + harm_s
            + pushed_out * replica.page_price_s
        )

    def _candidates(
        self, view: Fleet, request: LiveRequest, homes: Sequence[ReplicaId], blocks: dict[ReplicaState, int]
    ) -> list[ReplicaState]:
        names = dict.fromkeys(homes)
        holders = view.homes(request.adapter)
        most = self._given.holder_candidates
        if len(holders) > most:  # others each time
            first = request.key[1] % len(holders)
            holders = (holders[first:] + holders[:first])[:most]
        names.update(dict.fromkeys(holders))
        names.update(dict.fromkeys(replica.id for replica in blocks))
        names.update(dict.fromkeys(view.by_load.least(self._given.idle_candidates)))
        return [replica for replica in map(view.up.__getitem__, names) if replica.is_open]

    def _num_homes(self, view: Fleet, adapter: AdapterId) -> int:
        extra, at_s = self._extra_homes.get(adapter, (0.0, 0.0))
        if extra:
            extra *= 2.0 ** ((at_s - view.now) / self._given.home_half_life_s)
            if extra < 0.5:
                del self._extra_homes[adapter]
        return 1 + round(extra)
