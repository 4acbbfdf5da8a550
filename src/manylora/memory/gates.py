"""Lets a step begin before a copy that some of its rows read has landed on the device.

A kernel that makes a copy marks on the device which groups of layers have landed. A captured step passes
these gates on the device, each before the first layer of its group. Any other step waits for the whole copy,
on the step loop's thread, before it begins.

Owns that order, its time limit, and the knowledge of how the copy ended. Does not copy and does not run
anything.
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
"""How long a step waits for all its copies together, in seconds, before it goes on without them."""


LayerGroups = tuple[tuple[int, int], ...]
"""Groups of layers, each [first, end), in the order in which they land."""


@functools.cache
def layer_groups(num_layers: int, num_groups: int) -> LayerGroups:
    """Divide the layers into consecutive groups, as even as possible, none empty."""
    num_groups = max(1, min(num_groups, num_layers))
    edges = [number * num_layers // num_groups for number in range(num_groups + 1)]
    return tuple(itertools.pairwise(edges))


class LandedWords:
    """The copies that have landed, by group of layers: int64 [G], on the device. Each word is the number of
    the last copy by a kernel whose part in that group has landed.

    These copies land in order, so one number covers all copies up to it. ``groups``: [first, end) of layers.
    """

    def __init__(self, num_layers: int, num_groups: int, device: Device) -> None:
        self.groups = layer_groups(num_layers, num_groups)
        # Each word begins at a multiple of 16 bytes, since kernels are compiled anew for other alignments.
        self.words = device.zeros((len(self.groups), 2), torch.int64)[:, 0]


class CopyGate:
    """A gate that opens when a copy has been issued, and that steps pass. ``number``: the copy's number among
    copies by a kernel, from 1; 0: nothing on the device shows when the copy lands."""

    def __init__(self) -> None:
        self.number = 0
        self._changed = threading.Condition()
        self._landing: Callable[[], None] | None = None
        self.has_failed = False
        """Whether the copy has failed: parts that have not landed will never land."""
        self._answer: bool | None = None

    def open(self, landing: Callable[[], None], number: int = 0) -> None:
        """Open the gate. The step loop's thread calls ``landing``, and work issued after that sees the copy
        (``CopyLane.landing``). ``number``: the number of a copy by a kernel."""
        with self._changed:
            self._landing, self.number = landing, number
            self._changed.notify_all()

    def fail(self) -> None:
        """Mark the copy as failed, so that nothing waits for it any more. Parts that have not landed will
        never land."""
        with self._changed:
            self.has_failed = True
            self._changed.notify_all()

    def answer(self, ok: bool) -> None:
        """Record the copy's result, once everything that depends on it has been notified."""
        with self._changed:
            self._answer = ok
            self.has_failed = self.has_failed or not ok
            self._changed.notify_all()

    @property
    def is_answered(self) -> bool:
        return self._answer is not None

    def wait_answer(self) -> bool:
        """Wait for the answer, which every copy gets, and return whether the copy went well."""
        with self._changed:
            self._changed.wait_for(lambda: self._answer is not None)
            return self._answer is True

    def pass_whole(self, until: float) -> bool:
        """Order all work issued from now on after the whole copy, and return True. Return False where the
        copy fails before it is issued, or is not issued by ``until`` (``time.monotonic``). Called on the step
        loop's thread."""
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
    """The gates of one step's copies, each with the sequences that read the copied pages. Used by one
    thread."""

    def __init__(self, gates: Sequence[tuple[CopyGate, tuple[SequenceId, ...]]]) -> None:
        self._gates = gates
        self._until: float | None = None
        self._late: set[SequenceId] = set()
        self.told: Callable[[], np.ndarray] | None = None
        """Given where the step's gates are on the device. It waits for the step and returns int64: for how many
        nanoseconds the gates were shut, and whether a copy was late."""
        self.stall_s = 0.0
        """Seconds that the thread has waited at gates; after ``invalid`` the device's waits are included."""

    def pass_all(self, but_marked: bool = False) -> None:
        """Wait for every copy. ``but_marked``: skip copies that the device itself marks as they land."""
        for gate, sequences in self._gates:
            if not (but_marked and gate.number):
                self._pass(gate, sequences)

    def numbers(self) -> tuple[int, int]:
        """Return the input for gates on the device: the longest wait in nanoseconds, and the number of the
        last copy that has not been answered (0: none)."""
        unanswered = (gate.number for gate, _ in self._gates if not gate.is_answered)
        return int(LATE_S * 1e9), max(unanswered, default=0)

    def _pass(self, gate: CopyGate, sequences: tuple[SequenceId, ...]) -> None:
        began = time.monotonic()
        if self._until is None:
            self._until = began + LATE_S
        if not gate.pass_whole(self._until):
            self._late.update(sequences)
        self.stall_s += time.monotonic() - began

    def invalid(self) -> tuple[SequenceId, ...]:
        """Wait until every copy has been answered. Return the sequences whose copies failed or came too late;
        where a gate on the device was late, the sequences of all gates."""
        found = set(self._late)
        if self.told is not None:
            shut_ns, is_late = self.told().tolist()
            self.stall_s += shut_ns / 1e9
            if is_late:
                found.update(*(sequences for _, sequences in self._gates))
        for gate, sequences in self._gates:
            if not gate.wait_answer():
                found.update(sequences)
        return tuple(sorted(found))
