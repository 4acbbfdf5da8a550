"""dLoRA's Figures 10, 14 and 15 (§7.3, §7.5): one replica, over the skewness of requests and over their rate.

All three are of the same runs: 8 adapters of rank 8, 16 requests at once, ShareGPT's lengths, functions' arrivals.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from random import Random

from manylora_lab.reproduce import dlora_cells
from manylora_lab.reproduce.drawing import Matrix
from manylora_lab.reproduce.experiment import Experiment, GridResult, Setup
from manylora_lab.reproduce.merge_cells import MEASURED, PROFILE_NOTE, STATED, place_named, simulate
from manylora_lab.reproduce.parts import run_cases
from manylora_lab.reproduce.report import Headline, Row, mean, ratio
from manylora_lab.workloads.extracts import azure_functions, sharegpt_conversations
from manylora_lab.workloads.popularity import mapped_functions
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest

NUM_ADAPTERS, RANK, AT_ONCE = 8, 8, 16
MOST_TOKENS = 2048
HOURS, MINUTES = 6, 60
SKEWNESS = (4, 8, 16, 32)
OBJECTIVE_S = 0.5
"""Seconds a token. The arrival rate is one at which dLoRA's mean latency is about its objective (§7.3), and
the artifact's runs are near this."""
RATES = {STATED: (1.0, 2.0, 3.0, 4.0, 8.0), MEASURED: (8.0, 16.0)}
QUICK_RATES = {STATED: (1.0, 2.0, 4.0), MEASURED: (16.0,)}
ARTIFACT_RATE, ARTIFACT_REQUESTS = 4.0, 400
ARTIFACT = {
    ("latency_each_s_token", "unmerged"): (1.25, 1.34, 1.35, 1.43),
    ("latency_each_s_token", "merged"): (2.28, 1.53, 1.12, 1.06),
    ("latency_each_s_token", "dlora"): (0.58, 0.68, 0.72, 0.60),
    ("latency_p90_s_token", "unmerged"): (3.02, 3.24, 3.32, 3.45),
    ("latency_p90_s_token", "merged"): (6.28, 4.61, 3.10, 2.78),
    ("latency_p90_s_token", "dlora"): (1.20, 1.61, 1.63, 1.40),
}
"""Seconds a token, by skewness: what the authors' repository has for Figure 10, at 4 requests a second."""
FIELDS = {"latency_each_s_token": "mean latency", "latency_p90_s_token": "P90 latency"}
PAPER = {
    ("latency_each_s_token", "merged"): 3.9, ("latency_each_s_token", "unmerged"): 2.4,
    ("latency_p90_s_token", "merged"): 5.2, ("latency_p90_s_token", "unmerged"): 2.5,
}  # fmt: skip
"""§7.3: up to so many times dLoRA's. The first two are the artifact's means' ratios."""
COMPARED = ("merged", "unmerged", "dlora", "dlora, patient", "manylora")
PAPER_INFERENCE_SHARE = 0.967
"""§7.5."""

NOTES = (
    "dlora-a800: every step takes what the constants of dLoRA's published scheduler say, 15 ms merged and "
    "27 ms unmerged, whatever the batch, prompts included; a switch takes 20 ms. h200-llama-2-7b: the "
    "shipped profile.",
    PROFILE_NOTE,
    "Latency is a request's time until its end over its tokens, and of these the mean and P90. The text divides "
    "the sum of all latencies by the sum of all tokens (§7.1), in the rows as latency_s_token; the artifact's "
    "figures, whose ratios the text states, are above what 400 requests can come to so at 27 ms a step.",
    "Arrivals: Azure's functions of 2019 (the 100 called most, the first six hours) where Figure 10's are "
    "of 2021, which were not at hand; each hour is a sixth of the run, and within it an adapter's arrivals "
    "are Poisson. Lengths: of ShareGPT's first turns that fit 2,048 tokens. A run has so many requests, "
    "whatever its rate.",
    "The systems are modes of the engine: merged stays with the oldest request's adapter and yields after "
    "2 s; unmerged runs all together; dlora has dLoRA's thresholds and credits. Modes that merge have the "
    "copy of the base's weights taken from their pool, so total memory is equal; at 16 requests no pool is "
    "short.",
)


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaCase:
    """One run."""

    costs: str
    rate: float
    skewness: int
    system: str
    num_requests: int
    seed: int


def stream_of(case: ReplicaCase) -> Stream:
    """The same for each system and for all costs."""
    calls = azure_functions()
    of_function = mapped_functions([sum(minutes) for minutes in calls], NUM_ADAPTERS, case.skewness)
    by_hour = [[0] * NUM_ADAPTERS for _ in range(HOURS)]
    for adapter, minutes in zip(of_function, calls, strict=True):
        for hour in range(HOURS):
            by_hour[hour][adapter] += sum(minutes[hour * MINUTES : (hour + 1) * MINUTES])
    rng = Random(f"{case.seed} dlora")
    hours = sorted(rng.choices(range(HOURS), [sum(calls) for calls in by_hour], k=case.num_requests))
    hour_s = case.num_requests / case.rate / HOURS
    arrivals = sorted((hour_s * (hour + rng.random()), hour) for hour in hours)
    lengths = _lengths()
    requests = []
    for number, (moment, hour) in enumerate(arrivals):
        (adapter,) = rng.choices(range(NUM_ADAPTERS), by_hour[hour])
        prompt, output = rng.choice(lengths)
        requests.append(StreamRequest(moment, adapter, number, 0, (Piece(number, prompt),), output))
    return Stream("functions", tuple(requests), (RANK,) * NUM_ADAPTERS)


