"""CaraServe's Figures 3, 10, 11 and 13 to 15: what cold starts cost, under its loader and from pinned memory."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Sequence

import numpy as np

from manylora_lab.pricing.shapes import ALL_MODULES, shape_named
from manylora_lab.reproduce.caraserve_cells import MODULES
from manylora_lab.reproduce.caraserve_cold import (
    LOADERS,
    NOTES,
    QUANTILES,
    SYSTEMS,
    WORKERS,
    ColdCase,
    cold_of,
    cold_shares,
    costs_of,
    measure,
)
from manylora_lab.reproduce.cells import in_parallel
from manylora_lab.reproduce.drawing import BarPanels, Distributions, LinePanels
from manylora_lab.reproduce.experiment import Experiment, GridResult, Setup
from manylora_lab.reproduce.parts import run_cases
from manylora_lab.reproduce.report import Headline, Row, change

METRICS = {"ttft": "time to first token", "tpot": "time per token", "latency": "latency"}
TIE = 1.02
"""Means that differ by less are no order."""
_FULL_S, _QUICK_S, _SMOKE_S = 300.0, 30.0, 3.0
_TheirSystems = tuple[float, float, float]


@dataclasses.dataclass(frozen=True, slots=True)
class ColdLoad:
    """``paper``: by metric, what its text has over cached: of OnDmd, S-LoRA and CaraServe. ``held``: see
    ``ColdCase``."""

    name: str
    rate: float
    rank: int = 64
    functions: int | None = None
    model: str = "llama-2-7b"
    hardware: str = "a10"
    cards: int = 1
    held: int | None = None
    paper: dict[str, _TheirSystems] = dataclasses.field(default_factory=dict)


LOADS = {
    10: (
        ColdLoad("9/s", 9.0, paper={"ttft": (4.12, 4.51, 0.22), "tpot": (0.71, 0.78, 0.11),
                                "latency": (0.50, 0.50, 0.09)}),
    ),
    13: (
        ColdLoad("9/s, rank 32", 9.0, 32, paper={"ttft": (0.88, 1.26, 0.36), "tpot": (0.28, 0.36, 0.05),
                                             "latency": (0.25, 0.31, 0.06)}),
        ColdLoad("6/s, rank 64", 6.0, paper={"ttft": (0.42, 0.41, 0.01), "tpot": (0.25, 0.25, 0.10),
                                         "latency": (0.24, 0.20, 0.09)}),
    ),
    14: (
        ColdLoad("128 adapters", 1.5, functions=128, paper={
            "ttft": (0.31, 0.22, 0.09), "tpot": (0.08, 0.03, 0.03), "latency": (0.06, 0.03, 0.02)}),
        ColdLoad("256 adapters", 3.6, functions=256),
        ColdLoad("512 adapters", 7.7, functions=512, paper={
            "ttft": (0.39, 0.39, 0.07), "tpot": (0.34, 0.32, 0.07), "latency": (0.31, 0.31, 0.08)}),
    ),
    15: (
        ColdLoad("13B on 2 a10", 6.0, model="llama-2-13b", cards=2),
        ColdLoad("70B on 4 a100-80", 6.0, model="llama-2-70b", hardware="a100-80", cards=4, held=64),
    ),
}  # fmt: skip
"""By the figure."""
PAPER_FASTER = {"13B on 2 a10": -0.202, "70B on 4 a100-80": -0.185}
"""§7.3: latency of CaraServe against OnDmd."""
PAPER_SHARES = {3.0: 0.10, 6.0: 0.16, 9.0: 0.20}
"""§2.3: the cold start's share of a request's time, by requests a second."""
PUNICA_US, PUNICA_MS = 50.0, 2.0
"""Punica's text (§5.2): loading a layer, and a model, over PCIe 4 x16."""


def _cases(setup: Setup, loads: Sequence[ColdLoad]) -> dict[ColdCase, ColdLoad]:
    duration_s = setup.pick(_FULL_S, _QUICK_S, _SMOKE_S)
    return {
        ColdCase(
            system, loader, load.rate, load.rank, duration_s, load.functions, load.model, load.hardware,
            load.cards, setup.seed, load.held,
        ): load
        for load in loads
        for loader in LOADERS
        for system in SYSTEMS
    }  # fmt: skip


def _settings(setup: Setup, cases: Sequence[ColdCase]) -> Row:
    first = cases[0]
    return {
        "scale": setup.scale, "seed": setup.seed, "duration_s": first.duration_s, "quantiles": list(QUANTILES),
        "workers": WORKERS, "rates": dataclasses.asdict(cold_of(first).rates),
        "load_bytes_s": {case.loader: case.card.sustained_load_bytes_s for case in cases},
        "loads": sorted({f"{case.model}, {case.cards} x {case.hardware}, {case.rate:g}/s" for case in cases}),
    }  # fmt: skip


