"""When a step with cold rows is expected to end: arithmetic over numbers, for whatever decides or simulates.

A step's layers run in groups, each when the one before has ended and what it reads has landed; where the CPU
computes a group's adapters, part of this is hidden by the group's own work. Knows no sequence and no copy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import NamedTuple


@dataclasses.dataclass(frozen=True, slots=True)
class Landing:
    """A copy that moves from ``begin_s`` to ``end_s``."""

    begin_s: float
    end_s: float

    def group_s(self, number: int, num_groups: int) -> float:
        """When that group of layers, from 0, has landed."""
        return self.begin_s + (self.end_s - self.begin_s) * (number + 1) / num_groups

    def as_of(self, now: float) -> Landing:
        """What is expected where it has not been answered by ``now``: one that is late goes on for as long as it
        is late already."""
        late_s = now - self.end_s
        return self if late_s <= 0 else dataclasses.replace(self, end_s=now + late_s)


class CpuShare(NamedTuple):
    """The CPU computes adapters in all layers, for ``seconds``. A group's own work hides the share ``beside`` of
    itself of them."""

    seconds: float
    beside: float = 1.0


NO_CPU = CpuShare(0.0)


def end_s(
    begin_s: float,
    step_s: float,
    num_groups: int,
    histories: Iterable[Landing],
    adapters: Iterable[Landing] = (),
    cpu: CpuShare = NO_CPU,
) -> float:
    """When a step that would take ``step_s`` alone ends. ``histories``, ``adapters``: copies that every group
    reads; adapters that the CPU serves are not among them."""
    landings = [*histories, *adapters]
    group_s = step_s / num_groups
    group_s += max(0.0, cpu.seconds / num_groups - cpu.beside * group_s)
    end = begin_s
    for number in range(num_groups):
        for landing in landings:
            end = max(end, landing.group_s(number, num_groups))
        end += group_s
    return end


def boundary_s(begin_s: float, ready_s: float, step_s: float) -> float:
    """When the first step begins that may have what is ready at ``ready_s``, where steps of ``step_s`` follow one
    another from ``begin_s`` on."""
    late_s = ready_s - begin_s
    if late_s <= 0:
        return begin_s
    if step_s <= 0:
        return ready_s
    return begin_s + math.ceil(late_s / step_s) * step_s


class Beginning(NamedTuple):
    """One way for a cold row to begin: when its answer is expected, and for how long the step stands still."""

    mode: str
    answer_s: float
    stall_s: float

    @property
    def is_of_cpu(self) -> bool:
        return self.mode == "cpu"


GAIN = 0.01
"""By this share of the wait a way that asks for more must answer sooner."""


def choose(ways: Iterable[Beginning], now: float, allowed_s: float) -> Beginning:
    """The way that answers first of those that stand still for no longer than ``allowed_s``; of those that gain
    next to nothing by each other the one that comes before. ``ways`` begin with ``wait``."""
    best, *others = ways
    least_s = GAIN * (best.answer_s - now)
    for way in others:
        if way.stall_s <= allowed_s and best.answer_s - way.answer_s > least_s:
            best = way
    return best
