"""The cluster as the router knows it, and as routing policies see it: replicas, and indexes over them.

Owns the replicas that are up, the ones that may get work, the index by load, and the index of adapters' homes.
Policies read all of this and change none of it.
"""

from __future__ import annotations

import collections
import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from operator import add, sub

from manylora.config.routing import RouterConfig
from manylora.protocol import routing
from manylora.protocol.routing import BLOCK_TOKENS, NOWHERE, ON_DEVICE, ReplicaFacts, ReplicaId, ReplicaReport
from manylora.router.prefixes import Prefixes
from manylora.router.replicas import KindKey, ReplicaKind, ReplicaLoad, ReplicaState, kind_key
from manylora.router.requests import LiveRequest, Shape, shape_of
from manylora.types import BASE, AdapterId, RequestId


class LoadIndex:
    """The ids of replicas by an integer load. Each change takes O(log n), but for moving entries of small
    lists. ``loads``: those that some replica has, ascending."""

    def __init__(self) -> None:
        self._ids: dict[int, list[int]] = {}  # by load, ascending
        self.loads: list[int] = []

    def add(self, load: int, replica: int) -> None:
        ids = self._ids.get(load)
        if ids is None:
            self._ids[load] = [replica]
            insort(self.loads, load)
        else:
            insort(ids, replica)

    def remove(self, load: int, replica: int) -> None:
        ids = self._ids[load]
        if len(ids) == 1:
            del self._ids[load]
            del self.loads[bisect_left(self.loads, load)]
        else:
            del ids[bisect_left(ids, replica)]

    def ascending(self) -> Iterator[int]:
        """Yield ids, the least load first, then the lowest id; the index must not change meanwhile."""
        for load in self.loads:
            yield from self._ids[load]

    def descending(self, below: int) -> Iterator[int]:
        """Yield ids of a load below the bound, the largest first, then the highest id."""
        for place in range(bisect_left(self.loads, below) - 1, -1, -1):
            yield from reversed(self._ids[self.loads[place]])

    def least(self, count: int) -> list[int]:
        """Return the first ``count`` ids of ``ascending``."""
        return list(itertools.islice(self.ascending(), count))


_FIRST = 128.0
_KEEP = 0.9
"""The weight of an adapter's estimate against one new request."""


