"""How what a profile measured varies about its means, and what copies cost the steps beside them.

Owns how a log of steps, copies and reads becomes ``costs.Spread`` and a copy's drag.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

from manylora_lab.bench.step_log import LoggedStep, LoggedTransfer, StepLog
from manylora_lab.pricing.costs import IDLE_S, Spread, StepCosts

Seen = TypeVar("Seen", LoggedStep, LoggedTransfer)

_STALL = 4.0
"""Times the mean: the machine did something else."""
_NUM_VALUES = 40
"""Of each spread: its most extreme value comes once in so many draws."""
_FEWEST = 20
"""Of which a spread can be told."""


def spread_of(log: StepLog, crowded: StepLog, costs: StepCosts) -> Spread:
    """``log``: of an engine with room for all that it serves; ``crowded``: of one without, which copies."""
    warm = [step for step in log.steps if step.idle_s < IDLE_S]
    return Spread(
        decodes=_factors([step for step in warm if not step.work.num_prefill_tokens], _step_s(costs)),
        prefills=_factors([step for step in warm if step.work.num_prefill_tokens], _step_s(costs)),
        reads=_factors(log.reads, lambda read: costs.read_s(read.num_bytes, read.to_device)),
        landings=tuple(_rounded(wait_s) for wait_s in _levels(_landings(crowded.copies, costs))),
    )


def copy_drag(crowded: StepLog, costs: StepCosts) -> float:
    """By how many seconds steps took longer for each second of a copy beside them, compared with those of the same
    engine that had none; 0 where there are too few of either."""
    copies = sorted(crowded.copies, key=lambda copy: copy.began_s)
    begun_s = [copy.began_s for copy in copies]
    longest_s = max((copy.waited_s for copy in copies), default=0.0)
    beside: list[tuple[LoggedStep, float]] = []
    without = []
    for step in crowded.steps:
        if step.took_s <= _STALL * costs.step_s(step.work):
            first = bisect.bisect_left(begun_s, step.began_s - longest_s)
            after = bisect.bisect_left(begun_s, step.began_s + step.took_s)
            copied_s = _copied_s(step, copies[first:after], costs)
            if copied_s:
                beside.append((step, copied_s))
            else:
                without.append(step)
    if min(len(beside), len(without)) < _FEWEST:
        return 0.0
    lost_s = 0.0
    for is_prefill in (False, True):
        # The engine's speed at that time is no copy's doing.
        usual = [step for step in without if (step.work.num_prefill_tokens > 0) == is_prefill] or without
        speed = sum(step.took_s for step in usual) / sum(costs.step_s(step.work) for step in usual)
        lost_s += sum(
            step.took_s - speed * costs.step_s(step.work)
            for step, _ in beside
            if (step.work.num_prefill_tokens > 0) == is_prefill
        )
    return _rounded(max(0.0, lost_s / sum(copied_s for _, copied_s in beside)))


def _step_s(costs: StepCosts) -> Callable[[LoggedStep], float]:
    return lambda step: costs.step_s(step.work)


def _factors(seen: Sequence[Seen], expected_s: Callable[[Seen], float]) -> tuple[float, ...]:
    """What they took in what was expected of them, 1 in the mean; the level is the fit's."""
    factors = [one.took_s / expected_s(one) for one in seen]
    levels = _levels([factor for factor in factors if factor <= _STALL])
    mean = statistics.fmean(levels) if levels else 1.0
    return tuple(_rounded(level / mean) for level in levels)


def _levels(values: Sequence[float]) -> list[float]:
    """Values as likely as each other: the middles of equal shares of them, in order; none of too few."""
    if len(values) < _FEWEST:
        return []
    ordered = sorted(values)
    return [ordered[int((number + 0.5) * len(ordered) / _NUM_VALUES)] for number in range(_NUM_VALUES)]


def _landings(copies: Sequence[LoggedTransfer], costs: StepCosts) -> list[float]:
    """How much later than an idle engine this one was told. Of copies to the device that found the lane free:
    others wait for the copy before, or for the steps in flight."""
    found = []
    free_at = 0.0
    for copy in sorted(copies, key=lambda copy: copy.began_s):
        if copy.to_device:
            if copy.began_s >= free_at:
                found.append(max(0.0, copy.waited_s - costs.copy_s(copy.num_bytes, True)))
            free_at = max(free_at, copy.began_s + copy.waited_s)
    return found


def _copied_s(step: LoggedStep, copies: Sequence[LoggedTransfer], costs: StepCosts) -> float:
    """How much copying fell into the step. When in its wait a copy was at work is not known: all of it alike."""
    ends_s = step.began_s + step.took_s
    copied_s = 0.0
    for copy in copies:
        beside_s = min(copy.began_s + copy.waited_s, ends_s) - max(copy.began_s, step.began_s)
        if beside_s > 0:
            copied_s += beside_s * min(1.0, costs.copy_s(copy.num_bytes, copy.to_device) / copy.waited_s)
    return copied_s


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
