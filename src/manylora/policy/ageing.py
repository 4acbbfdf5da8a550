"""When each of many sequences is due for another priority, in O(log n). Does not know what that is."""

from __future__ import annotations

from manylora.policy.ranking import Ranking
from manylora.policy.sequences import Sequence
from manylora.types import SequenceId


class Ageing:
    """Sequences by the moment that comes next for each."""

    def __init__(self) -> None:
        self._sequences: dict[SequenceId, Sequence] = {}
        self._moments = Ranking()

    def add(self, sequence: Sequence, moment: float) -> None:
        self._sequences[sequence.id] = sequence
        self._moments.put(sequence.id, (moment, sequence.id))

    def drop(self, sequence: Sequence) -> None:
        """It need not be there."""
        if self._sequences.pop(sequence.id, None) is not None:
            self._moments.drop(sequence.id)

    def take_due(self, now: float) -> Sequence | None:
        """The first whose moment has come, if any; it leaves."""
        number = self._moments.least()
        if number is None or self._moments.rank(number)[0] > now:
            return None
        self._moments.drop(number)
        return self._sequences.pop(number)
