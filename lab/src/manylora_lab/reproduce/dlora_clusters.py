"""dLoRA's figures of clusters: 2b (load imbalance, §2.2), 9 (end to end, §7.2), 11 (migration, §7.4), 13
(utilization, §7.5)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from manylora_lab.reproduce.dlora_cells import CLUSTER_NOTES, OBJECTIVE_S, DloraCase, measure
from manylora_lab.reproduce.drawing import BarPanels, LinePanels, Matrix
from manylora_lab.reproduce.experiment import Experiment, GridResult, Setup
from manylora_lab.reproduce.parts import run_cases
from manylora_lab.reproduce.report import Headline, Row, ratio

REPLICAS, ADAPTERS = 8, 32
PAPER_IMBALANCE = 8.0
"""§2.2: the longest queueing delay of a replica over the shortest, up to."""
PAPER_GAINS = {
    ("llama-2-7b", "vllm-uniform"): 10.6, ("llama-2-7b", "peft"): 11.5,
    ("llama-2-13b", "vllm-uniform"): 53.0, ("llama-2-13b", "peft"): 15.0,
    ("llama-2-70b", "vllm-uniform"): 57.9, ("llama-2-70b", "peft"): 26.0,
}  # fmt: skip
"""§7.2: dLoRA's throughput within the objective over theirs, up to."""
PAPER_QUEUEING = {"rr": 3.6, "proactive": 1.4}
"""§7.4: the same, over its parts'."""
PAPER_SCALED = {("rr", "dlora"): 23.5, ("rr", "proactive"): 6.5, ("proactive", "dlora"): 2.39}
"""§7.4, with longer requests: one's latency over another's, up to."""


def _rows_of(setup: Setup, cases: Sequence[DloraCase]) -> list[Row]:
    return [
        {
            "system": case.system, "traffic": case.traffic, "model": case.model, "rate_per_s": case.rate,
            "length_scale": case.length_scale, "panel": f"{case.model}, {case.traffic}", **row,
        }
        for case, row in run_cases(measure, cases, setup).items()
    ]  # fmt: skip


def _by_replica(rows: Sequence[Row]) -> list[Row]:
    """A row for each replica of each run."""
    return [
        {"system": row["system"], "rate_per_s": row["rate_per_s"], **each}
        for row in rows
        for each in row["replicas"]
    ]


def _settings(setup: Setup, cases: Sequence[DloraCase]) -> Row:
    first = cases[0]
    return {
        "scale": setup.scale, "seed": setup.seed, "replicas": first.replicas, "duration_s": first.duration_s,
        "rates_per_s": list(dict.fromkeys(case.rate for case in cases)),
        "systems": list(dict.fromkeys(case.system for case in cases)),
    }  # fmt: skip


def within_objective(rows: Sequence[Row], field: str, objective: float) -> float | None:
    """The rate at which the field comes to the objective, between those that were run (on logarithms); the least
    rate scaled down where even that is beyond, None where none is."""
    known = sorted(rows, key=lambda row: row["rate_per_s"])
    if not known:
        return None
    before: Row | None = None
    for row in known:
        if row[field] > objective:
            if before is None:
                return None
            low, high = (math.log(max(each[field], 1e-9)) for each in (before, row))
            share = (math.log(objective) - low) / (high - low)
            rates = (math.log(each["rate_per_s"]) for each in (before, row))
            low_rate, high_rate = rates
            return round(math.exp(low_rate + share * (high_rate - low_rate)), 3)
        before = row
    return None


# ---------------------------------------------------------------- 2b


def _imbalance(setup: Setup) -> GridResult:
    duration_s, rate = setup.pick(120.0, 30.0, 4.0), REPLICAS * setup.pick(8.0, 8.0, 4.0)
    cases = [
        DloraCase(system, ADAPTERS, rate, duration_s, REPLICAS, setup.seed, "maf2")
        for system in ("uniform", "dlora", "manylora")
    ]
    rows = _rows_of(setup, cases)
    return GridResult(_settings(setup, cases), _by_replica(rows), _imbalance_figures(rows))


def _imbalance_figures(rows: Sequence[Row]) -> list[Headline]:
    figures = []
    for row in rows:
        delays = [each["queue_mean_s"] for each in row["replicas"] if each["requests"]]
        counts = [each["requests"] for each in row["replicas"]]
        name = row["system"]
        figures.append(
            Headline(
                f"{name}: the longest mean queueing delay of a replica over the shortest",
                ratio(max(delays), min(delays)),
                PAPER_IMBALANCE if name == "uniform" else None,
            )
        )
        figures.append(Headline(f"{name}: the longest, s", max(delays)))
        figures.append(
            Headline(f"{name}: the most requests over the fewest", ratio(max(counts), min(counts)))
        )
    return figures