def _grid(setup: Setup, figure: int) -> GridResult:
    loads = LOADS[figure]
    cases = _cases(setup, setup.pick(loads, loads, loads[:1]))
    found = run_cases(measure, cases, setup)
    rows = [
        {
            "load": cases[case].name, "loader": case.loader, "case": f"{cases[case].name}, {case.loader}",
            "system": case.system, **row,
        }
        for case, row in found.items()
    ]  # fmt: skip
    return GridResult(_settings(setup, list(cases)), rows)


# ---------------------------------------------------------------- over cached


def _of(rows: Sequence[Row], load: str, loader: str) -> dict[str, Row]:
    return {row["system"]: row for row in rows if (row["load"], row["loader"]) == (load, loader)}


def _loads(rows: Sequence[Row], figure: int) -> list[ColdLoad]:
    """Those that were run."""
    names = {row["load"] for row in rows}
    return [load for load in LOADS[figure] if load.name in names]


def _overheads(rows: list[Row], figure: int) -> list[Headline]:
    """Means over those of cached, less one; the paper's only under its loader."""
    figures = []
    for load in _loads(rows, figure):
        for loader in LOADERS:
            of = _of(rows, load.name, loader)
            for metric, name in METRICS.items():
                told = dict(zip(("block", "s-lora", "cpu"), load.paper.get(metric, ())))
                for system in SYSTEMS[1:]:
                    figures.append(
                        Headline(
                            f"{load.name}, {loader}: {name}, {system} over cached",
                            change(of[system][f"{metric}_mean_ms"], of["cached"][f"{metric}_mean_ms"]),
                            told.get(system) if loader == "theirs" else None,
                        )
                    )
    return figures


def _orders(rows: list[Row], figure: int) -> list[Headline]:
    """Under the paper's loader."""
    return [
        Headline(f"{load.name}, theirs: cached <= auto <= wait <= block in mean time to first token (1: yes)",
                 float(is_in_order(_of(rows, load.name, "theirs"))))
        for load in _loads(rows, figure)
    ]  # fmt: skip


def is_in_order(of: dict[str, Row]) -> bool:
    """Whether the mean time to the first token does not fall from one system to the next, but for ties."""
    means = [of[system]["ttft_mean_ms"] for system in ("cached", "auto", "wait", "block")]
    return all(first <= TIE * second for first, second in itertools.pairwise(means))


def _against_block(rows: list[Row]) -> list[Headline]:
    figures = []
    for load in _loads(rows, 15):
        for loader in LOADERS:
            of = _of(rows, load.name, loader)
            for system in ("cpu", "auto"):
                paper = PAPER_FASTER[load.name] if (system, loader) == ("cpu", "theirs") else None
                found = change(of[system]["latency_mean_ms"], of["block"]["latency_mean_ms"])
                figures.append(
                    Headline(f"{load.name}, {loader}: latency, {system} against block", found, paper)
                )
    return figures


_CDFS = Distributions(
    (
        ("ttft_ms", "time to first token, ms"),
        ("tpot_ms", "time per token, ms"),
        ("latency_ms", "latency, ms"),
    ),
    series="system",
    column="case",
)


def _figure(name: str, figure: int, title: str, section: str, *more: str) -> Experiment:
    headline = [functools.partial(_overheads, figure=figure), functools.partial(_orders, figure=figure)]
    return Experiment(
        name,
        title,
        f"CaraServe, Figure {figure} ({section})",
        functools.partial(_grid, figure=figure),
        _CDFS,
        (*headline, *([_against_block] if figure == 15 else [])),
        (*NOTES, *more),
        is_stored=True,
    )


FIG10 = _figure("caraserve-fig10", 10, "Cold starts of adapters of rank 64, each request's its own", "§7.2")
FIG13 = _figure("caraserve-fig13", 13, "The same with adapters of rank 32, and with fewer requests", "§7.2")
FIG14 = _figure(
    "caraserve-fig14",
    14,
    "The same over adapters that are as popular as functions of a trace",
    "§7.2",
    "Popularity is that of the busiest functions of the Azure Functions trace of 2019 at hand, with a tail beyond "
    "the 100 that it has; the paper groups functions of that of 2021 at random.",
)
FIG15 = _figure(
    "caraserve-fig15",
    15,
    "The same with larger models on several cards",
    "§7.3",
    "Cards share a model ideally: nothing is exchanged, and each loads its part.",
    "Four A100 of 80 GB have room for every adapter of the run beside 70B, so none would ever come from the host "
    "but under s-lora. The paper's servers keep adapters in host memory (§2.3, §3) and load one as it is asked "
    "for; of 70B's memory it says nothing. So the pool is held to 64 requests with their adapters, about as many "
    "as the A10's has room for beside 7B.",
)

