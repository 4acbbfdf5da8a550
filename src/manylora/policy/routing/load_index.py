"""Replicas by load: the least, the fullest below a bound, and the extremes, without a look at all of them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator


class LoadIndex:
    """Ids by an integer load. Adding, removing and finding are O(log n) but for moving entries of small lists."""

    def __init__(self) -> None:
        self._ids: dict[int, list[int]] = {}  # by load, ascending
        self._loads: list[int] = []  # that some have, ascending

    def add(self, load: int, replica: int) -> None:
        ids = self._ids.get(load)
        if ids is None:
            self._ids[load] = [replica]
            insort(self._loads, load)
        else:
            insort(ids, replica)

    def remove(self, load: int, replica: int) -> None:
        ids = self._ids[load]
        if len(ids) == 1:
            del self._ids[load]
            del self._loads[bisect_left(self._loads, load)]
        else:
            del ids[bisect_left(ids, replica)]

    @property
    def least_load(self) -> int:
        """Of those that there are; there must be one."""
        return self._loads[0]

    @property
    def largest_load(self) -> int:
        return self._loads[-1]

    def ascending(self) -> Iterator[int]:
        """Least load first, of equal ones the lowest id. Not to be changed meanwhile."""
        for load in self._loads:
            yield from self._ids[load]

    def descending(self, below: int) -> Iterator[int]:
        """Those of a load below the bound, largest first, of equal ones the highest id."""
        for place in range(bisect_left(self._loads, below) - 1, -1, -1):
            yield from reversed(self._ids[self._loads[place]])

    def least(self, count: int) -> list[int]:
        """The first of ``ascending``."""
        found: list[int] = []
        for load in self._loads:
            ids = self._ids[load]
            missing = count - len(found)
            if len(ids) >= missing:
                return found + ids[:missing]
            found += ids
        return found
