"""Cache policies on several seeds, and where adapters and KV really compete (§6.3, §6.6 to §6.8): paired, with
intervals.

Owns the loads, their rates and the intervals. ``manylora`` was changed by none of them, but by those of 7B-100
with seeds 0 and 1. The sizes of whole adapters were chosen by runs of seed 0, for their share of invalid KV, and
what is served before the settled load counts, too; seeds 2 to 4 were not looked at before.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from manylora_lab.reproduce.cells import (
    BELADY,
    BELADY_SEEN,
    REFERENCE,
    Cell,
    CellResult,
    in_parallel,
)
from manylora_lab.reproduce.drawing import BarPanels
from manylora_lab.reproduce.experiment import Experiment, GridResult, Setup
from manylora_lab.reproduce.fastlibra_grid import SIMULATION_NOTES
from manylora_lab.reproduce.fastlibra_table_peaks import LIMIT_MS, rounded, run_into
from manylora_lab.reproduce.fastlibra_table_store import CellStore
from manylora_lab.reproduce.report import ExperimentReport, Headline, Row, change
from manylora_lab.sim.ablation import ABLATIONS

SETTLE_S, COUNTED_S = 200.0, 600.0
SHARES = (0.4, 0.7, 0.95)
"""Of a load's peak."""
SEEDS = (1, 2, 3, 4)
SIMPLE = ("lru-ahead", "lru-drop", "lru", "static-lru", "s-lora")
"""Policies without values of nodes; of these the best is what is worth beating."""
BY_TURNS = ("fastlibra", "fastlibra-wom", "fastlibra-wos", "fastlibra-wol")
BY_PAGES = ("fastlibra-pages", "fastlibra-pages-wom", "fastlibra-pages-wos", "fastlibra-pages-wol")
LIMITS = (BELADY, BELADY_SEEN, REFERENCE)
"""What is no policy of an engine, and stands beside them."""
EVERY = ("manylora", *BY_TURNS, *BY_PAGES, *SIMPLE, *LIMITS)
FEW = ("manylora", "fastlibra", "fastlibra-pages", "lru-ahead", "lru-drop", "static-lru", *LIMITS)
SETTLED = ("manylora", "fastlibra", "lru-ahead", BELADY_SEEN, REFERENCE)
JUDGING_SEEDS = (2, 3, 4)
"""Where runs of seeds 0 and 1 were looked at before."""
_DRAWS = 2000
_SHORT = 0.2
"""Memory is short where unlimited memory is at least so much below the best other policy, at rates that this one
sustains."""


@dataclasses.dataclass(frozen=True)
class Load:
    """``cell``: its rate is the peak, of which ``shares`` are run. ``policies``: compared on it."""

    name: str
    cell: Cell
    policies: Sequence[str]
    shares: Sequence[float] = SHARES
    seeds: Sequence[int] = SEEDS


_CHAT = Cell("chatbot", "lru-ahead", 1.61, 100, SETTLE_S + COUNTED_S, settle_s=SETTLE_S)
WHOLE = dataclasses.replace(_CHAT, rate=0.85, num_adapters=500, ranks="random(64,128,256)", is_whole=True)
LOADS = (
    Load("500 whole adapters", WHOLE, EVERY),
    Load("500, and 500 that arrive", dataclasses.replace(WHOLE, newcomers=500, is_warm=False), FEW),
    Load("chatbot 7B-100", _CHAT, FEW),
    Load(
        "500 whole adapters, settled",
        dataclasses.replace(WHOLE, rate=0.65, settle_s=600.0, duration_s=1800.0),
        SETTLED,
        seeds=JUDGING_SEEDS,
    ),
    Load("translation 7B-100", dataclasses.replace(_CHAT, scenario="translation", rate=77.6), FEW),
    Load("agent 7B-100", dataclasses.replace(_CHAT, scenario="agent", rate=65.56), FEW),
)
"""Peaks: of 7B-100 those of ``fastlibra-pages`` in FastLibra's table; of whole adapters 0.85, where ``lru-ahead``
waits less than 500 ms in the mean with seed 0, which it does not at 0.9; over a longer time 0.65, with 232 ms."""


