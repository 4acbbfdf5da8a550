"""Cold starts: which sequences run while what they read is still on its way (CaraServe §4).

Decides whether a loading sequence has a row in the next step, and whether the CPU computes its adapter's part,
from when its copies are expected to land and what that costs the others; knows which copies each step in flight
needs. Learns from events alone. Moves nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from manylora.config import MOST_CPU_TOKENS, PolicyConfig
from manylora.policy.batching import StepPlan
from manylora.policy.cold_copies import ComingCopies
from manylora.policy.cold_forecast import (
    Beginning,
    CpuShare,
    boundary_s,
    choose,
    end_s,
)
from manylora.policy.cold_lessons import ColdLessons
from manylora.policy.reservations import Reservations
from manylora.policy.residency import Residency
from manylora.policy.sequences import LOADING, Scheduled, Sequence
from manylora.policy.tree import Node, path_to
from manylora.protocol import Await, CopyDone, CpuRows, StepDone, SwapPages
from manylora.types import AdapterId, CopyId, SequenceId

MOST_ALLOWED_S = 0.1
"""What steps may stand still for at once, however long none did."""

_NO_LIMIT = float("inf")


class _Forecast(NamedTuple):
    """The end of a step as it was expected when it was decided, at ``made_s``: of a row that began in ``mode``.
    ``is_guess``: no copy had been seen then."""

    node: Node
    mode: str
    made_s: float
    answer_s: float
    is_guess: bool


@dataclasses.dataclass(slots=True)
class _Step:
    """What a step in flight needs, and what was expected of it. ``waited``: of rows that waited until now."""

    awaits: tuple[Await, ...]
    cpu: tuple[CpuRows, ...]
    begun: _Forecast | None
    waited: list[_Forecast]
    stall_s: float
    has_others: bool
    num_served: int
    """Tokens that the CPU serves."""
    busy_s: float
    """Of the CPU, without its hand-overs."""

    def copies(self) -> set[CopyId]:
        """Those that it awaits, and those whose adapters the CPU serves meanwhile."""
        return {wanted.copy for wanted in self.awaits} | {served.copy for served in self.cpu}


def cold_starts(config: PolicyConfig, residency: Residency, held: Reservations) -> ColdStarts | None:
    """None where requests wait until all that they read is there."""
    if not config.cold_start.num_groups:
        return None
    return ColdStarts(config, residency, held)


class ColdStarts:
    """Under every ``--cold-start`` but ``wait``. A sequence that has a row before its copies have landed has one
    in flight at most, and stays LOADING until that step has ended; one whose row was the CPU's, until its
    adapter is there."""

    def __init__(self, config: PolicyConfig, residency: Residency, held: Reservations) -> None:
        self._config = config.cold_start
        self._page_tokens = config.page_tokens
        self._page_bytes = config.page_bytes
        self._residency = residency
        self._held = held
        self._copies = ComingCopies(residency)
        self._in_flight: dict[int, _Step] = {}
        self._steps_end_s = 0.0  # when the steps in flight are expected to have ended
        self._allowed_s = 0.0
        self._num_workers = config.cold_start.num_workers
        self._lessons = ColdLessons(config.cold_start.rates)
        # What was expected when these were first left to wait.
        self._waiting: dict[SequenceId, _Forecast] = {}
        # Of the step that is being composed:
        self._composed_s = 0.0
        self._chosen: dict[SequenceId, Beginning] = {}
        self._busy_s = 0.0
        self._num_served = 0
        self._stall_s = 0.0
        self._has_others = False  # which stand still with it

    # ------------------------------------------------------------ copies

    def copy_ended(self, event: CopyDone) -> None:
        """A copy has been answered; it is remembered while a step that needs it is in flight."""
        if self._copies.ended(event.copy, event.copy_s):
            self._forget_unless_needed(event.copy)

    def _forget_unless_needed(self, copy: CopyId) -> None:
        if not any(copy in step.copies() for step in self._in_flight.values()):
            self._copies.forget(copy)

    # ------------------------------------------------------------ the decision

    def add_rows(self, plan: StepPlan, started: Iterable[SwapPages], now: float) -> None:
        """Give rows to loading sequences, oldest first, where what the others lose by it is within what they may.

        One whose copies failed or were late before waits for them. ``started``: copies that begin before the step.
        """
        self._copies.started(started, now)
        self._chosen = {}
        self._composed_s = now
        self._busy_s = self._stall_s = 0.0
        self._num_served = 0
        self._has_others = len(self._held.admitted) > self._held.num_loading
        is_served: dict[AdapterId, bool] = {}  # by the CPU, in this step
        for sequence in self._held.admitted if self._held.num_loading else ():
            if (
                sequence.stage is not LOADING
                or sequence.num_failed_copies
                or self._held.is_in_flight(sequence)
            ):
                continue
            copies = self._copies.of_sequence(sequence)
            room = len(sequence.pages) * self._page_tokens - sequence.num_scheduled
            num_tokens = min(sequence.num_remaining, plan.budget, room)
            if not copies or num_tokens <= 0:
                continue
            ways = self._ways(sequence, copies, plan.rows, num_tokens, now)
            served = is_served.get(sequence.adapter)
            if served is not None:  # all rows of an adapter begin alike
                ways = [way for way in ways if way.mode == "wait" or way.is_of_cpu == served]
            way = self._choose(ways, now)
            if way.mode == "wait":
                root = self._residency.tree.node(sequence.adapter)
                self._waiting.setdefault(sequence.id, self._forecast(root, way))
                continue
            self._waiting.pop(sequence.id, None)
            if way.is_of_cpu:
                num_tokens = self._served_tokens(sequence, num_tokens)
                self._num_served += num_tokens
                self._busy_s += self._busy_seconds(num_tokens, self._residency.tree.node(sequence.adapter))
            is_served[sequence.adapter] = way.is_of_cpu
            self._chosen[sequence.id] = way
            self._allowed_s -= max(0.0, way.stall_s - self._stall_s) if self._has_others else 0.0
            self._stall_s = max(self._stall_s, way.stall_s)
            sequence.foresee([node.pages[0] for node in path_to(sequence.node)] if sequence.node else [])
            is_last = num_tokens == sequence.num_remaining
            plan.rows.append((sequence, num_tokens, 1 + sequence.num_unborn_forks if is_last else 0))
            plan.budget -= num_tokens

    def _forecast(self, node: Node, way: Beginning) -> _Forecast:
        """Of the step that is being composed."""
        is_guess = not self._residency.rates.has_copied
        return _Forecast(node, way.mode, self._composed_s, way.answer_s, is_guess)

    def _choose(self, ways: list[Beginning], now: float) -> Beginning:
        mode = self._config.mode
        # What a row of this step has cost already, this one may cost too.
        allowed_s = self._stall_s + self._allowed_s if self._has_others else _NO_LIMIT
        if mode == "auto":
            return choose(ways, now, allowed_s)
        way = next((way for way in ways if way.mode == mode), ways[0])
        return way if mode != "layerwise" or way.stall_s <= allowed_s else ways[0]

    def _ways(
        self, sequence: Sequence, copies: list[CopyId], rows: list[Scheduled], num_tokens: int, now: float
    ) -> list[Beginning]:
        """How the sequence may begin; to wait comes first."""
        mode, num_groups = self._config.mode, self._config.num_groups
        rates = self._residency.rates
        num_prefill = num_tokens + sum(count for _, count, _ in rows if count > 1)
        begin_s = max(now, self._steps_end_s)
        step_s = rates.expected_step_s(num_prefill)
        coming = [(c.landing.as_of(now), c.adapter) for c in map(self._copies.__getitem__, copies)]
        histories = [landing for landing, adapter in coming if adapter is None]
        adapters = [landing for landing, adapter in coming if adapter is not None]
        landed_s = max(landing.end_s for landing in (*histories, *adapters))
        # Where others go on, one of their steps is on its way when it has landed.
        starts_s = boundary_s(begin_s, landed_s, rates.expected_step_s(0) if rows else 0.0)
        found = [Beginning("wait", starts_s + step_s + self._lessons.beyond_s("wait"), 0.0)]
        alone_s = begin_s + step_s
        if mode != "cpu":
            name = "layerwise" if mode == "auto" else mode
            until_s = end_s(begin_s, step_s, num_groups, histories, adapters)
            answer_s = until_s + self._lessons.beyond_s(name)
            found.append(Beginning(name, answer_s, max(0.0, until_s - alone_s)))
        served = self._served_tokens(sequence, num_tokens) if self._serves_cpu() and adapters else 0
        if served > 0:
            root = self._residency.tree.node(sequence.adapter)
            busy_s = self._busy_seconds(served, root)
            share = self._share(self._num_served + served, self._busy_s + busy_s)
            until_s = end_s(begin_s, step_s, num_groups, histories, (), share)
            # A prompt that the CPU's memory cuts goes on when the adapter is there.
            answer_s = until_s if served == sequence.num_remaining else max(until_s, landed_s) + step_s
            answer_s += self._lessons.beyond_s("cpu")
            found.append(Beginning("cpu", answer_s, max(0.0, until_s - alone_s)))
        return found

    # ------------------------------------------------------------ the CPU

    def _serves_cpu(self) -> bool:
        return self._config.mode in ("cpu", "auto") and self._num_workers > 0

    def _served_tokens(self, sequence: Sequence, num_tokens: int) -> int:
        """How many of the sequence's next tokens the CPU may serve: of its prompt, and not the one that others
        fork off, which needs the adapter to be there."""
        if sequence.has_drawn:
            return 0
        most = sequence.num_remaining - (sequence.num_unborn_forks > 0)
        return min(num_tokens, most, MOST_CPU_TOKENS - self._num_served)

    def _busy_seconds(self, num_tokens: int, root: Node) -> float:
        return self._lessons.busy_s(num_tokens, root.num_pages * self._page_bytes, self._num_workers)

    def _share(self, num_tokens: int, busy_s: float) -> CpuShare:
        """``num_tokens``: of all cold rows of the step; all layers keep the workers busy for ``busy_s``."""
        return CpuShare(self._lessons.besides_s(num_tokens) + busy_s, self._lessons.beside)

    # ------------------------------------------------------------ steps

    def mode_of(self, sequence: Sequence) -> str:
        """How the sequence, which has a row in the step that starts, begins."""
        return self._chosen[sequence.id].mode

    def step_started(
        self, step: int, rows: list[Scheduled], now: float
    ) -> tuple[tuple[Await, ...], tuple[CpuRows, ...]]:
        """What the step awaits, by copy, and which copies' adapters the CPU serves."""
        num_prefill = sum(count for _, count, _ in rows if count > 1)
        expected_s = self._residency.rates.expected_step_s(num_prefill)
        self._steps_end_s = max(now, self._steps_end_s) + expected_s
        if not (self._held.num_loading or self._waiting):
            return (), ()
        wanted: dict[CopyId, list[int]] = {}
        served: dict[CopyId, list[int]] = {}
        first: Sequence | None = None
        for sequence, _, _ in rows:
            if sequence.stage is not LOADING:
                continue
            first = first or sequence
            way = self._chosen[sequence.id]
            for copy in self._copies.of_sequence(sequence) or ():
                if way.is_of_cpu and self._copies[copy].adapter is not None:
                    served.setdefault(copy, []).append(sequence.id)
                    self._residency.lent.lend(self._residency.tree.node(sequence.adapter), step)
                else:
                    wanted.setdefault(copy, []).append(sequence.id)
        awaits = tuple(Await(copy, tuple(sequences)) for copy, sequences in wanted.items())
        cpu = tuple(CpuRows(copy, tuple(sequences)) for copy, sequences in served.items())
        waited = [self._waiting.pop(row[0].id) for row in rows if row[0].id in self._waiting]
        if not self._held.num_loading:
            self._waiting.clear()  # of those that were aborted
        if first is not None or waited:
            begun = None
            if first is not None:
                begun = self._forecast(self._residency.tree.node(first.adapter), self._chosen[first.id])
            busy_s, stall_s, has_others = self._busy_s, self._stall_s, self._has_others
            self._in_flight[step] = _Step(
                awaits, cpu, begun, waited, stall_s, has_others, self._num_served, busy_s
            )
        return awaits, cpu

    def step_ended(
        self, event: StepDone, rows: list[Scheduled], now: float, *, is_idle: bool
    ) -> list[Scheduled]:
        """The rows that count, but for what the step's failure does. ``is_idle``: no other step is in flight."""
        if is_idle:
            self._steps_end_s = 0.0
        step = self._in_flight.pop(event.step, None)
        if event.ok:
            spare_s = max(0.0, self._config.stall * (event.device_s - event.stall_s))
            if step is not None and step.has_others:
                # What was expected has been taken off before it began.
                spare_s += step.stall_s - event.stall_s
            self._allowed_s = min(MOST_ALLOWED_S, self._allowed_s + spare_s)
        if step is not None:
            self._tell(event, step, now)
        return self._settle(rows, set(event.spoilt), step, now) if event.ok else rows

    def _tell(self, event: StepDone, step: _Step, now: float) -> None:
        """What came of the step, beside what was expected of it."""
        took_s = beside_s = 0.0
        awaited = {wanted.copy for wanted in step.awaits}
        for number in sorted(step.copies()):
            copy = self._copies.get(number)
            if copy is not None and copy.took_s is not None:
                took_s += copy.took_s if number in awaited else 0.0
                beside_s += copy.took_s if number not in awaited else 0.0
                self._forget_unless_needed(number)
        if step.cpu:
            self._residency.lent.step_ended(event.step)
            self._num_workers = event.cpu_workers if event.cpu_workers >= 0 else self._num_workers
            if event.cpu_s > 0 and not step.awaits:
                own_s = event.device_s - event.stall_s
                self._lessons.served(step.num_served, step.busy_s, event.cpu_s, own_s, event.stall_s)
        if step.begun is not None:
            hidden_s = beside_s + max(0.0, took_s - event.stall_s)
            self._residency.counters.stalled(event.stall_s, step.stall_s, hidden_s, event.cpu_s)
        for forecast in (*((step.begun,) if step.begun else ()), *step.waited):
            expected_s, answer_s = forecast.answer_s - forecast.made_s, now - forecast.made_s
            self._residency.counters.cold_answered(expected_s, answer_s)
            if event.ok and not event.spoilt and not forecast.is_guess:
                self._lessons.answered(forecast.mode, expected_s, answer_s)
            told = f"{forecast.mode}: ended after {1e3 * answer_s:.1f} ms, {1e3 * expected_s:.1f} expected"
            if forecast is step.begun:
                told += f"; stood still {1e3 * event.stall_s:.1f} ms, {1e3 * step.stall_s:.1f} expected"
            self._residency.note("begin", forecast.node, told)

    def _settle(
        self, rows: list[Scheduled], spoilt: set[SequenceId], step: _Step | None, now: float
    ) -> list[Scheduled]:
        """The rows that count, of a step that may have awaited copies: the answers to all of these have come. The
        others compute the same again, when what they read is there."""
        served = {sequence for rows in (() if step is None else step.cpu) for sequence in rows.sequences}
        kept: list[Scheduled] = []
        for row in rows:
            sequence, _, num_samples = row
            is_spoilt = sequence.id in spoilt
            if sequence.stage is LOADING and not is_spoilt:
                is_there = self._held.start_if_ready(sequence)
                is_spoilt = not is_there and sequence.id not in served
            if not is_spoilt:
                kept.append(row)
                continue
            self._residency.counters.spoilt_rows += 1
            sequence.row_failed(num_samples > 0)
            if sequence.stage is LOADING:
                sequence.note_failed_copy()
                self._held.put_back(sequence, now)
        return kept

    # ------------------------------------------------------------ for invariant checks

    def awaits(self) -> dict[int, tuple[Await, ...]]:
        """What each step in flight awaits, by step."""
        return {number: step.awaits for number, step in self._in_flight.items()}

    def is_awaited(self, step: int, sequence: Sequence, node: Node) -> bool:
        """Whether the step awaits, for the sequence, the copy that brings the node's contents, or the CPU serves
        it meanwhile."""
        copy = self._copies.of_node(node)
        needed = self._in_flight.get(step)
        return (
            copy is not None
            and needed is not None
            and (
                any(w.copy == copy and sequence.id in w.sequences for w in needed.awaits)
                or any(s.copy == copy and sequence.id in s.sequences for s in needed.cpu)
            )
        )
