"""A merge policy for tests: it switches where no policy would for so few requests."""

from __future__ import annotations

from manylora.policy.merging.choice import Choice, MergePolicy, MergeView, StepShape
from manylora.policy.sequences import Scheduled
from manylora.types import BASE


class EveryFewSteps(MergePolicy):
    """Merges another adapter every few steps, and none every now and then, whatever it is worth."""

    def __init__(self) -> None:
        self._num_steps = 0

    def choose(self, view: MergeView) -> Choice:
        """See MergePolicy."""
        targets = [BASE, *sorted(view.ready.keys() - {BASE})]
        target = targets[self._num_steps // 3 % len(targets)]
        if not view.may_switch_to(target):
            target = view.merged
        if not view.ready[target] and view.may_switch_to(BASE):
            target = BASE
        return Choice(target, reason="by the script")

    def started(self, shape: StepShape, rows: list[Scheduled], now: float) -> None:
        """See MergePolicy."""
        self._num_steps += 1
