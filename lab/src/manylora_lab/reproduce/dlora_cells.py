"""dLoRA's clusters in simulation (§7.1): its systems on replicas, and functions' requests over adapters."""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
from collections.abc import Sequence
from typing import Any

from manylora.config.merging import MergeConfig
from manylora.config.policy import CacheConfig, PolicyConfig
from manylora.config.routing import RouterConfig
from manylora.solving import solving
from manylora_lab.pricing.shapes import ModelShape, shape_named
from manylora_lab.reproduce.caraserve_cells import popularity
from manylora_lab.reproduce.cells import HOST_POOL_BYTES, PAGE_TOKENS
from manylora_lab.reproduce.punica_workload import MOST_TOKENS
from manylora_lab.reproduce.report import Row
from manylora_lab.sim.analytical import AnalyticalCosts
from manylora_lab.sim.cluster import Member, VirtualCluster
from manylora_lab.sim.cluster_summary import summarize_cluster
from manylora_lab.sim.hardware import HARDWARE
from manylora_lab.sim.merging import beside_pristine, merge_times
from manylora_lab.sim.replay import Outcome
from manylora_lab.sim.systems import UNIFORM_ROUTER, System, member_of
from manylora_lab.workloads import extracts
from manylora_lab.workloads.arrivals import gamma, poisson
from manylora_lab.workloads.popularity import mapped_functions
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest

FUNCTIONS, SKEWNESS, RANK = 1000, 4, 8
RUNNING_AT_ONCE = 128
BURST_CV = 4.0
OBJECTIVE_S = 0.5
"""Of the mean latency a token (§7.1)."""

SYSTEMS: dict[str, tuple[System, str, str]] = {
    "dlora": ("ours", "dlora", "dlora"),
    "proactive": ("ours", "dlora-proactive", "dlora"),
    "rr": ("ours", "dlora-rr", "dlora"),
    "manylora": ("ours", "manylora", "unmerged"),
    "uniform": ("ours", UNIFORM_ROUTER, "unmerged"),
    "merged": ("ours", "most-idle", "merged"),
    "peft": ("peft", "most-idle", "unmerged"),
    "vllm-uniform": ("vllm-uniform", UNIFORM_ROUTER, "unmerged"),
}
"""By name: what a replica is, the router, and the mode of merging."""

CLUSTER_NOTES = (
    "Simulated: the engine's own policy on A100-80 of assumed costs (for A800), 128 requests at once. dlora: its "
    "merging and router; rr and proactive: the same with the parts of its router; manylora: our defaults; "
    "uniform: an adapter has one replica; merged: our engine, which merges what it serves; peft: one adapter a "
    "batch, most-idle; vllm-uniform: a merged model for each adapter, shared out equally, swapped in over the "
    "link where they do not fit.",
    "maf1: the 100 busiest functions of the Azure Functions trace of 2019 at hand with a tail to 1,000, shared "
    "out over the adapters as in §7.1 (skewness 4), arrivals Poisson. maf2, of which too little was at hand: the "
    f"same functions, each adapter's arrivals a process of its own with a coefficient of variation of "
    f"{BURST_CV:g}. Lengths of ShareGPT's first rounds up to 2,048 tokens.",
    "Latency is a request's time until its end over its tokens: the sum over all requests over the sum of all "
    "tokens (§7.1).",
)


@dataclasses.dataclass(frozen=True, slots=True)
class DloraCase:
    """One run. ``rate``: requests a second of all replicas; ``cards``: of each; ``length_scale``: of prompts and
    replies; ``lead_s``: before what is judged, in which routers learn rates; ``is_warm``: every replica had every
    adapter before."""

    system: str
    num_adapters: int
    rate: float
    duration_s: float
    replicas: int
    seed: int = 0
    traffic: str = "maf1"
    model: str = "llama-2-7b"
    cards: int = 1
    length_scale: float = 1.0
    lead_s: float = 0.0
    is_warm: bool = True


def stream_of(case: DloraCase) -> Stream:
    """The same for every system; equal arrivals and lengths for any number of adapters in ``maf1``."""
    weights = popularity(FUNCTIONS)
    adapters = mapped_functions([round(weight) for weight in weights], case.num_adapters, SKEWNESS)
    arrivals = _bursts(case, adapters, weights) if case.traffic == "maf2" else _mixed(case, adapters, weights)
    rounds = [talk[0] for talk in extracts.sharegpt_conversations()]
    fitting = [one for one in rounds if one.new + one.generated <= MOST_TOKENS]
    draws = random.Random(f"{case.seed} lengths")
    requests = []
    for number, (moment, adapter) in enumerate(arrivals):
        one = draws.choice(fitting)
        prompt = (Piece(number, max(one.new, 1)),)
        output = max(one.generated, 1)
        requests.append(StreamRequest(moment, adapter, number, 0, prompt, output))
    stream = Stream("functions", tuple(requests), (RANK,) * case.num_adapters)
    return stream if case.length_scale == 1 else stream.with_lengths(case.length_scale)


