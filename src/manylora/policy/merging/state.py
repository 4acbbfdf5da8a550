"""The state of merging: no adapter, a switch under way, or one adapter. Carries out a policy's choices.

``MergedBatching`` pauses the sequences that a choice leaves out, and gives their slots to others.

Owns the switches, the merged adapter's pin, and the weights of each step in flight. Does not know when a switch
pays.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import NamedTuple

from manylora.config.merging import MERGE_POLICIES
from manylora.config.named import imported_class, place_of
from manylora.config.policy import PolicyConfig
from manylora.policy.batching import FirstComeFirstServed, StepPlan
from manylora.policy.merging.choice import Choice, MergePolicy, MergeView, StepShape, shape_of
from manylora.policy.merging.times import StepSeconds
from manylora.policy.reservations import Reservations
from manylora.policy.sequences import RUNNING, WAITING, Scheduled, Sequence
from manylora.protocol import commands, events
from manylora.types import BASE, AdapterId, SequenceId, SwitchId


def merge_policy(config: PolicyConfig, times: StepSeconds) -> MergePolicy:
    """Return the policy that ``--merge`` names; ``unmerged`` needs none."""
    found = imported_class("merge mode", place_of("merge", MERGE_POLICIES, config.merge.mode), MergePolicy)
    return found(config, times)


BARRED_S = 60.0
"""The time without merging after a failed switch."""


class Switch(NamedTuple):
    """A SetMerged that has not been answered."""

    number: SwitchId
    before: AdapterId
    after: AdapterId


class MergeState:
    """The merged adapter and its switches.

    ``adapter``: in the weights of the next step, by the last SetMerged; BASE without one, or after a failed
    one. It is pinned from its SetMerged until the next one has been answered.
    """

    def __init__(self, held: Reservations) -> None:
        self._config = held.config
        self._residency = held.residency
        self._held = held
        self._waiting = held.waiting
        self._times = StepSeconds(held.config.merge.times)
        self.policy = merge_policy(held.config, self._times)
        self.adapter: AdapterId = BASE
        self.switch: Switch | None = None
        """The switch under way."""
        self._num_switches = 0
        # A step that draws a token has started since the last switch, so that switches never stop all progress.
        self._has_drawn = True
        self._barred_until_s = 0.0
        self._is_restricted = False  # whether the last choice kept any from running
        self._gives_way = False
        self.in_flight: collections.deque[StepShape] = collections.deque()
        """The steps in flight, oldest first."""

    # ------------------------------------------------------------ asked

    @property
    def must_wait(self) -> bool:
        """Whether no step may start until the switch under way has ended."""
        return self.switch is not None and self._config.merge.times.steps_wait

    def pinned(self) -> list[AdapterId]:
        """Return the pinned adapters: in the weights now, or at either end of the switch under way."""
        kept = {self.adapter} if self.switch is None else {self.switch.before, self.switch.after}
        return sorted(kept - {BASE})

    def is_stuck(self) -> bool:
        """Return whether nothing runs for want of another choice; then the next choice lets all run."""
        if self.switch is not None or self._gives_way:
            return False
        if self._is_left_over():
            return True
        self._gives_way = self._held.is_stuck() and (self.adapter != BASE or self._is_restricted)
        return self._gives_way

    def _is_left_over(self) -> bool:
        """Return whether the merged adapter is removed, and its requests have ended."""
        adapter = self.adapter
        if self._residency.tree.knows(adapter) or adapter in self._waiting.num_by_adapter:
            return False
        return all(sequence.adapter != adapter for sequence in self._held.admitted)

    # ------------------------------------------------------------ choosing

    def choose(self, now: float) -> Choice:
        """Choose which sequences may run in the next step, and command the switch that this needs."""
        can_switch, can_merge = self.switch is None and self._has_drawn, now >= self._barred_until_s
        view = MergeView(
            now, self.adapter, can_switch, can_merge, self._held.admitted, self._waiting,
            self._config.max_num_seqs,
        )  # fmt: skip
        choice = self._choice(view)
        if choice.adapter != self.adapter:
            assert self.switch is None, "one switch at a time"
            assert choice.adapter == BASE or view.ready[choice.adapter], "what is merged can run"
            self._command(choice)
        if self.adapter != BASE:
            choice = dataclasses.replace(choice, only=self.adapter)
        self._is_restricted = choice.only is not None or choice.line is not None
        return choice

    def _choice(self, view: MergeView) -> Choice:
        if self._gives_way:
            self._gives_way = False
            return Choice(BASE, reason="nothing else can run")
        if self.switch is None and self._is_left_over():
            return Choice(BASE, reason="it is removed")
        return self.policy.choose(view)

    def _command(self, choice: Choice) -> None:
        before, after = self.adapter, choice.adapter
        tree = self._residency.tree
        if after != BASE:
            tree.pin(tree.node(after))
        self._num_switches += 1
        self._has_drawn = False
        self.switch = Switch(self._num_switches, before, after)
        self.adapter = after
        self._residency.decide(commands.SetMerged(self._num_switches, after))
        action, named = ("unmerge", before) if after == BASE else ("merge", after)
        self._residency.note(action, tree.node(named), choice.reason)

    # ------------------------------------------------------------ events

    def ended(self, event: events.SwitchDone, now: float) -> None:
        """Take the end of a switch; after a failed one nothing is merged."""
        switch, counters = self.switch, self._residency.counters
        if switch is None or event.switch != switch.number:
            return
        self.switch = None
        counters.switched(event.ok, event.switch_s, to_base=switch.after == BASE)
        self._unpin(switch.before)
        if event.ok:
            self._times.saw_switch(switch.before, switch.after, event.switch_s)
        else:
            if switch.after != BASE:
                named = self._residency.tree.node(switch.after)
                self._residency.note("unmerge", named, f"the switch failed: {event.error}")
            self._unpin(switch.after)
            self.adapter = BASE
            self._barred_until_s = now + BARRED_S
        self.policy.switched(switch.before, self.adapter, event.switch_s)

    def _unpin(self, adapter: AdapterId) -> None:
        if adapter != BASE:
            self._residency.unpin(self._residency.tree.node(adapter))

    def started(self, rows: list[Scheduled], now: float) -> AdapterId:
        """Note a step that starts; return the adapter in its weights."""
        self._has_drawn = self._has_drawn or any(num_samples for _, _, num_samples in rows)
        shape = shape_of(self.adapter, rows)
        self.in_flight.append(shape)
        self.policy.started(shape, rows, now)
        return shape.merged

    def step_ended(self, seconds: float) -> None:
        """Take the end of the oldest step. ``seconds``: of the device, 0 if not known."""
        shape, counters = self.in_flight.popleft(), self._residency.counters
        counters.steps_unmerged += shape.merged == BASE
        counters.steps_merged += shape.merged != BASE
        self._times.saw_step(shape, seconds)
        self.policy.step_ended(seconds)


class MergedBatching(FirstComeFirstServed):
    """The batching of the sequences that the merge policy's choice lets run. The others are paused."""

    def __init__(self, held: Reservations, merging: MergeState) -> None:
        super().__init__(held)
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
        """See FirstComeFirstServed. A sequence that loses its slot loses its row."""
        self._displaced.clear()
        super().admit(plan, now)
        if self._displaced:
            plan.rows = [row for row in plan.rows if row[0].id not in self._displaced]

    def candidates(self, now: float) -> list[Sequence]:
        """See FirstComeFirstServed. The batch comes first; then the adapters that may be admitted, or all."""
        batch, line = self._choice.batch, self._choice.line
        first = next((s for s in batch if s.stage is WAITING and self._is_let_in(s)), None)
        if first is not None:
            found = [first]
        elif line is None:
            found = super().candidates(now)
        else:
            firsts = [self._waiting.first_of(adapter) for adapter in line]
            found = [sequence for sequence in firsts if sequence is not None and self._is_let_in(sequence)]
        # A sequence that has just lost its slot does not take another's in return.
        return [] if any(sequence.id in self._displaced for sequence in found) else found

    def _is_let_in(self, sequence: Sequence) -> bool:
        return self._clusters is None or self._clusters.lets_in(sequence.adapter, self._held.admitted)

    def has_room(self, plan: StepPlan) -> bool:
        """See FirstComeFirstServed. A slot that can be taken from another counts as free."""
        if plan.budget <= 0 or not plan.prefills:
            return False
        has_slot = len(self._held.admitted) < self._config.max_num_seqs
        return has_slot or self._held.num_paused > 0 or any(s.stage is WAITING for s in self._choice.batch)

    def let_in(self, sequence: Sequence, budget: int, now: float) -> bool:
        """Admit a sequence; if slots or pages are missing, displace others for it.

        For a slot the newest paused sequence gives way or, to a sequence of the batch, the newest one outside
        it. For pages only a newer sequence gives way, and none while pages are on their way.
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
            if residency.num_available_soon(for_adapters=False) > residency.num_free(for_adapters=False):
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
