"""S-LoRA's evaluation in simulation (§7): its settings, synthetic loads, own variants, and what is measured.

Knows no figure; each has a file of its own.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Literal

from manylora.config.merging import MergeConfig
from manylora.config.policy import CacheConfig, PolicyConfig
from manylora.config.queueing import QueueConfig
from manylora_lab.pricing.costs import StepCosts, StepWork
from manylora_lab.pricing.shapes import ModelShape, shape_named
from manylora_lab.reproduce.report import Row
from manylora_lab.sim.analytical import AnalyticalCosts
from manylora_lab.sim.hardware import HARDWARE
from manylora_lab.sim.merging import merge_times
from manylora_lab.sim.replay import Outcome, Replay
from manylora_lab.workloads.stream import Stream
from manylora_lab.workloads.synthetic import Synthetic, synthetic

OBJECTIVE_S = 6.0
"""§7.1: SLO attainment is the share of requests that return the first token in 6 seconds."""
PAGE_TOKENS = 16
HOST_POOL_BYTES = 560 * 2**30
"""Assumed: room for 2,000 adapters of rank 64; the paper's hosts had 64 to 670 GB (§7.1)."""
RUNNING_AT_ONCE = 512
"""More than the pools hold, so that memory decides."""
BATCH_TOKENS = 8192


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """A model and the ranks of its adapters, in turn (Table 1, recalled in the papers' notes)."""

    model: str
    ranks: tuple[int, ...]

    @property
    def shape(self) -> ModelShape:
        return shape_named(self.model)


SETTINGS = {
    "S1": Setting("llama-2-7b", (8,)),
    "S2": Setting("llama-2-7b", (64, 32, 16, 8)),
    "S4": Setting("llama-2-13b", (64, 32, 16)),
    "S5": Setting("llama-30b", (32,)),
    "S6": Setting("llama-2-70b", (64,)),
}
POOL_TOKENS = {
    ("S1", "a10"): 14_000, ("S2", "a10"): 14_000, ("S4", "a100-40"): 14_000,
    ("S1", "a100-80"): 125_000, ("S2", "a100-80"): 125_000, ("S4", "a100-80"): 65_000,
}  # fmt: skip
"""Of the device's pool, by setting and card: --num-token of the launch commands in the authors' repository (for S1
on an A100-80 that of S2)."""

SYSTEMS = ("s-lora", "s-lora-bmm", "s-lora-no-unify-mem")
"""S-LoRA and its own variants (§7.1)."""
ADAPTERS_SHARE = 5_000 / 14_000
"""Of a pool in two parts, for adapters, at most: without unified memory the authors' launch commands (A10G, S2, 50
and more adapters) leave 9,000 of 14,000 tokens for KV."""

NOTES = (
    "Simulated: the engine's own policy on a card of assumed costs (manylora_lab.sim.analytical). A10 for "
    "the paper's "
    "A10G; Llama 2's sizes for Llama's, which are the same.",
    "Settings S1, S2, S4 and the defaults of the load are recalled (Tables 1 and 2 are lost in the text at "
    "hand) and agree with the authors' benchmarks/exp_suite.py; pools have the tokens of their launch commands.",
    "s-lora: one pool, nothing kept that is not in use, prefetch for the queue (§5). Unlike the authors' code, a "
    "request is admitted when its prompt fits, and the newest is preempted where outputs outgrow the pool.",
    "s-lora-no-unify-mem: a part of the pool for adapters, the rest for KV, each with its own LRU, no prefetch. "
    "Its loads are as fast as s-lora's, so what differs is memory alone.",
    "s-lora-bmm: these parts, and for every row of a step a contiguous copy of its adapter, padded to the largest "
    "rank: read, written and read again at the rate of memory; arithmetic at the largest rank.",
    "Every adapter was asked for once before, so that the host has it.",
)


@dataclasses.dataclass(frozen=True, slots=True)
class ServingCase:
    """One run. ``rate``: requests a second of all adapters together; ``alpha``: of ``power(alpha)``.

    ``merged``: one adapter at a time is merged, and whence the base's own weights come back: from a copy in the
    host's memory, or from subtracting (``in place``), which needs no memory and is not exact.
    """

    setting: str
    hardware: str
    num_adapters: int
    rate: float
    duration_s: float
    system: str = "s-lora"
    cv: float = 1.0
    alpha: float = 1.0
    admission: str = "fcfs"
    seed: int = 0
    adapter_batch_limit: str | None = None
    merged: Literal["host", "in place"] | None = None


def stream_of(case: ServingCase) -> Stream:
    """§7.2's synthetic load: Gamma arrivals, power-law popularity, prompts and outputs of 8 to 512 tokens."""
    ranks = ",".join(map(str, SETTINGS[case.setting].ranks))
    parts = Synthetic(f"gamma({case.cv:g})", f"power({case.alpha:g})", ranks=f"cycle({ranks})")
    return synthetic(
        parts, rate=case.rate, num_adapters=case.num_adapters, duration_s=case.duration_s, seed=case.seed
    )