# ---------------------------------------------------------------- 11


def _steps(setup: Setup) -> GridResult:
    return _grid(setup, 10)


def _step_figures(rows: list[Row]) -> list[Headline]:
    figures = []
    for loader in LOADERS:
        of = _of(rows, "9/s", loader)
        for field, name in (("prefill_step_mean_ms", "with prompts"), ("decode_step_mean_ms", "without")):
            figures += [
                Headline(
                    f"{loader}: a step {name}, {system} over cached", change(row[field], of["cached"][field])
                )
                for system, row in of.items()
                if system != "cached"
            ]
    return figures


FIG11 = Experiment(
    "caraserve-fig11",
    "What steps take, with prompts and without",
    "CaraServe, Figure 11 (§7.2)",
    _steps,
    BarPanels(
        (
            ("prefill_step_mean_ms", "step with prompts, ms"),
            ("decode_step_mean_ms", "step of decoding rows alone, ms"),
        ),
        "loader",
        "system",
    ),
    (_step_figures,),
    (
        *NOTES,
        "The paper's text has no numbers: decoding is alike, and OnDmd's and S-LoRA's prefills are long.",
    ),
    is_stored=True,
)

# ---------------------------------------------------------------- 3

_SHARES = "left: share of requests below a share of their time that is cold start"
_LOADING = "right: ms to load an adapter, by rank"
RANKS = (8, 16, 32, 64, 128)


def _measure_shares(case: ColdCase) -> Row:
    shares = cold_shares(case)
    found = np.percentile(shares, QUANTILES).tolist()
    return {"mean": statistics.fmean(shares), "values": [round(value, 4) for value in found]}


def _figure3(setup: Setup) -> GridResult:
    duration_s = setup.pick(_FULL_S, _QUICK_S, _SMOKE_S)
    cases = [
        ColdCase("block", loader, rate, 64, duration_s, functions=setup.pick(512, 512, 64), seed=setup.seed)
        for loader in LOADERS
        for rate in PAPER_SHARES
    ]
    found = in_parallel(
        _measure_shares, {case: case for case in cases}, setup.num_workers, setup.show, "simulations done"
    )
    rows: list[Row] = []
    headline = []
    for case, row in found.items():
        line = f"{case.rate:g}/s, {case.loader}"
        rows += [
            {"panel": _SHARES, "line": line, "x": value, "y": quantile / 100}
            for value, quantile in zip(row["values"], QUANTILES)
        ]
        paper = PAPER_SHARES[case.rate] if case.loader == "theirs" else None
        headline.append(
            Headline(f"{line}: cold start's mean share of a request", round(row["mean"], 4), paper)
        )
    for case in (cases[0], cases[-1]):
        for rank in RANKS:
            seconds = costs_of(case).copy_s(case.shape.adapter_bytes(rank, MODULES))
            rows.append({"panel": _LOADING, "line": case.loader, "x": rank, "y": round(1e3 * seconds, 4)})
            if rank == 64:
                headline.append(Headline(f"{case.loader}: ms to load rank 64", round(1e3 * seconds, 3)))
    headline += _beside_punica(cases[-1])
    return GridResult(_settings(setup, cases), rows, headline)


def _beside_punica(case: ColdCase) -> list[Headline]:
    """Of an adapter of rank 16 on all linears from pinned memory, as Punica's text tells of one."""
    costs, shape = costs_of(case), shape_named("llama-2-7b")
    num_bytes = shape.adapter_bytes(16, ALL_MODULES)
    return [
        Headline("pinned, rank 16 on all linears: us a layer, beside Punica's",
                 round(1e6 * costs.copy_s(num_bytes // shape.layers), 1), PUNICA_US),
        Headline("pinned, rank 16 on all linears: ms a model, beside Punica's",
                 round(1e3 * costs.copy_s(num_bytes), 2), PUNICA_MS),
    ]  # fmt: skip


FIG3 = Experiment(
    "caraserve-fig3",
    "The share of cold starts in requests' times, and what loading takes",
    "CaraServe, Figure 3 (§2.3)",
    _figure3,
    LinePanels(
        "panel", "line", ("x", "share of time, or rank"), ("y", "share of requests, or ms"), is_shared=False
    ),
    (),
    (
        *NOTES,
        "A request's cold start is what block takes longer for it than cached, others' loads included.",
        "Right: the assumed rates times the adapters' bytes. Punica's text does not name its model and rank.",
    ),
)