def cells_of(setup: Setup, loads: Sequence[Load]) -> dict[tuple[str, float, int, str], Cell]:
    """By load, share of the peak, seed and policy; those of one stream in a row."""
    scale, most = setup.pick(1.0, 0.05, 0.02), setup.pick(500, 100, 10)
    return {
        (load.name, share, seed, policy): dataclasses.replace(
            load.cell, policy=policy, rate=rounded(share * load.cell.rate), seed=seed + setup.seed,
            duration_s=scale * load.cell.duration_s, settle_s=scale * load.cell.settle_s,
            num_adapters=min(most, load.cell.num_adapters), newcomers=min(most, load.cell.newcomers),
        )
        for load in loads
        for share in setup.pick(load.shares, load.shares[-1:], load.shares[-1:])
        for seed in setup.pick(load.seeds, load.seeds[:2], load.seeds[:2])
        for policy in load.policies
    }  # fmt: skip


def run(setup: Setup, loads: Sequence[Load]) -> GridResult:
    """Run what the store does not have, unless only a report is asked for, and report the loads of which all is
    there; ``settings["missing"]`` says how much of the others is not. Raises ConfigError."""
    if setup.store is None:
        with tempfile.TemporaryDirectory() as folder:
            return run(dataclasses.replace(setup, store=Path(folder) / "cells.jsonl"), loads)
    cells, store = cells_of(setup, loads), CellStore(setup.store)
    missing = {cell: cell for cell in cells.values() if store.find(cell) is None}
    if setup.is_run and missing:
        run_one = functools.partial(_run, setup.store)
        in_parallel(run_one, missing, setup.num_workers, setup.show, "simulations done")
        store.refresh()
    results = {key: found for key, cell in cells.items() if (found := store.find(cell)) is not None}
    lacking = collections.Counter(key[0] for key in cells if key not in results)
    settings = {
        "scale": setup.scale, "seed": setup.seed, "seeds": sorted({key[2] for key in cells}),
        "shares": sorted({key[1] for key in cells}), "settle_s": SETTLE_S, "counted_s": COUNTED_S,
        "loads": {load.name: dataclasses.asdict(load.cell) for load in loads}, "missing": dict(lacking),
        "hours_simulated": round(sum(map(store.seconds, cells.values())) / 3600, 3),
    }  # fmt: skip
    rows = [row for load in loads if load.name not in lacking for row in rows_of(load, results)]
    return GridResult(settings, rows)


@functools.lru_cache(maxsize=1)
def _opened(path: Path) -> CellStore:
    """Once in each process."""
    return CellStore(path)


def _run(store: Path, cell: Cell) -> None:
    run_into(_opened(store), cell)


# ---------------------------------------------------------------- rows and intervals


COLUMNS = (
    "ttft_queue_ms", "ttft_adapter_ms", "ttft_kv_ms", "kv_hit_device", "kv_hit_host", "adapter_hit_device",
    "adapter_reads", "invalid_share", "pages_in", "pages_out",
)  # fmt: skip


