"""What a merge policy is asked and told, and what it answers. Decides nothing."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

from manylora.config import PolicyConfig
from manylora.policy.queue import WaitingQueue
from manylora.policy.sequences import RUNNING, Scheduled, Sequence
from manylora.types import BASE, AdapterId


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """What is to be merged, and which sequences may run.

    ``adapter``: whose weights the next step runs on; BASE: the base's own. ``only``: whose admitted sequences may
    run; None: those of all. Where an adapter is merged only its own may, whatever this says.
    ``line``: the adapters whose waiting sequences may be admitted, the first of them first; None: all, in the
    queue's order. ``batch``: sequences that are to be in, in this order; a waiting one may take the slot of an
    admitted one that is not among them. ``reason``: why ``adapter`` changes, for the trace.
    """

    adapter: AdapterId
    only: AdapterId | None = None
    line: tuple[AdapterId, ...] | None = None
    batch: tuple[Sequence, ...] = ()
    reason: str = ""


@dataclasses.dataclass(slots=True)
class MergeView:
    """What a merge policy may look at when the next step is composed.

    ``merged``: whose weights the step runs on if nothing changes. ``can_switch``: no switch is under way, and a
    token was drawn since the last one; ``can_merge``: none has failed lately. ``ready``: admitted sequences that
    could have a row, by adapter; their adapters are resident.
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
        """Whether the step may run on these weights; an adapter's only where it has a sequence to run on them."""
        if adapter == self.merged:
            return True
        if adapter == BASE:
            return self.can_switch
        return self.can_switch and self.can_merge and self.ready[adapter] > 0

    def num_unfinished(self, adapter: AdapterId) -> int:
        """Sequences of the adapter, admitted or waiting."""
        return self.num_admitted[adapter] + self.waiting.num_by_adapter.get(adapter, 0)

    def first_served(self) -> list[Sequence]:
        """As many as may run at once, admitted or waiting, the first that came first (dLoRA's B_fcfs)."""
        known = [*self.admitted, *self.waiting.leading(self.max_num_seqs)]
        known.sort(key=lambda sequence: sequence.order)
        return known[: self.max_num_seqs]

    def longest_paused(self, but: AdapterId | None = None) -> Sequence | None:
        """The sequence that has been paused for longest, of any other adapter than ``but``."""
        paused = [s for s in self.admitted if s.paused_s is not None and s.adapter != but]
        return min(paused, key=lambda s: (s.paused_s, s.order), default=None)


class StepShape(NamedTuple):
    """What a step holds, by adapter. ``merged``: whose weights it runs on; all rows are of that adapter then."""

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
        """The adapter with most tokens; BASE where all are the base's."""
        adapters = self.tokens.keys() - {BASE}
        return max(adapters, key=lambda adapter: (self.tokens[adapter], -adapter), default=BASE)


def shape_of(merged: AdapterId, rows: list[Scheduled]) -> StepShape:
    """Of a step that is about to start."""
    shape = StepShape(merged, collections.Counter(), collections.Counter())
    for sequence, num_tokens, _ in rows:
        shape.rows[sequence.adapter] += 1
        shape.tokens[sequence.adapter] += num_tokens
    return shape


class MergeGauges(NamedTuple):
    """What a policy shows of itself, where it has it: dLoRA's thresholds, and its credits in seconds for which one
    request is held back."""

    alpha: float | None = None
    beta: float | None = None
    credits: tuple[tuple[AdapterId, float], ...] = ()


class MergePolicy:
    """Asked once whenever a step is composed. All that it knows comes from what it is told."""

    def __init__(self, config: PolicyConfig, times: Any) -> None:
        """``times``: the ``StepSeconds`` of the device."""

    def choose(self, view: MergeView) -> Choice:
        """The choice may name another adapter than the merged one only where ``view.may_switch_to`` allows it."""
        raise NotImplementedError

    def started(self, shape: StepShape, rows: list[Scheduled], now: float) -> None:
        """A step starts that the last choice has led to."""

    def step_ended(self, seconds: float) -> None:
        """A step has ended, after so many seconds of the device; 0 where that is not known."""

    def switched(self, before: AdapterId, after: AdapterId, seconds: float) -> None:
        """A switch has taken effect, or, with ``after`` BASE, failed."""

    def forget(self, adapter: AdapterId) -> None:
        """The adapter is gone, and all its requests."""

    def gauges(self) -> MergeGauges:
        """What the policy shows of itself."""
        return MergeGauges()
