"""The contract of merge policies: their view, their choice, and the events that they learn from. Decides
nothing."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

from manylora.config.policy import PolicyConfig
from manylora.policy.queue import WaitingQueue
from manylora.policy.sequences import RUNNING, Scheduled, Sequence
from manylora.types import BASE, AdapterId


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The choice of the merged adapter, and of the sequences that may run.

    ``adapter``: in the weights of the next step; BASE: none. ``only``: the adapter whose admitted sequences may
    run; None: all. While an adapter is merged only its own may run in any case. ``line``: the adapters whose
    waiting sequences may be admitted, in this order; None: all, in the queue's order. ``batch``: sequences that
    should run, in this order; a waiting one may take the slot of an admitted one outside the batch. ``reason``:
    why ``adapter`` changes, for the trace.
    """

    adapter: AdapterId
    only: AdapterId | None = None
    line: tuple[AdapterId, ...] | None = None
    batch: tuple[Sequence, ...] = ()
    reason: str = ""


@dataclasses.dataclass(slots=True)
class MergeView:
    """The view of a merge policy when the next step is composed.

    ``merged``: the adapter in the weights if nothing changes. ``can_switch``: no switch is under way, and a
    token was drawn since the last one; ``can_merge``: none has failed lately. ``ready``: admitted sequences
    that could have a row, by adapter; their adapters are resident.
    """

    now: float
    merged: AdapterId
    can_switch: bool
    can_merge: bool
    admitted: list[Sequence]
    waiting: WaitingQueue
    max_num_seqs: int
    ready: collections.Counter[AdapterId] = dataclasses.field(init=False)
    num_admitted: collections.Counter[AdapterId] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.num_admitted = collections.Counter(s.adapter for s in self.admitted)
        self.ready = collections.Counter(s.adapter for s in self.admitted if s.stage is RUNNING)

    def may_switch_to(self, adapter: AdapterId) -> bool:
        """Return whether the step may run on these weights; an adapter needs a sequence that could run."""
        if adapter == self.merged:
            return True
        if adapter == BASE:
            return self.can_switch
        return self.can_switch and self.can_merge and self.ready[adapter] > 0

    def num_unfinished(self, adapter: AdapterId) -> int:
        """Return how many sequences the adapter has, admitted or waiting."""
        return self.num_admitted[adapter] + self.waiting.num_by_adapter.get(adapter, 0)

    def first_served(self) -> list[Sequence]:
        """Return as many sequences as may run at once, admitted or waiting, by arrival (dLoRA's B_fcfs)."""
        known = [*self.admitted, *self.waiting.leading(self.max_num_seqs)]
        known.sort(key=lambda sequence: sequence.order)
        return known[: self.max_num_seqs]

    def longest_paused(self, but: AdapterId | None = None) -> Sequence | None:
        """Return the sequence paused for longest, of any adapter but ``but``."""
        paused = [s for s in self.admitted if s.paused_s is not None and s.adapter != but]
        return min(paused, key=lambda s: (s.paused_s, s.order), default=None)


class StepShape(NamedTuple):
    """The rows and tokens of a step by adapter. ``merged``: the adapter in its weights, then of all rows."""

    merged: AdapterId
    rows: collections.Counter[AdapterId]
    tokens: collections.Counter[AdapterId]

    @property
    def num_rows(self) -> int:
        return self.rows.total()

    @property
    def num_tokens(self) -> int:
        return self.tokens.total()

    def largest(self) -> AdapterId:
        """Return the adapter with most tokens; BASE if all are the base's."""
        adapters = self.tokens.keys() - {BASE}
        return max(adapters, key=lambda adapter: (self.tokens[adapter], -adapter), default=BASE)


def shape_of(merged: AdapterId, rows: list[Scheduled]) -> StepShape:
    """Return the shape of a step that is about to start."""
    shape = StepShape(merged, collections.Counter(), collections.Counter())
    for sequence, num_tokens, _ in rows:
        shape.rows[sequence.adapter] += 1
        shape.tokens[sequence.adapter] += num_tokens
    return shape


class MergeGauges(NamedTuple):
    """The gauges of a policy, if it has them: dLoRA's thresholds, and its credits in seconds of one request
    held back."""

    alpha: float | None = None
    beta: float | None = None
    credits: tuple[tuple[AdapterId, float], ...] = ()


class MergePolicy:
    """A merge policy. It chooses once for each step, and learns from events alone."""

    def __init__(self, config: PolicyConfig, times: Any) -> None:
        """Keep the config and ``times``, the ``StepSeconds`` of the device."""

    def choose(self, view: MergeView) -> Choice:
        """Return the choice, which may change the merged adapter only if ``view.may_switch_to`` allows it."""
        raise NotImplementedError

    def started(self, shape: StepShape, rows: list[Scheduled], now: float) -> None:
        """Take the start of a step after the last choice."""

    def step_ended(self, seconds: float) -> None:
        """Take the end of a step. ``seconds``: of the device, 0 if not known."""

    def switched(self, before: AdapterId, after: AdapterId, seconds: float) -> None:
        """Take a switch that has taken effect or, with ``after`` BASE, failed."""

    def forget(self, adapter: AdapterId) -> None:
        """Drop an adapter that is gone with all its requests."""

    def gauges(self) -> MergeGauges:
        """Return the policy's gauges."""
        return MergeGauges()
