"""Sequences in line: the first of many in O(log n), though any may leave, and though ranks change.

Owns the order among what it is given; does not know where that comes from.
"""

from __future__ import annotations

from typing import NamedTuple

from manylora.policy.fair import FairShares
from manylora.policy.ranking import Ranking
from manylora.policy.sequences import Sequence


class Line:
    """Sequences by arrival; which end is the first, is asked."""

    def __init__(self) -> None:
        self._members: dict[int, Sequence] = {}
        self._oldest = Ranking()
        self._newest: Ranking | None = None  # from when it is asked for

    def __len__(self) -> int:
        return len(self._members)

    def add(self, sequence: Sequence) -> None:
        self._members[sequence.id] = sequence
        self._oldest.put(sequence.id, sequence.order)
        if self._newest is not None:
            self._newest.put(sequence.id, _reversed(sequence))

    def drop(self, sequence: Sequence) -> None:
        del self._members[sequence.id]
        self._oldest.drop(sequence.id)
        if self._newest is not None:
            self._newest.drop(sequence.id)

    def first(self, newest: bool = False) -> Sequence | None:
        if newest and self._newest is None:
            self._newest = Ranking()
            for sequence in self._members.values():
                self._newest.put(sequence.id, _reversed(sequence))
        ranking = self._newest if newest and self._newest is not None else self._oldest
        number = ranking.least()
        return None if number is None else self._members[number]


def _reversed(sequence: Sequence) -> tuple[float, int]:
    arrived_s, number = sequence.order
    return -arrived_s, -number


class LinePlace(NamedTuple):
    """Where a sequence stands; the least is first, and within one place arrival decides.

    ``level``: its priority, less what it has gained by waiting. ``is_new``: it was never admitted.
    """

    level: int
    is_new: bool
    client: int


class Ranks:
    """Ranks by place. Among new sequences of one level the client is next whose counter is least."""

    def __init__(self, shares: FairShares | None) -> None:
        self._shares = shares
        self._lines: dict[LinePlace, Line] = {}
        self._levels = Ranking()
        self._num_by_level: dict[int, int] = {}
        self._clients: dict[int, Ranking] = {}  # by level, those with new sequences

    def __bool__(self) -> bool:
        return bool(self._lines)

    @property
    def num_levels(self) -> int:
        return len(self._num_by_level)

    def add(self, sequence: Sequence, place: LinePlace) -> None:
        line = self._lines.get(place)
        if line is None:
            line = self._lines[place] = Line()
        line.add(sequence)
        level = place.level
        if place.is_new:
            ranking = self._clients.get(level)
            if ranking is None:
                ranking = self._clients[level] = Ranking()
            ranking.put(place.client, self._rank(place.client))
        if level not in self._num_by_level:
            self._num_by_level[level] = 0
            self._levels.put(level, (level, 0))
        self._num_by_level[level] += 1

    def drop(self, sequence: Sequence, place: LinePlace) -> None:
        line = self._lines[place]
        line.drop(sequence)
        if not line:
            del self._lines[place]
            if place.is_new:
                self._clients[place.level].drop(place.client)
        self._num_by_level[place.level] -= 1
        if not self._num_by_level[place.level]:
            del self._num_by_level[place.level]
            self._levels.drop(place.level)
            self._clients.pop(place.level, None)

    def counter_fell(self, client: int) -> None:
        """What was charged to it ahead has been given back: no rank of it may be above its counter."""
        for ranking in self._clients.values():
            if client in ranking:
                ranking.put(client, self._rank(client))

    def first(self, newest: bool) -> Sequence | None:
        """The first of all."""
        level = self._levels.least()
        if level is None:
            return None
        returned = self._lines.get(LinePlace(level, False, 0))
        if returned is not None:
            return returned.first()
        # Counters only grow, but where ``counter_fell`` is told: no client is ranked by more than its counter.
        client = self._clients[level].least_by(self._rank)
        assert client is not None, "at a level without sequences that return new ones wait"
        return self.first_at(LinePlace(level, True, client), newest)

    def first_at(self, place: LinePlace, newest: bool) -> Sequence | None:
        """The first of those at one place."""
        line = self._lines.get(place)
        return None if line is None else line.first(newest and place.is_new)

    def _rank(self, client: int) -> tuple[int, int]:
        return self._shares.counter(client) if self._shares is not None else 0, client
