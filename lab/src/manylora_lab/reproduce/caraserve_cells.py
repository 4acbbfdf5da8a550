"""CaraServe's servers and requests in simulation (§7.5): adapters of many functions, in several ranks."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

from manylora.config.policy import CacheConfig, PolicyConfig
from manylora.config.routing import RouterConfig
from manylora_lab.pricing.costs import StepWork
from manylora_lab.pricing.ranks import RankedStep, RankLines, fit_rank_lines
from manylora_lab.pricing.shapes import shape_named
from manylora_lab.reproduce.caraserve_fits import device_lines
from manylora_lab.reproduce.cells import PAGE_TOKENS, measured_costs
from manylora_lab.reproduce.report import Row
from manylora_lab.sim.analytical import AnalyticalCosts
from manylora_lab.sim.cluster import Member, VirtualCluster
from manylora_lab.sim.cluster_summary import summarize_cluster
from manylora_lab.sim.device import Kernel
from manylora_lab.sim.hardware import HARDWARE
from manylora_lab.workloads import extracts
from manylora_lab.workloads.arrivals import parse_process
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest
from manylora_lab.workloads.synthetic import independent

SCHEDULERS = ("caraserve", "most-idle", "first-fit", "random", "manylora")
RANKS = (8, 16, 32, 64)
MODULES = ("q_proj", "k_proj", "v_proj")
TAIL = 1.45
"""The exponent with which popularity falls beyond the functions at hand: that of the 300 busiest of the 1,250
functions of a day's sample of 2019 (log-log least squares: 1.454)."""
RUNNING_AT_ONCE = 64
SLO_TIMES = 1.5
_SHAPE = shape_named("llama-2-7b")
_A10 = HARDWARE["a10"]
_BATCHES, _LARGEST_BATCH = 400, 32
_KV_TOKENS = 64
MERGED_STEP_S = 0.024
LAUNCHES = 96
"""Projections of a step with adapters on q, k and v: three in each of 32 layers."""
PRINTED, MEASURED = "printed", "measured"
"""Whose steps servers take: the paper's A10, or an H200's."""
DECODE_LINES = {"bgmv": (3.906e-6, 31.8e-3), "mbgmv": (2.344e-6, 33.5e-3)}
"""Seconds for each unit of rank, and besides: from the four latencies printed in the paper's Figure 5. Its
objective there, 36 ms, is 1.5 times a merged step."""

NOTES = (
    "Simulated: the engine's own policy on an A10 with Llama-2-7B. A decode step takes what the latencies printed "
    "in the paper's Figure 5 say: 31.8 ms and 3.91 us for each unit of rows times the largest rank (BGMV), or "
    "33.5 ms and 2.34 us for each of the sum of ranks (MBGMV); prompts by the card's data sheet.",
    "Measured: the same on an H200. A step takes what the shipped profile of Llama-2-7B says, and with adapters "
    f"{LAUNCHES} launches more, each by the lines of `caraserve-fig9` there; requests come faster, by as much "
    "as a step with a merged adapter is shorter.",
    "bgmv: every row reads as much as the step's largest adapter has; mbgmv: every row reads its own.",
    "Functions: the 100 busiest of the Azure Functions trace at hand, and beyond them a tail that falls with "
    f"rank**-{TAIL}; each has an adapter of a rank drawn from {', '.join(map(str, RANKS))} (the paper does not "
    "say). Arrivals are a Poisson process. Lengths are log-normal with Alpaca's means and spread (20 and 60 "
    "tokens, from words, assumed 4/3 tokens each).",
    "The objective is 36 ms, as in that figure, and measured as there 1.5 times a step with a merged adapter.",
    "CaraServe's coefficients are fitted to steps of the simulated server itself. Adapters come from the host's "
    "memory at the link's rate. Reports are 50 ms old.",
)


