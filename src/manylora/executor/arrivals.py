"""What is told of an adapter's read while it goes on, group by group of layers: to the copy that follows it, or to
the steps that await it.

Owns nothing of the read. A read that goes wrong, or on as another adapter's than was said, has to give up first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from manylora.memory.gates import CopyGate, Filling

Groups = Sequence[tuple[int, int]]
"""[first, end) of layers, in the order in which they are to be read."""


class Arrivals(Protocol):
    """Told by the threads of one read."""

    groups: Groups

    def arrived(self, num_layers: int, landing: Callable[[], None]) -> None:
        """So many of the first layers are in the pages; on the device once ``landing`` has been called on the step
        loop's thread, for what is issued after that."""

    def give_up(self) -> None:
        """What has not arrived will not, or is not what was entered ahead. Before the read is answered."""

    def answer(self) -> None:
        """The read has been answered."""


class HostArrivals:
    """In host pages, for a copy."""

    def __init__(self, groups: Groups, filling: Filling) -> None:
        self.groups = groups
        self._filling = filling
        self._has_given_up = False

    def arrived(self, num_layers: int, landing: Callable[[], None]) -> None:
        if not self._has_given_up:
            self._filling.filled(num_layers)

    def give_up(self) -> None:
        self._has_given_up = True

    def answer(self) -> None:
        self._filling.answer(not self._has_given_up)


class DeviceArrivals:
    """In pages of the device, for steps."""

    def __init__(self, groups: Groups, gate: CopyGate) -> None:
        self.groups = groups
        self._gate = gate
        self._num_open = 0
        self._has_given_up = False

    def arrived(self, num_layers: int, landing: Callable[[], None]) -> None:
        if self._has_given_up:
            return
        while self._num_open < len(self.groups) and self.groups[self._num_open][1] <= num_layers:
            self._gate.open(landing)
            self._num_open += 1

    def give_up(self) -> None:
        self._has_given_up = True
        self._gate.fail()

    def answer(self) -> None:
        self._gate.answer(not self._has_given_up)
