"""CaraServe's cold starts in simulation (§2.3, §7.2, §7.3): systems, loaders, requests, and what is measured.

Knows no figure; ``caraserve_cold_figures`` has them.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
from collections.abc import Sequence
from typing import Literal

import numpy as np

from manylora.config.cold_start import ColdStartConfig
from manylora.config.policy import CacheConfig, PolicyConfig
from manylora.protocol.commands import Command, RunStep
from manylora.protocol.events import Event, StepDone
from manylora_lab.pricing.cold import CpuRates
from manylora_lab.pricing.shapes import ModelShape, shape_named
from manylora_lab.reproduce.caraserve_cells import MODULES, popularity
from manylora_lab.reproduce.cells import PAGE_TOKENS
from manylora_lab.reproduce.report import Row
from manylora_lab.sim.analytical import AnalyticalCosts
from manylora_lab.sim.cold import ASSUMED_CORES, ColdCosts, assumed_cold
from manylora_lab.sim.hardware import CARASERVE_LOADER_BYTES_S, HARDWARE, Hardware
from manylora_lab.sim.replay import Outcome, Replay
from manylora_lab.workloads.arrivals import parse_process
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest
from manylora_lab.workloads.synthetic import independent

System = Literal["cached", "block", "s-lora", "wait", "layerwise", "cpu", "auto"]
SYSTEMS: tuple[System, ...] = ("cached", "block", "s-lora", "wait", "layerwise", "cpu", "auto")
Loader = Literal["theirs", "pinned"]
LOADERS: tuple[Loader, ...] = ("theirs", "pinned")
QUANTILES = (1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99)
WORKERS = 8
"""As many CPUs as the paper's Figure 18 goes to."""
MEASURED_RATES = CpuRates(step_s=6.4e-3, byte_s=1.7e-10, token_byte_s=1.2e-11, slice_tokens=4)
"""Of one core of a shared machine, by a line through products of q, k and v of rank 64; step_s: of 32 products. A
slice is what the engine makes of such a line: a quarter of 0.2 ms and of reading 3.1 MB, at 0.04 ms a token."""
_RUNNING_AT_ONCE = 64
_KV_PAGES = 8
"""For each request, beside all adapters, so that none of these has to leave a pool that is to hold them all."""

NOTES = (
    "Simulated: the engine's own policy on cards of assumed costs (manylora_lab.sim.analytical), adapters on q, k "
    "and v, each in host memory when it is asked for. A step computes prompts and decoding rows together, where "
    "the paper's server lets prompts go first.",
    f"theirs: adapters are loaded at {CARASERVE_LOADER_BYTES_S / 1e9:g} GB/s, an assumption: the paper tells of "
    '"a few to tens of milliseconds" for up to 100 MiB (§2.3), and of 20 % of the time of requests at 9/s, which '
    "by itself would be 4.7 GB/s at most. pinned: the same card with adapters in pinned memory, at 85 % of PCIe 4 "
    "x16.",
    "cached: all adapters are in the card's memory, which has room for them. block: on demand, the paper's OnDmd: "
    "a step waits for the adapters of its new rows. s-lora: the same with S-LoRA's cache, which keeps nothing "
    "that is not in use and prefetches for the queue. cpu is CaraServe's. wait, layerwise and auto are ours.",
    f"{WORKERS} workers on a host of {ASSUMED_CORES} cores. A core takes what our workers took on one of a shared "
    "machine of ours, not on the paper's. What it computes is hidden by half of the "
    "step's own time at most, and its results cross the link.",
    "Arrivals are a Poisson process. Lengths are log-normal with Alpaca's means and spread (20 and 60 tokens, "
    "from words, assumed 4/3 tokens each).",
)


@dataclasses.dataclass(frozen=True, slots=True)
class ColdCase:
    """One run. ``functions``: adapters, as popular as functions of a trace; None: each request has its own.
    ``held``: the cards' pool has room for so many requests with their adapters; None: for what memory holds."""

    system: System
    loader: Loader
    rate: float
    rank: int
    duration_s: float
    functions: int | None = None
    model: str = "llama-2-7b"
    hardware: str = "a10"
    cards: int = 1
    seed: int = 0
    held: int | None = None

    @property
    def shape(self) -> ModelShape:
        return shape_named(self.model)

    @property
    def card(self) -> Hardware:
        found = HARDWARE[self.hardware]
        if self.loader == "theirs":
            return dataclasses.replace(found, loader_bytes_s=CARASERVE_LOADER_BYTES_S)
        return found


def costs_of(case: ColdCase) -> AnalyticalCosts:
    """Of steps and copies."""
    return AnalyticalCosts(case.shape, case.card, case.cards)


def cold_of(case: ColdCase) -> ColdCosts:
    """Of the CPU. Results of a model on several cards cross as many links."""
    found = assumed_cold(case.shape, MODULES, case.card)
    rates = MEASURED_RATES
    per_layer_s = rates.step_s / shape_named("llama-2-7b").layers
    rates = dataclasses.replace(rates, step_s=per_layer_s * case.shape.layers)
    results = None if found.result_bytes_s is None else case.cards * found.result_bytes_s
    return dataclasses.replace(found, rates=rates, num_workers=WORKERS, result_bytes_s=results)


