"""The seconds of steps and switches by mode: measured before serving, corrected by events.

Only differences between modes count for a choice, and these are small beside the common part, such as attention
over ever longer contexts. So a difference is corrected only by the median steps before and after a switch.
Numbers in, seconds out.
"""

from __future__ import annotations

import bisect
import collections
import statistics
from collections.abc import Mapping

from manylora.config.merging import MergeTimes, StepTimes
from manylora.policy.merging.choice import StepShape
from manylora.types import BASE, AdapterId

_KEEP = 0.9
"""The weight of an estimate against one new observation."""
_STEPS = 9
"""Decoding steps on each side of a switch whose medians are compared."""
_SKIPPED = 2
"""Steps after a switch that are not counted: the device may still be busy with the switch."""
_MOST_SCALE = 2.0
"""The most by which a difference may exceed the one measured before serving."""


class StepSeconds:
    """The seconds of a step by its tokens: unmerged, all of one adapter; and merged."""

    def __init__(self, times: MergeTimes) -> None:
        self.steps_wait = times.steps_wait
        self.merge_s = times.merge_s
        self.restore_s = times.restore_s
        # Of steps with as many tokens, the one of the fewest rows.
        steps = sorted(times.steps, key=lambda step: (step.num_tokens, step.num_rows))
        by_tokens = {step.num_tokens: step for step in reversed(steps)}
        self._tokens = sorted(by_tokens)
        self._steps = [by_tokens[num_tokens] for num_tokens in self._tokens]
        self.scale = 1.0
        """The factor between an adapter's addition to a step and the one measured before serving."""
        self._level_s = 0.0  # of steps beside what was measured, whatever their mode
        self._num_seen = 0
        self._before = collections.deque[float](maxlen=_STEPS)  # a decoding step's seconds beside its model's
        self._compared: float | None = None  # the median before the last switch
        self._was_merged = False
        self._is_merged = False
        self._num_after = 0
        self._addons = collections.deque[float](maxlen=_STEPS)

    # ------------------------------------------------------------ estimates

    def merged_s(self, num_tokens: int) -> float:
        """Return the seconds of a step of the merged adapter's rows alone."""
        return max(self._measured(num_tokens).merged_s + self._level_s, 0.0)

    def unmerged_s(self, num_tokens: int) -> float:
        """Return the seconds of a step of one adapter's rows, none merged."""
        return self.merged_s(num_tokens) + self.adapter_s(num_tokens)

    def adapter_s(self, num_tokens: int) -> float:
        """Return the seconds that tokens of adapters add to a step while nothing is merged."""
        if not num_tokens:
            return 0.0
        step = self._measured(num_tokens)
        return self.scale * max(step.unmerged_s - step.merged_s, 0.0)

    def added_s(self, tokens: Mapping[AdapterId, int], merged: AdapterId) -> float:
        """Return the seconds that adapters add to a step with these tokens by adapter, on the base's weights or
        on those of the one adapter of all tokens."""
        return self.adapter_s(sum(number for adapter, number in tokens.items() if adapter != merged))

    def switch_s(self, before: AdapterId, after: AdapterId) -> float:
        """Return the seconds of a switch.

        Pristine weights in host memory come back before another adapter is merged; on the device they are read
        as the other is merged.
        """
        if before == after:
            return 0.0
        if after == BASE:
            return self.restore_s
        return self.merge_s + (self.restore_s if before != BASE and self.steps_wait else 0.0)

    def _measured(self, num_tokens: int) -> StepTimes:
        """Interpolate between the nearest two measured sizes, and not beyond the least and the largest."""
        if not self._steps:
            return StepTimes(0, 0, 0.0, 0.0)
        place = bisect.bisect_left(self._tokens, num_tokens)
        if place == 0 or place == len(self._steps):
            return self._steps[min(place, len(self._steps) - 1)]
        low, high = self._steps[place - 1], self._steps[place]
        part = (num_tokens - low.num_tokens) / (high.num_tokens - low.num_tokens)
        unmerged_s = low.unmerged_s + part * (high.unmerged_s - low.unmerged_s)
        merged_s = low.merged_s + part * (high.merged_s - low.merged_s)
        return StepTimes(num_tokens, num_tokens, unmerged_s, merged_s)

    # ------------------------------------------------------------ events

    def saw_step(self, shape: StepShape, seconds: float) -> None:
        """Learn from a step. ``seconds``: of the device, 0 if not known."""
        num_tokens, is_merged = shape.num_tokens, shape.merged != BASE
        if seconds <= 0 or num_tokens != shape.num_rows:
            return  # with prompts in it a step's length says little about its mode
        adds_s = self.added_s(shape.tokens, shape.merged)
        beside_s = seconds - self._measured(num_tokens).merged_s - adds_s
        if is_merged != self._is_merged:
            self._compared = statistics.median(self._before) if len(self._before) == _STEPS else None
            self._was_merged, self._is_merged, self._num_after = self._is_merged, is_merged, 0
            self._before.clear()
        self._num_after += 1
        if self._num_after > _SKIPPED:
            self._before.append(beside_s)
            self._addons.append(self.adapter_s(num_tokens))
        self._num_seen += 1
        keep = min(_KEEP, 1 - 1 / self._num_seen)
        self._level_s = keep * self._level_s + (1 - keep) * beside_s
        if self._compared is not None and len(self._before) == _STEPS:
            self._correct(self._compared, statistics.median(self._before))
            self._compared = None

    def _correct(self, before_s: float, after_s: float) -> None:
        """Correct the addition of adapters by the excess of the same steps over their models in two modes."""
        adds_s = statistics.median(self._addons)
        if adds_s <= 0:
            return
        missing_s = after_s - before_s if self._was_merged else before_s - after_s
        found = self.scale * (1 + missing_s / adds_s)
        self.scale = min(max((self.scale + found) / 2, 0.0), _MOST_SCALE)

    def saw_switch(self, before: AdapterId, after: AdapterId, seconds: float) -> None:
        """Learn from a switch."""
        if seconds <= 0 or (before != BASE and after != BASE and self.steps_wait):
            return  # that one is two in one
        if after == BASE:
            self.restore_s = _KEEP * self.restore_s + (1 - _KEEP) * seconds if self.restore_s else seconds
        else:
            self.merge_s = _KEEP * self.merge_s + (1 - _KEEP) * seconds if self.merge_s else seconds