class OutputLengths:
    """The mean output length of all requests, and of each adapter's, in which late requests count most."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._count = 0
        self._adapters: dict[AdapterId, float] = {}

    @property
    def mean(self) -> float:
        """The mean of all requests that have ended; 128 before the first."""
        return self._sum / self._count if self._count else _FIRST

    def saw(self, adapter: AdapterId, num_tokens: int) -> None:
        """Learn from a request that has ended."""
        self._sum += num_tokens
        self._count += 1
        old = self._adapters.get(adapter)
        self._adapters[adapter] = num_tokens if old is None else _KEEP * old + (1 - _KEEP) * num_tokens

    def forget(self, adapter: AdapterId) -> None:
        self._adapters.pop(adapter, None)

    def expected(self, adapter: AdapterId) -> float:
        """Return the expected output of one more request."""
        found = self._adapters.get(adapter)
        return self.mean if found is None else found

    def remaining(self, adapter: AdapterId, num_generated: float, max_tokens: int) -> float:
        """Return how many tokens a request is still expected to generate, at least 1."""
        expected = min(self.expected(adapter), max_tokens) - num_generated
        return expected if expected > 1 else 1.0


class Fleet:
    """The replicas of the cluster, with their indexes.

    ``up``: by id; ``open_ids``: the ids of replicas that may get work, ascending; ``by_load``: these by their
    sequences. ``load``: the sum over all that are up. ``now``: the moment of the event that is handled.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.now = 0.0
        self.up: dict[ReplicaId, ReplicaState] = {}
        self.open_ids: list[ReplicaId] = []
        self.by_load = LoadIndex()
        self.prefixes = Prefixes(config.prefix_blocks)
        self.lengths = OutputLengths()
        self.adapters: dict[AdapterId, tuple[int, int]] = {BASE: (0, 0)}
        self._sizes: dict[tuple[int, int], tuple[int, int]] = {}  # one tuple for equal adapters
        self._homes: dict[AdapterId, tuple[ReplicaId, ...]] = {}
        self._shapes: collections.Counter[Shape] = collections.Counter()  # of those that do not drain
        self._lacking: collections.Counter[AdapterId] = collections.Counter()  # replicas that are up
        self.load = ReplicaLoad()
        self.version = 0  # one more whenever a replica comes or goes
        self.known_shapes: dict[Shape, Shape] = {}  # of all that ever were up
        self._kinds: dict[KindKey, ReplicaKind] = {}  # likewise

    # ------------------------------------------------------------ what policies ask

    def homes(self, adapter: AdapterId) -> tuple[ReplicaId, ...]:
        """Return the replicas that have the adapter in some tier, or get it with a request."""
        return self._homes.get(adapter, ())

    def find(self, replica: ReplicaId, epoch: int) -> ReplicaState | None:
        """Return this epoch of the replica if it is up."""
        found = self.up.get(replica)
        return found if found is not None and found.epoch == epoch else None

    def can_take(self, replica: ReplicaState | None, request: LiveRequest) -> bool:
        """Return whether the replica is open and could serve the request alone to its end."""
        return replica is not None and replica.is_open and self.fits_ever(replica, request)

    def fits_ever(self, replica: ReplicaState, request: LiveRequest) -> bool:
        """Return whether the replica serves the request's adapter and could hold it alone to its end."""
        return request.adapter not in replica.lacks and request.can_ever_fit(replica.shape)

    def num_cached(self, replica: ReplicaState, request: LiveRequest) -> int:
        """Return how many tokens of the prompt the replica's prefix cache is believed to have."""
        if not request.prefix:
            return 0
        return BLOCK_TOKENS * self.prefixes.cached_blocks(request.prefix, replica)

    def is_any_shape_right(self, request: LiveRequest) -> bool:
        """Return whether a replica that was ever up could hold the request."""
        return any(map(request.can_ever_fit, self.known_shapes))

    def is_any_right(self, request: LiveRequest) -> bool:
        """Return whether a replica that is up and does not drain could serve the request."""
        if request.adapter not in self._lacking:
            return any(map(request.can_ever_fit, self._shapes))
        staying = (replica for replica in self.up.values() if replica.drains_from_s is None)
        return any(self.fits_ever(replica, request) for replica in staying)

    def why_none(self, request: LiveRequest) -> str:
        """Return why no replica could serve the request, for people."""
        if request.adapter in self._lacking:
            return "no replica that is up can hold the request and has its adapter"
        return "no replica that can hold the request is up"

    def lacking(self, adapter: AdapterId) -> frozenset[ReplicaId]:
        """Return the replicas that cannot serve the adapter."""
        if adapter not in self._lacking:
            return frozenset()
        return frozenset(replica.id for replica in self.up.values() if adapter in replica.lacks)

    @property
    def mean_load(self) -> ReplicaLoad:
        """The mean load of a replica."""
        count = len(self.up) or 1
        return ReplicaLoad(*[total / count for total in self.load])

    def remaining_tokens(self, request: LiveRequest) -> float:
        """Return how many tokens each sample of the request is still expected to generate."""
        return self.lengths.remaining(
            request.adapter, request.num_generated / request.samples, request.max_tokens
        )

    # ------------------------------------------------------------ adapters

    def list_adapter(self, event: routing.Listed) -> None:
        size = event.rank, event.num_pages
        self.adapters[event.adapter] = self._sizes.setdefault(size, size)

    def unlist_adapter(self, event: routing.Unlisted) -> None:
        if event.adapter != BASE:
            self.adapters.pop(event.adapter, None)
            self.lengths.forget(event.adapter)

    def _note_home(self, adapter: AdapterId, replica: ReplicaState) -> None:
        """Note whether the replica has the adapter in some tier, or gets it with a request."""
        homes = self._homes.get(adapter, ())
        place = bisect_left(homes, replica.id)
        is_home = adapter in replica.adapters or adapter in replica.residency
        if adapter == BASE or is_home == (homes[place : place + 1] == (replica.id,)):
            return
        if is_home:
            self._homes[adapter] = (*homes[:place], replica.id, *homes[place:])
        elif len(homes) > 1:
            self._homes[adapter] = homes[:place] + homes[place + 1 :]
        else:
            del self._homes[adapter]

    # ------------------------------------------------------------ requests

    def take(self, replica: ReplicaState, request: LiveRequest) -> int:
        """Assign the request to the replica; return the assignment's number."""
        before = replica.load
        cached = BLOCK_TOKENS * self.prefixes.add(request.prefix, replica)
        number = replica.take(request, cached)
        self._recount(replica, request.adapter, before)
        return number

    def hold(self, replica: ReplicaState, request: LiveRequest) -> None:
        """Add a request that the replica has already, by another router's assignment."""
        before = replica.load
        replica.hold(request)
        self._recount(replica, request.adapter, before)
        self.prefixes.add(request.prefix, replica)

    def drop(self, replica: ReplicaState, request: LiveRequest) -> None:
        """Remove the request from the replica."""
        before = replica.load
        replica.drop(request)
        self._recount(replica, request.adapter, before)

    def _recount(self, replica: ReplicaState, adapter: AdapterId, before: ReplicaLoad) -> None:
        """Update the sums and indexes after the replica got or lost a request for the adapter."""
        self._reload(before, replica.load)
        self._note_home(adapter, replica)
        if replica.is_open:
            self.by_load.remove(int(before.rows), replica.id)
            self.by_load.add(replica.rows, replica.id)

    def _reload(self, before: ReplicaLoad, now: ReplicaLoad) -> None:
        if now != before:
            self.load = ReplicaLoad(*map(add, self.load, map(sub, now, before)))

    # ------------------------------------------------------------ replicas

    def add(self, replica: ReplicaId, epoch: int, facts: ReplicaFacts) -> ReplicaState:
        """Add a replica that is up."""
        # One tuple for equal shapes: requests remember the last that they were asked about.
        shape = shape_of(facts)
        shape = self.known_shapes.setdefault(shape, shape)
        kind = self._kinds.setdefault(kind_key(facts), ReplicaKind(facts))
        state = self.up[replica] = ReplicaState(replica, epoch, facts, shape, kind, self.now)
        self._shapes[shape] += 1
        self.version += 1
        self._reopen(state)
        return state

    def remove(self, replica: ReplicaState) -> None:
        """Remove a replica that is down; its requests must have been dropped."""
        replica.end()
        self._reopen(replica)
        if replica.drains_from_s is None:
            self._forget_shape(replica.shape)
        residency, replica.residency = replica.residency, {}
        for adapter in residency:
            self._note_home(adapter, replica)
        self.note_lacks(replica, ())
        self._reload(replica.load, ReplicaLoad())
        self.version += 1
        del self.up[replica.id]

    def note_lacks(self, replica: ReplicaState, lacks: Iterable[AdapterId]) -> None:
        """Set the adapters that the replica cannot serve."""
        before = replica.lacks
        replica.lacks = frozenset(lacks)
        self._lacking.update(replica.lacks - before)
        self._lacking.subtract(before - replica.lacks)
        self._lacking = +self._lacking  # of counts above 0

    def drain(self, replica: ReplicaState, since_s: float) -> None:
        """Close the replica for good, draining since ``since_s``; the earliest moment counts."""
        if replica.drains_from_s is None:
            self._forget_shape(replica.shape)
            replica.drains_from_s = since_s
            self._reopen(replica)
        replica.drains_from_s = min(replica.drains_from_s, since_s)

    def suspect(self, replica: ReplicaState) -> None:
        """Close the replica until it reports again."""
        replica.is_suspect = True
        self._reopen(replica)

    def reserve(self, replica: ReplicaState, is_reserved: bool) -> None:
        """Close the replica for all requests but one, or let it have any request again."""
        replica.is_reserved = is_reserved
        self._reopen(replica)

    def _forget_shape(self, shape: Shape) -> None:
        self._shapes[shape] -= 1
        if not self._shapes[shape]:
            del self._shapes[shape]

    def _reopen(self, replica: ReplicaState) -> None:
        """Let the replica get new work, or none, as its present state says."""
        is_held = replica.is_suspect or replica.is_reserved or replica.drains_from_s is not None
        was_open, replica.is_open = replica.is_open, replica.is_up and not is_held
        if replica.is_open and not was_open:
            insort(self.open_ids, replica.id)
            self.by_load.add(replica.rows, replica.id)
        elif was_open and not replica.is_open:
            del self.open_ids[bisect_left(self.open_ids, replica.id)]
            self.by_load.remove(replica.rows, replica.id)

    # ------------------------------------------------------------ reports

    def receive(self, replica: ReplicaState, report: ReplicaReport) -> list[RequestId]:
        """Take a newer report; return the requests whose assignments it has seen."""
        before = replica.load
        seen = replica.receive(report, self.now)
        self._reload(before, replica.load)
        replica.is_suspect = False
        self._reopen(replica)
        status = report.status
        if status.is_full:
            named = {adapter for adapter, tier in status.residency if tier != NOWHERE}
            for adapter in [each for each in replica.residency if each not in named]:
                self._set_tier(replica, adapter, NOWHERE)
        for adapter, tier in status.residency:
            self._set_tier(replica, adapter, tier)
        if status.evicted:
            self.prefixes.evict(status.evicted, replica)
        return seen

    def _set_tier(self, replica: ReplicaState, adapter: AdapterId, tier: int) -> None:
        if adapter == BASE or not NOWHERE <= tier <= ON_DEVICE:
            return
        was_there = adapter in replica.residency
        if tier != NOWHERE:
            replica.residency[adapter] = tier
        elif was_there:
            del replica.residency[adapter]
        if was_there != (tier != NOWHERE):
            self._note_home(adapter, replica)
