"""Punica's Figure 13: a cluster under a load that rises and falls (§7.3), by router."""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics

from manylora.config.policy import CacheConfig, PolicyConfig
from manylora.config.routing import RouterConfig
from manylora_lab.pricing.shapes import shape_named
from manylora_lab.reproduce.cells import HOST_POOL_BYTES, PAGE_TOKENS
from manylora_lab.reproduce.drawing import Curves
from manylora_lab.reproduce.experiment import Experiment, GridResult, Setup
from manylora_lab.reproduce.parts import run_cases
from manylora_lab.reproduce.punica_workload import MOST_TOKENS, RANK
from manylora_lab.reproduce.report import Headline, Row, change
from manylora_lab.sim.analytical import AnalyticalCosts
from manylora_lab.sim.cluster import Member, VirtualCluster
from manylora_lab.sim.cluster_summary import summarize_cluster
from manylora_lab.sim.hardware import HARDWARE
from manylora_lab.workloads import extracts
from manylora_lab.workloads.arrivals import poisson
from manylora_lab.workloads.popularity import Popularity
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest

ROUTERS = ("punica", "punica-consolidate", "most-idle", "manylora")
MOST_BATCH = 32
FULL_BATCH = 0.9 * MOST_BATCH
REPLICA_RATE = 3.2
"""Requests a second of each replica at the height of the load: about as many as it can serve."""
ADAPTERS = 64
_SHAPE = shape_named("llama-2-7b")
_PARTS = 60


@dataclasses.dataclass(frozen=True, slots=True)
class LoadCase:
    """One run of ``duration_s``, half of which the rate rises."""

    router: str
    replicas: int
    duration_s: float
    seed: int = 0


def stream_of(case: LoadCase) -> Stream:
    """The same for every router."""
    most = case.replicas * REPLICA_RATE
    times, draws = random.Random(f"{case.seed} times"), random.Random(f"{case.seed} lengths")
    half_s = case.duration_s / 2
    moments = [
        moment
        for moment in poisson(most, case.duration_s, times)
        if times.random() < 1 - abs(moment - half_s) / half_s
    ]
    rounds = [talk[0] for talk in extracts.sharegpt_conversations()]
    fitting = [one for one in rounds if one.new + one.generated <= MOST_TOKENS]
    adapters = Popularity.parse("geometric(1.5)").draws(ADAPTERS, random.Random(f"{case.seed} adapters"))
    requests = []
    for number, (moment, adapter) in enumerate(zip(moments, adapters)):
        one = draws.choice(fitting)
        prompt = (Piece(number, max(one.new, 1)),)
        requests.append(StreamRequest(moment, adapter, number, 0, prompt, max(one.generated, 1)))
    return Stream("rising and falling", tuple(requests), (RANK,) * ADAPTERS)


def measure(case: LoadCase) -> Row:
    """``total``: of all of the time; ``parts``: a row for each part of it."""
    stream = stream_of(case)
    costs = AnalyticalCosts(_SHAPE, HARDWARE["a100-40"])
    page_bytes = _SHAPE.page_bytes(PAGE_TOKENS)
    config = PolicyConfig(
        num_pages=costs.pool_bytes() // page_bytes,
        page_tokens=PAGE_TOKENS,
        max_model_len=2 * MOST_TOKENS,
        max_num_seqs=MOST_BATCH,
        max_batch_tokens=MOST_TOKENS,
        num_host_pages=HOST_POOL_BYTES // page_bytes,
        page_bytes=page_bytes,
        cache=CacheConfig("lru"),
        max_prefills_per_step=1,
    )
    pages = [_SHAPE.adapter_pages(RANK, PAGE_TOKENS)] * ADAPTERS
    cluster = VirtualCluster(
        stream, [Member(config, costs, pages)] * case.replicas, RouterConfig(case.router), is_warm=False
    )
    cluster.run()
    sets = [(now, sizes) for now, sizes in cluster.working_sets if now <= case.duration_s]
    busy = [size for _, sizes in sets for size in sizes if size]
    found = summarize_cluster(cluster)
    total: Row = {
        "requests": len(stream.requests),
        "replica_hours": round(len(busy) / 3600, 4),
        "full_share": round(sum(size >= FULL_BATCH for size in busy) / max(len(busy), 1), 4),
        "batch_of_busy": round(statistics.fmean(busy), 2), "went_busy_again": _woken(sets),
        **{name: found[name] for name in (
            "ttft_mean_ms", "ttft_p99_ms", "tpot_mean_ms", "output_tokens_per_s", "moves", "recomputed_tokens",
            "preemptions", "adapter_loads", "decision_mean_us",
        )},
    }  # fmt: skip
    part_s = case.duration_s / _PARTS
    arrived = [0] * (_PARTS + 1)
    for request in stream.requests:
        arrived[int(request.arrival_s / part_s)] += 1
    rows: list[Row] = []
    for part, group in itertools.groupby(sets, key=lambda entry: int(entry[0] / part_s)):
        sizes = [size for _, each in group for size in each]
        used = [size for size in sizes if size]
        rows.append(
            {
                "router": case.router, "time_s": round(part * part_s, 1),
                "rate_per_s": round(arrived[part] / part_s, 3),
                "busy_replicas": round(case.replicas * len(used) / len(sizes), 2),
                "batch_of_busy": round(statistics.fmean(used), 2) if used else 0.0,
            }
        )  # fmt: skip
    return {"total": total, "parts": rows}


