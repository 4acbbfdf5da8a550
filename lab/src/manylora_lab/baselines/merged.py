"""``merged``: one adapter at a time is served, merged (the baseline of dLoRA and of S-LoRA).

Owns whose turn it is. The base has turns like an adapter; its own weights serve it.
"""

from __future__ import annotations

from manylora.config.policy import PolicyConfig
from manylora.policy.merging.choice import Choice, MergePolicy, MergeView
from manylora.policy.sequences import Sequence
from manylora.types import BASE, AdapterId, SequenceId


class AlwaysMerged(MergePolicy):
    """The adapter of the oldest request has the turn, with all its requests, until it has none left.

    It loses the turn to those that it has paused when they have been paused for ``starve_s``, and where none is
    paused to the first in line when that has been first for so long. From then on no request goes before that one,
    so that the adapters that take turns come to their end, and the first in line to its turn.
    """

    def __init__(self, config: PolicyConfig, times: object) -> None:
        self._starve_s = config.merge.starve_s
        self._turn: AdapterId | None = None
        self._first: SequenceId | None = None  # in line, of another
        self._first_since_s = 0.0

    def choose(self, view: MergeView) -> Choice:
        """See MergePolicy."""
        if not view.can_merge and view.merged == BASE:
            self._turn = None
            return Choice(BASE)  # a switch has failed: all run unmerged for a while
        paused = view.longest_paused(self._turn)
        starved = self._starved(view)
        self._take_turns(view, paused, starved)
        turn = self._turn
        if turn is None:
            return Choice(view.merged)
        line = () if starved is not None and starved.adapter != turn else (turn,)
        if view.ready[turn] and view.may_switch_to(turn):
            return Choice(turn, turn, line, reason="its turn")
        # Until the next one can run, the one before goes on; it gives up a slot where all are taken.
        first = None if view.num_admitted[turn] else view.waiting.first_of(turn)
        return Choice(view.merged, view.merged, line, () if first is None else (first,))

    def _take_turns(self, view: MergeView, paused: Sequence | None, starved: Sequence | None) -> None:
        turn = self._turn
        is_left = turn is not None and (
            view.num_admitted[turn] > 0 or (paused is None and view.num_unfinished(turn) > 0)
        )
        if paused is not None and paused.paused_s is not None:
            if not is_left or view.now - paused.paused_s >= self._starve_s:
                self._turn = paused.adapter
        elif not is_left:
            first = view.admitted[0] if view.admitted else view.waiting.first()
            self._turn = None if first is None else first.adapter
        elif starved is not None:
            self._turn = starved.adapter

    def _starved(self, view: MergeView) -> Sequence | None:
        """The first in line, where it is another's and has been first for so long."""
        first = view.waiting.first()
        if first is None or first.adapter == self._turn:
            return None
        if first.id != self._first:
            self._first, self._first_since_s = first.id, view.now
        return first if view.now - self._first_since_s >= self._starve_s else None
