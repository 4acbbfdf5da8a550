"""A machine and a device in virtual time: events are handed over in the order in which ``engine.driver`` does.

As there, the loop waits for the oldest step in flight: what comes meanwhile is handed over when it has ended, then
the timer if it is due, then the step's StepDone. Does not know where requests come from.
"""

from __future__ import annotations

import collections
import heapq
import time
from collections.abc import Callable
from typing import Protocol

from manylora.protocol.commands import (
    CLIENT_COMMANDS,
    DEVICE_COMMANDS,
    ClientCommand,
    Command,
    Emit,
    Machine,
    Report,
    SetTimer,
)
from manylora.protocol.events import Event, ReportDue, StepDone, Timer
from manylora.reports import Which

_RANKS: dict[type[Event], int] = {Timer: 1, StepDone: 2}
"""Among what is due at one moment."""


class VirtualDevice(Protocol):
    """Obeys commands in virtual time; steps run one after another."""

    def obey(self, command: Command, now: float) -> tuple[float, Event] | None:
        """When the command is done and what it leads to; None for what takes no time."""


class VirtualLoop:
    """``advance`` hands over one event. ``watch`` is told of every command, with its moment."""

    def __init__(
        self,
        machine: Machine,
        device: VirtualDevice,
        watch: Callable[[float, Command], None] | None = None,
    ) -> None:
        self._machine = machine
        self.now = 0.0
        self.num_events = 0
        self.handle_s = 0.0  # of real time
        self._watch = watch
        self._device = device
        self._ends: collections.deque[float] = collections.deque()  # of the steps in flight, oldest first
        self._due: list[tuple[float, int, int, Event]] = []
        self._num_due = 0
        self._timer: Timer | None = None
        self._timers_in_a_row = 0

    def advance(self) -> bool:
        """Hand the next event to the machine and obey; False when there is none."""
        due, event = self._next()
        if event is None:
            return False
        now = due if due > self.now else self.now
        self.now = self._ends[0] if self._ends and self._ends[0] > now else now
        self._timers_in_a_row = self._timers_in_a_row + 1 if type(event) is Timer else 0
        self._tell(event)
        return True

    def _tell(self, event: Event) -> list[Command]:
        if type(event) is StepDone:
            self._ends.popleft()
        began = time.perf_counter()
        commands = self._machine.handle(event, self.now)
        self.handle_s += time.perf_counter() - began
        self.num_events += 1
        if self._watch is not None:
            for command in commands:
                self._watch(self.now, command)
        for command in commands:
            if type(command) is Emit:
                self._note_token(command)
            else:
                self._obey(command)
        return commands

    def report(self, which: Which = "all") -> Report:
        """The machine's state at this moment."""
        (report,) = self._machine.handle(ReportDue(which), self.now)
        assert isinstance(report, Report)
        return report

    # ------------------------------------------------------------ what is due

    def _next(self) -> tuple[float, Event | None]:
        """The next event and when it is due."""
        while self._due:
            due, _, _, event = heapq.heappop(self._due)
            if type(event) is not Timer or self._may_fire(event, due):
                return due, event
        return 0.0, None

    def _waits_until(self) -> float:
        return self._ends[0] if self._ends else 0.0

    def _may_fire(self, timer: Timer, due: float) -> bool:
        """Only the timer that was set last counts, and it waits for the oldest step in flight."""
        if timer is not self._timer:
            return False
        if due >= self._waits_until():
            return True
        self._put(self._waits_until(), timer)
        return False

    def _put(self, due: float, event: Event) -> None:
        """Hand over the event then. Of what is due at once, the timer and a step's end come last."""
        self._num_due += 1
        heapq.heappush(self._due, (due, _RANKS.get(type(event), 0), self._num_due, event))

    # ------------------------------------------------------------ commands

    def _obey(self, command: Command) -> None:
        kind = type(command)
        if kind in DEVICE_COMMANDS:
            answer = self._device.obey(command, self.now)
            if answer is not None:
                self._put(*answer)
                if type(answer[1]) is StepDone:
                    self._ends.append(answer[0])
        elif kind in CLIENT_COMMANDS:
            self._note(command)  # type: ignore[arg-type]
        elif kind is SetTimer:
            self._set_timer(command)  # type: ignore[arg-type]

    def _set_timer(self, command: SetTimer) -> None:
        self._timer = Timer()
        self._put(command.at, self._timer)

    def _note(self, command: ClientCommand) -> None:
        """News of a request, but for its tokens."""

    def _note_token(self, command: Emit) -> None:
        """A token of a request."""
