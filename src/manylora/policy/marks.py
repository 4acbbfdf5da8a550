"""Between which levels of use a policy keeps the device (FastLibra §5.3). Owns the levels; what moves is
``swap``'s."""

from __future__ import annotations

import math
from typing import Protocol

LEAST_ROOM, MOST_ROOM = 0.02, 0.10
"""The least and the most share of the device that is kept free, where the high mark follows what steps take."""
ROOM_STEPS = 2
"""So many of the largest intakes that a step had lately find room: one, and another while that is freed anew."""
ROOM_HALF_LIFE_S = 60.0
"""How fast a large intake is forgotten."""
_SLACK = 64
"""Each decision costs something whatever its size: one after every step makes room for several, a 64th of the
device."""


class Marks(Protocol):
    """Levels in pages of the device. ``every_step``: they are looked at after every step, else at intervals."""

    high_pages: int
    """Nodes leave while more pages are used."""
    low_pages: int
    """Nodes may come without being asked for while fewer are."""
    slack_pages: int
    """How far below the high mark they leave."""
    every_step: bool

    def step_ended(self, num_taken: int, now: float) -> None:
        """A step has ended; so many pages were taken since the start."""


class FixedMarks:
    """Shares of the device that stay as they are."""

    def __init__(self, high: float, low: float, num_pages: int, every_step: bool = False) -> None:
        self.high_pages = int(high * num_pages)
        self.low_pages = math.ceil(min(low, high) * num_pages)
        self.slack_pages = num_pages // _SLACK if every_step else 0
        self.every_step = every_step

    def step_ended(self, num_taken: int, now: float) -> None:
        """See Marks."""


class IntakeMarks:
    """A high mark that leaves room for what steps took lately.

    Room beyond what is asked for at once costs host pages: what has left the device for it lies there.
    """

    every_step = True

    def __init__(self, low: float, num_pages: int) -> None:
        high = 1 - MOST_ROOM  # until steps have shown what they take
        self.high_pages = int(high * num_pages)
        self.low_pages = math.ceil(min(low, high) * num_pages)
        self.slack_pages = num_pages // _SLACK
        self._num_pages = num_pages
        self._room_pages = MOST_ROOM * num_pages
        self._taken_before = 0
        self._noted_at = 0.0

    def step_ended(self, num_taken: int, now: float) -> None:
        """See Marks."""
        total = self._num_pages
        asked, least = ROOM_STEPS * (num_taken - self._taken_before), LEAST_ROOM * total
        if asked > least or self._room_pages > least:  # or it stays as small as it gets
            faded = self._room_pages * math.pow(0.5, (now - self._noted_at) / ROOM_HALF_LIFE_S)
            self._room_pages = min(max(faded, asked, least), MOST_ROOM * total)
            self.high_pages = int(total - self._room_pages)
        self._taken_before, self._noted_at = num_taken, now
