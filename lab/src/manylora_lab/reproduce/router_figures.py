"""Our own figures of routing: how old reports may be, how far from the bound, what moves cost, and size."""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Sequence

from manylora_lab.pricing.costs import StepWork, prefill_pairs
from manylora_lab.pricing.shapes import shape_named
from manylora_lab.reproduce.drawing import LinePanels, Lines
from manylora_lab.reproduce.experiment import Experiment, GridResult, Setup
from manylora_lab.reproduce.parts import run_cases
from manylora_lab.reproduce.report import Headline, Row, change, ratio
from manylora_lab.reproduce.router_cells import (
    ADAPTERS,
    CLAIRVOYANT,
    REPLICAS,
    fitted,
    lower_bound_s,
    pooled_peak,
    run_router,
    slo_s,
)
from manylora_lab.sim.analytical import AnalyticalCosts
from manylora_lab.sim.cluster_summary import summarize_cluster
from manylora_lab.sim.hardware import HARDWARE
from manylora_lab.workloads.arrivals import poisson
from manylora_lab.workloads.named import named
from manylora_lab.workloads.popularity import Popularity
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest

OWN = "router: our own, beside CaraServe's (§5)"
COMPARED = ("manylora", "cache-aware", "caraserve", "most-idle", "round-robin")
NOTES = (
    "Simulated: the engine's own policy on A10 with Llama-2-7B of assumed costs, 8 replicas unless it is said, "
    "100 adapters, chat of FastLibra's scenario. Loads are shares of the pooled peak: what one replica with the "
    "rates and the memory of all could serve at the mean lengths. The objective between tokens is 1.5 times a "
    "merged step.",
)
_FIELDS = (
    "ttft_mean_ms", "ttft_p99_ms", "tpot_mean_ms", "slo_attainment", "busy_share", "prefix_hit", "adapter_loads",
    "moves", "recomputed_tokens", "decision_mean_us", "decision_p99_us",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class RouterCase:
    """One run of chat. ``settings``: of the router, as its parameters' keys and values."""

    router: str
    load: float
    delay_s: float
    duration_s: float
    seed: int
    settings: tuple[tuple[str, str], ...] = ()


def chat_of(case: RouterCase) -> Stream:
    """The same for every router."""
    probe = fitted(named("chatbot", rate=8.0, num_adapters=ADAPTERS, duration_s=case.duration_s, seed=0))
    rate = case.load * pooled_peak(probe)
    return fitted(
        named("chatbot", rate=rate, num_adapters=ADAPTERS, duration_s=case.duration_s, seed=case.seed)
    )


def measure(case: RouterCase) -> Row:
    """Equal cases give equal rows, but for the time of decisions."""
    cluster = run_router(chat_of(case), case.router, case.delay_s, more=case.settings)
    found = summarize_cluster(cluster, slo_s())
    bound_ms = round(1e3 * lower_bound_s(cluster.front.outcomes), 3)
    return {
        "requests": len(cluster.front.outcomes),
        "bound_ttft_ms": bound_ms,
        **{name: found[name] for name in _FIELDS},
    }


def _rows(setup: Setup, cases: Sequence[RouterCase]) -> list[Row]:
    return [
        {"router": case.router, "load": case.load, "delay_ms": round(1e3 * case.delay_s), **row}
        for case, row in run_cases(measure, cases, setup).items()
    ]


def _settings(setup: Setup, duration_s: float) -> Row:
    return {
        "scale": setup.scale, "seed": setup.seed, "replicas": REPLICAS, "adapters": ADAPTERS,
        "duration_s": duration_s, "slo_tpot_s": round(slo_s(), 6),
    }  # fmt: skip


# ---------------------------------------------------------------- how old reports may be


def _staleness(setup: Setup) -> GridResult:
    duration_s = setup.pick(120.0, 40.0, 4.0)
    delays = setup.pick((0.0, 0.05, 0.2, 0.5, 1.0, 2.0), (0.0, 0.2, 1.0), (0.0, 1.0))
    routers = setup.pick(COMPARED, COMPARED, COMPARED[:2])
    cases = [RouterCase(router, 0.8, delay, duration_s, setup.seed) for router in routers for delay in delays]
    return GridResult(_settings(setup, duration_s), _rows(setup, cases))


def _staleness_figures(rows: list[Row]) -> list[Headline]:
    figures = []
    for router in dict.fromkeys(row["router"] for row in rows):
        of = {row["delay_ms"]: row["ttft_mean_ms"] for row in rows if row["router"] == router}
        for delay in sorted(of)[1:]:
            figures.append(
                Headline(f"{router}: mean TTFT with reports {delay} ms old, change", change(of[delay], of[0]))
            )
    return figures


STALENESS = Experiment(
    "router-staleness",
    "Time to the first token over the age of replicas' reports",
    OWN,
    _staleness,
    Lines(("delay_ms", "age of reports, ms"), ("ttft_mean_ms", "mean TTFT, ms"), "router"),
    (_staleness_figures,),
    (*NOTES, "At 0.8 of the peak."),
    is_stored=True,
)

# ---------------------------------------------------------------- how far from the bound


def _bound(setup: Setup) -> GridResult:
    duration_s = setup.pick(120.0, 40.0, 4.0)
    loads = setup.pick((0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.95), (0.4, 0.6, 0.8), (0.5,))
    cases = [
        RouterCase(router, load, 0.0 if router == CLAIRVOYANT else 0.05, duration_s, setup.seed)
        for router in (CLAIRVOYANT, *COMPARED)
        for load in loads
    ]
    rows = _rows(setup, cases)
    bounds = [
        {**row, "router": "bound", "ttft_mean_ms": row["bound_ttft_ms"]}
        for row in rows
        if row["router"] == "manylora"
    ]
    return GridResult(_settings(setup, duration_s), [*rows, *bounds])


def _bound_figures(rows: list[Row]) -> list[Headline]:
    at = {(row["router"], row["load"]): row["ttft_mean_ms"] for row in rows}
    figures = []
    for load in dict.fromkeys(row["load"] for row in rows):
        best_ms = min(at[router, load] for router in COMPARED if router != "manylora")
        ours_ms, bound_ms = at["manylora", load], at["bound", load]
        figures += [
            Headline(f"load {load:g}: manylora's mean TTFT over the bound", ratio(ours_ms, bound_ms)),
            Headline(f"load {load:g}: the best other's over the bound", ratio(best_ms, bound_ms)),
            Headline(f"load {load:g}: clairvoyant's over ours", ratio(at[CLAIRVOYANT, load], ours_ms)),
        ]
    return figures


BOUND = Experiment(
    "router-bound",
    "Time to the first token over the load, with a bound that no router can better",
    OWN,
    _bound,
    Lines(("load", "share of the pooled peak"), ("ttft_mean_ms", "mean TTFT, ms"), "router"),
    (_bound_figures,),
    (
        *NOTES,
        "bound: the larger of two means: a step with those tokens of the prompt that no other request has; and "
        "the mean flow time of their arithmetic on one machine as fast as all, shortest remaining work first. "
        "clairvoyant is no bound: our router, told of each reply's length and of replicas without delay.",
    ),
    is_stored=True,
)

# ---------------------------------------------------------------- what moves cost

MOVED_TOKENS = 1000
WITHOUT_MOVES = "manylora without moves"
_MODELS = {"llama-2-7b": ("a10", "a100-80"), "llama-2-13b": ("a100-80",), "llama-2-70b": ("a100-80",)}
_CARDS = {"llama-2-70b": 4}


def _moves(setup: Setup) -> GridResult:
    """What computing 1,000 tokens again takes, the bandwidth at which sending their KV takes as long, and a
    cluster that moves against one that does not."""
    rows: list[Row] = []
    for model, cards in _MODELS.items():
        shape = shape_named(model)
        for card in cards:
            costs = AnalyticalCosts(shape, HARDWARE[card], _CARDS.get(model, 1))
            work = StepWork(0, MOVED_TOKENS, MOVED_TOKENS, 0, 0, prefill_pairs(0, MOVED_TOKENS))
            seconds, num_bytes = costs.step_s(work), MOVED_TOKENS * shape.kv_token_bytes
            where = f"{model} on {_CARDS.get(model, 1)} {card}"
            rows.append(
                {
                    "part": "a thousand tokens", "router": where, "load": 0.0,
                    "recompute_ms": round(1e3 * seconds, 2), "kv_mib": round(num_bytes / 2**20, 1),
                    "break_even_gbit_s": round(8e-9 * num_bytes / seconds, 2), "ttft_mean_ms": None,
                }
            )  # fmt: skip
    duration_s = setup.pick(120.0, 40.0, 4.0)
    loads = setup.pick((0.5, 0.8, 0.95), (0.8,), (0.8,))
    names = {"manylora": (), WITHOUT_MOVES: (("move_gain", "1e9"),)}
    cases = {
        (name, load): RouterCase("manylora", load, 0.05, duration_s, setup.seed, settings)
        for name, settings in names.items()
        for load in loads
    }
    found = run_cases(measure, list(cases.values()), setup)
    rows[:0] = [
        {"part": "a cluster", **found[case], "router": name, "load": load}
        for (name, load), case in cases.items()
    ]
    return GridResult(_settings(setup, duration_s), rows)


def _move_figures(rows: list[Row]) -> list[Headline]:
    figures = [
        Headline(f"{row['router']}: gigabit/s at which sending KV takes as long", row["break_even_gbit_s"])
        for row in rows
        if row["part"] == "a thousand tokens"
    ]
    at = {(row["router"], row["load"]): row for row in rows if row["part"] == "a cluster"}
    for name, load in at:
        if name == "manylora":
            mine, without = at[name, load], at[WITHOUT_MOVES, load]
            saved = change(mine["ttft_mean_ms"], without["ttft_mean_ms"])
            figures.append(Headline(f"load {load:g}: moves' change of mean TTFT", saved))
            figures.append(Headline(f"load {load:g}: moves", mine["moves"]))
            figures.append(Headline(f"load {load:g}: tokens computed again", mine["recomputed_tokens"]))
    return figures


MOVES = Experiment(
    "router-moves",
    "What moving requests costs: computing again or sending KV, and a cluster with and without",
    OWN,
    _moves,
    LinePanels(
        "part", "router", ("load", "share of the pooled peak"), ("ttft_mean_ms", "mean TTFT, ms"), is_shared=False
    ),
    (_move_figures,),
    (
        *NOTES,
        "Moves never send KV here: a request is computed again where it goes. The break-even is what a network "
        "would have to give for sending to take as long as computing, with both devices idle.",
    ),
    is_stored=True,
)  # fmt: skip

# ---------------------------------------------------------------- size


@dataclasses.dataclass(frozen=True, slots=True)
class SizeCase:
    """One run of lone requests over many adapters."""

    router: str
    replicas: int
    adapters: int
    duration_s: float
    seed: int


REPLICA_RATE = 5.0
_PROMPT, _OUTPUT = (64, 192), (32, 96)


def lone_of(case: SizeCase) -> Stream:
    """The same for every router; adapters by Zipf's law."""
    rate = REPLICA_RATE * case.replicas
    moments = poisson(rate, case.duration_s, random.Random(f"{case.seed} times"))
    draws = random.Random(f"{case.seed} lengths")
    adapters = Popularity.parse("zipf(1)").draws(case.adapters, random.Random(f"{case.seed} adapters"))
    requests = tuple(
        StreamRequest(
            moment, adapter, number, 0, (Piece(number, draws.randint(*_PROMPT)),), draws.randint(*_OUTPUT)
        )
        for number, (moment, adapter) in enumerate(zip(moments, adapters))
    )
    return Stream("lone", requests, (32,) * case.adapters)


def measure_size(case: SizeCase) -> Row:
    """Simulate."""
    cluster = run_router(lone_of(case), case.router, 0.05, case.replicas)
    found = summarize_cluster(cluster, slo_s())
    shares = [each["busy_share"] for each in found["replicas"]]
    return {
        "requests": len(cluster.front.outcomes),
        **{name: found[name] for name in _FIELDS},
        "router_s": found["router_s"],
        "events": cluster.times.num_events,
        "busy_spread": round(statistics.pstdev(shares), 4),
    }


def _size(setup: Setup) -> GridResult:
    sizes = setup.pick(
        ((8, 1000), (60, 40_000), (250, 100_000), (1000, 100_000)), ((8, 1000), (60, 10_000)), ((4, 100),)
    )
    duration_s = setup.pick(10.0, 4.0, 1.0)
    cases = [
        SizeCase(router, replicas, adapters, duration_s, setup.seed)
        for replicas, adapters in sizes
        for router in ("manylora", "cache-aware", "most-idle")
    ]
    rows: list[Row] = [
        {"router": case.router, "replicas": case.replicas, "adapters": case.adapters, **row}
        for case, row in run_cases(measure_size, cases, setup).items()
    ]
    return GridResult({**_settings(setup, duration_s), "sizes": [list(each) for each in sizes]}, rows)


def _size_figures(rows: list[Row]) -> list[Headline]:
    figures = []
    for row in rows:
        what = f"{row['replicas']} replicas, {row['adapters']} adapters, {row['router']}"
        figures.append(Headline(f"{what}: mean TTFT, ms", row["ttft_mean_ms"]))
        figures.append(Headline(f"{what}: us a decision", row["decision_mean_us"]))
    return figures


SIZE = Experiment(
    "router-size",
    "From 8 replicas with 1,000 adapters to 1,000 with 100,000, at an equal load each",
    OWN,
    _size,
    Lines(("replicas", "replicas"), ("ttft_mean_ms", "mean TTFT, ms"), "router"),
    (_size_figures,),
    (
        *NOTES,
        f"Lone requests of 64 to 192 prompt and 32 to 96 reply tokens, {REPLICA_RATE:g} a second and replica, "
        "adapters of rank 32 by Zipf's law (exponent 1). Decisions by the wall clock of a busy machine; "
        "benchmarks.router_speed measures them alone.",
    ),
    is_stored=True,
)
