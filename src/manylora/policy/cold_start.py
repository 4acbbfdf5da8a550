"""Cold starts: which sequences run while what they read is still on its way (CaraServe §4).

Decides whether a loading sequence gets a row in the next step, by the expected landing of its copies and the
stall of the others. Knows the copies that each step in flight needs. Learns from events alone; moves nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable
from typing import NamedTuple

from manylora.config.cold_start import MOST_CPU_TOKENS
from manylora.policy.batching import StepPlan
from manylora.policy.reservations import Reservations
from manylora.policy.residency import Residency
from manylora.policy.sequences import LOADING, Scheduled, Sequence
from manylora.policy.tree import LOADING as NODE_LOADING
from manylora.policy.tree import RESIDENT, Node, path_to
from manylora.protocol import commands, events
from manylora.types import AdapterId, CopyId, SequenceId

MOST_ALLOWED_S = 0.1
"""The most that the stall budget can grow to."""
GAIN = 0.01
"""Under ``auto`` a row begins early only if that shortens its wait by more than this share."""

_LEARN = 0.3
"""The share of a miss by which the next forecast is corrected."""
_FORGET = 0.95
"""The miss of a mode that was not tried fades by this factor, or it would never be tried again."""

# ---------------------------------------------------------------- forecasts


@dataclasses.dataclass(frozen=True, slots=True)
class Landing:
    """The time in which a copy moves, from ``begin_s`` to ``end_s``."""

    begin_s: float
    end_s: float

    def group_s(self, number: int, num_groups: int) -> float:
        """Return when a group of layers, numbered from 0, has landed."""
        return self.begin_s + (self.end_s - self.begin_s) * (number + 1) / num_groups

    def as_of(self, now: float) -> Landing:
        """Return the landing expected for a copy unanswered at ``now``: a late copy goes on for as long as it
        is late already."""
        late_s = now - self.end_s
        return self if late_s <= 0 else dataclasses.replace(self, end_s=now + late_s)


def end_s(begin_s: float, step_s: float, num_groups: int, landings: Iterable[Landing]) -> float:
    """Return when a step ends that would take ``step_s`` alone.

    Its layers run in groups: each begins when the group before has ended and its own part of the copies has
    landed.
    """
    landings = list(landings)
    group_s = step_s / num_groups
    end = begin_s
    for number in range(num_groups):
        for landing in landings:
            end = max(end, landing.group_s(number, num_groups))
        end += group_s
    return end


def boundary_s(begin_s: float, ready_s: float, step_s: float) -> float:
    """Return when the first step begins after ``ready_s``, if steps of ``step_s`` follow one another from
    ``begin_s`` on."""
    late_s = ready_s - begin_s
    if late_s <= 0:
        return begin_s
    if step_s <= 0:
        return ready_s
    return begin_s + math.ceil(late_s / step_s) * step_s


class Beginning(NamedTuple):
    """A way to begin a cold row, with the expected time of its answer and the stall of its step."""

    mode: str
    answer_s: float
    stall_s: float


class _Forecast(NamedTuple):
    """The expected answer of a row that began in ``mode``, as of the decision at ``made_s``.

    ``is_guess``: no copy had been seen then.
    """

    node: Node
    mode: str
    made_s: float
    answer_s: float
    is_guess: bool


class Misses:
    """The recent delay of answers against their forecasts, by the way of beginning."""

    def __init__(self) -> None:
        self.late_s = collections.defaultdict[str, float](float)
        """The mean delay by mode; negative if answers came sooner."""

    def answered(self, mode: str, expected_s: float, took_s: float) -> None:
        """Learn from an answer. A miss counts for at most the whole expected time."""
        missed_s = min(max(took_s - expected_s, -expected_s), expected_s)
        for other in self.late_s:
            if other != mode:
                self.late_s[other] *= _FORGET
        self.late_s[mode] += _LEARN * missed_s


# ---------------------------------------------------------------- copies on their way


@dataclasses.dataclass(slots=True)
class _Copy:
    """A copy that was commanded at ``since_s``: its expected landing, and ``took_s`` once it was answered.

    ``adapter``: the adapter that it brings, if any.
    """

    landing: Landing
    adapter: AdapterId | None
    num_pages: int
    since_s: float
    took_s: float | None = None


class ComingCopies:
    """Copies to the device, by number, that cold rows may read, with their expected landings."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self.by_number: dict[CopyId, _Copy] = {}
        """The copies in flight, and answered ones that a step in flight names."""
        self._lane_free_s = 0.0  # when the last one that was answered had landed

    def started(self, copies: Iterable[commands.SwapPages], now: float) -> None:
        """Add copies that were just commanded, in order."""
        for command in copies:
            if command.to_device:
                incoming = _Copy(Landing(now, now), command.adapter, len(command.pairs), now)
                self.by_number[command.copy] = incoming
        self._expect()

    def ended(self, number: CopyId, seconds: float) -> bool:
        """Note the answer to a copy; return False if the copy was forgotten."""
        copy = self.by_number.get(number)
        if copy is None:
            return False
        copy.took_s = seconds
        self._lane_free_s = max(self._lane_free_s, copy.landing.begin_s + seconds)
        self._expect()
        return True

    def _expect(self) -> None:
        """Forecast anew when the copies in flight land, one after another."""
        free_s = self._lane_free_s
        for copy in self.by_number.values():
            if copy.took_s is None:
                begin_s = max(copy.since_s, free_s)
                free_s = begin_s + copy.num_pages * self._residency.rates.page_in_s
                copy.landing = Landing(begin_s, free_s)

    def of_sequence(self, sequence: Sequence) -> list[CopyId] | None:
        """Return the copies that the sequence waits for; None if anything that it needs is in no copy in
        flight."""
        assert sequence.node is not None
        found: dict[CopyId, None] = {}
        for node in (self._residency.tree.node(sequence.adapter), *path_to(sequence.node)):
            if node.residence is RESIDENT or node.has_landed:
                continue
            move = self._residency.transfers.current.get(node)
            if node.residence is not NODE_LOADING or move is None or not move.to_device or move.copy is None:
                return None
            found[move.copy] = None
        return list(found)


