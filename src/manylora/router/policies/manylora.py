"""Routes to the replica where a request costs the fewest seconds, its own and those of other requests: our
policy."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from manylora.config.routing import ManyloraParameters
from manylora.protocol.hashing import hash_number
from manylora.protocol.routing import ReplicaId
from manylora.router.fleet import Fleet
from manylora.router.policies.cost import cheapest, load_s, wait_s
from manylora.router.policies.policy import Relocation, RoutingPolicy, Wish
from manylora.router.replicas import ReplicaState
from manylora.router.requests import LiveRequest
from manylora.types import BASE, AdapterId


def balance(view: Fleet, most_moves: int, least_ratio: float) -> list[Relocation]:
    """Plan at most ``most_moves`` moves from the replica with the longest wait to that with the shortest,
    newest requests first.

    A request that has not begun gains the difference of the waits. A running one gains the difference of its
    remaining steps. The cost is the tokens to compute again, and the load of its adapter. Every move gains
    ``least_ratio`` times its cost.
    """
    waits = {name: wait_s(view, view.up[name], 1, 0) for name in view.open_ids}
    if len(waits) < 2:
        return []
    source = view.up[max(waits, key=lambda name: (waits[name], -name))]
    target = view.up[min(waits, key=lambda name: (waits[name], name))]
    gap_s = waits[source.id] - waits[target.id]
    if gap_s <= 0:
        return []
    moves: list[Relocation] = []
    for request in source.movable():
        if len(moves) == most_moves:
            break
        if not view.fits_ever(target, request) or not target.has_room(request):
            continue
        cached = min(view.num_cached(target, request), request.num_tokens - 1)
        prefill_s = (request.num_tokens - cached) * target.kind.token_s
        cost_s = prefill_s + load_s(target, request.adapter, request.adapter_pages)
        gain_s = gap_s
        if request.num_generated:
            gain_s = min(gap_s, view.remaining_tokens(request) * max(source.step_s - target.step_s, 0.0))
        if gain_s > least_ratio * cost_s:
            moves.append(
                Relocation(
                    request.id, request.attempt, source.id, target.id, "balance", gain_s, least_ratio * cost_s
                )
            )
            gap_s -= prefill_s + request.num_tokens * source.kind.token_s
    return moves


_POINTS = 16
"""The number of points of each replica on the ring. More points make the shares more even."""


class HomeRing:
    """A ring of consistent hashing (Karger 1997). Replicas have many points on the ring; an adapter's homes
    are the first replicas after its own point. One replica more or less changes the homes of few adapters."""

    def __init__(self) -> None:
        self._version = -1
        self._points: list[int] = []
        self._replicas: list[ReplicaId] = []

    def homes(self, view: Fleet, adapter: AdapterId, count: int) -> list[ReplicaId]:
        """Return the first ``count`` open homes of the adapter, in their order."""
        if self._version != view.version:
            self._build(view)
        found: list[ReplicaId] = []
        replicas, up = self._replicas, view.up
        place = bisect_right(self._points, hash_number(adapter))
        for step in range(place - len(replicas), place):  # past the end, from the ring's beginning
            replica = replicas[step]
            if replica not in found and up[replica].is_open:
                found.append(replica)
                if len(found) == count:
                    break
        return found

    def _build(self, view: Fleet) -> None:
        self._version = view.version
        points = sorted(
            (hash_number((replica << 8) + point), replica) for replica in view.up for point in range(_POINTS)
        )
        self._points = [point for point, _ in points]
        self._replicas = [replica for _, replica in points]


class CheapestReplica(RoutingPolicy):
    """A policy that takes the cheapest of a few candidates.

    The candidates are the adapter's homes, replicas that have the adapter, those that have most of the
    prompt, and the least loaded ones. An adapter has one home. It gets one more each time that a request
    finds a queue at all its homes; the further homes are forgotten as time passes. Among equal costs the
    earlier candidate wins.
    """

    parameters = ManyloraParameters

    def __init__(self, parameters: ManyloraParameters) -> None:
        self._given = parameters
        self._ring = HomeRing()
        self._extra_homes: dict[AdapterId, tuple[float, float]] = {}  # their number, and its time
        self._balanced_s = float("-inf")

    def choose(self, view: Fleet, request: LiveRequest) -> ReplicaState | None:
        """See RoutingPolicy."""
        blocks = view.prefixes.match(request.prefix, self._given.prefix_candidates)
        homes: Sequence[ReplicaId] = ()
        if request.adapter != BASE:
            homes = self._ring.homes(view, request.adapter, self.num_homes(view.now, request.adapter))
        best = cheapest(view, request, self._candidates(view, request, homes, blocks), blocks)
        if best is None:  # no candidate can ever hold it
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
        """Return the number of homes that the adapter has at the moment."""
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
        if len(holders) > most:  # different ones for each request
            first = request.key[1] % len(holders)
            holders = (holders[first:] + holders[:first])[:most]
        names = dict.fromkeys((*homes, *holders, *view.by_load.least(self._given.idle_candidates)))
        up, found = view.up, list(blocks)
        for name in names:
            replica = up[name]
            if replica.is_open and replica not in blocks:
                found.append(replica)
        return found
