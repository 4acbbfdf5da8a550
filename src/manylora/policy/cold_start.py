"""Cold starts: which sequences run while what they read is still on its way (CaraServe §4).

Decides whether a loading sequence has a row in the next step, from when its copies are expected to land and what
that costs the others; knows which copies each step in flight awaits. Learns from events alone. Moves nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from manylora.config import ColdStartConfig, PolicyConfig
from manylora.policy.batching import StepPlan
from manylora.policy.reservations import Reservations
from manylora.policy.residency import Residency
from manylora.policy.sequences import LOADING, Scheduled, Sequence
from manylora.policy.tree import LOADING as NODE_LOADING
from manylora.policy.tree import RESIDENT, Node, path_to
from manylora.protocol import Await, CopyDone, StepDone, SwapPages
from manylora.types import CopyId, SequenceId

MOST_ALLOWED_S = 0.1
"""What steps may stand still for at once, however long none did."""


@dataclasses.dataclass(slots=True)
class _Copy:
    """When a copy is expected to move its first byte and its last, and what it took, once that is known."""

    begin_s: float
    end_s: float
    took_s: float | None = None


def cold_starts(config: PolicyConfig, residency: Residency, held: Reservations) -> ColdStarts | None:
    """None where requests wait until all that they read is there."""
    if not config.cold_start.num_groups:
        return None
    return ColdStarts(config.cold_start, config.page_tokens, residency, held)


class ColdStarts:
    """Under ``--cold-start block`` and ``layerwise``. A sequence that awaits copies has one row in flight at most,
    and stays LOADING until that step has ended."""

    def __init__(
        self, config: ColdStartConfig, page_tokens: int, residency: Residency, held: Reservations
    ) -> None:
        self._config = config
        self._page_tokens = page_tokens
        self._residency = residency
        self._held = held
        self._copies: dict[CopyId, _Copy] = {}  # on their way to the device
        self._in_flight: dict[int, tuple[Await, ...]] = {}  # what each step awaits
        self._steps_end_s = 0.0  # when the steps in flight are expected to have ended
        self._allowed_s = 0.0

    # ------------------------------------------------------------ copies

    def _started(self, copies: Iterable[SwapPages], now: float) -> None:
        """These were commanded, after those before."""
        free_s = max([now, *(copy.end_s for copy in self._copies.values() if copy.took_s is None)])
        for command in copies:
            if command.to_device:
                end_s = free_s + len(command.pairs) * self._residency.rates.page_in_s
                self._copies[command.copy] = _Copy(free_s, end_s)
                free_s = end_s

    def copy_ended(self, event: CopyDone) -> None:
        """A copy has been answered; it is remembered while a step that awaits it is in flight."""
        copy = self._copies.get(event.copy)
        if copy is None:
            return
        copy.took_s = event.copy_s
        if not any(wanted.copy == event.copy for awaits in self._in_flight.values() for wanted in awaits):
            del self._copies[event.copy]

    def _coming(self, sequence: Sequence) -> list[CopyId] | None:
        """The copies that bring what the sequence waits for; None where something does not come by a copy that is
        on its way."""
        assert sequence.node is not None
        found: dict[CopyId, None] = {}
        for node in (self._residency.tree.node(sequence.adapter), *path_to(sequence.node)):
            if node.residence is RESIDENT or node.has_landed:
                continue
            move = self._residency.transfers.current(node)
            if node.residence is not NODE_LOADING or move is None or move.copy is None or not move.to_device:
                return None
            found[move.copy] = None
        return list(found)

    # ------------------------------------------------------------ the decision

    def add_rows(self, plan: StepPlan, started: Iterable[SwapPages], now: float) -> None:
        """Give rows to loading sequences, oldest first, where what the others lose by it is within what they may.

        One whose copies failed or were late before waits for them. ``started``: copies that begin before the step.
        """
        self._started(started, now)
        stall_s = 0.0
        for sequence in self._held.admitted if self._held.num_loading else ():
            if (
                sequence.stage is not LOADING
                or sequence.num_failed_copies
                or self._held.is_in_flight(sequence)
            ):
                continue
            copies = self._coming(sequence)
            room = len(sequence.pages) * self._page_tokens - sequence.num_scheduled
            num_tokens = min(sequence.num_remaining, plan.budget, room)
            if not copies or num_tokens <= 0:
                continue
            expected_s = max(stall_s, self._stall_s(copies, plan.rows, num_tokens, now))
            if not self._may_stall(expected_s - stall_s):
                continue
            stall_s = expected_s
            sequence.foresee([node.pages[0] for node in path_to(sequence.node)] if sequence.node else [])
            is_last = num_tokens == sequence.num_remaining
            plan.rows.append((sequence, num_tokens, 1 + sequence.num_unborn_forks if is_last else 0))
            plan.budget -= num_tokens

    def _may_stall(self, seconds: float) -> bool:
        """Whether a step may stand still for so much longer; if so, it is taken off what is left."""
        has_others = len(self._held.admitted) > self._held.num_loading
        if self._config.mode == "block" or not has_others:
            return True
        if seconds > self._allowed_s:
            return False
        self._allowed_s -= seconds
        return True

    def _stall_s(self, copies: list[CopyId], rows: list[Scheduled], num_tokens: int, now: float) -> float:
        """How much longer than without them the step is expected to take: its layers run group by group, each when
        the one before has ended and its own pages have landed."""
        num_groups = self._config.num_groups
        rates = self._residency.rates
        num_prefill = num_tokens + sum(count for _, count, _ in rows if count > 1)
        begin_s, step_s = max(now, self._steps_end_s), rates.expected_step_s(num_prefill)
        end_s = begin_s
        for number in range(1, num_groups + 1):
            landed_s = now
            for copy in (self._copies[copy] for copy in copies):
                landed_s = max(landed_s, copy.begin_s + (copy.end_s - copy.begin_s) * number / num_groups)
            end_s = max(end_s, landed_s) + step_s / num_groups
        return max(0.0, end_s - begin_s - step_s)

    # ------------------------------------------------------------ steps

    def step_started(self, step: int, rows: list[Scheduled], now: float) -> tuple[Await, ...]:
        """What the step awaits, by copy."""
        num_prefill = sum(count for _, count, _ in rows if count > 1)
        expected_s = self._residency.rates.expected_step_s(num_prefill)
        self._steps_end_s = max(now, self._steps_end_s) + expected_s
        wanted: dict[CopyId, list[int]] = {}
        for sequence, _, _ in rows:
            if sequence.stage is LOADING:
                for copy in self._coming(sequence) or ():
                    wanted.setdefault(copy, []).append(sequence.id)
        awaits = tuple(Await(copy, tuple(sequences)) for copy, sequences in wanted.items())
        if awaits:
            self._in_flight[step] = awaits
        return awaits

    def step_ended(
        self, event: StepDone, rows: list[Scheduled], now: float, *, is_idle: bool
    ) -> list[Scheduled]:
        """The rows that count, but for what the step's failure does. ``is_idle``: no other step is in flight."""
        if is_idle:
            self._steps_end_s = 0.0
        if event.ok:
            spare_s = self._config.stall * (event.device_s - event.stall_s)
            self._allowed_s = min(MOST_ALLOWED_S, self._allowed_s + max(0.0, spare_s))
        awaits = self._in_flight.pop(event.step, ())
        took_s = 0.0
        for wanted in awaits:
            copy = self._copies.get(wanted.copy)
            if copy is not None and copy.took_s is not None:
                took_s += copy.took_s
                if not any(other.copy == wanted.copy for rest in self._in_flight.values() for other in rest):
                    del self._copies[wanted.copy]
        if awaits:
            self._residency.counters.stalled(event.stall_s, took_s)
        return self._settle(rows, set(event.spoilt), now) if event.ok else rows

    def _settle(self, rows: list[Scheduled], spoilt: set[SequenceId], now: float) -> list[Scheduled]:
        """The rows that count, of a step that may have awaited copies: the answers to all of these have come. The
        others compute the same again, when what they read is there."""
        kept: list[Scheduled] = []
        for row in rows:
            sequence, _, num_samples = row
            is_spoilt = sequence.id in spoilt
            if sequence.stage is LOADING and not is_spoilt:
                is_spoilt = not self._held.start_if_ready(sequence)
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
        return self._in_flight

    def is_awaited(self, step: int, sequence: Sequence, node: Node) -> bool:
        """Whether the step awaits, for the sequence, the copy that brings the node's contents."""
        move = self._residency.transfers.current(node)
        return move is not None and any(
            wanted.copy == move.copy and sequence.id in wanted.sequences
            for wanted in self._in_flight.get(step, ())
        )