@functools.cache
def _lengths() -> tuple[tuple[int, int], ...]:
    firsts = [rounds[0] for rounds in sharegpt_conversations()]
    return tuple(
        (first.new, first.generated)
        for first in firsts
        if first.new and first.generated and first.new + first.generated <= MOST_TOKENS
    )


def measure(case: ReplicaCase) -> Row:
    """Equal cases give equal rows."""
    return simulate(stream_of(case), place_named(case.costs), case.system, AT_ONCE)


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaGrid:
    """Every system at every rate and skewness."""

    systems: Sequence[str]
    skewness: Sequence[int] = SKEWNESS

    def __call__(self, setup: Setup) -> GridResult:
        """Run it."""
        rates: dict[str, tuple[float, ...]] = setup.pick(RATES, QUICK_RATES, {STATED: (4.0,)})
        skewness = setup.pick(self.skewness, self.skewness[:: len(self.skewness) - 1], self.skewness[-1:])
        num_requests = setup.pick(400, 200, 24)
        cases = [
            ReplicaCase(costs, rate, each, system, num_requests, setup.seed)
            for costs, of_costs in rates.items()
            for rate in of_costs
            for each in skewness
            for system in self.systems
        ]
        found = run_cases(measure, cases, setup)
        rows: list[Row] = [
            {
                "costs": case.costs, "rate_per_s": case.rate, "load": f"{case.costs}, {case.rate:g}/s",
                "skewness": case.skewness, "run": f"{case.costs}, skewness {case.skewness}",
                "system": case.system, "requests": case.num_requests, **row,
            }
            for case, row in found.items()
        ]  # fmt: skip
        settings = {
            "scale": setup.scale, "seed": setup.seed, "num_requests": num_requests, "at_once": AT_ONCE,
            "num_adapters": NUM_ADAPTERS, "rank": RANK, "skewness": list(skewness),
            "systems": list(self.systems),
            "rates_per_s": {costs: list(of_costs) for costs, of_costs in rates.items()},
        }  # fmt: skip
        return GridResult(settings, rows)


def _by_load(rows: list[Row], costs: str) -> dict[float, list[Row]]:
    rates = dict.fromkeys(row["rate_per_s"] for row in rows if row["costs"] == costs)
    return {rate: [r for r in rows if (r["costs"], r["rate_per_s"]) == (costs, rate)] for rate in rates}


def at_objective(rows: list[Row], costs: str) -> float | None:
    """The rate at which dLoRA's mean latency is nearest to the objective, of those that were run."""
    means = {
        rate: mean([row["latency_each_s_token"] for row in of_rate if row["system"] == "dlora"])
        for rate, of_rate in _by_load(rows, costs).items()
    }
    known = {rate: abs(value - OBJECTIVE_S) for rate, value in means.items() if value is not None}
    return min(known, key=lambda rate: known[rate]) if known else None


def most_over_dlora(rows: list[Row], field: str, system: str) -> float | None:
    """A system's figure over dLoRA's, at the skewness where that is largest."""
    at = {(row["skewness"], row["system"]): row[field] for row in rows}
    ratios = [ratio(at[skewness, system], at[skewness, "dlora"]) for skewness in {key[0] for key in at}]
    return max((value for value in ratios if value is not None), default=None)


def _fig10_headline(rows: list[Row]) -> list[Headline]:
    """The paper's ratios beside those at the objective, the artifact's latencies beside those at its rate; and, by
    rate, where the ratios come from."""
    figures = []
    for costs in dict.fromkeys(row["costs"] for row in rows):
        is_stated, by_load = costs == STATED, _by_load(rows, costs)
        rate = at_objective(rows, costs)
        if rate is None:
            continue
        figures.append(Headline(f"{costs}: requests/s where dlora is nearest to 0.5 s a token", rate))
        for (field, system), paper in PAPER.items():
            name = f"{costs}: {FIELDS[field]} of {system} over dlora's, at most"
            value = most_over_dlora(by_load[rate], field, system)
            figures.append(Headline(name, value, paper if is_stated else None))
        if is_stated:
            figures += _beside_artifact(by_load.get(ARTIFACT_RATE, []))
        for each, of_rate in by_load.items():
            for system in ("merged", "unmerged", "dlora, patient", "manylora"):
                name = f"{costs}, {each:g}/s: mean latency of {system} over dlora's, at most"
                figures.append(Headline(name, most_over_dlora(of_rate, "latency_each_s_token", system)))
    return figures


