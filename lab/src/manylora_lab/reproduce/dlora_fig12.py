"""dLoRA's Figure 12: throughput over the number of adapters, at one rate (§7.5)."""

from __future__ import annotations

import dataclasses
import itertools
import random

from manylora.config import CacheConfig, MergeConfig, PolicyConfig
from manylora.config.routing import RouterConfig
from manylora.pricing.shapes import shape_named
from manylora.solving.process import solving
from manylora_lab.reproduce.caraserve_cells import popularity
from manylora_lab.reproduce.cells import HOST_POOL_BYTES, PAGE_TOKENS, in_parallel
from manylora_lab.reproduce.drawing import Lines
from manylora_lab.reproduce.experiment import Experiment, GridResult, Setup
from manylora_lab.reproduce.punica_workload import MOST_TOKENS
from manylora_lab.reproduce.report import Headline, Row, ratio
from manylora_lab.sim.analytical import AnalyticalCosts
from manylora_lab.sim.cluster import VirtualCluster
from manylora_lab.sim.cluster_summary import summarize_cluster
from manylora_lab.sim.hardware import HARDWARE
from manylora_lab.sim.merging import beside_pristine, merge_times
from manylora_lab.sim.systems import UNIFORM_ROUTER, System, member_of
from manylora_lab.workloads import extracts
from manylora_lab.workloads.arrivals import poisson
from manylora_lab.workloads.popularity import mapped_functions
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest

SYSTEMS = ("dlora", "manylora", "peft", "vllm-uniform")
REPLICAS, FUNCTIONS, SKEWNESS, RANK = 8, 1000, 4, 8
REPLICA_RATE = 6.0
RUNNING_AT_ONCE = 128
PAPER_FALLS = {"vllm-uniform": 3.0, "peft": 1.5}
"""§7.5: how many times less throughput at the most adapters than at the fewest."""
_SHAPE = shape_named("llama-2-7b")


@dataclasses.dataclass(frozen=True, slots=True)
class AdaptersCase:
    """One run."""

    system: str
    num_adapters: int
    duration_s: float
    replicas: int = REPLICAS
    seed: int = 0


def stream_of(case: AdaptersCase) -> Stream:
    """Functions of a trace, shared out over the adapters; equal arrivals and lengths for any number of these."""
    weights = popularity(FUNCTIONS)
    adapters = mapped_functions([round(weight) for weight in weights], case.num_adapters, SKEWNESS)
    moments = poisson(case.replicas * REPLICA_RATE, case.duration_s, random.Random(f"{case.seed} times"))
    chosen = random.Random(f"{case.seed} functions").choices(
        range(FUNCTIONS), cum_weights=list(itertools.accumulate(weights)), k=len(moments)
    )
    rounds = [talk[0] for talk in extracts.sharegpt_conversations()]
    fitting = [one for one in rounds if one.new + one.generated <= MOST_TOKENS]
    draws = random.Random(f"{case.seed} lengths")
    requests = []
    for number, (moment, function) in enumerate(zip(moments, chosen)):
        one = draws.choice(fitting)
        prompt = (Piece(number, max(one.new, 1)),)
        output = max(one.generated, 1)
        requests.append(StreamRequest(moment, adapters[function], number, 0, prompt, output))
    return Stream("functions", tuple(requests), (RANK,) * case.num_adapters)


