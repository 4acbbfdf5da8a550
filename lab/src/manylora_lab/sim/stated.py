"""Costs of a described device, by its data sheet or by the seconds that a paper's authors state."""

from __future__ import annotations

from manylora.config.declaring import ConfigError
from manylora_lab.pricing.costs import StepWork
from manylora_lab.pricing.shapes import ModelShape
from manylora_lab.sim.analytical import AnalyticalCosts
from manylora_lab.sim.hardware import Hardware, StatedTimes


class StatedCosts(AnalyticalCosts):
    """A step takes ``times.unmerged_s`` where any row goes through an adapter, else ``times.merged_s``, whatever
    the batch and whether it decodes or reads prompts. Copies and reads are as in ``AnalyticalCosts``."""

    def __init__(self, shape: ModelShape, hardware: Hardware, times: StatedTimes) -> None:
        """Raises ConfigError for another model than the stated one."""
        if shape.name != times.model:
            raise ConfigError(f"{hardware.name} has times of {times.model}, not of {shape.name}")
        super().__init__(shape, hardware)
        self.times = times

    def step_s(self, work: StepWork, /) -> float:
        """See StepCosts."""
        return self.times.unmerged_s if work.adapter_bytes else self.times.merged_s


def described_costs(shape: ModelShape, hardware: Hardware, cards: int = 1) -> AnalyticalCosts:
    """Of ``shape`` on ``cards`` of ``hardware``. Raises ConfigError, also for several cards where times are stated
    of one."""
    if hardware.stated is None:
        return AnalyticalCosts(shape, hardware, cards)
    if cards > 1:
        raise ConfigError(f"{hardware.name} has times of one card, not of {cards}")
    return StatedCosts(shape, hardware, hardware.stated)
