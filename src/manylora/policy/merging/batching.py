"""Steps whose sequences share weights: which of them are paused meanwhile, and which may take another's slot."""

from __future__ import annotations

from manylora.config import PolicyConfig
from manylora.policy.batching import FirstComeFirstServed, StepPlan
from manylora.policy.merging.choice import Choice
from manylora.policy.merging.state import MergeState
from manylora.policy.queue import WaitingQueue
from manylora.policy.reservations import Reservations
from manylora.policy.residency import Residency
from manylora.policy.sequences import RUNNING, Sequence
from manylora.types import BASE, SequenceId


class MergedBatching(FirstComeFirstServed):
    """First come, first served among those that the merge policy's choice lets run. The others are paused."""

    def __init__(
        self,
        config: PolicyConfig,
        residency: Residency,
        held: Reservations,
        waiting: WaitingQueue,
        merging: MergeState,
    ) -> None:
        super().__init__(config, residency, held, waiting)
        self._in_line = waiting
        self._merging = merging
        self._choice = Choice(BASE)
        self._batch: set[SequenceId] = set()
        self._displaced: set[SequenceId] = set()  # for this step

    def compose(self, now: float) -> StepPlan:
        """See FirstComeFirstServed; no rows, and no room, where a switch must end first."""
        if not self._merging.must_wait:
            self._choice = self._merging.choose(now)  # which may begin one
        if self._merging.must_wait:
            return StepPlan([], 0)
        choice = self._choice
        self._batch = {sequence.id for sequence in choice.batch}
        for sequence in self._held.admitted:
            if sequence.stage is RUNNING:
                if self.may_run(sequence):
                    self._held.resume(sequence, now)
                else:
                    self._held.pause(sequence, now)
        return super().compose(now)

    def may_run(self, sequence: Sequence) -> bool:
        """See FirstComeFirstServed."""
        only = self._choice.only
        return only is None or sequence.adapter == only

    def runnable(self) -> list[Sequence]:
        """See FirstComeFirstServed."""
        if self._choice.only is None:
            return self._held.admitted
        return [sequence for sequence in self._held.admitted if self.may_run(sequence)]

    # ------------------------------------------------------------ admission

    def admit(self, plan: StepPlan, now: float) -> None:
        """See FirstComeFirstServed. Those that lose their slots lose their rows."""
        self._displaced.clear()
        super().admit(plan, now)
        if self._displaced:
            plan.rows = [row for row in plan.rows if row[0].id not in self._displaced]

    def candidates(self, now: float) -> list[Sequence]:
        """See FirstComeFirstServed. Of the batch first; then of the adapters that may be admitted, or of all."""
        found: list[Sequence] | None = None
        for sequence in self._choice.batch:
            if sequence.is_waiting and self._is_let_in(sequence):
                found = [sequence]
                break
        if found is None and self._choice.line is None:
            found = super().candidates(now)
        elif found is None:
            firsts = [self._in_line.first_of(adapter) for adapter in self._choice.line or ()]
            found = [sequence for sequence in firsts if sequence is not None and self._is_let_in(sequence)]
        # What has just lost a slot does not take another's in return.
        return [] if any(sequence.id in self._displaced for sequence in found) else found

    def _is_let_in(self, sequence: Sequence) -> bool:
        return self._clusters is None or self._clusters.lets_in(sequence.adapter, self._held.admitted)

    def has_room(self, plan: StepPlan) -> bool:
        """See FirstComeFirstServed: whether a slot is free, or one can be had."""
        if plan.budget <= 0 or not plan.prefills:
            return False
        has_slot = len(self._held.admitted) < self._config.max_num_seqs
        return has_slot or self._held.num_paused > 0 or any(s.is_waiting for s in self._choice.batch)

    def let_in(self, sequence: Sequence, budget: int, now: float) -> bool:
        """Admit it; where slots or pages are missing, instead of those that must give way to it.

        For a slot the newest that is paused, or not of the batch where the sequence is of it; for pages only such
        as came after it, and none while pages are on their way.
        """
        held, residency = self._held, self._residency
        if len(held.admitted) >= self._config.max_num_seqs:
            victim = self._gives_way_to(sequence)
            if victim is None:
                return False
            self._displace(victim, now)
        while not held.admit(sequence, budget, now):
            victim = self._gives_way_to(sequence)
            if victim is None or victim.order < sequence.order:
                return False
            if residency.num_coming(for_adapters=False) > residency.num_free(for_adapters=False):
                return False
            self._displace(victim, now)
        return True

    def _displace(self, victim: Sequence, now: float) -> None:
        self._displaced.add(victim.id)
        self._held.displace(victim, now)

    def _gives_way_to(self, sequence: Sequence) -> Sequence | None:
        is_chosen = sequence.id in self._batch
        for admitted in reversed(self._held.admitted):
            if not admitted.has_drawn:
                continue  # sent back before that, over and over, it would never get on
            if admitted.paused_s is not None:
                return admitted
            if is_chosen and admitted.id not in self._batch and admitted.adapter != sequence.adapter:
                return admitted
        return None