FIG2B = Experiment(
    "dlora-fig2b",
    "Requests of a bursty trace over eight replicas, each adapter on one of them",
    "dLoRA, Figure 2b (§2.2)",
    _imbalance,
    BarPanels((("queue_mean_s", "queueing delay, s"), ("requests", "requests")), "replica", "system"),
    (),
    (*CLUSTER_NOTES, "The paper prints neither rate nor duration: 8 requests a second and replica are ours."),
    is_stored=True,
)

# ---------------------------------------------------------------- 9

_SERVED = {"llama-2-7b": (128, 1, 8), "llama-2-13b": (128, 1, 8), "llama-2-70b": (32, 4, 2)}
"""Adapters, cards of a replica, and replicas; the paper has four times as many."""
_SPREAD = {
    "llama-2-7b": (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 24.0, 32.0),
    "llama-2-13b": (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 12.0),
    "llama-2-70b": (0.03125, 0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0),
}
"""Requests a second of each card."""
FIG9_SYSTEMS = ("dlora", "manylora", "peft", "vllm-uniform")


def _end_to_end(setup: Setup) -> GridResult:
    models = setup.pick(tuple(_SERVED), ("llama-2-7b", "llama-2-13b"), ("llama-2-7b",))
    traffics = setup.pick(("maf1", "maf2"), ("maf1", "maf2"), ("maf1",))
    requests = setup.pick(1200, 240, 60)
    cases = []
    for model in models:
        adapters, cards, replicas = _SERVED[model]
        per_card = setup.pick(_SPREAD[model], _SPREAD[model][::3], _SPREAD[model][-1:])
        for each in per_card:
            rate = each * cards * replicas
            cases += [
                DloraCase(
                    system, adapters, rate, requests / rate, replicas, setup.seed, traffic, model, cards
                )
                for traffic in traffics
                for system in FIG9_SYSTEMS
            ]
    return GridResult({**_settings(setup, cases), "requests": requests}, _rows_of(setup, cases))


def _gains(rows: list[Row]) -> list[Headline]:
    figures = []
    for model in dict.fromkeys(row["model"] for row in rows):
        for traffic in dict.fromkeys(row["traffic"] for row in rows):
            borne = {
                system: within_objective(
                    [r for r in rows if (r["model"], r["traffic"], r["system"]) == (model, traffic, system)],
                    "latency_s_token", OBJECTIVE_S,
                )
                for system in dict.fromkeys(row["system"] for row in rows)
            }  # fmt: skip
            for system, rate in borne.items():
                figures.append(
                    Headline(f"{model}, {traffic}: {system}'s requests/s within 0.5 s a token", rate)
                )
            figures += [
                Headline(
                    f"{model}, {traffic}: dlora's over {system}'s",
                    ratio(borne["dlora"], borne[system]),
                    PAPER_GAINS[model, system],
                )
                for system in ("vllm-uniform", "peft")
            ]
    return figures


def over_dlora(rows: list[Row]) -> list[Headline]:
    """At the largest rate, where every system has a latency, within the objective or not."""
    figures = []
    for model, traffic in dict.fromkeys((row["model"], row["traffic"]) for row in rows):
        here = [row for row in rows if (row["model"], row["traffic"]) == (model, traffic)]
        rate = max(row["rate_per_s"] for row in here)
        latency_s = {row["system"]: row["latency_s_token"] for row in here if row["rate_per_s"] == rate}
        figures += [
            Headline(
                f"{model}, {traffic}, {rate:g} requests/s: {system}'s latency a token over dlora's",
                ratio(latency_s[system], latency_s["dlora"]),
            )
            for system in latency_s
            if system != "dlora"
        ]
    return figures


FIG9 = Experiment(
    "dlora-fig9",
    "Mean latency a token over the rate, many adapters of three models",
    "dLoRA, Figure 9 (§7.2)",
    _end_to_end,
    LinePanels(
        "panel", "system", ("rate_per_s", "requests/s"), ("latency_s_token", "s/token"),
        is_log=("rate_per_s", "latency_s_token"), is_shared=False,
    ),
    (_gains, over_dlora),
    (
        *CLUSTER_NOTES,
        "8 A100-80 where the paper has 32 A800; 128, 128 and 32 adapters as there. Every run has so many "
        "requests, whatever its rate, so that a system which is far behind has a bounded backlog, and its latency "
        "there is not that of an endless run: with few requests (--quick) none comes to the objective, and "
        "only latencies at one rate compare. A rate within the objective lies between those that were run, on "
        "logarithms; '-': all of them or none.",
    ),
    is_stored=True,
)  # fmt: skip

# ---------------------------------------------------------------- 11

FIG11_SYSTEMS = ("dlora", "proactive", "rr", "manylora")
_SCALE_RATE = 5.0
MOST_QUEUEING_S = 0.5