def _mixed(case: DloraCase, adapters: Sequence[int], weights: Sequence[float]) -> list[tuple[float, int]]:
    moments = poisson(case.rate, case.duration_s, random.Random(f"{case.seed} times"))
    chosen = random.Random(f"{case.seed} functions").choices(
        range(FUNCTIONS), cum_weights=list(itertools.accumulate(weights)), k=len(moments)
    )
    return [(moment, adapters[function]) for moment, function in zip(moments, chosen)]


def _bursts(case: DloraCase, adapters: Sequence[int], weights: Sequence[float]) -> list[tuple[float, int]]:
    """Each adapter's own process; cut out of one that is longer, so that it does not begin with a burst."""
    shares = [0.0] * case.num_adapters
    for adapter, weight in zip(adapters, weights):
        shares[adapter] += weight / sum(weights)
    lead_s = 10 * case.duration_s
    arrivals = []
    for adapter, share in enumerate(shares):
        times = random.Random(f"{case.seed} bursts {adapter}")
        moments = gamma(case.rate * share, BURST_CV, lead_s + case.duration_s, times)
        arrivals += [(moment - lead_s, adapter) for moment in moments if moment >= lead_s]
    return sorted(arrivals)


def member_named(name: str, case: DloraCase, shape: ModelShape) -> tuple[Member, RouterConfig]:
    """A replica of a system, and the router before it."""
    system, router, mode = SYSTEMS[name]
    costs = AnalyticalCosts(shape, HARDWARE["a100-80"], case.cards)
    page_bytes = shape.page_bytes(PAGE_TOKENS)
    adapter_pages = shape.adapter_pages(RANK, PAGE_TOKENS)
    pool_bytes, merge = beside_pristine(MergeConfig(mode), costs.pool_bytes(), shape.layer_bytes, "cuda")
    most_tokens = int(2 * MOST_TOKENS * max(case.length_scale, 1.0))
    if merge.is_on:
        times = merge_times(
            costs, adapter_pages * page_bytes, shape.layer_bytes, RUNNING_AT_ONCE, most_tokens,
            on_host=merge.copy == "host",
        )  # fmt: skip
        merge = dataclasses.replace(merge, times=times)
    config = PolicyConfig(
        num_pages=pool_bytes // page_bytes,
        page_tokens=PAGE_TOKENS,
        max_model_len=most_tokens,
        max_num_seqs=RUNNING_AT_ONCE,
        max_batch_tokens=2 * MOST_TOKENS,
        num_host_pages=HOST_POOL_BYTES // case.replicas // page_bytes,
        page_bytes=page_bytes,
        cache=CacheConfig("manylora" if name == "manylora" else "lru"),
        merge=merge,
    )
    member = member_of(system, config, costs, (adapter_pages,) * case.num_adapters, shape.weight_bytes)
    return member, RouterConfig(router)


def measure(case: DloraCase) -> Row:
    """Simulate; equal cases give equal rows, but for what solving takes."""
    stream, shape = stream_of(case), shape_named(case.model)
    member, router = member_named(case.system, case, shape)
    with solving() as solve:
        cluster = VirtualCluster(
            stream, [member] * case.replicas, router, is_warm=case.is_warm, solve=solve, samples_memory=True
        )
        cluster.run()
    found = summarize_cluster(cluster)
    names = (
        "done_per_s", "output_tokens_per_s", "ttft_mean_ms", "time_per_token_mean_ms", "tpot_mean_ms",
        "busy_share", "moves", "adapter_loads", "solves", "solve_mean_ms",
    )  # fmt: skip
    merging: dict[str, Any] = found["merging"] or {}
    busy_s = sum(loop.busy_s for loop in cluster.loops)
    solve_s, switch_s = sum(cluster.times.solved_s), merging.get("switch_s", 0.0)
    all_s = busy_s + switch_s + solve_s
    memory = [sizes for now, sizes in cluster.memory_used if 0 <= now <= case.duration_s]
    replicas = []
    for loop, each in zip(cluster.loops, found["replicas"], strict=True):
        served = _judged(case, cluster.front.served.get(loop.place, ()))
        replicas.append(
            {
                "replica": loop.place, "requests": each["requests"], "busy_share": each["busy_share"],
                "queue_mean_s": _queue_s(served),
                "kv_share": round(statistics.fmean(sizes[loop.place] for sizes in memory), 4) if memory else 0.0,
            }
        )  # fmt: skip
    return {
        "requests": len(stream.requests),
        "latency_s_token": _latency_s_token(_judged(case, cluster.front.outcomes)),
        "queue_mean_s": _queue_s(_judged(case, cluster.front.outcomes)),
        **{name: found[name] for name in names},
        "switches": merging.get("switches_merged", 0) + merging.get("switches_base", 0),
        "switch_share": round(switch_s / all_s, 6),
        "solve_share": round(solve_s / all_s, 6),
        "replicas": replicas,
    }


def _judged(case: DloraCase, outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.handed_s >= case.lead_s]


def _latency_s_token(outcomes: Sequence[Outcome]) -> float:
    total_s = sum(outcome.end_s - outcome.handed_s for outcome in outcomes)
    return round(total_s / sum(outcome.num_tokens for outcome in outcomes), 5)


def _queue_s(outcomes: Sequence[Outcome]) -> float:
    """The mean time until a request was first admitted, at the router and on its replica."""
    return round(statistics.fmean([outcome.queue_s for outcome in outcomes] or [0.0]), 5)