# ---------------------------------------------------------------- decisions


@dataclasses.dataclass(slots=True)
class _Step:
    """The copies that a step in flight needs, and its forecasts.

    ``forecasts``: of its first cold row, if it has any (``is_cold``), then of rows that had to wait.
    """

    awaits: tuple[commands.Await, ...]
    cpu: tuple[commands.CpuRows, ...]
    forecasts: list[_Forecast]
    is_cold: bool
    stall_s: float
    has_others: bool

    def copies(self) -> set[CopyId]:
        """Return the copies that the step awaits, and the copies whose adapters the CPU serves meanwhile."""
        return {wanted.copy for wanted in self.awaits} | {served.copy for served in self.cpu}


class ColdStarts:
    """The decisions of every ``--cold-start`` but ``wait``.

    A sequence with a row before its copies have landed has one such row in flight at most. It stays LOADING
    until that step has ended or, if the CPU computed the row, until its adapter is there.
    """

    def __init__(self, held: Reservations) -> None:
        self._config = held.config.cold_start
        self._page_tokens = held.config.page_tokens
        self._residency = held.residency
        self._held = held
        self._copies = ComingCopies(held.residency)
        self._in_flight: dict[int, _Step] = {}
        self._steps_end_s = 0.0  # when the steps in flight are expected to have ended
        self._allowed_s = 0.0
        self._num_workers = held.config.cold_start.num_workers
        self._misses = Misses()
        # What was expected when these were first left to wait.
        self._waiting: dict[SequenceId, _Forecast] = {}
        # Of the step that is being composed:
        self._composed_s = 0.0
        self.chosen: dict[SequenceId, Beginning] = {}
        """The ways of its loading sequences."""
        self._num_served = 0  # tokens that the CPU serves
        self._stall_s = 0.0
        self._has_others = False  # which stand still with it

    def copy_ended(self, event: events.CopyDone) -> None:
        """Note the answer to a copy, which is kept while a step in flight needs it."""
        if self._copies.ended(event.copy, event.copy_s):
            self._forget_unless_needed(event.copy)

    def _forget_unless_needed(self, copy: CopyId) -> None:
        if not any(copy in step.copies() for step in self._in_flight.values()):
            del self._copies.by_number[copy]

    # ------------------------------------------------------------ the next step

    def add_rows(self, plan: StepPlan, started: Iterable[commands.SwapPages], now: float) -> None:
        """Add loading sequences to the step, oldest first, while the stall of the others stays within the
        budget.

        A sequence whose copies failed or were late before waits for them. ``started``: copies that begin before
        the step.
        """
        self._copies.started(started, now)
        self.chosen = {}
        self._composed_s = now
        self._stall_s = 0.0
        self._num_served = 0
        self._has_others = len(self._held.admitted) > self._held.num_loading
        for sequence in self._held.admitted if self._held.num_loading else ():
            if sequence.stage is not LOADING or sequence.num_failed_copies:
                continue
            copies = None if self._held.is_in_flight(sequence) else self._copies.of_sequence(sequence)
            room = len(sequence.pages) * self._page_tokens - sequence.num_scheduled
            num_tokens = min(sequence.num_remaining, plan.budget, room)
            if not copies or num_tokens <= 0:
                continue
            way, num_tokens = self._way(sequence, copies, plan.rows, num_tokens, now)
            if way.mode == "wait":
                root = self._residency.tree.node(sequence.adapter)
                self._waiting.setdefault(sequence.id, self._forecast(root, way))
                continue
            self._waiting.pop(sequence.id, None)
            self._num_served += num_tokens if way.mode == "cpu" else 0
            self.chosen[sequence.id] = way
            self._allowed_s -= max(0.0, way.stall_s - self._stall_s) if self._has_others else 0.0
            self._stall_s = max(self._stall_s, way.stall_s)
            sequence.plan_pages([node.pages[0] for node in path_to(sequence.node)] if sequence.node else [])
            is_last = num_tokens == sequence.num_remaining
            plan.rows.append((sequence, num_tokens, 1 + sequence.num_forks if is_last else 0))
            plan.budget -= num_tokens

    def _way(
        self, sequence: Sequence, copies: list[CopyId], rows: list[Scheduled], num_tokens: int, now: float
    ) -> tuple[Beginning, int]:
        """Return how the sequence begins, and with how many tokens."""
        mode, num_groups = self._config.mode, self._config.num_groups
        rates = self._residency.rates
        num_prefill = num_tokens + sum(count for _, count, _ in rows if count > 1)
        begin_s = max(now, self._steps_end_s)
        step_s = rates.expected_step_s(num_prefill)
        coming = [self._copies.by_number[copy] for copy in copies]
        incoming = [(copy.landing.as_of(now), copy.adapter) for copy in coming]
        landed_s = max(landing.end_s for landing, _ in incoming)
        # Where others go on, one of their steps is on its way when it has landed.
        starts_s = boundary_s(begin_s, landed_s, rates.expected_step_s(0) if rows else 0.0)
        wait = Beginning("wait", starts_s + step_s + self._misses.late_s["wait"], 0.0)
        served = num_tokens
        if mode == "cpu":
            has_adapter = any(adapter is not None for _, adapter in incoming)
            served = self._served_tokens(sequence, num_tokens) if has_adapter else 0
            if served <= 0:
                return wait, num_tokens
            incoming = [(landing, adapter) for landing, adapter in incoming if adapter is None]
        until_s = end_s(begin_s, step_s, num_groups, [landing for landing, _ in incoming])
        name = "layerwise" if mode == "auto" else mode
        answer_s = until_s
        if mode == "cpu" and served < sequence.num_remaining:
            # A prompt that the CPU's memory cuts goes on when the adapter is there.
            answer_s = max(until_s, landed_s) + step_s
        stall_s = max(0.0, until_s - begin_s - step_s)
        way = Beginning(name, answer_s + self._misses.late_s[name], stall_s)
        return (way, served) if self._may_begin(way, wait, now) else (wait, num_tokens)

    def _may_begin(self, way: Beginning, wait: Beginning, now: float) -> bool:
        """Return whether a row begins this way instead of waiting."""
        if self._config.mode not in ("layerwise", "auto"):
            return True
        # What a row of this step has cost already, this one may cost too.
        if self._has_others and way.stall_s > self._stall_s + self._allowed_s:
            return False
        return self._config.mode != "auto" or wait.answer_s - way.answer_s > GAIN * (wait.answer_s - now)

    def _served_tokens(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many of the sequence's next tokens the CPU may serve.

        Only prompt tokens count, without the last if other samples fork off it: that one needs the adapter.
        """
        if self._num_workers == 0 or sequence.has_drawn:
            return 0
        most = sequence.num_remaining - (sequence.num_forks > 0)
        return min(num_tokens, most, MOST_CPU_TOKENS - self._num_served)

    def _forecast(self, node: Node, way: Beginning) -> _Forecast:
        """Make the forecast of a row in the step that is being composed."""
        is_guess = not self._residency.rates.num_copies[True]
        return _Forecast(node, way.mode, self._composed_s, way.answer_s, is_guess)

    # ------------------------------------------------------------ steps

    def step_started(
        self, step: int, rows: list[Scheduled], now: float
    ) -> tuple[tuple[commands.Await, ...], tuple[commands.CpuRows, ...]]:
        """Return the copies that the step awaits, and the copies whose adapters the CPU serves."""
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
            is_of_cpu = self.chosen[sequence.id].mode == "cpu"
            for copy in self._copies.of_sequence(sequence) or ():
                if is_of_cpu and self._copies.by_number[copy].adapter is not None:
                    served.setdefault(copy, []).append(sequence.id)
                    self._residency.host_reads[self._residency.tree.node(sequence.adapter)] = step
                else:
                    wanted.setdefault(copy, []).append(sequence.id)
        awaits = tuple(commands.Await(copy, tuple(sequences)) for copy, sequences in wanted.items())
        cpu = tuple(commands.CpuRows(copy, tuple(sequences)) for copy, sequences in served.items())
        forecasts = [self._waiting.pop(row[0].id) for row in rows if row[0].id in self._waiting]
        if not self._held.num_loading:
            self._waiting.clear()  # of those that were aborted
        if first is not None:
            root = self._residency.tree.node(first.adapter)
            forecasts.insert(0, self._forecast(root, self.chosen[first.id]))
        if forecasts:
            is_cold = first is not None
            self._in_flight[step] = _Step(awaits, cpu, forecasts, is_cold, self._stall_s, self._has_others)
        return awaits, cpu

    def step_ended(
        self, event: events.StepDone, rows: list[Scheduled], now: float, *, is_idle: bool
    ) -> list[Scheduled]:
        """Learn from a step's end and return its valid rows. ``is_idle``: no other step is in flight."""
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
            self._compare(event, step, now)
        return self._settle(rows, set(event.invalid), step, now) if event.ok else rows

    def _compare(self, event: events.StepDone, step: _Step, now: float) -> None:
        """Compare the step with its forecasts, and count its stall."""
        took_s = beside_s = 0.0
        awaited = {wanted.copy for wanted in step.awaits}
        for number in sorted(step.copies()):
            copy = self._copies.by_number.get(number)
            if copy is not None and copy.took_s is not None:
                took_s += copy.took_s if number in awaited else 0.0
                beside_s += copy.took_s if number not in awaited else 0.0
                self._forget_unless_needed(number)
        if step.cpu:
            self._residency.host_read_ended(event.step)
            self._num_workers = event.cpu_workers if event.cpu_workers >= 0 else self._num_workers
        if step.is_cold:
            hidden_s = beside_s + max(0.0, took_s - event.stall_s)
            self._residency.counters.stalled(event.stall_s, step.stall_s, hidden_s, event.cpu_s)
        for forecast in step.forecasts:
            expected_s, answer_s = forecast.answer_s - forecast.made_s, now - forecast.made_s
            self._residency.counters.cold_answered(expected_s, answer_s)
            if event.ok and not event.invalid and not forecast.is_guess:
                self._misses.answered(forecast.mode, expected_s, answer_s)
            text = f"{forecast.mode}: ended after {1e3 * answer_s:.1f} ms, {1e3 * expected_s:.1f} expected"
            if step.is_cold and forecast is step.forecasts[0]:
                text += f"; stood still {1e3 * event.stall_s:.1f} ms, {1e3 * step.stall_s:.1f} expected"
            self._residency.note("begin", forecast.node, text)

    def _settle(
        self, rows: list[Scheduled], invalid: set[SequenceId], step: _Step | None, now: float
    ) -> list[Scheduled]:
        """Return the valid rows of a step whose copies have all been answered.

        The other sequences compute their tokens again, when all that they read is there.
        """
        served = {sequence for rows in (() if step is None else step.cpu) for sequence in rows.sequences}
        kept: list[Scheduled] = []
        for row in rows:
            sequence, _, num_samples = row
            is_invalid = sequence.id in invalid
            if sequence.stage is LOADING and not is_invalid:
                is_there = self._held.start_if_ready(sequence)
                is_invalid = not is_there and sequence.id not in served
            if not is_invalid:
                kept.append(row)
                continue
            self._residency.counters.spoilt_rows += 1
            sequence.row_failed(num_samples > 0)
            if sequence.stage is LOADING:
                sequence.note_failed_copy()
                self._held.put_back(sequence, now)
        return kept
