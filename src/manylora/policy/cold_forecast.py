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
    """A copy that moves from ``begin_s`` to ``end_s``, its groups of layers from ``first_group`` on first.
    ``ahead``: the share of it that comes in all groups before the rest, B of an adapter; 0: none does."""

    begin_s: float
    end_s: float
    first_group: int = 0
    ahead: float = 0.0

    def group_s(self, number: int, num_groups: int) -> float:
        """When that group, from 0, has landed."""
        place = (number - self.first_group) % num_groups + 1
        return self._at(self.ahead * num_groups + (1 - self.ahead) * place, num_groups)

    def ahead_s(self, number: int, num_groups: int) -> float:
        """When what comes ahead of that group has landed; all of it, where nothing does."""
        if not self.ahead:
            return self.group_s(number, num_groups)
        return self._at(self.ahead * (number + 1), num_groups)

    def _at(self, place: float, num_places: int) -> float:
        return self.begin_s + (self.end_s - self.begin_s) * place / num_places

    def as_of(self, now: float) -> Landing:
        """What is expected where it has not been answered by ``now``: one that is late goes on for as long as it
        is late already."""
        late_s = now - self.end_s
        return self if late_s <= 0 else dataclasses.replace(self, end_s=now + late_s)


class CpuShare(NamedTuple):
    """The CPU computes adapters in the first ``groups`` groups; in all of them it would take ``seconds``. Of it
    a group's own work hides as much as the share ``beside`` of itself. ``shrinks_only``: the group reads what
    comes ahead of it."""

    groups: int
    seconds: float
    beside: float = 1.0
    shrinks_only: bool = False


NO_CPU = CpuShare(0, 0.0)


def end_s(
    begin_s: float,
    step_s: float,
    num_groups: int,
    histories: Iterable[Landing],
    adapters: Iterable[Landing] = (),
    cpu: CpuShare = NO_CPU,
) -> float:
    """When a step that would take ``step_s`` alone ends. ``histories``: copies that every group reads of;
    ``adapters``: those that a group reads of where the CPU does not serve it."""
    histories, adapters = list(histories), list(adapters)
    group_s = step_s / num_groups
    served_s = group_s + max(0.0, cpu.seconds / num_groups - cpu.beside * group_s)
    end = begin_s
    for number in range(num_groups):
        is_served = number < cpu.groups
        for landing in histories if is_served else (*histories, *adapters):
            end = max(end, landing.group_s(number, num_groups))
        for landing in adapters if is_served and cpu.shrinks_only else ():
            end = max(end, landing.ahead_s(number, num_groups))
        end += served_s if is_served else group_s
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


def split(begin_s: float, step_s: float, num_groups: int, adapter: Landing, cpu: CpuShare) -> int:
    """In how many of the first groups the CPU is to serve while the link brings the others first, for the step to
    end soonest; 0: in none, ``num_groups``: in all. ``cpu``: whatever its groups."""

    def end_of(groups: int) -> float:
        landing = dataclasses.replace(adapter, first_group=groups % num_groups)
        return end_s(begin_s, step_s, num_groups, (), (landing,), cpu._replace(groups=groups))

    return min(range(num_groups + 1), key=end_of)


class Beginning(NamedTuple):
    """One way for a cold row to begin: when it is expected to have its answer, for how long the step stands still
    for it, in how many groups the CPU serves, and whether the device expands what it has shrunk."""

    mode: str
    answer_s: float
    stall_s: float
    groups: int = 0
    shrinks_only: bool = False

    @property
    def of_cpu(self) -> tuple[int, bool]:
        """What the CPU does."""
        return self.groups, self.shrinks_only


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
