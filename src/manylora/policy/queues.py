"""The queue that sequences wait in. Owns their order; decides nothing."""

from __future__ import annotations

import bisect
import collections
import itertools

from manylora.policy.fair import FairShares
from manylora.policy.sequences import Sequence
from manylora.types import AdapterId, SequenceId

Rank = tuple[int, bool, int, int, float, int]
"""Of a waiting sequence: level, whether it is new, its client's counter, the client, and arrival."""


class WaitingQueue:
    """Two queues, one behind the other, each in arrival order (``ranked.RankedQueue`` knows other orders).

    A sequence that returns (preempted, or a fork that found no room) comes before all that still wait for the
    first time; of those the oldest or the newest is next, as ``is_newest_first`` says at the moment.
    """

    def __init__(self) -> None:
        self.is_newest_first = False
        self.shares: FairShares | None = None
        """What clients were served, where the queue is fair to them."""
        self._returned: list[Sequence] = []
        # In arrival order. Either end of it is found at once, whatever has left; of a dict it is not.
        self._arrived = collections.OrderedDict[SequenceId, Sequence]()
        self.num_by_adapter = collections.Counter[AdapterId]()
        """How many wait for each adapter that any waits for."""
        self.num_tokens = 0
        """What those that wait had when they joined."""
        self._sizes: dict[SequenceId, int] = {}

    def __len__(self) -> int:
        return len(self._returned) + len(self._arrived)

    @property
    def num_arrived(self) -> int:
        """Requests that wait and were never admitted."""
        return len(self._arrived)

    def arrive(self, sequence: Sequence) -> None:
        """A sequence of a new request. Where it has waited elsewhere, those that came after it are behind it."""
        later = list(
            itertools.takewhile(lambda s: s.order > sequence.order, reversed(self._arrived.values()))
        )
        self._arrived[sequence.id] = sequence
        for other in reversed(later):
            self._arrived.move_to_end(other.id)
        self._count(sequence)

    def _count(self, sequence: Sequence) -> None:
        self.num_by_adapter[sequence.adapter] += 1
        self._sizes[sequence.id] = len(sequence.tokens)
        self.num_tokens += len(sequence.tokens)

    def put_back(self, sequence: Sequence) -> None:
        """A sequence of a request that was admitted before."""
        sequence.wait_again()
        self._count(sequence)
        bisect.insort(self._returned, sequence, key=lambda s: s.order)

    def admit(self, sequence: Sequence, num_cached: int) -> None:
        """It leaves the queue to be served; so many tokens of it are cached."""
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a waiting sequence out, wherever it stands; the caller then changes its stage."""
        self.num_tokens -= self._sizes.pop(sequence.id)
        self.num_by_adapter[sequence.adapter] -= 1
        if not self.num_by_adapter[sequence.adapter]:
            del self.num_by_adapter[sequence.adapter]
        if self._arrived.pop(sequence.id, None) is None:
            self._returned.remove(sequence)

    def forget(self, adapter: AdapterId) -> None:
        """The adapter is gone, and all its requests."""

    def age(self, now: float) -> None:
        """Those that have waited long enough for it go up to another priority; O(log n) for each."""

    # ------------------------------------------------------------ asked

    def first(self) -> Sequence | None:
        """The first in line."""
        if self._returned:
            return self._returned[0]
        if not self._arrived:
            return None
        values = self._arrived.values()
        return next(reversed(values) if self.is_newest_first else iter(values))

    def rank(self, sequence: Sequence) -> Rank:
        """What of several sequences that wait has the least is the first in line."""
        is_new = sequence.id in self._arrived
        return (0, is_new, 0, 0, *self._rank_among_equals(sequence, is_new))

    def _rank_among_equals(self, sequence: Sequence, is_new: bool) -> tuple[float, int]:
        arrived_s, number = sequence.order
        return (-arrived_s, -number) if self.is_newest_first and is_new else (arrived_s, number)

    def leading(self, count: int) -> list[Sequence]:
        """The first few in line, in the order in which they would be admitted if no token came meanwhile."""
        first = self._returned[:count]
        arrived = reversed(self._arrived.values()) if self.is_newest_first else self._arrived.values()
        first.extend(itertools.islice(arrived, count - len(first)))
        return first

    def arrived_until(self, moment: float) -> list[Sequence]:
        """Those that came by then and were never admitted, in arrival order."""
        early = []
        for sequence in self._arrived.values():
            if sequence.state.arrived_s > moment:
                break
            early.append(sequence)
        return early
