"""The cases of FastLibra's evaluation (§6.1, §6.3): scenarios, models on cards, numbers of adapters, rates.

Rates are fixed before policies are compared: shares of the peak that ``fastlibra`` bears in each case.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Sequence
from typing import Any

from manylora.reproduce.cells import Cell, peak_rate
from manylora.reproduce.experiment import Setup

SCENARIOS = ("chatbot", "translation", "agent")
MODELS = (("llama-2-7b", 1), ("llama-2-13b", 2), ("codellama-34b", 4))
"""With the cards that the paper gives them (§6.1)."""
ADAPTERS = (20, 50, 100)
BASELINES = ("static-lru", "s-lora")
VARIANTS = ("fastlibra-wom", "fastlibra-wos", "fastlibra-wol")
POLICIES = ("manylora", "fastlibra", *BASELINES)
NOTES = (
    "Simulated: the engine's own policy on a device of assumed costs (manylora.sim.analytical), ideally split "
    "over the cards.",
    "The paper's NPU has no stated memory bandwidth: 1.2 TB/s is assumed.",
    "static-lru stands for the paper's vLLM with LRU offloading (§6.1), s-lora for its S-LoRA.",
    "Adapters of rank 32 or 64 on q, k, v, o (the paper does not name the modules); every one was asked for once "
    "before.",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One group of bars of the paper's figures, as "7B-20" in a scenario."""

    scenario: str
    model: str
    cards: int
    num_adapters: int

    @property
    def name(self) -> str:
        size = self.model.rpartition("-")[2].upper()
        return f"{self.scenario} {size}-{self.num_adapters}"

    def cell(self, policy: str, rate: float, setup: Setup, **others: Any) -> Cell:
        """The case under a policy at a rate."""
        return Cell(
            self.scenario, policy, rate, self.num_adapters, duration_s(setup),
            model=self.model, cards=self.cards, seed=setup.seed, **others,
        )  # fmt: skip


def duration_s(setup: Setup) -> float:
    """Of one run: the paper's half hour, or less."""
    return setup.pick(1800.0, 60.0, 8.0)


def cases(setup: Setup) -> list[Case]:
    """All of the paper's; a few with less time."""
    scenarios: Sequence[str] = setup.pick(SCENARIOS, SCENARIOS, SCENARIOS[:1])
    models: Sequence[tuple[str, int]] = setup.pick(MODELS, MODELS[:1], MODELS[:1])
    adapters: Sequence[int] = setup.pick(ADAPTERS, (100,), (20,))
    return [Case(s, model, cards, n) for s in scenarios for model, cards in models for n in adapters]


def rate_shares(setup: Setup) -> tuple[float, ...]:
    """Of the peak: ten from nothing to all (§6.3)."""
    return setup.pick(tuple(n / 10 for n in range(1, 11)), (0.4, 0.9), (0.5,))


def peaks(wanted: Sequence[tuple[Case, str]], setup: Setup) -> dict[tuple[Case, str], float]:
    """The peak rate of each case under each policy, by bisection."""
    tolerance = setup.pick(0.03, 0.2, 0.5)
    found: dict[tuple[Case, str], float] = {}
    with concurrent.futures.ProcessPoolExecutor(setup.num_workers) as pool:
        running = {
            pool.submit(peak_rate, case.cell(policy, 2.0, setup), tolerance=tolerance): (case, policy)
            for case, policy in wanted
        }
        for done in concurrent.futures.as_completed(running):
            found[running[done]] = done.result()
            setup.show(f"{len(found)} of {len(running)} peak rates found")
    return {key: found[key] for key in wanted}
