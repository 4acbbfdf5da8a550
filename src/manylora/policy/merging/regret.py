"""``manylora``: merge when the measured time that it would have saved has paid for the switch. No thresholds.

A ski rental between as many states as there are weights to run on. The regret of a state is the excess cost of
the present weights over it; when that reaches half of the switch there and back, the switch is made. So the
time lost is at most three times the loss of a switcher that knows the future, and two switches. On an unlucky
stream, where others come after each switch, that alone could be slower than unmerged: there the price doubles.
When switches have cost more than they saved by ``SHARE`` of the time and ``ALLOWANCE``, there are none for a
while. If others end the merging, it may delay first tokens by ``SHARE`` of the times to first tokens. Both
rules go before the bound (see docs/decisions.md).
"""

from __future__ import annotations

from manylora.config.policy import PolicyConfig
from manylora.policy.merging.choice import Choice, MergePolicy, MergeView, StepShape
from manylora.policy.merging.times import StepSeconds
from manylora.policy.sequences import RUNNING, Scheduled, Sequence
from manylora.types import BASE, AdapterId

SHARE = 0.005
"""The share of the time in steps by which switches may cost more than they have saved."""
ALLOWANCE = 3.0
"""The switches there and back that may be lost besides, so that a short run can show the worth of merging."""


class RegretMerging(MergePolicy):
    """The merge policy ``manylora``. ``minority``: other adapters' requests end the merging at once
    (``unmerge``), or wait for ``starve_s`` at most (``wait``)."""

    def __init__(self, config: PolicyConfig, times: StepSeconds) -> None:
        self._times = times
        self._minority = config.merge.minority
        self._starve_s = config.merge.starve_s
        self.regrets: dict[AdapterId, float] = {}
        """By adapter, the excess seconds of the present weights over its own, for the steps that these could
        have run."""
        self.saved_s = 0.0
        """The seconds saved by merging so far, less its cost."""
        self.busy_s = 0.0
        self.first_tokens_s = 0.0
        """The sum of the times to the first tokens so far."""
        self.late_s = 0.0
        """The sum of the delays that unmerging for others has added to them."""
        self._seen: set[AdapterId] = set()  # with requests
        self._since_s = 0.0  # when the present weights were chosen

    # ------------------------------------------------------------ the choice

    def choose(self, view: MergeView) -> Choice:
        """See MergePolicy."""
        merged = view.merged
        if merged != BASE:
            choice = self._end_for_others(view)
            if choice is not None:
                return choice
        for target in sorted(self.regrets):
            if target == merged or not view.may_switch_to(target):
                continue
            there_s, back_s = self._times.switch_s(merged, target), self._times.switch_s(target, merged)
            regret_s, price_s = self.regrets[target], (there_s + back_s) / 2
            is_alone = target == BASE or view.ready.keys() == {target}  # so that none would be paused
            if not is_alone or not self._pays(target, regret_s, price_s):
                continue
            self._since_s = view.now
            reason = f"regret {regret_s * 1e3:.3g} ms >= {price_s * 1e3:.3g} ms"
            return self._on(target, reason)
        return self._on(merged)

    def _on(self, adapter: AdapterId, reason: str = "") -> Choice:
        is_alone = adapter != BASE and self._minority == "wait"
        return Choice(adapter, line=(adapter,) if is_alone else None, reason=reason)

    def _end_for_others(self, view: MergeView) -> Choice | None:
        """Return the choice to unmerge, if a sequence of another adapter can wait no longer."""
        merged = view.merged
        if not view.may_switch_to(BASE):
            return None
        if self._minority == "unmerge":
            others = [s for s in view.admitted if s.adapter != merged and s.stage is RUNNING]
            if not others:
                return None
            self.late_s += self._times.restore_s * sum(_has_no_token(sequence) for sequence in others)
            return Choice(BASE, reason="others can run")
        paused, first = view.longest_paused(merged), view.waiting.first()
        if first is not None and first.adapter == merged:
            first = None
        if not view.num_admitted[merged] and (paused or (first and not view.num_unfinished(merged))):
            return Choice(BASE, reason="only others are left")
        waited_s = 0.0
        if paused is not None and paused.paused_s is not None:
            waited_s = view.now - paused.paused_s
        elif first is not None:
            waited_s = view.now - max(first.state.arrived_s, self._since_s)
        if waited_s < self._starve_s:
            return None
        return Choice(BASE, reason=f"others have waited {waited_s:.2f} s")

    def _pays(self, target: AdapterId, regret_s: float, price_s: float) -> bool:
        """Return whether the regret has reached the price, or up to twice the price after losses by switches.

        After larger losses no adapter is merged.
        """
        has_others = len(self._seen) > (target in self._seen)
        if target != BASE and self._minority == "unmerge" and has_others:
            next_late_s = self.late_s + self._times.restore_s
            if next_late_s > SHARE * self.first_tokens_s:
                return False
        debt_s = max(-self.saved_s, 0.0)
        if target != BASE and debt_s > SHARE * self.busy_s + ALLOWANCE * 2 * price_s:
            return False
        return regret_s >= price_s + (min(debt_s, price_s) if target != BASE else 0.0)

    # ------------------------------------------------------------ events

    def started(self, shape: StepShape, rows: list[Scheduled], now: float) -> None:
        """See MergePolicy."""
        merged, cost_s = shape.merged, self._cost_s(shape, shape.merged)
        targets = {BASE, shape.largest()}
        if len(shape.rows) > 1:
            targets = {BASE}  # others would have had to pause
        regrets = {
            target: self.regrets.get(target, 0.0) + cost_s - self._cost_s(shape, target)
            for target in targets - {merged}
        }
        self.regrets = {target: regret_s for target, regret_s in regrets.items() if regret_s > 0}
        self.saved_s += self._cost_s(shape, BASE) - cost_s
        first_ones = [s for s, _, num_samples in rows if num_samples and _has_no_token(s)]
        if first_ones:
            step_s = self._times.unmerged_s(shape.num_tokens)
            self.first_tokens_s += sum(now - s.state.arrived_s + step_s for s in first_ones)
            self._seen.update(s.adapter for s in first_ones)

    def _cost_s(self, shape: StepShape, merged: AdapterId) -> float:
        """Return the excess seconds of a step on these weights over one of the base alone."""
        return self._times.added_s(shape.tokens, merged)

    def step_ended(self, seconds: float) -> None:
        """See MergePolicy."""
        self.busy_s += seconds

    def switched(self, before: AdapterId, after: AdapterId, seconds: float) -> None:
        """See MergePolicy."""
        self.saved_s -= seconds
        self.regrets.clear()

    def forget(self, adapter: AdapterId) -> None:
        """See MergePolicy."""
        self.regrets.pop(adapter, None)
        self._seen.discard(adapter)


def _has_no_token(sequence: Sequence) -> bool:
    """Return whether the sequence has no token yet, and no step in flight draws one."""
    return len(sequence.tokens) == sequence.num_prompt and not sequence.num_pending
