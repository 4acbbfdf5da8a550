"""The composition of a step: its sequences, and the tokens of each, decodes and prompt chunks alike.

Every decoding sequence gets its token. The rest of the budget goes to prompt chunks, oldest first, then to
admissions. A batching policy says which admitted sequences may run, and which waiting sequence is next.
Admission policies (S-LoRA §4.3, §7.5) set the order of the queue; ``Clusters`` limits the adapters that run at
once (S-LoRA §4.2, appendix A). Does not know what a page is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from manylora.config.policy import FIRST_STEP_S, PolicyConfig
from manylora.policy.queue import WaitingQueue
from manylora.policy.reservations import Reservations
from manylora.policy.sequences import RUNNING, Scheduled, Sequence
from manylora.protocol import commands
from manylora.types import BASE, AdapterId, RequestError

KEPT = 0.7
"""The weight of a moving average against one new observation. The authors' abort_req_queue.py has 0.3 and
truncates."""


class Admission:
    """The admission policies: ``fcfs``, oldest first; ``lcfs``, newest first; ``early-abort``.

    A sequence that was admitted before comes first in all of them. Early abort is as in the authors'
    repository; the paper gives the idea. A round drops requests whose first token would miss the objective
    after their wait and ``FIRST_STEP_S`` for the next step. Then it takes the newest first if the queue grows
    by as many as are admitted, else the oldest. ``growth``: the mean, over rounds, of how many more wait than
    after the last round that admitted any. ``admitted``: the mean number admitted, over rounds that admitted
    any.
    """

    def __init__(self, config: PolicyConfig, waiting: WaitingQueue) -> None:
        self._waiting = waiting
        self._max_waiting = config.max_waiting
        self._objective_s = config.slo_ttft_s if config.admission == "early-abort" else None
        self._num_left = 0
        self.growth = 1.0
        self.admitted = 1.0
        waiting.is_newest_first = config.admission == "lcfs"

    def refusal(self) -> RequestError | None:
        """Return why a new request cannot join the queue now, if so."""
        if self._max_waiting is None or self._waiting.num_arrived < self._max_waiting:
            return None
        return RequestError(
            429, f"the queue is full: {self._waiting.num_arrived} requests wait; try again later"
        )

    def begin_round(self, now: float) -> list[Sequence]:
        """Set the queue's order for a step with room, and return the sequences that are too late."""
        self._waiting.age(now)
        if self._objective_s is None:
            return []
        self.growth = KEPT * self.growth + (1 - KEPT) * (len(self._waiting) - self._num_left)
        self._waiting.is_newest_first = self.growth >= self.admitted
        return self._waiting.arrived_until(now + FIRST_STEP_S - self._objective_s)

    def end_round(self, num_admitted: int) -> None:
        """Note how many sequences the round admitted."""
        if num_admitted and self._objective_s is not None:
            self.admitted = KEPT * self.admitted + (1 - KEPT) * num_admitted
            self._num_left = len(self._waiting)


OVERTAKEN_S = 2.0
"""The longest time in which the first in line may be overtaken."""


class Clusters:
    """A limit of adapters that run at once (S-LoRA's adapter clustering).

    While ``limit`` adapters have admitted sequences, waiting sequences of these adapters, or of the base, go
    first. If none waits, a soft limit takes the first in line all the same, so that the device never idles for
    want of an adapter; a hard limit lets it wait until fewer adapters run. Under a soft limit a sequence
    overtakes only equals, at one ``queue.Place``. Under a hard limit the first in line cannot run, so the first
    that can goes before it. The first in line is overtaken for ``OVERTAKEN_S`` at most.
    """

    def __init__(self, limit: int, is_hard: bool, waiting: WaitingQueue) -> None:
        self._limit = limit
        self._is_hard = is_hard
        self._waiting = waiting
        self._first: Sequence | None = None  # in line, at the last call of ``candidates``

    def candidates(self, admitted: Iterable[Sequence], now: float) -> list[Sequence]:
        """Return the sequence to admit next beside ``admitted``, then the one to take if the first finds no
        room."""
        self._first = first = self._waiting.first()
        if first is None:
            return []
        running = _adapters(admitted)
        if len(running) < self._limit or first.adapter in running or first.adapter == BASE:
            return [first]
        since_s, beside = first.overtaken_s, None if self._is_hard else first
        found: list[Sequence | None] = []
        if since_s is None or now - since_s < OVERTAKEN_S:
            found = [self._waiting.first_of(adapter, beside) for adapter in (BASE, *sorted(running))]
        before = min((s for s in found if s is not None), key=self._waiting.rank, default=None)
        return [s for s in (before, beside) if s is not None]

    def lets_in(self, adapter: AdapterId, admitted: Iterable[Sequence]) -> bool:
        """Return whether a sequence of the adapter may be admitted beside ``admitted``, whatever its place in
        line."""
        self._first = None  # none is overtaken for another's adapter
        if not self._is_hard or adapter == BASE:
            return True
        running = _adapters(admitted)
        return len(running) < self._limit or adapter in running

    def overtakes(self, admitted: Sequence, now: float) -> bool:
        """Return whether the admitted candidate has overtaken the first in line; note it there."""
        if self._first is None or admitted is self._first:
            return False
        self._first.note_overtaken(now)
        return True


