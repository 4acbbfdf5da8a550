"""dLoRA's long-term placement (§5.1): copies of adapters for the bursts that they may see.

The burst tolerance of an adapter is its peak over its load: the requests that replicas with the adapter could hold
in their unallocated memory, over the mean rate at which it is asked for. Numbers in, copies out.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence

from manylora.types import AdapterId

Copy = tuple[AdapterId, int]
"""An adapter, and the place of a replica in the sequences below."""
NOTHING: Mapping[AdapterId, Collection[int]] = {}


class _Bursts:
    """Burst tolerances while copies are added. ``free``: unallocated pages of each replica."""

    def __init__(
        self,
        free: Sequence[int],
        holders: Mapping[AdapterId, Iterable[int]],
        sizes: Mapping[AdapterId, int],
        loads: Mapping[AdapterId, float],
        request_pages: float,
    ) -> None:
        self.free = list(free)
        self.holders = {adapter: set(holders.get(adapter, ())) for adapter in sorted(loads)}
        self._on: list[set[AdapterId]] = [set() for _ in free]
        for adapter, places in self.holders.items():
            for place in places:
                self._on[place].add(adapter)
        self._sizes = sizes
        self._loads = loads
        self._request_pages = request_pages
        self._heap = [self._entry(adapter) for adapter in self.holders]
        heapq.heapify(self._heap)

    def tolerance(self, adapter: AdapterId) -> float:
        peak = sum(max(self.free[place], 0) for place in self.holders[adapter]) / self._request_pages
        return peak / self._loads[adapter]

    def _entry(self, adapter: AdapterId) -> tuple[float, float, AdapterId]:
        """Ordered by tolerance, of equal ones by the larger load, then by the lower id."""
        return self.tolerance(adapter), -self._loads[adapter], adapter

    def least(self) -> tuple[float, AdapterId]:
        """The least tolerance, and the adapter that has it."""
        while True:
            entry = self._heap[0]
            now = self._entry(entry[2])
            if entry == now:
                return now[0], now[2]
            heapq.heapreplace(self._heap, now)

    def change(self, adapter: AdapterId, place: int, is_added: bool) -> None:
        """Add a copy, or undo that."""
        if is_added:
            self.holders[adapter].add(place)
            self._on[place].add(adapter)
            self.free[place] -= self._sizes[adapter]
        else:
            self.free[place] += self._sizes[adapter]
        for each in sorted(self._on[place]):
            heapq.heappush(self._heap, self._entry(each))
        if not is_added:
            self.holders[adapter].remove(place)
            self._on[place].remove(adapter)
            heapq.heappush(self._heap, self._entry(adapter))


def plan_copies(
    free: Sequence[int],
    reserve: Sequence[int],
    holders: Mapping[AdapterId, Iterable[int]],
    sizes: Mapping[AdapterId, int],
    loads: Mapping[AdapterId, float],
    request_pages: float,
    barred: Mapping[AdapterId, Collection[int]] = NOTHING,
) -> list[Copy]:
    """Copies to preload, in order: each of the adapter that tolerates least, on the replica without it that has
    most unallocated memory (of equal ones the first), until that would make the least tolerance smaller; this
    last copy is not made.

    ``free``: unallocated pages of each replica; ``reserve``: how many of them copies may take; ``holders``: the
    replicas that have an adapter; ``loads``: requests a second, all above 0; ``request_pages``: of a mean request;
    ``barred``: replicas that cannot have an adapter.
    """
    if not loads:
        return []
    bursts, left = _Bursts(free, holders, sizes, loads, request_pages), list(reserve)
    copies: list[Copy] = []
    while True:
        before, adapter = bursts.least()
        size = sizes[adapter]
        places = [
            place
            for place in range(len(left))
            if place not in bursts.holders[adapter]
            and size <= left[place]
            and place not in barred.get(adapter, ())
        ]
        if not places:
            return copies
        place = max(places, key=lambda each: (bursts.free[each], -each))
        bursts.change(adapter, place, is_added=True)
        if bursts.least()[0] < before:
            bursts.change(adapter, place, is_added=False)
            return copies
        left[place] -= size
        copies.append((adapter, place))