def _beside_artifact(rows: list[Row]) -> list[Headline]:
    """Only of as many requests: the queue of an overload grows to its end."""
    at = {(row["skewness"], row["system"]): row for row in rows if row["requests"] == ARTIFACT_REQUESTS}
    return [
        Headline(
            f"{STATED}, skewness {skewness}: {FIELDS[field]} of {system}, s/token",
            at[skewness, system][field],
            artifact=value,
        )
        for (field, system), values in ARTIFACT.items()
        for skewness, value in zip(SKEWNESS, values, strict=True)
        if (skewness, system) in at
    ]


def _fig14_headline(rows: list[Row]) -> list[Headline]:
    figures = []
    for costs in dict.fromkeys(row["costs"] for row in rows):
        rate = at_objective(rows, costs)
        if rate is not None:
            most = most_over_dlora(_by_load(rows, costs)[rate], "latency_each_s_token", "s-lora")
            name = f"{costs}, {rate:g}/s: mean latency of s-lora over dlora's, at most"
            figures.append(Headline(name, most, 1.8 if costs == STATED else None))
    return figures


CLUSTER = "8 replicas"
_CLUSTER_ADAPTERS, _CLUSTER_REPLICAS = 32, 8
_WITHOUT_SOLVER = ReplicaGrid(("dlora", "manylora"), skewness=(4, 16))


def _overheads(setup: Setup) -> GridResult:
    """The one replica, and a cluster in which the programme is solved too."""
    found = _WITHOUT_SOLVER(setup)
    rates = [_CLUSTER_REPLICAS * rate for rate in setup.pick((4.0, 8.0, 12.0, 14.0), (8.0, 14.0), (4.0,))]
    cases = [
        dlora_cells.DloraCase(
            "dlora",
            _CLUSTER_ADAPTERS,
            rate,
            setup.pick(60.0, 15.0, 3.0),
            _CLUSTER_REPLICAS,
            setup.seed,
            "maf2",
        )
        for rate in rates
    ]
    rows = [{**row, "solve_share": 0.0} for row in found.rows]
    for case, row in run_cases(dlora_cells.measure, cases, setup).items():
        names = ("requests", "switches", "switch_share", "solves", "solve_mean_ms", "solve_share")
        rows.append(
            {
                "costs": CLUSTER, "rate_per_s": case.rate, "run": CLUSTER, "system": "dlora",
                **{name: row[name] for name in names},
            }
        )  # fmt: skip
    settings = {**found.settings, "cluster_rates_per_s": rates, "cluster_adapters": _CLUSTER_ADAPTERS}
    return GridResult(settings, rows, found.headline, found.notes)


def _fig15_headline(rows: list[Row]) -> list[Headline]:
    return [
        Headline(
            f"{costs}: least share of inference",
            round(
                1 - max(row["switch_share"] + row["solve_share"] for row in rows if row["costs"] == costs), 4
            ),
            PAPER_INFERENCE_SHARE if costs in (STATED, CLUSTER) else None,
        )
        for costs in dict.fromkeys(row["costs"] for row in rows)
    ]


_MEAN, _P90 = ("latency_each_s_token", "mean latency, s/token"), ("latency_p90_s_token", "P90, s/token")
FIG10 = Experiment(
    "dlora-fig10",
    "Latency of merged-only, unmerged-only, dLoRA's and our batching, by skewness and rate",
    "dLoRA, Figure 10 (§7.3)",
    ReplicaGrid(COMPARED),
    Matrix((_MEAN, _P90), x=("skewness", "skewness"), series="system", column="load"),
    (_fig10_headline,),
    NOTES,
    is_stored=True,
)
FIG14 = Experiment(
    "dlora-fig14",
    "Latency of dLoRA's batching beside S-LoRA, by skewness",
    "dLoRA, Figure 14 (§7.5)",
    ReplicaGrid(("s-lora", "dlora")),
    Matrix((_MEAN,), x=("skewness", "skewness"), series="system", column="load"),
    (_fig14_headline,),
    (
        *NOTES,
        "s-lora: the engine unmerged, with S-LoRA's pool and prefetch. Its steps take what unmerged steps "
        "take on these costs: dLoRA states no time of S-LoRA's own kernels, so what differs is merging, "
        "and caching a little.",
    ),
    is_stored=True,
)
FIG15 = Experiment(
    "dlora-fig15",
    "The share of switching and of solving, by rate",
    "dLoRA, Figure 15 (§7.5)",
    _overheads,
    Matrix(
        (
            ("switch_share", "share of switching"),
            ("switches", "switches"),
            ("solve_share", "share of solving"),
        ),
        x=("rate_per_s", "requests/s"),
        series="system",
        column="run",
    ),
    (_fig15_headline,),
    (
        *NOTES,
        "Switching over steps and switching, idle time left out. On 8 replicas (A100-80 of assumed costs, 32 "
        "adapters in bursts) the solver's time is added to both: what HiGHS really took in a process of its own, "
        "though no step waits for it.",
    ),
    is_stored=True,
)