def measure(case: AdaptersCase) -> Row:
    """Simulate; equal cases give equal rows."""
    stream, costs = stream_of(case), AnalyticalCosts(_SHAPE, HARDWARE["a100-80"])
    page_bytes = _SHAPE.page_bytes(PAGE_TOKENS)
    adapter_pages = _SHAPE.adapter_pages(RANK, PAGE_TOKENS)
    system: System = "ours"
    merge, router = MergeConfig(), case.system
    if case.system == "peft":
        system, router = "peft", "most-idle"
    elif case.system == "vllm-uniform":
        system, router = "vllm-uniform", UNIFORM_ROUTER
    elif case.system == "dlora":
        merge = MergeConfig("dlora")
    pool_bytes, merge = beside_pristine(merge, costs.pool_bytes(), _SHAPE.layer_bytes, "cuda")
    if merge.is_on:
        times = merge_times(
            costs, adapter_pages * page_bytes, _SHAPE.layer_bytes, RUNNING_AT_ONCE, 2 * MOST_TOKENS,
            on_host=merge.copy == "host",
        )  # fmt: skip
        merge = dataclasses.replace(merge, times=times)
    config = PolicyConfig(
        num_pages=pool_bytes // page_bytes,
        page_tokens=PAGE_TOKENS,
        max_model_len=2 * MOST_TOKENS,
        max_num_seqs=RUNNING_AT_ONCE,
        max_batch_tokens=2 * MOST_TOKENS,
        num_host_pages=HOST_POOL_BYTES // case.replicas // page_bytes,
        page_bytes=page_bytes,
        cache=CacheConfig("manylora" if case.system == "manylora" else "lru"),
        merge=merge,
    )
    member = member_of(system, config, costs, (adapter_pages,) * case.num_adapters, _SHAPE.weight_bytes)
    with solving() as solve:
        cluster = VirtualCluster(
            stream, [member] * case.replicas, RouterConfig(router), is_warm=True, solve=solve
        )
        cluster.run()
    found = summarize_cluster(cluster)
    names = (
        "done_per_s", "output_tokens_per_s", "ttft_mean_ms", "time_per_token_mean_ms", "tpot_mean_ms",
        "busy_share", "moves", "adapter_loads",
    )  # fmt: skip
    return {"requests": len(stream.requests), **{name: found[name] for name in names}}


def _grid(setup: Setup) -> GridResult:
    counts = setup.pick((8, 16, 32, 64, 128), (8, 32, 128), (4, 16))
    duration_s, replicas = setup.pick(300.0, 15.0, 3.0), setup.pick(REPLICAS, 2, 2)
    cases = [
        AdaptersCase(system, count, duration_s, replicas, setup.seed)
        for system in SYSTEMS
        for count in counts
    ]
    found = in_parallel(
        measure, {case: case for case in cases}, setup.num_workers, setup.show, "simulations done"
    )
    rows: list[Row] = [
        {"system": case.system, "num_adapters": case.num_adapters, **row} for case, row in found.items()
    ]
    settings = {
        "scale": setup.scale, "seed": setup.seed, "replicas": replicas, "duration_s": duration_s,
        "rate_per_s": replicas * REPLICA_RATE, "num_adapters": list(counts), "functions": FUNCTIONS,
        "skewness": SKEWNESS,
    }  # fmt: skip
    return GridResult(settings, rows)


def _falls(rows: list[Row]) -> list[Headline]:
    figures = []
    for system in dict.fromkeys(row["system"] for row in rows):
        mine = [row for row in rows if row["system"] == system]
        few, many = (pick(mine, key=lambda row: row["num_adapters"]) for pick in (min, max))
        fall = ratio(few["done_per_s"], many["done_per_s"])
        what = (
            f"{system}: throughput with {few['num_adapters']} adapters over that with {many['num_adapters']}"
        )
        figures.append(Headline(what, fall, PAPER_FALLS.get(system)))
    return figures


FIG12 = Experiment(
    "dlora-fig12",
    "Throughput over the number of adapters, at one rate",
    "dLoRA, Figure 12 (§7.5)",
    _grid,
    Lines(("num_adapters", "adapters"), ("done_per_s", "requests done a second"), "system"),
    (_falls,),
    (
        "Simulated: the engine's own policy on A100-80 of assumed costs (for A800). dlora: dLoRA's merging and "
        "router. manylora: our defaults. peft: "
        "one adapter a batch, most-idle. vllm-uniform: a merged model for each adapter, shared out equally, "
        "swapped in over the link where they do not fit.",
        "Throughput: requests until the last has ended, so a system that falls behind is measured by its "
        "backlog. The paper prints neither the rate nor the number of GPUs; 8 replicas at 6 requests a second "
        "each are ours.",
        "Functions: the 100 busiest of the Azure Functions trace at hand with a tail to 1,000, shared out over "
        "the adapters as in §7.1; lengths of ShareGPT's first rounds.",
    ),
)
