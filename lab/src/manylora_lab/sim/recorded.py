"""A real run's arrivals and measured times, and the loop of ``loop`` on a device that takes just these.

Owns what is taken out of a recorded run, and what is not: the order of its events. Knows no file format.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from manylora.config.policy import PolicyConfig
from manylora.policy.replica import Replica
from manylora.protocol.commands import Ask, Command, RunStep, SetTimer, ask_of
from manylora.protocol.events import Event, StepDone, Timer
from manylora_lab.sim.loop import VirtualLoop

_TIMER: Ask = ("timer", 0)


class Told(NamedTuple):
    """An event, when the replica was told, and what it commanded."""

    now: float
    event: Event
    commands: Sequence[Command]


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredAnswer:
    """One thing that came. ``event`` is None where the recording ends before the answer.

    ``took_s``: from the command to the answer; of a timer from the moment it was set for; of an event without
    a command from the clock's zero. ``late_s``: how long it then waited behind others, with the loop awake.
    """

    event: Event | None
    took_s: float = 0.0
    late_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Recording:
    """What came unasked (requests, aborts, adapters) and, by what was asked and in that order, the answers."""

    given: Sequence[MeasuredAnswer]
    answers: Mapping[Ask, Sequence[MeasuredAnswer]]


# ---------------------------------------------------------------- what was measured


def measured(told: Sequence[Told]) -> Recording:
    """Arrivals, durations and results of a run; how they are found out, ``conformance`` says."""
    due = _due(told)
    given: list[MeasuredAnswer] = []
    answers: dict[Ask, list[MeasuredAnswer]] = collections.defaultdict(list)
    asked_s: dict[Ask, float] = {}
    steps_end = _steps_end(told)
    in_flight: collections.deque[float] = collections.deque()  # when they end
    before = step_ended_s = 0.0
    for number, (now, event, commands) in enumerate(told):
        late_s = _gap(max(before, due[number], in_flight[0] if in_flight else 0.0), now)
        before = now
        asked = ask_of(event)
        if asked is None:
            given.append(MeasuredAnswer(event, due[number], late_s))
        elif asked in asked_s:
            answers[asked][-1] = MeasuredAnswer(event, _gap(asked_s.pop(asked), due[number]), late_s)
        if isinstance(event, StepDone):
            step_ended_s = now
            if in_flight:
                in_flight.popleft()
        for command in commands:
            asks = ask_of(command)
            if asks is None:
                continue
            asked_s[asks] = command.at if isinstance(command, SetTimer) else now
            if isinstance(command, RunStep) and command.step in steps_end:
                in_flight.append(steps_end[command.step])
            answers[asks].append(MeasuredAnswer(None))
    if step_ended_s <= asked_s.get(_TIMER, math.inf) < before:
        # Due, it waits until nothing else has come; the recording ends before that.
        answers[_TIMER][-1] = MeasuredAnswer(None, math.inf)
    return Recording(given, answers)


def _waits(told: Sequence[Told]) -> Iterator[tuple[int, int]]:
    """Each wait for a step: the last event before the loop turned to it, and the step's StepDone or the
    recording's end. What lies between came while the loop waited, or stood in line then."""
    in_flight = 0
    began: int | None = None
    for number, (_, event, commands) in enumerate(told):
        if began is not None and isinstance(event, StepDone):
            yield began, number
            in_flight -= 1
            began = number if in_flight else None
        num_issued = sum(isinstance(command, RunStep) for command in commands)
        in_flight += num_issued
        if num_issued and began is None:
            began = number
    if began is not None:
        yield began, len(told)


def _steps_end(told: Sequence[Told]) -> dict[int, float]:
    """When the loop saw each step end: when it turned to the first event after its wait."""
    return {
        event.step: told[began + 1].now
        for began, ended in _waits(told)
        if ended < len(told) and isinstance(event := told[ended].event, StepDone)
    }


def _due(told: Sequence[Told]) -> list[float]:
    """When each event came: when the loop turned to it, or, where a step kept the loop, during that step."""
    due = [now for now, _, _ in told]
    timer_at = 0.0
    timers_at = []
    for _, _, commands in told:
        timers_at.append(timer_at)
        for command in commands:
            if isinstance(command, SetTimer):
                timer_at = command.at
    for began, ended in _waits(told):
        _move_into_step(told, due, timers_at, began, ended)
    return due


def _move_into_step(
    told: Sequence[Told], due: list[float], timers_at: Sequence[float], began: int, ended: int
) -> None:
    """Events after ``began`` and before ``ended`` came while the loop waited, until the first of them."""
    inside = range(began + 1, ended)
    start_s = told[began].now
    end_s = told[began + 1].now if began + 1 < len(told) else start_s
    for place, number in enumerate(inside, 1):
        if isinstance(told[number].event, Timer):
            due[number] = min(max(timers_at[number], math.nextafter(start_s, math.inf)), end_s)
        else:
            due[number] = start_s + (end_s - start_s) * place / (len(inside) + 1)
    if ended < len(told):
        due[ended] = end_s


def _gap(start_s: float, end_s: float) -> float:
    """What is to be added to ``start_s`` so that it gives ``end_s`` to the last bit."""
    gap_s = end_s - start_s
    while start_s + gap_s < end_s:
        gap_s = math.nextafter(gap_s, math.inf)
    while start_s + gap_s > end_s:
        gap_s = math.nextafter(gap_s, -math.inf)
    return gap_s


# ---------------------------------------------------------------- the same again


class RecordedDevice:
    """Answers what was answered, after the time that it took."""

    def __init__(self, answers: Mapping[Ask, Sequence[MeasuredAnswer]]) -> None:
        self.late_s: dict[int, float] = {}  # by the identity of events that wait
        self._answers: dict[Ask, Iterator[MeasuredAnswer]] = {
            asked: iter(of) for asked, of in answers.items()
        }

    def obey(self, command: Command, now: float) -> tuple[float, Event] | None:
        """See ``loop.VirtualDevice``; None also where the recording has no answer."""
        asks = ask_of(command)
        if asks is None:
            return None
        answer = self.answer(asks)
        return None if answer.event is None else (now + answer.took_s, answer.event)

    def answer(self, asks: Ask) -> MeasuredAnswer:
        """The next answer to that; one without an event where there is none."""
        answer = next(self._answers.get(asks, iter(())), MeasuredAnswer(None))
        if answer.event is not None:
            self.late_s[id(answer.event)] = answer.late_s
        return answer


class RecordedLoop(VirtualLoop):
    """A fresh replica that lives through a recording. The loop's heap decides what is handed over when."""

    def __init__(self, config: PolicyConfig, recording: Recording) -> None:
        self._recorded = RecordedDevice(recording.answers)
        super().__init__(Replica(config), self._recorded)
        for come in recording.given:
            if come.event is not None:
                self._recorded.late_s[id(come.event)] = come.late_s
                self._put(come.took_s, come.event)

    def next_told(self) -> Told | None:
        """Hand over one event; None when there is none."""
        due, event = self._next()
        if event is None:
            return None
        self.now = due
        return Told(due, event, self._tell(event))

    def _next(self) -> tuple[float, Event | None]:
        due, event = super()._next()
        late_s = self._recorded.late_s.pop(id(event), 0.0)
        return max(self.now, due, self._waits_until()) + late_s, event

    def _set_timer(self, command: SetTimer) -> None:
        answer = self._recorded.answer(_TIMER)
        self._timer = Timer()
        self._recorded.late_s[id(self._timer)] = answer.late_s
        self._put(command.at + answer.took_s, self._timer)
