"""A heap of numbers whose ranks change, with lazy deletion. Does not know what the numbers stand for."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Rank = tuple[float, int]

_SLACK = 16


class Ranking:
    """Numbers by rank, the smallest first, each change in O(log n). A number that was dropped, or has a new rank,
    leaves the heap when it reaches the top, or when half of the heap is stale."""

    def __init__(self) -> None:
        self._ranks: dict[int, Rank] = {}
        self._heap: list[tuple[float, int, int]] = []

    def put(self, number: int, rank: Rank) -> None:
        """Add a number, or change its rank."""
        if self._ranks.get(number) != rank:
            self._ranks[number] = rank
            heapq.heappush(self._heap, (*rank, number))
            self._shrink()

    def __contains__(self, number: int) -> bool:
        return number in self._ranks

    def rank(self, number: int) -> Rank:
        """Return the rank of a number that was put."""
        return self._ranks[number]

    def drop(self, number: int) -> None:
        del self._ranks[number]
        self._shrink()

    def _shrink(self) -> None:
        if len(self._heap) > 2 * len(self._ranks) + _SLACK:
            self._heap = [(*rank, number) for number, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def least(self) -> int | None:
        """Return the number of the smallest rank, or None."""
        heap = self._heap
        while heap:
            first, second, number = heap[0]
            if self._ranks.get(number) == (first, second):
                return number
            heapq.heappop(heap)
        return None

    def least_by(self, rank_of: Callable[[int], Rank]) -> int | None:
        """Return the smallest by ``rank_of``, whose ranks are never below those that were put."""
        while (number := self.least()) is not None:
            self.put(number, rank_of(number))
            if self.least() == number:
                return number
        return None
