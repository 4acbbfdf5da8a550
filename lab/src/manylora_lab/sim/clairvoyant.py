"""The least time that a switcher could have taken over the steps of a run, had it known them all beforehand.

Dynamic programming over what is merged (as dLoRA's iteration-level choice, §4.2, with hindsight): O(steps x
adapters) time, and memory for the adapters alone, so a stream may be of any length. Seconds are those beyond the
base's own steps, as they were measured before serving (``MergeTimes``). Knows commands; not when they were given.
"""

from __future__ import annotations

import collections
import math
from typing import NamedTuple

from manylora.config.merging import MergeConfig
from manylora.policy.merging.choice import StepShape
from manylora.policy.merging.times import StepSeconds
from manylora.protocol.commands import Command, EndSequence, RunStep
from manylora.types import BASE, AdapterId, SequenceId


class Hindsight(NamedTuple):
    """Seconds beyond the base's own steps. ``taken_s``: by the run, its switches included; ``clairvoyant_s``: the
    least that any switcher takes; ``free_s``: if switches took nothing. ``loss_s`` and ``clairvoyant_loss_s`` are
    what the first two take beyond the last, ``ratio`` theirs (None: the clairvoyant loses nothing), and
    ``switch_s`` is the longest switch, of which two are allowed beside three times the clairvoyant's loss."""

    num_steps: int
    taken_s: float
    clairvoyant_s: float
    free_s: float
    switch_s: float

    @property
    def loss_s(self) -> float:
        return max(self.taken_s - self.free_s, 0.0)

    @property
    def clairvoyant_loss_s(self) -> float:
        return max(self.clairvoyant_s - self.free_s, 0.0)

    @property
    def beyond_s(self) -> float:
        """What is lost beyond three times the clairvoyant's loss and two switches; at most 0 within the bound."""
        return self.loss_s - 3 * self.clairvoyant_loss_s - 2 * self.switch_s

    def report(self) -> dict[str, float | None]:
        """For JSON, to the microsecond."""
        values = {
            "taken_s": self.taken_s, "clairvoyant_s": self.clairvoyant_s, "free_s": self.free_s,
            "loss_s": self.loss_s, "clairvoyant_loss_s": self.clairvoyant_loss_s,
        }  # fmt: skip
        lost_s = round(self.clairvoyant_loss_s, 9)
        ratio = round(self.loss_s / lost_s, 3) if lost_s else None
        return {"steps": self.num_steps, **{name: round(s, 6) for name, s in values.items()}, "ratio": ratio}


class Clairvoyant:
    """Told of a run's commands in order; ``hindsight`` may be asked at any time.

    An adapter's weights fit a step whose rows are all its own; the base's fit every step.
    """

    def __init__(self, merge: MergeConfig) -> None:
        self._times = StepSeconds(merge.times)
        self._adapters: dict[SequenceId, AdapterId] = {}
        self._best: dict[AdapterId, float] = {
            BASE: 0.0
        }  # to have run all steps so far and end on these weights
        self._taken_s = 0.0
        self._free_s = 0.0
        self._merged: AdapterId = BASE
        self._num_steps = 0

    def told(self, command: Command) -> None:
        """One command of the run."""
        match command:
            case RunStep():
                for start in command.starts:
                    self._adapters[start.sequence] = start.adapter
                self.ran(self._shape(command))
            case EndSequence():
                self._adapters.pop(command.sequence, None)

    def _shape(self, step: RunStep) -> StepShape:
        rows, tokens = collections.Counter[AdapterId](), collections.Counter[AdapterId]()
        for row in step.rows:
            adapter = self._adapters[row.sequence]
            rows[adapter] += 1
            tokens[adapter] += row.num_tokens
        return StepShape(step.merged, rows, tokens)

    def ran(self, shape: StepShape) -> None:
        """A step, and the weights that it ran on."""
        self._num_steps += 1
        self._taken_s += self._times.switch_s(self._merged, shape.merged) + self._cost_s(shape, shape.merged)
        self._merged = shape.merged
        best, at_once = {}, math.inf
        from_base_s = self._best[BASE]
        from_other_s = min((s for state, s in self._best.items() if state != BASE), default=math.inf)
        for state in self._states(shape):
            cost_s = self._cost_s(shape, state)
            at_once = min(at_once, cost_s)
            best[state] = cost_s + min(
                self._best.get(state, math.inf),
                from_base_s + self._times.switch_s(BASE, state),
                from_other_s + self._times.switch_s(-1, state),
            )
        self._best = best
        self._free_s += at_once

    def _states(self, shape: StepShape) -> set[AdapterId]:
        """The weights on which the step could have run."""
        return {*shape.rows, BASE} if len(shape.rows) == 1 else {BASE}

    def _cost_s(self, shape: StepShape, merged: AdapterId) -> float:
        return self._times.added_s(shape.tokens, merged)

    def hindsight(self) -> Hindsight:
        """Of all steps so far."""
        switch_s = max(self._times.merge_s, self._times.restore_s)
        return Hindsight(
            self._num_steps, self._taken_s, min(self._best.values()), self._free_s, switch_s
        )  # fmt: skip
