"""S-LoRA's adapter clustering (§4.2, appendix A): few adapters at once, and for how long a request is overtaken.

Owns the choice of the next sequence while as many adapters run as may; does not know the queue's order.
"""

from __future__ import annotations

from collections.abc import Iterable

from manylora.policy.queue import WaitingQueue
from manylora.policy.sequences import Sequence
from manylora.types import BASE, AdapterId

OVERTAKEN_S = 2.0
"""How long the first in line may be overtaken."""


class Clusters:
    """While ``limit`` adapters have admitted sequences, those of one of them, or of the base, go first.

    Where there are none of these, a soft limit takes the first in line all the same, so that the device never
    idles for want of an adapter; a hard one lets it wait until fewer run. Under a soft limit only equals are
    overtaken, those at one place (``lines.LinePlace``). Under a hard one what is first cannot run, so the first
    that can goes before it. What stands first in line and has been overtaken for ``OVERTAKEN_S`` is overtaken no
    more.
    """

    def __init__(self, limit: int, is_hard: bool, waiting: WaitingQueue) -> None:
        self._limit = limit
        self._is_hard = is_hard
        self._waiting = waiting
        self._first: Sequence | None = None  # in line, when it was asked last

    def candidates(self, admitted: Iterable[Sequence], now: float) -> list[Sequence]:
        """The sequence to be admitted next beside these, and the one to take instead where that finds no room."""
        self._first = first = self._waiting.first()
        if first is None:
            return []
        running = _adapters(admitted)
        if len(running) < self._limit or first.adapter in running or first.adapter == BASE:
            return [first]
        since_s = first.overtaken_s
        chosen = None
        if since_s is None or now - since_s < OVERTAKEN_S:
            chosen = self._overtaker(first, [BASE, *sorted(running)])
        return ([] if chosen is None else [chosen]) + ([] if self._is_hard else [first])

    def lets_in(self, adapter: AdapterId, admitted: Iterable[Sequence]) -> bool:
        """Whether a sequence of the adapter may be admitted beside these, whatever its place in line."""
        self._first = None  # none is overtaken for another's adapter
        if not self._is_hard or adapter == BASE:
            return True
        running = _adapters(admitted)
        return len(running) < self._limit or adapter in running

    def overtakes(self, admitted: Sequence, now: float) -> bool:
        """Whether the candidate that was admitted has overtaken the first in line, which takes note of it."""
        if self._first is None or admitted is self._first:
            return False
        self._first.note_overtaken(now)
        return True

    def _overtaker(self, first: Sequence, adapters: list[int]) -> Sequence | None:
        waiting = self._waiting
        if self._is_hard:
            found = [waiting.first_of(adapter) for adapter in adapters]
        else:
            found = [waiting.first_beside(first, adapter) for adapter in adapters]
        return min((s for s in found if s is not None), key=waiting.rank, default=None)


def _adapters(admitted: Iterable[Sequence]) -> set[AdapterId]:
    return {sequence.adapter for sequence in admitted if sequence.adapter != BASE}