def measure(case: ServingCase, stream: Stream | None = None) -> Row:
    """Simulate, and say what the paper's figures show. Equal cases give equal rows."""
    return summary(simulate(case, stream or stream_of(case)))


def simulate(case: ServingCase, stream: Stream) -> list[Outcome]:
    """Every request's outcome, in order of arrival."""
    shape = SETTINGS[case.setting].shape
    page_bytes = shape.page_bytes(PAGE_TOKENS)
    pages = [shape.adapter_pages(rank, PAGE_TOKENS) for rank in stream.ranks]
    num_pages = POOL_TOKENS[case.setting, case.hardware] // PAGE_TOKENS
    costs: StepCosts = AnalyticalCosts(shape, HARDWARE[case.hardware])
    if case.system == "s-lora-bmm":
        costs = PaddedCopies(shape, case.hardware, max(pages) * page_bytes)
    config = dataclasses.replace(
        engine_config(num_pages, page_bytes, _cache(case, num_pages, pages)),
        admission=case.admission,
        slo_ttft_s=OBJECTIVE_S,
        queue=QueueConfig(adapter_batch_limit=case.adapter_batch_limit),
        merge=_merge(case, costs, statistics.median_low(pages) * page_bytes, shape),
    )
    replay = Replay(stream, config, costs, pages)
    replay.run()
    return replay.outcomes


def engine_config(num_pages: int, page_bytes: int, cache: CacheConfig) -> PolicyConfig:
    """Of an engine whose memory alone says how many requests run."""
    return PolicyConfig(
        num_pages=num_pages,
        page_tokens=PAGE_TOKENS,
        max_model_len=2048,
        max_num_seqs=RUNNING_AT_ONCE,
        max_batch_tokens=BATCH_TOKENS,
        num_host_pages=HOST_POOL_BYTES // page_bytes,
        page_bytes=page_bytes,
        cache=cache,
    )


def _merge(case: ServingCase, costs: StepCosts, adapter_bytes: int, shape: ModelShape) -> MergeConfig:
    if case.merged is None:
        return MergeConfig()
    on_host = case.merged == "host"
    times = merge_times(
        costs, adapter_bytes, shape.layer_bytes, RUNNING_AT_ONCE, BATCH_TOKENS, on_host=on_host
    )
    return MergeConfig("merged", copy="host" if on_host else "device", times=times)


def _cache(case: ServingCase, num_pages: int, adapter_pages: Sequence[int]) -> CacheConfig:
    if case.system == "s-lora":
        return CacheConfig("s-lora")
    wanted = max(max(adapter_pages), min(sum(adapter_pages), ADAPTERS_SHARE * num_pages))
    # Half a page more, so that rounding does not take one away.
    return CacheConfig("static-lru", adapter_share=(wanted + 0.5) / num_pages)


class PaddedCopies(AnalyticalCosts):
    """LoRA by copies: each row's adapter, padded to ``padded_bytes``, lies in contiguous memory for a batched
    matrix product (§7.1, S-LoRA-bmm).

    A copy is read, written and read again at the rate at which steps read memory. A decoding row has a copy of its
    own; prefill rows are taken to need no more copies than there are adapters.
    """

    def __init__(self, shape: ModelShape, hardware: str, padded_bytes: int) -> None:
        super().__init__(shape, HARDWARE[hardware])
        self._padded_bytes = padded_bytes
        self._memory_byte_s = 1 / HARDWARE[hardware].sustained_memory_bytes_s

    def step_s(self, work: StepWork, /) -> float:
        """See StepCosts."""
        num_copies = max(work.num_decodes, work.num_adapters) if work.num_adapters else 0
        num_tokens = work.num_decodes + work.num_prefill_tokens if work.num_adapters else 0
        padded = work._replace(
            adapter_bytes=0, num_adapters=0, adapter_token_bytes=num_tokens * self._padded_bytes
        )
        base_s = super().step_s(padded)
        return base_s + 3 * num_copies * self._padded_bytes * self._memory_byte_s


def summary(outcomes: Sequence[Outcome]) -> Row:
    """Requests a second until the last has ended; seconds; shares of all requests, the dropped ones included."""
    served = [outcome for outcome in outcomes if not outcome.is_dropped]
    waits = [outcome.ttft_s for outcome in served]
    end_s = max(outcome.end_s for outcome in outcomes)
    return {
        "throughput_per_s": round(len(served) / end_s, 4),
        "ttft_mean_s": round(statistics.fmean(waits), 4) if waits else None,
        "latency_mean_s": round(statistics.fmean(o.end_s - o.handed_s for o in served), 4)
        if served
        else None,
        "attainment": round(sum(wait < OBJECTIVE_S for wait in waits) / len(outcomes), 4),
        "satisfaction": round(sum(map(satisfaction, waits)) / len(outcomes), 4),
        "dropped": round(1 - len(served) / len(outcomes), 4),
        "requests": len(outcomes),
    }


def satisfaction(ttft_s: float) -> float:
    """1 at once, 0 from the objective on, a parabola between them."""
    return max(0.0, 1.0 - (ttft_s / OBJECTIVE_S) ** 2)
