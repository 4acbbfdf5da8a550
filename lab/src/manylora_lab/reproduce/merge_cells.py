"""Streams under modes of merging, in simulation, at equal total memory: dLoRA's baselines, ours, and a bound.

Knows no figure; dLoRA's and our own have a file of their own each.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics

import numpy as np

from manylora.config.merging import MergeConfig
from manylora.config.policy import CacheConfig, PolicyConfig
from manylora_lab.pricing.costs import StepCosts, StepWork
from manylora_lab.pricing.fit import fit_profile
from manylora_lab.pricing.profile import Profile
from manylora_lab.pricing.shapes import ATTENTION_MODULES, ModelShape, shape_named
from manylora_lab.reproduce.report import Row
from manylora_lab.sim.hardware import HARDWARE
from manylora_lab.sim.merging import beside_pristine, measured_costs, measured_times, merge_times
from manylora_lab.sim.replay import Replay
from manylora_lab.sim.shipped import find_profile
from manylora_lab.sim.stated import described_costs
from manylora_lab.sim.summary import merging
from manylora_lab.workloads.stream import Stream

STATED, MEASURED = "dlora-a800", "h200-llama-2-7b"
MODEL = "llama-2-7b"
MEMORY_SHARE = 0.9
PAGE_TOKENS = 16
BATCH_TOKENS = 8192
HOST_POOL_BYTES = 32 * 2**30

SYSTEMS: dict[str, tuple[CacheConfig, MergeConfig]] = {
    "unmerged": (CacheConfig(), MergeConfig()),
    "s-lora": (CacheConfig("s-lora"), MergeConfig()),
    "merged": (CacheConfig(), MergeConfig("merged", copy="device")),
    "dlora": (CacheConfig(), MergeConfig("dlora", copy="device")),
    "dlora, patient": (CacheConfig(), MergeConfig("dlora", copy="device", starve_s=1e4)),
    "manylora": (CacheConfig(), MergeConfig("manylora", copy="device")),
    "manylora, wait": (CacheConfig(), MergeConfig("manylora", copy="device", minority="wait")),
}
"""What keeps pages, and when an adapter is merged; copies of the base's weights lie on the device, out of the
pool. ``dlora, patient``: starvation acts after hours only, as in dLoRA's artifact, where credits hardly act."""
FREE = "free switching"
"""A reference, no system: unmerged, but a step whose rows are all one adapter's takes what the base would, no
switch takes anything, and there is no copy. About the most that a switcher can do that pauses no request."""

PROFILE_NOTE = (
    "On the H200 a step takes what was fitted to the shipped profile; where that has no merged steps, one "
    "counts as a step of the base alone, and a switch as two such steps of one row. No GPU ran this."
)


@dataclasses.dataclass(frozen=True, slots=True)
class PricedCard:
    """What a card takes. ``memory_bytes``: beside the weights, for pages and a copy of the base's."""

    shape: ModelShape
    costs: StepCosts
    modules: tuple[str, ...]
    memory_bytes: int
    profile: Profile | None = None

    def adapter_pages(self, rank: int) -> int:
        """Pages of one adapter."""
        return self.shape.adapter_pages(rank, PAGE_TOKENS, self.modules)

    @property
    def has_measured(self) -> bool:
        """Whether what merging takes was measured here, with the copy on the device."""
        return self.profile is not None and measured_times(self.profile, on_host=False) is not None


@functools.cache
def place_named(name: str) -> PricedCard:
    """By a described card's name or a shipped profile's; of a profile's machine the memory is an H200's. Kept,
    since a fit takes seconds."""
    if name in HARDWARE:
        shape, card = shape_named(MODEL), HARDWARE[name]
        costs = described_costs(shape, card)
        return PricedCard(shape, costs, ATTENTION_MODULES, costs.pool_bytes(MEMORY_SHARE))
    profile = find_profile(name)
    memory_bytes = int(MEMORY_SHARE * HARDWARE["h200"].memory_bytes) - profile.model.weight_bytes
    return PricedCard(profile.model, fit_profile(profile), profile.adapter_modules, memory_bytes, profile)