@dataclasses.dataclass(frozen=True, slots=True)
class ServersCase:
    """One run. ``rate``: requests a second of all functions, on the paper's servers; ``times``: whose steps."""

    kernel: Kernel
    scheduler: str
    servers: int
    functions: int
    rate: float
    duration_s: float
    seed: int = 0
    most_requests: int | None = None
    times: str = PRINTED


class ServerCosts(AnalyticalCosts):
    """Of one of the paper's servers: a step with adapters takes ``DECODE_LINES``, which have attention in them,
    and what prompts take beyond the weights."""

    def __init__(self, kernel: Kernel) -> None:
        link = _A10.sustained_link_bytes_s
        super().__init__(_SHAPE, _A10, launch_s=0.0, read_bytes_s=link, read_base_s=2e-3, reads_at_once=1)
        slope_s, self._base_s = DECODE_LINES["mbgmv" if kernel == "mbgmv" else "bgmv"]
        self._byte_s = slope_s / _SHAPE.adapter_bytes(1, MODULES)

    def step_s(self, work: StepWork, /) -> float:
        """See StepCosts."""
        num_tokens = work.num_decodes + work.num_prefill_tokens
        beyond_s = max(num_tokens * self._token_s - self._weights_s, 0.0)
        if not work.adapter_bytes:
            return MERGED_STEP_S + beyond_s
        return self._base_s + work.adapter_bytes * self._byte_s + beyond_s


class DeviceServerCosts(AnalyticalCosts):
    """Of a server with the device whose lines ship: its profile's steps, and LoRA's launches by the lines."""

    def __init__(self, kernel: Kernel) -> None:
        hardware = HARDWARE["h200"]
        link = hardware.sustained_link_bytes_s
        super().__init__(_SHAPE, hardware, read_bytes_s=link, read_base_s=2e-3, reads_at_once=1)
        line = device_lines()["mbgmv" if kernel == "mbgmv" else "bgmv"]
        self._lora_s = 1e-6 * LAUNCHES * line.base_us
        self._byte_s = 1e-9 * LAUNCHES * line.slopes_ns[0] / _SHAPE.adapter_bytes(1, MODULES)
        self._steps = measured_costs("llama-2-7b")

    def step_s(self, work: StepWork, /) -> float:
        """See StepCosts."""
        seconds = self._steps.step_s(work._replace(adapter_bytes=0, num_adapters=0, adapter_token_bytes=0))
        return seconds + self._lora_s + work.adapter_bytes * self._byte_s if work.adapter_bytes else seconds


def costs_of(kernel: Kernel, times: str) -> AnalyticalCosts:
    """Of one server."""
    return ServerCosts(kernel) if times == PRINTED else DeviceServerCosts(kernel)


def merged_step_s(times: str) -> float:
    """A decode step of one row whose adapter is merged."""
    return costs_of("bgmv", times).step_s(StepWork(1, 0, _KV_TOKENS))


def slo_s(times: str = PRINTED) -> float:
    """The objective for the time between tokens."""
    return SLO_TIMES * merged_step_s(times)


def speed_of(times: str) -> float:
    """How many times as fast as the paper's servers these are."""
    return merged_step_s(PRINTED) / merged_step_s(times)


def lines_of(kernel: Kernel, times: str = PRINTED) -> RankLines:
    """The scheduler's lines, fitted to steps of the simulated server with this kernel."""
    costs, source = costs_of(kernel, times), random.Random(0)
    decodes = []
    for _ in range(_BATCHES):
        ranks = source.choices(RANKS, k=source.randint(1, _LARGEST_BATCH))
        sizes = [_SHAPE.adapter_bytes(rank, MODULES) for rank in ranks]
        num_bytes = sum(sizes) if kernel == "mbgmv" else len(sizes) * max(sizes)
        work = StepWork(len(ranks), 0, len(ranks) * _KV_TOKENS, num_bytes, len(ranks), 0, num_bytes)
        decodes.append(RankedStep(sum(ranks), len(ranks) * max(ranks), costs.step_s(work)))
    prefills = [
        (num_tokens, costs.step_s(StepWork(0, num_tokens, num_tokens))) for num_tokens in range(8, 513, 8)
    ]
    found = fit_rank_lines(decodes, prefills)
    assert found is not None
    return found


