"""One replica's policy: events in, commands out. The only door into ``policy`` for an engine.

Owns adapters from being added to being freed, and the steps in flight. ``requests`` owns requests, ``batching``
chooses the rows of a step, ``reservations`` owns the pages of sequences. Knows no clock, no tensor, no text.
"""

from __future__ import annotations

import collections
import dataclasses

from manylora.config.policy import PolicyConfig
from manylora.policy.batching import Admission, FirstComeFirstServed, StepPlan
from manylora.policy.cache_policies import CachePolicy
from manylora.policy.cold_start import ColdStarts
from manylora.policy.merging.state import MergedBatching, MergeState
from manylora.policy.queue import WaitingQueue
from manylora.policy.report import ClusterReport, Gauges
from manylora.policy.requests import Requests
from manylora.policy.reservations import Reservations
from manylora.policy.residency import Residency
from manylora.policy.sequences import LOADING, Scheduled, Sequence, run_step
from manylora.policy.swap import PinnedAdapters, Swapper
from manylora.policy.tree import RESIDENT, Node, subtree
from manylora.protocol import commands, events
from manylora.types import BASE, AdapterId, RequestError

MAX_FAILED_COPIES = 3
"""The most failed copies of a request before it fails: after each it looks for another way."""


class Replica:
    """The state machine. ``handle`` is the only way to change it; commands come in execution order.

    It answers an unknown id with an end, never with an exception: the removal of an unknown adapter with
    AdapterFreed, a second request of a live id with Reject, a row without its tokens with its request's end. It
    ignores an answer that it did not ask for.
    """

    def __init__(self, config: PolicyConfig, cache: CachePolicy | None = None) -> None:
        """``cache``: to use instead of the policy that the config names."""
        self._config = config
        self._waiting = WaitingQueue(config.queue)
        self._admission = Admission(config, self._waiting)
        self._residency = Residency(config, cache)
        self._tree = self._residency.tree
        self._held = held = Reservations(config, self._residency, self._waiting)
        self._requests = Requests(held, self._admission)
        self._merging: MergeState | None = None  # where nothing is ever merged
        self._batching = FirstComeFirstServed(held)
        if config.merge.is_on:
            self._merging = MergeState(held)
            self._batching = MergedBatching(held, self._merging)
        # None where requests wait until all that they read is there.
        self._cold = ColdStarts(held) if config.cold_start.num_groups else None
        self._swapper = Swapper(held)
        self._gauges = Gauges(held, self._merging)
        self._cluster_report = ClusterReport(held)
        self._pinned = PinnedAdapters(held)
        self._removing: set[AdapterId] = set()
        self._num_steps = 0
        self._in_flight: collections.deque[list[Scheduled]] = collections.deque()  # oldest first
        self._timer_is_set = False

    # ------------------------------------------------------------ the door

    def handle(self, event: events.Event, now: float) -> list[commands.Command]:
        """React to one event at time ``now`` (seconds, any origin, never decreasing)."""
        more = False
        match event:
            case events.StepDone():  # first, for there are most of them
                self._step_done(event, now)
                more = event.more
            case events.Arrive():
                self._requests.arrive(event, now)
                more = event.more
            case events.Abort():
                self._requests.abort(event, now)
            case events.Release():
                self._requests.hand_over(event, now)
            case events.AdapterRead():
                self._adapter_read(event, now)
            case events.CopyDone():
                self._copy_done(event, now)
            case events.SwitchDone():
                if self._merging is not None:
                    self._merging.ended(event, now)
            case events.Timer():
                self._timer_is_set = False
                self._swapper.tick(now)
            case events.AdapterAdded():
                self._tree.add_adapter(event.adapter, event.num_pages)
            case events.AdapterRemoved():
                self._remove(event.adapter)
            case events.PinAdapter():
                change = self._pinned.keep if event.is_pinned else self._pinned.forget
                change(event.adapter)
            case events.ReportDue():
                counters = dataclasses.replace(self._residency.counters)
                return [commands.Report(self._gauges.read(event.which), counters)]
            case events.StatusDue():
                return [self._cluster_report.read(event.is_full)]
        self._requests.release_idle(now)
        if self._removing:
            self._free_removed()
        if not more:
            while self._start_next(now):
                pass
        return self._requests.take_commands()

    # ------------------------------------------------------------ adapters

    def _remove(self, adapter: AdapterId) -> None:
        """Remove an adapter. AdapterFreed follows when nothing of it is left: at once, if it is unknown."""
        self._pinned.forget(adapter)
        if self._tree.mark_removed(adapter):
            self._removing.add(adapter)
        elif adapter not in self._removing:
            self._requests.send(commands.AdapterFreed(adapter))

    def _adapter_read(self, event: events.AdapterRead, now: float) -> None:
        if event.adapter not in self._residency.transfers.reads:
            return
        node = self._residency.read_ended(event)
        if node is not None:
            status = 400 if event.is_at_fault else 503
            error = RequestError(status, f"the adapter could not be read: {event.error}", "model")
            for state in {s.state.id: s.state for s in self._waiting_for(node)}.values():
                self._requests.fail(state, error, now)
            self._pinned.forget(event.adapter)
            self._residency.abandon_load(node)
        self._wake(now)

    def _copy_done(self, event: events.CopyDone, now: float) -> None:
        nodes = self._residency.copy_ended(event)
        if self._cold is not None:
            self._cold.copy_ended(event)
        for node in nodes:
            if node.is_dropped:
                continue
            # The host's copy is not to be trusted either: KV is computed again, an adapter read again.
            for sequence in self._waiting_for(node):
                if sequence.note_failed_copy() >= MAX_FAILED_COPIES:
                    error = RequestError(503, f"what the request needs could not be copied: {event.error}")
                    self._requests.fail(sequence.state, error, now)
                elif sequence.stage is LOADING:
                    self._held.put_back(sequence, now)
            if node.is_adapter:
                self._pinned.forget(node.adapter)
            self._residency.abandon_load(node)
            self._residency.discard(node)
        self._wake(now)

    def _waiting_for(self, node: Node) -> list[Sequence]:
        """Return the loading sequences that cannot start without this node."""
        below = {id(member) for member in subtree(node)}
        return [s for s in self._held.admitted if s.stage is LOADING and id(s.node) in below]

    def _wake(self, now: float) -> None:
        """Start the sequences whose copies have all landed, and note each part of their wait.

        A sequence that has a row already goes on when its step has ended.
        """
        if not self._held.num_loading:
            return
        self._requests.collect()
        loading = [s for s in self._held.admitted if s.stage is LOADING and not self._held.is_in_flight(s)]
        for sequence in loading:
            if self._tree.node(sequence.adapter).residence is RESIDENT:
                sequence.note_adapter(now)
            if self._held.start_if_ready(sequence):
                self._requests.note_ready(sequence, now)

    def _free_removed(self) -> None:
        """Free removed adapters that no request uses and no transfer touches."""
        residency, transfers = self._residency, self._residency.transfers
        for adapter in sorted(self._removing):
            if self._requests.num_live[adapter] or adapter in transfers.reads:
                continue
            if self._merging is not None and adapter in self._merging.pinned():
                continue  # it is unmerged first
            residency.discard(self._tree.node(adapter))
            if transfers.num_moves[adapter]:
                continue
            self._tree.forget(adapter)
            self._removing.remove(adapter)
            del transfers.num_moves[adapter], self._requests.num_live[adapter]
            self._waiting.forget(adapter)
            if self._merging is not None:
                self._merging.policy.forget(adapter)
            self._requests.send(commands.AdapterFreed(adapter))

    # ------------------------------------------------------------ steps

    def _start_next(self, now: float) -> bool:
        """Start transfers and a step, if there are any; return whether another step may follow at once."""
        depth, in_flight = self._config.pipeline_depth, self._in_flight
        if len(self._pinned):
            self._pinned.pin()
        plan = self._compose(now) if len(in_flight) < depth else StepPlan([], 0)
        rows = plan.rows
        # Transfers run beside compute: they start before the step.
        if len(self._pinned):
            self._pinned.bring(now)
        self._swapper.use_idle_lane(now)
        copies = self._residency.start_transfers()
        if self._cold is not None:
            self._cold.add_rows(plan, copies, now)
        if not self._timer_is_set and (self._requests.by_id or self._swapper.may_bring_in):
            self._timer_is_set = True
            self._requests.send(commands.SetTimer(now + self._config.cache.interval_s))
        if rows:
            self._start_step(rows, now)
        elif not in_flight:
            if self._merging is not None and self._merging.is_stuck():
                return True
            if self._pinned.give_way():
                return True
        return bool(rows) and len(in_flight) < depth

    def _compose(self, now: float) -> StepPlan:
        """Return the plan of the next step; requests that are too late end before others are admitted."""
        batching = self._batching
        plan = batching.compose(now)
        if batching.has_room(plan):
            for sequence in self._admission.begin_round(now):
                self._refuse(sequence, now)
            if len(self._waiting):
                batching.admit(plan, now)
                self._admission.end_round(len(plan.admitted))
                for sequence, decided in plan.admitted:
                    self._requests.commands += decided
                    self._requests.note_admission(sequence, now)
        return plan

    def _refuse(self, sequence: Sequence, now: float) -> None:
        waited_s, objective_s = now - sequence.state.arrived_s, self._config.slo_ttft_s
        message = f"after {waited_s:.1f} s in the queue, no first token can come within {objective_s:g} s"
        self._requests.fail(sequence.state, RequestError(503, message), now)
        if self._removing:
            self._free_removed()

    def _start_step(self, rows: list[Scheduled], now: float) -> None:
        self._num_steps = step = self._num_steps + 1
        self._in_flight.append(rows)
        self._residency.device.step_started(step)
        self._residency.visits.batch(len(rows), now)
        merged = BASE if self._merging is None else self._merging.started(rows, now)
        awaits, cpu = ((), ()) if self._cold is None else self._cold.step_started(step, rows, now)
        if self._cold is not None and (awaits or cpu):
            self._requests.collect()
            for sequence in [sequence for sequence, _, _ in rows if sequence.stage is LOADING]:
                sequence.note_adapter(now)
                self._requests.note_ready(sequence, now, self._cold.chosen[sequence.id].mode)
        self._requests.send(run_step(step, rows, merged, awaits, cpu))

    def _step_done(self, event: events.StepDone, now: float) -> None:
        oldest = self._num_steps - len(self._in_flight) + 1
        if not oldest <= event.step <= self._num_steps:
            return  # it has ended, or never started
        for step in range(oldest, event.step):
            # Steps end in order, so it has ended too; its result is not known.
            self._end_step(events.StepDone(step, False, error="its end was not told"), now)
        self._end_step(event, now)
        self._swapper.step_ended(now)
        self._wake(now)  # a page that was computed may be what another was waiting for

    def _end_step(self, event: events.StepDone, now: float) -> None:
        rows = self._in_flight.popleft()
        self._residency.device.step_ended(event.step)
        if self._merging is not None:
            self._merging.step_ended(event.device_s if event.ok else 0.0)
        if self._cold is not None:
            rows = self._cold.step_ended(event, rows, now, is_idle=not self._in_flight)
        if event.ok:
            num_tokens = sum([num_tokens for _, num_tokens, _ in rows])
            self._residency.rates.saw_step(len(rows), num_tokens, event.device_s - event.stall_s)
            if event.unsound:
                self._requests.fail_unsound(rows, set(event.unsound), now)
            self._requests.take_step(event.step, rows, dict(event.tokens), now)
        else:
            self._requests.fail_step(rows, event.error, now)