def stream_of(case: ColdCase) -> Stream:
    """The same for every system and loader."""
    seed = case.seed
    moments = parse_process("gamma(1)")(case.rate, case.duration_s, random.Random(f"{seed} times"))
    chosen: Sequence[int] = range(len(moments))
    count = len(moments)
    if case.functions is not None:
        count = case.functions
        weights = list(itertools.accumulate(popularity(count)))
        source = random.Random(f"{seed} functions")
        chosen = source.choices(range(count), cum_weights=weights, k=len(moments))
    lengths, draws = independent("lognormal(20,0.8)", "lognormal(60,1)"), random.Random(f"{seed} lengths")
    requests = []
    for number, (moment, adapter) in enumerate(zip(moments, chosen)):
        prompt, output = lengths(draws)
        requests.append(StreamRequest(moment, adapter, number, 0, (Piece(number, prompt),), output))
    return Stream("cold", tuple(requests), (case.rank,) * count)


def config_of(case: ColdCase, stream: Stream) -> PolicyConfig:
    """The engine's, with the system's policy."""
    page_bytes = case.shape.page_bytes(PAGE_TOKENS)
    adapter_pages = case.shape.adapter_pages(case.rank, PAGE_TOKENS, MODULES)
    all_pages = adapter_pages * len(stream.ranks) + _KV_PAGES * len(stream.requests)
    num_pages = costs_of(case).pool_bytes() // page_bytes
    if case.held is not None:
        num_pages = min(num_pages, case.held * (adapter_pages + _KV_PAGES))
    mode = {"cached": "wait", "s-lora": "block"}.get(case.system, case.system)
    return PolicyConfig(
        num_pages=num_pages + all_pages if case.system == "cached" else num_pages,
        page_tokens=PAGE_TOKENS,
        max_model_len=2048,
        max_num_seqs=_RUNNING_AT_ONCE,
        max_batch_tokens=2048,
        num_host_pages=all_pages,
        page_bytes=page_bytes,
        cache=CacheConfig("s-lora" if case.system == "s-lora" else "manylora"),
        pipeline_depth=1,  # as in the paper's engine
        cold_start=ColdStartConfig(mode, num_workers=WORKERS if mode == "cpu" else 0),
    )


class ColdReplay(Replay):
    """Notes also how long each step took, with what it waited for: those with prompts, and the others."""

    def __init__(self, case: ColdCase) -> None:
        stream, cold = stream_of(case), cold_of(case)
        adapter_pages = case.shape.adapter_pages(case.rank, PAGE_TOKENS, MODULES)
        self.prefill_s: list[float] = []
        self.decode_s: list[float] = []
        self._with_prompts: set[int] = set()
        super().__init__(
            stream,
            config_of(case, stream),
            costs_of(case),
            [adapter_pages] * len(stream.ranks),
            watch=self._note_step,
            cold=cold,
        )

    def _note_step(self, now: float, command: Command) -> None:
        if type(command) is RunStep and any(row.num_tokens > 1 for row in command.rows):
            self._with_prompts.add(command.step)

    def _tell(self, event: Event) -> list[Command]:
        if type(event) is StepDone and self.since_start_s is not None:
            steps = self.prefill_s if event.step in self._with_prompts else self.decode_s
            steps.append(event.device_s)
        return super()._tell(event)


def simulate(case: ColdCase) -> ColdReplay:
    """A run that has ended."""
    replay = ColdReplay(case)
    replay.run()
    return replay


def measure(case: ColdCase) -> Row:
    """Times in ms, the quantiles of ``QUANTILES`` in lists. Equal cases give equal rows."""
    replay = simulate(case)
    outcomes = replay.outcomes
    counters = replay.report().counters
    row: Row = {"requests": len(outcomes)}
    of_token = [outcome.tpot_s for outcome in outcomes if outcome.tpot_s is not None]
    for name, seconds in (
        ("ttft", [outcome.ttft_s for outcome in outcomes]),
        ("tpot", of_token),
        ("latency", [latency_s(outcome) for outcome in outcomes]),
        ("prefill_step", replay.prefill_s),
        ("decode_step", replay.decode_s),
    ):
        row[f"{name}_mean_ms"] = _ms(statistics.fmean(seconds)) if seconds else None
        found = np.percentile(seconds, QUANTILES).tolist() if seconds else []
        row[f"{name}_ms"] = [_ms(value) for value in found]
    row["began"] = {key: value for key, value in sorted(counters.cold_starts.items()) if value}
    row["stood_still_s"] = round(counters.cold_start_stall_s, 4)
    row["expected_still_s"] = round(counters.cold_start_expected_s, 4)
    return row


def cold_shares(case: ColdCase) -> list[float]:
    """Of each request: the share of its time that the case's system takes and ``cached`` does not."""
    cold, cached = simulate(case), simulate(dataclasses.replace(case, system="cached"))
    pairs = zip(cold.outcomes, cached.outcomes, strict=True)
    return [1 - latency_s(warm) / latency_s(slow) for slow, warm in pairs]


def latency_s(outcome: Outcome) -> float:
    """From when it was asked for to its last token."""
    return outcome.end_s - outcome.handed_s


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
