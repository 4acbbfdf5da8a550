"""When each of many sequences is due for another priority, in O(log n). Does not know what that is."""

from __future__ import annotations

import heapq

from manylora.policy.sequences import Sequence
from manylora.types import SequenceId

_SLACK = 16


class Ageing:
    """Sequences by the moment that comes next for each."""

    def __init__(self) -> None:
        self._due: dict[SequenceId, tuple[float, Sequence]] = {}
        self._heap: list[tuple[float, SequenceId]] = []

    def add(self, sequence: Sequence, moment: float) -> None:
        self._due[sequence.id] = moment, sequence
        heapq.heappush(self._heap, (moment, sequence.id))

    def drop(self, sequence: Sequence) -> None:
        """It need not be there."""
        if self._due.pop(sequence.id, None) is not None and len(self._heap) > 2 * len(self._due) + _SLACK:
            self._heap = [(moment, number) for number, (moment, _) in self._due.items()]
            heapq.heapify(self._heap)

    def take_due(self, now: float) -> Sequence | None:
        """The first whose moment has come, if any; it leaves."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            moment, number = heapq.heappop(heap)
            due = self._due.get(number)
            if due is not None and due[0] == moment:
                del self._due[number]
                return due[1]
        return None