def _migration(setup: Setup) -> GridResult:
    judged_s, lead_s = setup.pick((60.0, 60.0), (12.0, 8.0), (2.0, 1.0))
    rates = setup.pick((6.0, 8.0, 10.0, 11.0, 12.0, 13.0, 14.0), (8.0, 12.0, 14.0), (4.0,))
    scales = setup.pick((1.0, 1.5, 2.0, 2.25, 2.5, 2.75, 3.0), (1.0, 2.0, 3.0), (2.0,))

    def case(system: str, rate: float, scale: float) -> DloraCase:
        return DloraCase(
            system, ADAPTERS, REPLICAS * rate, lead_s + judged_s, REPLICAS, setup.seed, "maf2",
            length_scale=scale, lead_s=lead_s, is_warm=False,
        )  # fmt: skip

    cases = [case(system, rate, 1.0) for rate in rates for system in FIG11_SYSTEMS]
    cases += [case(system, _SCALE_RATE, scale) for scale in scales for system in FIG11_SYSTEMS]
    rows = _rows_of(setup, cases)
    for row in rows:
        is_a = row["rate_per_s"] != REPLICAS * _SCALE_RATE
        row["part"] = "a: rate" if is_a else "b: length ratio"
        row["varied"] = row["rate_per_s"] if is_a else row["length_scale"]
    return GridResult({**_settings(setup, cases), "scales": list(scales)}, rows)


def _migration_figures(rows: list[Row]) -> list[Headline]:
    figures = []
    part_a = [row for row in rows if row["part"].startswith("a")]
    part_b = [row for row in rows if row["part"].startswith("b")]
    borne = {
        system: within_objective(
            [row for row in part_a if row["system"] == system], "queue_mean_s", MOST_QUEUEING_S
        )
        for system in FIG11_SYSTEMS
    }
    for system, rate in borne.items():
        figures.append(Headline(f"{system}: requests/s with a queueing delay of 0.5 s", rate))
    for system, paper in PAPER_QUEUEING.items():
        figures.append(Headline(f"dlora's over {system}'s", ratio(borne["dlora"], borne[system]), paper))
    at = {(row["varied"], row["system"]): row["latency_s_token"] for row in part_b}
    for (slow, fast), paper in PAPER_SCALED.items():
        ratios = [ratio(at[scale, slow], at[scale, fast]) for scale, system in at if system == slow]
        most = max((value for value in ratios if value is not None), default=None)
        figures.append(Headline(f"latency of {slow} over that of {fast}, at most, by length", most, paper))
    return figures


FIG11 = Experiment(
    "dlora-fig11",
    "Placement, dispatch and migration: queueing over the rate, latency over the length of requests",
    "dLoRA, Figure 11 (§7.4)",
    _migration,
    Matrix(
        (("queue_mean_s", "queueing delay, s"), ("latency_s_token", "s/token")),
        x=("varied", "requests/s; length ratio"), series="system", column="part",
    ),
    (_migration_figures,),
    (
        *CLUSTER_NOTES,
        "No replica has an adapter at the start, and what is judged comes after as long a time, from which the "
        f"long-term rates are. 8 replicas, 32 adapters. (b): {_SCALE_RATE:g} requests a second and replica; the "
        "paper prints none.",
    ),
    is_stored=True,
)  # fmt: skip

# ---------------------------------------------------------------- 13


def _utilization(setup: Setup) -> GridResult:
    duration_s = setup.pick(120.0, 20.0, 4.0)
    rate = REPLICAS * 8.0
    cases = [
        DloraCase(system, adapters, rate, duration_s, REPLICAS, setup.seed)
        for system, adapters in (("dlora", ADAPTERS), ("manylora", ADAPTERS), ("merged", 1))
    ]
    rows = _rows_of(setup, cases)
    names = {"merged": "optimal: one adapter, merged"}
    for row in rows:
        row["system"] = names.get(row["system"], row["system"])
    return GridResult(_settings(setup, cases), _by_replica(rows), _utilization_figures(rows))


def _utilization_figures(rows: Sequence[Row]) -> list[Headline]:
    figures = []
    for row in rows:
        for field, what in (("busy_share", "busy"), ("kv_share", "of memory used")):
            shares = [each[field] for each in row["replicas"]]
            figures.append(
                Headline(f"{row['system']}: share {what}, mean", round(sum(shares) / len(shares), 4))
            )
            figures.append(
                Headline(f"{row['system']}: share {what}, least over most", ratio(min(shares), max(shares)))
            )
    return figures


FIG13 = Experiment(
    "dlora-fig13",
    "The share of time in which each replica is busy, and of its memory that is used",
    "dLoRA, Figure 13 (§7.5)",
    _utilization,
    BarPanels((("busy_share", "busy"), ("kv_share", "memory used")), "replica", "system"),
    (),
    (
        *CLUSTER_NOTES,
        "Busy: steps run, whatever they use of the device (the paper has its SM utilization, which a simulation "
        "has not). Memory: pages of running requests and of adapters, of the pool beside the weights, once a "
        "second. The paper prints no figures: replicas are balanced, and near what one adapter alone gives.",
    ),
    is_stored=True,
)
