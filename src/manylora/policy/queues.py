"""The queue that sequences wait in. Owns their order; decides nothing."""

from __future__ import annotations

import bisect
import collections

from manylora.policy.sequences import WAITING, Sequence
from manylora.types import AdapterId


class WaitingQueue:
    """Two queues, one behind the other, each in arrival order.

    A sequence that returns (preempted, or a fork that found no room) comes before all that still wait for the
    first time; of those the oldest or the newest is next, as ``is_newest_first`` says at the moment. Admission
    takes only the first in line, so the second queue shrinks at its ends.
    """

    def __init__(self) -> None:
        self.is_newest_first = False
        self._returned: list[Sequence] = []
        self._arrived: collections.deque[Sequence] = collections.deque()
        self._num_arrived = 0
        self.num_by_adapter = collections.Counter[AdapterId]()
        """How many wait for each adapter that any waits for."""

    def __len__(self) -> int:
        return len(self._returned) + self._num_arrived

    @property
    def num_arrived(self) -> int:
        """Requests that wait and were never admitted."""
        return self._num_arrived

    def arrive(self, sequence: Sequence) -> None:
        """A sequence of a new request, later than all others."""
        self._arrived.append(sequence)
        self._num_arrived += 1
        self.num_by_adapter[sequence.adapter] += 1

    def put_back(self, sequence: Sequence) -> None:
        """A sequence of a request that was admitted before."""
        sequence.wait_again()
        self.num_by_adapter[sequence.adapter] += 1
        bisect.insort(self._returned, sequence, key=lambda s: s.order)

    def first(self) -> Sequence | None:
        """The first in line."""
        if self._returned:
            return self._returned[0]
        arrived = self._arrived
        if self.is_newest_first:
            while arrived and arrived[-1].stage is not WAITING:
                arrived.pop()
            return arrived[-1] if arrived else None
        while arrived and arrived[0].stage is not WAITING:
            arrived.popleft()
        return arrived[0] if arrived else None

    def remove(self, sequence: Sequence) -> None:
        """Take a waiting sequence out, wherever it stands; the caller then changes its stage for good.

        Inside ``_arrived`` it is only skipped later: a middle removal there means that it has ended.
        """
        self.num_by_adapter[sequence.adapter] -= 1
        if not self.num_by_adapter[sequence.adapter]:
            del self.num_by_adapter[sequence.adapter]
        if sequence in self._returned:
            self._returned.remove(sequence)
            return
        self._num_arrived -= 1
        if self._arrived[0] is sequence:
            self._arrived.popleft()
        elif self._arrived[-1] is sequence:
            self._arrived.pop()

    def leading(self, count: int) -> list[Sequence]:
        """The first few in line."""
        first = self._returned[:count]
        for sequence in reversed(self._arrived) if self.is_newest_first else self._arrived:
            if len(first) >= count:
                break
            if sequence.stage is WAITING:
                first.append(sequence)
        return first

    def arrived_until(self, moment: float) -> list[Sequence]:
        """Those that came by then and were never admitted, in arrival order."""
        early = []
        for sequence in self._arrived:
            if sequence.state.arrived_s > moment:
                break
            if sequence.stage is WAITING:
                early.append(sequence)
        return early

    def members(self) -> list[Sequence]:
        """All that wait: those that returned, then the others, each in arrival order."""
        return self._returned + [s for s in self._arrived if s.stage is WAITING]