def rows_of(load: Load, results: Mapping[tuple[str, float, int, str], CellResult]) -> list[Row]:
    """A row for each policy and share of the load's peak, and one (share 0) for all shares together."""
    mine = {key[1:]: result for key, result in results.items() if key[0] == load.name}
    shares, seeds = sorted({share for share, _, _ in mine}), sorted({seed for _, seed, _ in mine})
    ttft = {
        policy: {
            share: [float(mine[share, seed, policy]["ttft_mean_ms"]) for seed in seeds] for share in shares
        }
        for policy in load.policies
    }
    simple = best([policy for policy in load.policies if policy in SIMPLE], ttft)
    rows = []
    for policy in load.policies:
        for share in (*shares, 0.0):
            taken = [share] if share else shares
            ours = [ttft[policy][each] for each in taken]
            theirs = [ttft[simple][each] for each in taken]
            by_seed = [statistics.fmean(values) for values in zip(*ours, strict=True)]
            low, high = interval(ours, theirs)
            of_share = [mine[each, seed, policy] for each in taken for seed in seeds]
            row: Row = {
                "case": load.name, "policy": policy, "share": share, "best_simple": simple,
                "ttft_mean_ms": round(statistics.fmean(by_seed), 3),
                "ttft_ms_by_seed": [round(value, 3) for value in by_seed],
                "change": round(mean_change(ours, theirs), 4), "change_low": low, "change_high": high,
                "sustained": sum(value < LIMIT_MS for values in ours for value in values) / len(of_share),
            }  # fmt: skip
            for name in COLUMNS:
                values = [float(result[name]) for result in of_share if name in result]
                row[name] = round(statistics.fmean(values), 4) if values else None
            rows.append(row)
    return rows


def best(policies: Sequence[str], ttft: Mapping[str, Mapping[float, Sequence[float]]]) -> str:
    """Of the lowest geometric mean."""

    def height(policy: str) -> float:
        return statistics.fmean(math.log(value) for values in ttft[policy].values() for value in values)

    return min(policies, key=height)


def mean_change(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """The geometric mean of the ratios of what belongs together, less 1. By share, then by seed."""
    logs = [math.log(a / b) for mine, other in zip(ours, theirs) for a, b in zip(mine, other)]
    return math.exp(statistics.fmean(logs)) - 1


def interval(
    ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], draws: int = _DRAWS
) -> tuple[float, float]:
    """A 95 % bootstrap interval of ``mean_change``: seeds are drawn anew, each with all its shares and both
    policies, since these belong together. Of four seeds it is a coarse one."""
    logs = np.log(np.asarray(ours) / np.asarray(theirs)).mean(axis=0)
    drawn = np.random.default_rng(0).choice(logs, size=(draws, len(logs))).mean(axis=1)
    low, high = np.exp(np.quantile(drawn, (0.025, 0.975))) - 1
    return round(float(low), 4), round(float(high), 4)


# ---------------------------------------------------------------- headline


def headline(rows: list[Row]) -> list[Headline]:
    """For each load: ``manylora`` against the best simple policy and the best other, and how much of what
    unlimited memory would gain it has at rates that the best other sustains."""
    figures: list[Headline] = []
    for case in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == case]
        whole = {row["policy"]: row for row in mine if row["share"] == 0.0}
        ours = whole["manylora"]
        others = [policy for policy in whole if policy not in ("manylora", *LIMITS, *ABLATIONS)]
        rival = min(others, key=lambda policy: float(whole[policy]["change"]))
        against = change(1 + ours["change"], 1 + whole[rival]["change"])
        figures += [
            Headline(
                f"{case}: manylora against the best simple policy ({ours['best_simple']})", ours["change"]
            ),
            Headline(f"{case}: manylora against the best other policy ({rival})", against),
        ]
        for policy in LIMITS:
            if policy in whole:
                gap = change(1 + whole[policy]["change"], 1 + whole[rival]["change"])
                figures.append(Headline(f"{case}: {policy} against the best other policy", gap))
        sustained = _where_sustained(mine, rival)
        if REFERENCE in sustained:
            gap = (1 + sustained[REFERENCE]["change"]) / (1 + sustained[rival]["change"]) - 1
            closed = _closed(sustained, rival, REFERENCE)
            figures += [
                Headline(
                    f"{case}: {REFERENCE} against the best other policy, at rates that it sustains",
                    round(gap, 4),
                ),
                Headline(f"{case}: memory is short", float(-gap >= _SHORT)),
                Headline(f"{case}: share of that gap which manylora closes", closed),
            ]
        if BELADY_SEEN in whole:
            closed = _closed(whole, ours["best_simple"], BELADY_SEEN)
            figures.append(
                Headline(
                    f"{case}: share of belady-seen's gain on the best simple policy that manylora has", closed
                )
            )
        for policy in ("static-lru", "fastlibra-wom", "fastlibra-pages-wom"):
            if policy in whole:
                figures.append(Headline(f"{case}: invalid KV under {policy}", whole[policy]["invalid_share"]))
    return figures


