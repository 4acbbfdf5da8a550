"""When KV is copied to the host, and between which levels of use the device is kept (FastLibra §5.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from manylora.policy.tree import Node
from manylora.policy.value import Rates

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


_PRIOR_PAGES = 128
"""Offloaded pages that count as having come back once, before any was seen."""
_MEMORY_PAGES = 8192
"""After so many offloaded pages both counts are halved: what was asked for long ago says little."""
_WRITE_SHARE = 0.05
"""The share of a write's time that it costs a step that runs on beside it (1 to 3 % slower on an H200)."""
_TRIAL_S = 1.0
_TRIALS_EVERY = 16
"""In one second of so many KV is offloaded whatever is believed, or the policy would not notice that cached KV is
asked for again."""


class OffloadRule(Protocol):
    """Whether KV is copied to the host, and back."""

    def is_copy_cheaper(self, kv: Sequence[Node]) -> bool:
        """Whether bringing these pages from the host holds up less than computing them."""

    def pays(self, node: Node, now: float) -> bool:
        """Whether to write a page of KV to the host."""

    def offloaded(self) -> None:
        """A page was written to the host."""

    def came_back(self, num_pages: int) -> None:
        """Requests asked for pages that only the host had."""


class AlwaysOffload:
    """Copies always pay."""

    def is_copy_cheaper(self, kv: Sequence[Node]) -> bool:
        """See OffloadRule."""
        return True

    def pays(self, node: Node, now: float) -> bool:
        """See OffloadRule."""
        return True

    def offloaded(self) -> None:
        """See OffloadRule."""

    def came_back(self, num_pages: int) -> None:
        """See OffloadRule."""


class NeverOffload(AlwaysOffload):
    """KV that leaves the device is dropped; the host never has any."""

    def pays(self, node: Node, now: float) -> bool:
        """See OffloadRule."""
        return False


class OffloadWhereItPays:
    """An offloaded page's value is that of having it back, times how often offloaded pages came back so far."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._offloaded = 0.0
        self._came_back = 0.0

    def is_copy_cheaper(self, kv: Sequence[Node]) -> bool:
        """See OffloadRule."""
        return not kv or self._rates.weigh_copying([node.depth.bit_length() for node in kv]) >= 0

    def pays(self, node: Node, now: float) -> bool:
        """See OffloadRule."""
        rates = self._rates
        saved_s = rates.weigh_copying((node.depth.bit_length(),))
        if saved_s < 0:
            return False
        if int(now / _TRIAL_S) % _TRIALS_EVERY == 0:
            return True
        returns = (self._came_back + _PRIOR_PAGES) / (self._offloaded + _PRIOR_PAGES)
        return returns * saved_s >= _WRITE_SHARE * rates.held_up * rates.page_out_s

    def offloaded(self) -> None:
        """See OffloadRule."""
        self._offloaded += 1
        if self._offloaded > _MEMORY_PAGES:
            self._offloaded /= 2
            self._came_back /= 2

    def came_back(self, num_pages: int) -> None:
        """See OffloadRule."""
        self._came_back += num_pages
