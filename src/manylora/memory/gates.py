"""Gates: a step may begin while a copy to the device that some of its rows read still lands.

A kernel that brings a copy says on the device which groups of layers have landed. A captured step passes them
there, each before its first layer. Any other step passes a copy whole, on the step loop's thread, before it
begins.
Owns that order, its bound in time, and what is known of the copy's end. Does not copy and does not run anything.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from manylora.devices.device import Device
from manylora.types import SequenceId

LATE_S = 10.0
"""How long a step waits for the copies that it awaits, in all, before it goes on without."""


LayerGroups = tuple[tuple[int, int], ...]
"""[first, end) of layers each, in the order in which they land."""


@functools.cache
def layer_groups(num_layers: int, num_groups: int) -> LayerGroups:
    """Consecutive groups of layers, as even as can be, none empty."""
    num_groups = max(1, min(num_groups, num_layers))
    edges = [number * num_layers // num_groups for number in range(num_groups + 1)]
    return tuple(itertools.pairwise(edges))


class LandedWords:
    """By group of layers, the number of the last copy by a kernel whose part there has landed: int64 [G], on the
    device.

    These copies land one after the other, so one number stands for all up to it. ``groups``: [first, end) of
    layers.
    """

    def __init__(self, num_layers: int, num_groups: int, device: Device) -> None:
        self.groups = layer_groups(num_layers, num_groups)
        # Each begins at a multiple of 16 bytes: kernels are compiled anew for what does not.
        self.words = device.zeros((len(self.groups), 2), torch.int64)[:, 0]


class CopyGate:
    """Opened when a copy has been issued, and passed by steps. ``number``: of the copy among those that a kernel
    brings, from 1; 0: nothing tells the device when it lands."""

    def __init__(self) -> None:
        self.number = 0
        self._changed = threading.Condition()
        self._landing: Callable[[], None] | None = None
        self.has_failed = False
        """What has not landed will not come."""
        self._answer: bool | None = None

    def open(self, landing: Callable[[], None], number: int = 0) -> None:
        """The copy has landed once ``landing`` has been called on the step loop's thread, for what is issued after
        that (``CopyLane.landing``). ``number``: of one that a kernel brings."""
        with self._changed:
            self._landing, self.number = landing, number
            self._changed.notify_all()

    def fail(self) -> None:
        """What has not landed will not come; nothing waits for it any more."""
        with self._changed:
            self.has_failed = True
            self._changed.notify_all()

    def answer(self, ok: bool) -> None:
        """The copy has been answered, and what has to know of it was told."""
        with self._changed:
            self._answer = ok
            self.has_failed = self.has_failed or not ok
            self._changed.notify_all()

    @property
    def is_answered(self) -> bool:
        return self._answer is not None

    def wait_answer(self) -> bool:
        """Wait for the answer, which every copy gets; whether the copy went well."""
        with self._changed:
            self._changed.wait_for(lambda: self._answer is not None)
            return self._answer is True

    def pass_whole(self, until: float) -> bool:
        """What is issued from now on reads the copy as it landed: True. False where it has not come by ``until``
        (``time.monotonic``) or will not. On the step loop's thread."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._landing is not None or self.has_failed, max(0.0, until - time.monotonic())
            )
            landing = self._landing
        if landing is None:
            return False
        landing()
        return True


class Awaited:
    """The gates of one step's copies, each with the sequences that read what it brings. Of one thread."""

    def __init__(
        self, gates: Sequence[tuple[CopyGate, tuple[SequenceId, ...]]], late_s: float = LATE_S
    ) -> None:
        self._gates = gates
        self._late_s = late_s
        self._until: float | None = None
        self._late: set[SequenceId] = set()
        self._told: Callable[[], np.ndarray] | None = None
        self.stall_s = 0.0
        """How long the thread has waited at gates; from ``spoilt`` on, and the device."""

    def pass_all(self, but_marked: bool = False) -> None:
        """Wait for every copy; ``but_marked``: for those that land without the device being told."""
        for gate, sequences in self._gates:
            if not (but_marked and gate.number):
                self._pass(gate, sequences)

    def numbers(self) -> tuple[int, int]:
        """For gates on the device: for how many nanoseconds to wait, and the number of the last copy that has not
        been answered (0: none)."""
        unanswered = (gate.number for gate, _ in self._gates if not gate.is_answered)
        return int(self._late_s * 1e9), max(unanswered, default=0)

    def passes_on_device(self, told: Callable[[], np.ndarray]) -> None:
        """The step's gates are on the device. ``told`` waits for it: int64, for how many nanoseconds they were
        shut, and whether a copy was late."""
        self._told = told

    def _pass(self, gate: CopyGate, sequences: tuple[SequenceId, ...]) -> None:
        began = time.monotonic()
        if self._until is None:
            self._until = began + self._late_s
        if not gate.pass_whole(self._until):
            self._late.update(sequences)
        self.stall_s += time.monotonic() - began

    def spoilt(self) -> tuple[SequenceId, ...]:
        """Wait until every copy has been answered: the sequences that read what did not come, or not in time."""
        found = set(self._late)
        if self._told is not None:
            shut_ns, is_late = self._told().tolist()
            self.stall_s += shut_ns / 1e9
            if is_late:
                found.update(*(sequences for _, sequences in self._gates))
        for gate, sequences in self._gates:
            if not gate.wait_answer():
                found.update(sequences)
        return tuple(sorted(found))