def _woken(sets: list[tuple[float, tuple[int, ...]]]) -> int:
    """How often a replica that had been idle after work got work again."""
    count = 0
    for place in range(len(sets[0][1])):
        sizes = [each[place] for _, each in sets]
        worked = list(itertools.accumulate(sizes, lambda before, size: before or size > 0, initial=False))
        count += sum(
            worked[moment] and not sizes[moment - 1] and sizes[moment] > 0 for moment in range(1, len(sizes))
        )
    return count


def _grid(setup: Setup) -> GridResult:
    replicas, duration_s = setup.pick((16, 3600.0), (4, 100.0), (2, 20.0))
    cases = [LoadCase(router, replicas, duration_s, setup.seed) for router in ROUTERS]
    found = run_cases(measure, cases, setup)
    settings = {
        "scale": setup.scale, "seed": setup.seed, "replicas": replicas, "duration_s": duration_s,
        "most_rate_per_s": replicas * REPLICA_RATE, "adapters": ADAPTERS, "max_batch": MOST_BATCH,
        "max_prefills_per_step": 1,
    }  # fmt: skip
    totals = {case.router: row["total"] for case, row in found.items()}
    rows = [part for row in found.values() for part in row["parts"]]
    return GridResult({**settings, "totals": totals}, rows, _headline(totals))


def _headline(of: dict[str, Row]) -> list[Headline]:
    """Of each router's totals."""
    figures = [
        Headline(
            f"{name}: share of busy replicas' time at 90 % of the largest batch or more", row["full_share"]
        )
        for name, row in of.items()
    ]
    figures += [
        Headline(
            f"{name}: replica-hours against most-idle",
            change(row["replica_hours"], of["most-idle"]["replica_hours"]),
        )
        for name, row in of.items()
        if name != "most-idle"
    ]
    figures += [
        Headline(f"{name}: mean time to first token, ms", row["ttft_mean_ms"]) for name, row in of.items()
    ]
    return figures


FIG13 = Experiment(
    "punica-fig13",
    "Replicas in use and their batches while the load rises and falls",
    "Punica, Figure 13 (§7.3)",
    _grid,
    Curves(
        (
            ("rate_per_s", "requests a second"),
            ("busy_replicas", "busy replicas"),
            ("batch_of_busy", "their batch"),
        ),
        x=("time_s", "time, s"),
        panel="router",
        y="",
    ),
    (),
    (
        "Simulated: the engine's own policy on A100-40 of assumed costs (manylora_lab.sim.analytical), one new "
        "prompt a step. The paper has no baseline and prints no figures: its picture shows busy GPUs at their "
        "largest batch, and idle ones that stay idle.",
        "Lengths: first rounds of ShareGPT conversations of at most 2,048 tokens. Popularity: each adapter 1.5 "
        "times as often as the next (the paper's Zipf-1.5). The height of the load is what the replicas can "
        "just serve; the paper prints no rate.",
        "Replica-hours count the seconds in which a replica has a request, until the load ends.",
    ),
    is_stored=True,
)
