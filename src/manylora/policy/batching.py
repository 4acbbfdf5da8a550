"""Which sequences run in the next step, and how many tokens of each: decodes and prompt chunks alike.

Every decoding sequence gets its token; what is left of the budget goes to prompt chunks, oldest first, then to
admissions. A batching policy says which of those that hold pages may run, and which of those that wait is next.
Does not know what a page is.
"""

from __future__ import annotations

import dataclasses

from manylora.config import PolicyConfig
from manylora.policy.clusters import Clusters
from manylora.policy.queue import WaitingQueue
from manylora.policy.reservations import Growth, Reservations
from manylora.policy.residency import Residency
from manylora.policy.sequences import RUNNING, Scheduled, Sequence
from manylora.protocol import Command

_ANY_NUMBER = 2**31


@dataclasses.dataclass(slots=True)
class AdmittedSequence:
    """A sequence that left the queue, and what was decided for it, in order, until then."""

    sequence: Sequence
    decided: list[Command]


@dataclasses.dataclass(slots=True)
class StepPlan:
    """What runs in the next step. ``rows`` is empty when nothing can run. ``budget``: tokens that are left;
    ``prefills``: how many more prompts may have a row."""

    rows: list[Scheduled]
    budget: int
    prefills: int = 0
    admitted: list[AdmittedSequence] = dataclasses.field(default_factory=list)


class FirstComeFirstServed:
    """All that hold pages run; of those that wait the first in line is next, and stops those behind it."""

    def __init__(
        self, config: PolicyConfig, residency: Residency, held: Reservations, waiting: WaitingQueue
    ) -> None:
        self._config = config
        self._residency = residency
        self._held = held
        self._waiting = waiting
        self._most_prefills = config.max_prefills_per_step or _ANY_NUMBER
        self._clusters: Clusters | None = None
        if waiting.adapter_limit is not None:
            self._clusters = Clusters(*waiting.adapter_limit, waiting)

    # ------------------------------------------------------------ what another policy decides otherwise

    def runnable(self) -> list[Sequence]:
        """The admitted sequences that may have a row, oldest first."""
        return self._held.admitted

    def candidates(self, now: float) -> list[Sequence]:
        """The sequence to be admitted next, then those to be tried where it finds no room."""
        if self._clusters is not None:
            return self._clusters.candidates(self._held.admitted, now)
        first = self._waiting.first()
        return [] if first is None else [first]

    def may_run(self, sequence: Sequence) -> bool:
        """Whether an admitted sequence may have a row at once."""
        return True

    def let_in(self, sequence: Sequence, budget: int, now: float) -> bool:
        """Admit a sequence that waits, if what it needs can be had."""
        return self._held.admit(sequence, budget, now)

    # ------------------------------------------------------------ the plan

    def compose(self, now: float) -> StepPlan:
        """Rows of the sequences that hold pages; makes the room that they need."""
        self._held.begin_step()
        if (long_from := self._config.long_from) is not None:
            for sequence in [s for s in self._held.admitted if s.stage is RUNNING and s.outgrows(long_from)]:
                if not (sequence.num_pending and sequence.must_wait):
                    self._held.displace(sequence, now)
        page_tokens = self._config.page_tokens
        rows: list[Scheduled] = []
        unusual: list[
            tuple[int, int]
        ] = []  # rows of more than one token or page, by place, with what remains
        num_longer = 0
        for sequence in self.runnable():
            if sequence.stage is not RUNNING or (sequence.num_pending and sequence.must_wait):
                continue
            num_scheduled = sequence.num_scheduled
            remaining = len(sequence.tokens) + sequence.num_pending - num_scheduled
            if remaining > 1:
                num_longer += 1
                unusual.append((len(rows), remaining))
            elif num_scheduled >= len(sequence.pages) * page_tokens:
                unusual.append((len(rows), 1))
            rows.append((sequence, 1, 1 + sequence.num_unborn_forks))
        budget = self._config.max_batch_tokens - (len(rows) - num_longer)
        return (
            self._settle(rows, unusual, budget, now)
            if unusual
            else StepPlan(rows, budget, self._most_prefills)
        )

    def _settle(
        self, rows: list[Scheduled], unusual: list[tuple[int, int]], budget: int, now: float
    ) -> StepPlan:
        """Cut prompt chunks to the budget and make room for rows that need another page.

        A sequence that finds none has no row, nor has one that is preempted for it: such a one is newer, so it is
        never among the rows before.
        """
        held = self._held
        preemptions = held.num_preemptions
        prefills = self._most_prefills
        for place, remaining in unusual:
            sequence = rows[place][0]
            if sequence.stage is not RUNNING:
                continue
            num_tokens = 1 if remaining == 1 else min(remaining, budget) if prefills else 0
            # It may find no room, or none before a copy has ended; it keeps what it has and tries again.
            if num_tokens == 0 or held.grow(sequence, num_tokens, now) is not Growth.DONE:
                rows[place] = (sequence, 0, 0)
                continue
            if remaining > 1:
                budget -= num_tokens
                prefills -= 1
            num_samples = 1 + sequence.num_unborn_forks if num_tokens == remaining else 0
            rows[place] = (sequence, num_tokens, num_samples)
        # A sequence that was just preempted must not take the pages straight back from the one it made room for.
        if held.num_preemptions > preemptions:
            budget = 0
        return StepPlan([row for row in rows if row[1] and row[0].stage is RUNNING], budget, prefills)

    def has_room(self, plan: StepPlan) -> bool:
        """Whether the step can take in sequences that wait."""
        return plan.budget > 0 and plan.prefills > 0 and len(self._held.admitted) < self._config.max_num_seqs

    def admit(self, plan: StepPlan, now: float) -> None:
        """Admit one after the other into the plan; the first that cannot reserve stops those behind it."""
        while self.has_room(plan):
            sequence = self._admit_one(plan.budget, now)
            if sequence is None:
                break
            plan.admitted.append(AdmittedSequence(sequence, self._residency.collect()))
            # One that waits for its adapter keeps its reservation and is passed by others.
            if sequence.stage is RUNNING and self.may_run(sequence):
                remaining = sequence.num_remaining
                num_tokens = min(remaining, plan.budget)
                plan.budget -= num_tokens
                plan.prefills -= 1
                num_samples = 1 + sequence.num_unborn_forks if num_tokens == remaining else 0
                plan.rows.append((sequence, num_tokens, num_samples))

    def _admit_one(self, budget: int, now: float) -> Sequence | None:
        """The sequence that was admitted, if any."""
        held = self._held
        candidates = self.candidates(now)
        for sequence in candidates:
            # One that was preempted with a row in flight comes back when that has ended.
            if held.is_in_flight(sequence):
                return None
            if self.let_in(sequence, budget, now):
                if self._clusters is not None and self._clusters.overtakes(sequence, now):
                    self._residency.counters.adapter_limit_overtaken += 1
                return sequence
        if candidates:
            held.make_room_for_queue(budget, now)
        return None