class SummedCosts:
    """Another device's costs, and the sum of what its steps took; ``is_free``: with free switching (``FREE``)."""

    def __init__(self, costs: StepCosts, is_free: bool = False) -> None:
        self.steps_s = 0.0
        self._step_s = costs.step_s
        self._is_free = is_free
        self.overhead_s, self.copy_s, self.read_s = costs.overhead_s, costs.copy_s, costs.read_s
        self.reads_at_once = costs.reads_at_once
        self.wake_s = costs.wake_s
        self.answer_s = costs.answer_s
        self.copy_drag = costs.copy_drag
        self.spread = costs.spread

    def step_s(self, work: StepWork, /) -> float:
        """See StepCosts."""
        if self._is_free and work.num_adapters == 1:
            work = work._replace(adapter_bytes=0, num_adapters=0, adapter_token_bytes=0)
        seconds = self._step_s(work)
        self.steps_s += seconds
        return seconds


def simulate(
    stream: Stream, place: PricedCard, system: str, max_num_seqs: int, memory_bytes: int | None = None
) -> Row:
    """What a system makes of a stream without base requests. Latencies are seconds a token: ``latency_s_token``
    is the sum of all requests' over the sum of their tokens, as dLoRA's text has it (§7.1); the others are the
    mean and P90 of each request's over its own tokens."""
    cache, merge = SYSTEMS.get(system, SYSTEMS["unmerged"])
    page_bytes = place.shape.page_bytes(PAGE_TOKENS)
    pages = [place.adapter_pages(rank) for rank in stream.ranks]
    pool_bytes, merge = beside_pristine(
        merge, memory_bytes or place.memory_bytes, place.shape.layer_bytes, "cuda"
    )
    measured = measured_times(place.profile, on_host=False) if place.profile is not None else None
    times = measured or merge_times(
        place.costs, statistics.median_low(pages) * page_bytes, place.shape.layer_bytes, max_num_seqs,
        BATCH_TOKENS, on_host=False,
    )  # fmt: skip
    config = PolicyConfig(
        num_pages=pool_bytes // page_bytes,
        page_tokens=PAGE_TOKENS,
        max_model_len=4096,
        max_num_seqs=max_num_seqs,
        max_batch_tokens=BATCH_TOKENS,
        num_host_pages=HOST_POOL_BYTES // page_bytes,
        page_bytes=page_bytes,
        cache=cache,
        merge=dataclasses.replace(merge, times=times) if merge.is_on else merge,
    )
    costs = SummedCosts(place.costs, system == FREE)
    of_merged = (
        measured_costs(place.profile, place.costs, on_host=False) if place.profile is not None else None
    )
    replay = Replay(stream, config, costs, pages, merging=of_merged)
    replay.run()
    outcomes = replay.outcomes
    latencies = [outcome.end_s - outcome.handed_s for outcome in outcomes]
    tokens = [outcome.num_tokens for outcome in outcomes]
    of_merging = merging(replay) or {}
    switch_s = of_merging.get("switch_s", 0.0)
    return {
        "latency_s_token": round(sum(latencies) / sum(tokens), 5),
        "latency_each_s_token": round(float(np.mean(np.divide(latencies, tokens))), 5),
        "latency_p90_s_token": round(float(np.percentile(np.divide(latencies, tokens), 90)), 5),
        "ttft_mean_s": round(statistics.fmean(outcome.ttft_s for outcome in outcomes), 5),
        "tokens_per_s": round(sum(tokens) / max(outcome.end_s for outcome in outcomes), 2),
        "steps_merged": of_merging.get("steps_merged", 0.0),
        "switches": of_merging.get("switches_merged", 0) + of_merging.get("switches_base", 0),
        "switch_share": round(switch_s / (switch_s + costs.steps_s), 5),
        "longest_pause_s": of_merging.get("longest_pause_s", 0.0),
    }