def router_of(case: ServersCase) -> RouterConfig:
    """The scheduler with its parameters."""
    if case.scheduler != "caraserve":
        return RouterConfig(case.scheduler)
    lines = lines_of(case.kernel, case.times)
    decode = lines.mbgmv if case.kernel == "mbgmv" else lines.bgmv
    values: dict[str, Any] = {
        "kernel": "mbgmv" if case.kernel == "mbgmv" else "bgmv",
        "decode_slope_s": decode.slope_s, "decode_base_s": decode.base_s,
        "prefill_slope_s": lines.prefill.slope_s, "prefill_base_s": lines.prefill.base_s,
        "slo_s": slo_s(case.times),
    }  # fmt: skip
    return RouterConfig(case.scheduler, tuple((key, str(value)) for key, value in values.items()))


def popularity(functions: int) -> list[float]:
    """The weight of each function, the busiest first."""
    heads = sorted((float(sum(minutes)) for minutes in extracts.azure_functions()), reverse=True)[:functions]
    last = heads[-1]
    return heads + [last * (place / len(heads)) ** -TAIL for place in range(len(heads) + 1, functions + 1)]


def stream_of(case: ServersCase) -> Stream:
    """The same for every kernel and scheduler, on faster servers sooner."""
    seed = case.seed
    speed = speed_of(case.times)
    moments = parse_process("gamma(1)")(case.rate, case.duration_s, random.Random(f"{seed} times"))
    moments = [moment / speed for moment in moments]
    if case.most_requests is not None:
        moments = moments[: case.most_requests]
    weights = list(itertools.accumulate(popularity(case.functions)))
    source = random.Random(f"{seed} functions")
    chosen = source.choices(range(case.functions), cum_weights=weights, k=len(moments))
    lengths, draws = independent("lognormal(20,0.8)", "lognormal(60,1)"), random.Random(f"{seed} lengths")
    requests = []
    for number, (moment, function) in enumerate(zip(moments, chosen)):
        prompt, output = lengths(draws)
        requests.append(StreamRequest(moment, function, number, 0, (Piece(number, prompt),), output))
    ranks = tuple(random.Random(f"{seed} ranks").choices(RANKS, k=case.functions))
    return Stream("functions", tuple(requests), ranks)


def measure(case: ServersCase) -> Row:
    """Simulate; equal cases give equal rows, but for the time of decisions."""
    costs, stream = costs_of(case.kernel, case.times), stream_of(case)
    page_bytes = _SHAPE.page_bytes(PAGE_TOKENS)
    config = PolicyConfig(
        num_pages=costs.pool_bytes() // page_bytes,
        page_tokens=PAGE_TOKENS,
        max_model_len=2048,
        max_num_seqs=RUNNING_AT_ONCE,
        max_batch_tokens=2048,
        page_bytes=page_bytes,
        cache=CacheConfig("lru"),
    )
    pages = [_SHAPE.adapter_pages(rank, PAGE_TOKENS, MODULES) for rank in stream.ranks]
    member = Member(config, costs, pages, kernel=case.kernel)
    cluster = VirtualCluster(stream, [member] * case.servers, router_of(case), is_warm=False)
    cluster.run()
    found = summarize_cluster(cluster, slo_s(case.times))
    fields = (
        "slo_attainment", "tpot_mean_ms", "tpot_p50_ms", "tpot_p99_ms", "time_per_token_mean_ms", "ttft_mean_ms",
        "ttft_p99_ms", "done_per_s", "busy_share", "adapter_loads", "decision_mean_us", "decision_p99_us",
    )  # fmt: skip
    return {"requests": len(stream.requests), **{name: found[name] for name in fields}}
