"""Cold starts on a simulated device: when layer groups land and run, what CPU workers take, what a store saves.

Owns these times. Knows no lanes, and no policy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from manylora.config.declaring import ConfigError
from manylora.protocol.commands import RunStep
from manylora.types import CopyId
from manylora_lab.pricing.cold import NO_GATES, CpuRates, GateLines, cpu_rates, gate_lines
from manylora_lab.pricing.costs import StepCosts
from manylora_lab.pricing.profile import Profile
from manylora_lab.pricing.shapes import ModelShape
from manylora_lab.sim.hardware import Hardware

_ASSUMED = CpuRates()


@dataclasses.dataclass(frozen=True, slots=True)
class ColdCosts:
    """What cold starts take beside ``StepCosts``.

    ``rates``: of one of ``num_workers`` workers. The machine has ``cores``, of which the engine keeps one and each
    read that is under way takes one. ``beside``: the share of a step's own time that hides the CPU's.
    ``result_token_bytes``: what crosses the link for each token that the CPU serves, over all layers, at
    ``result_bytes_s`` beside copies that leave the link room; None: as a copy does, in turns with these.
    ``group_shares``: of a step's time, by layer groups; empty: even. ``gates``: what a copy costs the step that
    awaits it beside standing still.
    """

    rates: CpuRates = _ASSUMED
    num_workers: int = 0
    cores: int = 16
    beside: float = 0.5
    result_token_bytes: int = 0
    result_bytes_s: float | None = None
    group_shares: tuple[float, ...] = ()
    gates: GateLines = NO_GATES

    def __post_init__(self) -> None:
        if self.cores < 1:
            raise ConfigError(f"a machine has at least 1 core, got {self.cores}")
        if not 0 <= self.beside <= 1:
            raise ConfigError(f"beside must lie between 0 and 1, got {self.beside}")
        if self.result_bytes_s is not None and self.result_bytes_s <= 0:
            raise ConfigError(f"result_bytes_s must be more than 0, got {self.result_bytes_s}")

    def busy_s(self, served: Iterable[tuple[int, int]], num_reading: int) -> float:
        """Of the busiest worker, for (tokens, bytes) of each adapter, without hand-overs."""
        workers = max(1, min(self.num_workers, self.cores - 1 - num_reading))
        return sum(self.rates.busy_s(tokens, size, workers) for tokens, size in served)


NOTHING_COLD = ColdCosts()


@dataclasses.dataclass(frozen=True, slots=True)
class _Landing:
    """A copy that steps may await: from when it moves, for how long, in how many groups, and when it is told.
    ``commanded``: when; ``num_bytes``: all of it."""

    begin: float
    seconds: float
    groups: int
    told: float
    commanded: float
    num_bytes: int

    def landed_s(self, number: int, count: int) -> float:
        """When what group ``number`` of ``count`` reads of it has landed."""
        return self.begin + self.seconds * -(-(number + 1) * self.groups // count) / self.groups


class Landings:
    """Of the copies that steps in flight may await."""

    def __init__(self, cold: ColdCosts) -> None:
        self._cold = cold
        self._copies: dict[CopyId, _Landing] = {}

    def begun(
        self,
        copy: CopyId,
        begin: float,
        seconds: float,
        groups: int,
        told: float,
        *,
        now: float,
        num_bytes: int,
    ) -> None:
        """It was commanded ``now``, moves from ``begin`` on, and its end is ``told``."""
        self._copies[copy] = _Landing(begin, seconds, groups, told, now, num_bytes)

    def gate_s(self, step: RunStep, now: float) -> tuple[float, float]:
        """What the step's copies cost beside standing still: before it, of those commanded ``now``, and of it."""
        copies = {*(wanted.copy for wanted in step.awaits), *(rows.copy for rows in step.cpu)}
        gates = self._cold.gates
        issue_s = step_s = 0.0
        for copy in map(self._copies.__getitem__, copies):
            step_s += gates.step[0] + copy.num_bytes * gates.step[1]
            if copy.commanded == now:
                issue_s += gates.issue[0] + copy.num_bytes * gates.issue[1]
        return issue_s, step_s

    def forget(self, before: float, steps_end: float) -> None:
        """Steps await copies that have not been answered; steps in flight end at ``steps_end`` at the latest."""
        for copy in [c for c, landing in self._copies.items() if max(landing.told, steps_end) < before]:
            del self._copies[copy]

    def stalled_s(self, step: RunStep, begin: float, seconds: float, cpu_s: float) -> float:
        """How long the step stands still for its copies and for the CPU, which takes ``cpu_s``: its layers run
        group by group, each when the one before has ended and what it reads has landed; and it ends after the
        answers of the copies that it awaits."""
        awaited = [self._copies[wanted.copy] for wanted in step.awaits]
        count = max(copy.groups for copy in (*awaited, *(self._copies[rows.copy] for rows in step.cpu)))
        shares = self._cold.group_shares if len(self._cold.group_shares) == count else ()
        end = begin
        for number in range(count):
            own_s = seconds * shares[number] if shares else seconds / count
            end = max(end, *(copy.landed_s(number, count) for copy in awaited)) if awaited else end
            end += own_s
            if step.cpu:
                end += max(0.0, cpu_s / count - self._cold.beside * own_s)
        return (
            max(end, *(copy.told for copy in awaited)) - begin - seconds if awaited else end - begin - seconds
        )


def link_s(costs: StepCosts, num_bytes: int, copy_limit: int | None) -> float:
    """What bytes to the device take, at no more than ``copy_limit`` a second."""
    seconds = costs.copy_s(num_bytes)
    return seconds if copy_limit is None else max(seconds, num_bytes / copy_limit)


def measured_cold(profile: Profile) -> ColdCosts | None:
    """As the profile measured it; None where it has it not."""
    rates = cpu_rates(profile)
    if rates is None:
        return None
    shape, modules = profile.model, profile.adapter_modules
    return ColdCosts(
        rates,
        cores=profile.cores,
        result_token_bytes=_result_token_bytes(shape, modules),
        group_shares=profile.group_shares,
        gates=gate_lines(profile),
    )


ASSUMED_CORES = 16
_HANDOVER_S = 20e-6
_CORE_FLOPS = 100e9
_CORE_BYTES_S = 8e9
_GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""Modules that read one input: a product each."""


def assumed_cold(shape: ModelShape, modules: tuple[str, ...], hardware: Hardware) -> ColdCosts:
    """Assumed, of a host of 16 cores: 20 us for each hand-over, 8 GB/s and 100 GFLOP/s a core in 16 bits.
    Results cross the hardware's link, also where adapters come slower."""
    is_link = hardware.loader_bytes_s is None
    num_products = shape.layers * sum(any(name in modules for name in group) for group in _GROUPS)
    # A number of an adapter is used by each token for two operations.
    token_byte_s = 2 / shape.itemsize / _CORE_FLOPS
    rates = CpuRates(num_products * _HANDOVER_S, 1 / _CORE_BYTES_S, token_byte_s, 16)
    return ColdCosts(
        rates,
        cores=ASSUMED_CORES,
        result_token_bytes=_result_token_bytes(shape, modules),
        result_bytes_s=None if is_link else hardware.sustained_link_bytes_s,
    )


def _result_token_bytes(shape: ModelShape, modules: tuple[str, ...]) -> int:
    sizes = shape.modules
    return shape.layers * shape.itemsize * sum(sizes[name][1] for name in modules if name in sizes)