def _adapters(admitted: Iterable[Sequence]) -> set[AdapterId]:
    return {sequence.adapter for sequence in admitted if sequence.adapter != BASE}


_ANY_NUMBER = 2**31


@dataclasses.dataclass(slots=True)
class StepPlan:
    """The rows of the next step, none if nothing can run. ``budget``: tokens left; ``prefills``: prompts that
    may still get a row. ``admitted``: the sequences that left the queue, each with the commands decided until
    then."""

    rows: list[Scheduled]
    budget: int
    prefills: int = 0
    admitted: list[tuple[Sequence, list[commands.Command]]] = dataclasses.field(default_factory=list)


class FirstComeFirstServed:
    """The batching of all sequences alike: all admitted sequences run, and the first in line is admitted next.

    If it finds no room, it stops the sequences behind it.
    """

    def __init__(self, held: Reservations) -> None:
        self._config = held.config
        self._residency = held.residency
        self._held = held
        self._waiting = held.waiting
        self._most_prefills = held.config.max_prefills_per_step or _ANY_NUMBER
        self._clusters: Clusters | None = None
        if held.waiting.adapter_limit is not None:
            self._clusters = Clusters(*held.waiting.adapter_limit, held.waiting)

    # ------------------------------------------------------------ what another policy decides otherwise

    def runnable(self) -> list[Sequence]:
        """Return the admitted sequences that may have a row, oldest first."""
        return self._held.admitted

    def candidates(self, now: float) -> list[Sequence]:
        """Return the sequence to admit next, then the ones to try if it finds no room."""
        if self._clusters is not None:
            return self._clusters.candidates(self._held.admitted, now)
        first = self._waiting.first()
        return [] if first is None else [first]

    def may_run(self, sequence: Sequence) -> bool:
        """Return whether an admitted sequence may have a row at once."""
        return True

    def let_in(self, sequence: Sequence, budget: int, now: float) -> bool:
        """Admit a waiting sequence if all that it needs can be reserved."""
        return self._held.admit(sequence, budget, now)

    # ------------------------------------------------------------ the plan

    def compose(self, now: float) -> StepPlan:
        """Plan the rows of the admitted sequences, and make the room that they need."""
        self._held.begin_step()
        if (long_from := self._config.long_from) is not None:
            for sequence in [s for s in self._held.admitted if s.stage is RUNNING and s.outgrows(long_from)]:
                if not (sequence.num_pending and sequence.must_wait):
                    self._held.displace(sequence, now)
        page_tokens = self._config.page_tokens
        rows: list[Scheduled] = []
        # Rows of more than one token or page, by place, with the number of tokens that remain.
        unusual: list[tuple[int, int]] = []
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
            rows.append((sequence, 1, 1 + sequence.num_forks))
        budget = self._config.max_batch_tokens - (len(rows) - num_longer)
        if not unusual:
            return StepPlan(rows, budget, self._most_prefills)
        return self._settle(rows, unusual, budget, now)

    def _settle(
        self, rows: list[Scheduled], unusual: list[tuple[int, int]], budget: int, now: float
    ) -> StepPlan:
        """Cut prompt chunks to the budget and make room for rows that need another page.

        A sequence that gets no page is left out of this step. To free a page a newer sequence may be preempted;
        it comes later in the order, so it has no row yet.
        """
        held = self._held
        counters = self._residency.counters
        preemptions = counters.preemptions
        prefills = self._most_prefills
        for place, remaining in unusual:
            sequence = rows[place][0]
            if sequence.stage is not RUNNING:
                continue
            num_tokens = 1 if remaining == 1 else min(remaining, budget) if prefills else 0
            # It may find no room, or none before a copy has ended; it keeps what it has and tries again.
            if num_tokens == 0 or not held.grow(sequence, num_tokens, now):
                rows[place] = (sequence, 0, 0)
                continue
            if remaining > 1:
                budget -= num_tokens
                prefills -= 1
            num_samples = 1 + sequence.num_forks if num_tokens == remaining else 0
            rows[place] = (sequence, num_tokens, num_samples)
        # A sequence that was just preempted must not take the pages straight back from the one it made room for.
        if counters.preemptions > preemptions:
            budget = 0
        return StepPlan([row for row in rows if row[1] and row[0].stage is RUNNING], budget, prefills)

    def has_room(self, plan: StepPlan) -> bool:
        """Return whether the step can take in waiting sequences."""
        return plan.budget > 0 and plan.prefills > 0 and len(self._held.admitted) < self._config.max_num_seqs

    def admit(self, plan: StepPlan, now: float) -> None:
        """Admit one sequence after another into the plan, until one cannot reserve what it needs."""
        while self.has_room(plan):
            sequence = self._admit_one(plan.budget, now)
            if sequence is None:
                break
            plan.admitted.append((sequence, self._residency.collect()))
            # One that waits for its adapter keeps its reservation and is passed by others.
            if sequence.stage is RUNNING and self.may_run(sequence):
                remaining = sequence.num_remaining
                num_tokens = min(remaining, plan.budget)
                plan.budget -= num_tokens
                plan.prefills -= 1
                num_samples = 1 + sequence.num_forks if num_tokens == remaining else 0
                plan.rows.append((sequence, num_tokens, num_samples))

    def _admit_one(self, budget: int, now: float) -> Sequence | None:
        """Admit the first candidate that finds room, and return it."""
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
