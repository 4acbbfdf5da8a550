"""The watchdog of an engine: a step that does not end, a loop that is stuck, a process that is silent.

The loop counts its pieces of work (``Activity``). A judge looks at the count at regular intervals, and a number
that stays the same for too long is a hang (``Judge``). In a server the engine's process sends its pulse to the
server's, which judges; an engine in the caller's own process is watched by a thread of its driver. The
owner of an engine that hangs decides what to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

_MOST_TICK_S = 0.5
_TICKS = 8
"""A judge looks this often in a step's time limit, or every ``_MOST_TICK_S``."""


def tick_s(limit_s: float) -> float:
    """Return the interval at which an engine with this limit sends its pulse, and the watchdog looks."""
    return min(_MOST_TICK_S, limit_s / _TICKS)


class Pulse(NamedTuple):
    """The work of an engine at one moment.

    ``work``: the number of its piece of work, 0 while it is idle. ``prepared_s``:
    seconds that it has spent on compiling and capturing so far.
    """

    work: int
    prepared_s: float


class Activity:
    """The work of a loop. Written by the loop's thread, read by any."""

    def __init__(self) -> None:
        self._count = 0
        self.work = 0
        """The number of the present piece of work; 0: none."""

    def begin(self) -> None:
        """Begin another piece of work, and end the one before."""
        self.work = self._count = self._count + 1

    def rest(self) -> None:
        """Note that the loop is idle."""
        self.work = 0


class Judge:
    """A judge that takes an engine for lost when a piece of work, or silence, lasts longer than ``limit_s``
    seconds.

    Time that the judge itself sleeps through does not count: where all processes are stopped together, or this
    one's thread does not get to run, nothing is known of the engine.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._most_s = 2 * tick_s(limit_s)
        self._clock = clock
        self._looked_s = clock()
        self._seen: Pulse | None = None
        self.busy_s = 0.0
        """The time that the piece of work seen last has taken."""
        self.silent_s = 0.0
        """The time without a new pulse."""

    def look(self, pulse: Pulse | None) -> str | None:
        """Judge by a pulse that came since the last look, if any; return why the engine is lost, if it is."""
        now = self._clock()
        passed_s = min(now - self._looked_s, self._most_s)
        self._looked_s = now
        if pulse is None:
            self.silent_s += passed_s
            if self.silent_s > self._limit_s:
                return f"the engine has said nothing for {self._limit_s:g} s"
            return None
        before, self._seen = self._seen, pulse
        if before is None or pulse.work != before.work or not pulse.work:
            self.busy_s = 0.0
        else:
            # The silent time belongs to it as well.
            prepared_s = pulse.prepared_s - before.prepared_s
            self.busy_s += max(self.silent_s + passed_s - prepared_s, 0.0)
        self.silent_s = 0.0
        if self.busy_s > self._limit_s:
            return f"a step has not ended within {self._limit_s:g} s"
        return None