def _where_sustained(rows: Sequence[Row], policy: str) -> dict[str, Row]:
    """Each policy's change over the shares that this one sustains with every seed; empty where there is none."""
    shares = {row["share"] for row in rows if row["policy"] == policy and row["sustained"] == 1.0} - {0.0}
    logs = collections.defaultdict[str, list[float]](list)
    for row in rows:
        if row["share"] in shares:
            logs[row["policy"]].append(math.log(1 + row["change"]))
    return {name: {"change": math.exp(statistics.fmean(values)) - 1} for name, values in logs.items()}


def _closed(whole: Mapping[str, Row], rival: str, limit: str) -> float | None:
    """How far ``manylora`` is from one policy to another that is ahead of it; None where that one is not."""
    gap = whole[rival]["change"] - whole[limit]["change"]
    return round((whole[rival]["change"] - whole["manylora"]["change"]) / gap, 4) if gap > 0 else None


NOTES = (
    *SIMULATION_NOTES[:3],
    "500 whole adapters: the 7B model on one card, ranks 64, 128 or 256 at random on all seven projections, asked "
    "for by zipf(1); that arrive: 500 more, one after the other in the place of the oldest, cold.",
    "Each run: so many seconds are served and do not count, then so many that do. Share 0: all rates together.",
    "change: of mean TTFT against the load's best simple policy, the geometric mean over rates and seeds of pairs "
    "with the same requests; low and high: 95 % bootstrap interval over seeds.",
    "belady knows the workload, belady-seen only of adapters that were asked for since it began; cached has "
    "unlimited memory; none of them is a bound.",
)


def _bars(*fields: tuple[str, str]) -> BarPanels:
    return BarPanels(fields, group="case", series="policy")


def _draw(report: ExperimentReport, path: Path) -> None:
    rows = [row for row in report.rows if row["share"] == 0.0]
    bars = _bars(
        ("change", "mean TTFT against the best simple policy"), ("invalid_share", "invalid KV, share")
    )
    bars(dataclasses.replace(report, rows=rows), path)


SEEDS_EXPERIMENT = Experiment(
    "fastlibra-seeds",
    "cache policies on four seeds, where adapters and KV compete and elsewhere, with intervals",
    "FastLibra, §6.3 and §6.6 to §6.8",
    functools.partial(run, loads=LOADS),
    _draw,
    (headline,),
    NOTES,
    hardwares=("npu",),
)

ABLATED = (Load("500 whole adapters", WHOLE, ("manylora", "lru", "lru-ahead", *ABLATIONS), SHARES[-1:]),)


def _effects(rows: list[Row]) -> list[Headline]:
    """What each feature gains where all others are there, and where none is."""
    whole = {row["policy"]: row for row in rows if row["share"] == 0.0}
    if not whole:
        return []
    figures = []
    for name in ABLATIONS:
        base = "manylora" if name.startswith("manylora") else "lru"
        effect = change(1 + whole[name]["change"], 1 + whole[base]["change"])
        figures.append(Headline(f"{name} against {base}", effect))
    together = change(1 + whole["manylora"]["change"], 1 + whole["lru"]["change"])
    return [*figures, Headline("manylora against lru", together)]


ABLATION_EXPERIMENT = Experiment(
    "fastlibra-ablation",
    "manylora's seven features, each on and off, where adapters and KV compete",
    "FastLibra, §6.6 to §6.8 (of manylora, which the paper does not have)",
    functools.partial(run, loads=ABLATED),
    _draw,
    (_effects,),
    NOTES,
    hardwares=("npu",),
)
