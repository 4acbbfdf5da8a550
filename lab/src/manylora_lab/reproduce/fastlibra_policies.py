"""FastLibra's evaluation of policies (§6.3 to §6.9): Figures 11 to 16, each a grid, a headline and a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from manylora_lab.reproduce.cells import REFERENCE, Cell, CellResult, run_cells
from manylora_lab.reproduce.drawing import Areas, BarPanels, StackedBars
from manylora_lab.reproduce.experiment import Experiment, GridResult, Setup
from manylora_lab.reproduce.fastlibra_grid import (
    BASELINES,
    MANY_ADAPTERS,
    NOTES,
    OURS,
    PAPERS_NAMES,
    POLICIES,
    POPULARITIES,
    SHOWN,
    SIMULATION_NOTES,
    VARIANTS,
    WARM_NOTE,
    Against,
    Grid,
    PolicyGrid,
    against_both,
    cases,
    cases_of_many,
    pairs,
    scenario_rows,
)
from manylora_lab.reproduce.fastlibra_paper import AGAINST, IN_SCENARIOS, INVALID, OF_VARIANTS, stated
from manylora_lab.reproduce.report import Headline, Row, change, mean, ratio

# ---------------------------------------------------------------- Figure 11

PEAK_TTFT_MS = 500.0


def _rows_with_peaks(grid: Grid) -> list[Row]:
    return [_row_with_peak(grid, case, policy) for case in grid.cases for policy in SHOWN]


def _row_with_peak(grid: Grid, case: str, policy: str) -> Row:
    mine = grid.runs[case, policy]
    sustained = [
        run
        for index, run in enumerate(mine)
        if all(grid.runs[case, each][index]["ttft_mean_ms"] < PEAK_TTFT_MS for each in POLICIES)
    ]
    # Without limits on memory a peak would say nothing of a policy.
    peak = None if policy == REFERENCE else round(grid.peaks[case, policy], 3)
    return {
        "case": case, "policy": policy, "peak_per_s": peak,
        "ttft_mean_ms": grid.mean(case, policy, "ttft_mean_ms"),
        "tpot_mean_ms": grid.mean(case, policy, "tpot_mean_ms"),
        "ttft_sustained_ms": mean([run["ttft_mean_ms"] for run in sustained]),
        "tpot_sustained_ms": mean([run["tpot_mean_ms"] for run in sustained]),
        "ttft_ms_by_rate": [run["ttft_mean_ms"] for run in mine],
        **grid.parts(case, policy),
    }  # fmt: skip


def _against_baselines() -> Iterator[Against]:
    """Means over all cases of the changes in each."""
    for ours in OURS:
        for baseline in BASELINES:
            name, paper = PAPERS_NAMES[baseline], AGAINST[baseline]
            for what, figure in (("ttft", paper.ttft), ("tpot", paper.tpot)):
                against = f"{ours}: {what.upper()} against {name}"
                yield Against(
                    f"{against}, mean rates", ours, baseline, f"{what}_mean_ms", paper=stated(ours, figure)
                )
                yield Against(f"{against}, sustained rates", ours, baseline, f"{what}_sustained_ms")
            over = f"{ours}: peak over {name}'s"
            yield Against(over, ours, baseline, "peak_per_s", ratio, paper=stated(ours, paper.peak))
    for baseline, (scenario, most, elsewhere) in IN_SCENARIOS.items():
        against = f"fastlibra: TTFT against {PAPERS_NAMES[baseline]}"
        yield Against(
            f"{against}, {scenario}", "fastlibra", baseline, "ttft_mean_ms", paper=most, within=scenario
        )
        yield Against(
            f"{against}, without {scenario}", "fastlibra", baseline, "ttft_mean_ms", paper=elsewhere,
            without=scenario,
        )  # fmt: skip
    for other in ("fastlibra", REFERENCE):
        yield Against(f"manylora: TTFT against {other}, mean rates", "manylora", other, "ttft_mean_ms")


FIG11 = Experiment(
    "fastlibra-fig11",
    "TTFT, TPOT and peak rate of the cache policies, by scenario, model and number of adapters",
    "FastLibra, Figure 11 (§6.3)",
    PolicyGrid(cases, SHOWN, _rows_with_peaks, peaks_of=POLICIES),
    BarPanels(
        (("ttft_mean_ms", "TTFT, ms"), ("tpot_mean_ms", "TPOT, ms"), ("peak_per_s", "peak, requests/s")),
        group="case",
        series="policy",
        is_log=("ttft_mean_ms",),
    ),
    tuple(_against_baselines()),
    NOTES,
)

# ---------------------------------------------------------------- Figure 12

PARTS = {"queue": "queue", "adapter": "LoRA cold start", "kv": "KV cold start", "steps": "steps"}
"""The paper's three, and what is left."""


def _rows_of_parts(grid: Grid) -> list[Row]:
    columns = {f"{part}_ms": f"ttft_{part}_ms" for part in PARTS}
    return scenario_rows(grid, SHOWN, {**columns, "ttft_ms": "ttft_mean_ms"})


def _changes_of_parts(rows: list[Row]) -> list[Headline]:
    """The paper gives no numbers here: "the lowest in all scenarios"."""
    figures = []
    for ours in OURS:
        for baseline in BASELINES:
            for part in ("queue", "adapter", "kv"):
                # Means first: in one scenario a part can be next to nothing.
                compared = pairs(rows, ours, baseline, f"{part}_ms", "scenario")
                found = change(mean([a for a, _ in compared]), mean([b for _, b in compared]))
                figures.append(Headline(f"{ours}: {PARTS[part]} against {PAPERS_NAMES[baseline]}", found))
    return figures


FIG12 = Experiment(
    "fastlibra-fig12",
    "parts of TTFT (queue, LoRA cold start, KV cold start) of the cache policies, by scenario",
    "FastLibra, Figure 12 (§6.4)",
    PolicyGrid(cases, SHOWN, _rows_of_parts),
    StackedBars(
        tuple((f"{part}_ms", label) for part, label in PARTS.items()),
        group="scenario",
        series="policy",
        unit="ms",
    ),
    (_changes_of_parts,),
    (*NOTES, "steps: the rest of TTFT, which the paper does not show."),
)

# ---------------------------------------------------------------- Figure 13

USE_COLUMNS = {
    "used": "pool_used", "running": "pool_running", "history": "pool_history", "adapters": "pool_adapters",
    "invalid": "pool_invalid", "kv_hit": "kv_hit_device", "adapter_hit": "adapter_hit_device",
    "kv_hit_host": "kv_hit_host", "invalid_share": "invalid_share",
}  # fmt: skip


def _rows_of_use(grid: Grid) -> list[Row]:
    rows = scenario_rows(grid, POLICIES, USE_COLUMNS)
    for row in rows:
        row["hit"] = mean([row["kv_hit"], row["adapter_hit"]])
    return rows


def _use_over_baselines() -> Iterator[Against]:
    for ours in OURS:
        for baseline in BASELINES:
            paper = AGAINST[baseline]
            for field, what, figure in (("used", "memory use", paper.used), ("hit", "hit rate", paper.hit)):
                yield Against(
                    f"{ours}: {what} over {PAPERS_NAMES[baseline]}'s", ours, baseline, field, ratio,
                    by="scenario", paper=stated(ours, figure),
                )  # fmt: skip


def _invalid_share(policy: str, rows: list[Row]) -> Headline:
    invalid = [row["invalid_share"] for row in rows if row["policy"] == policy]
    return Headline(f"{policy}: invalid share of history", mean(invalid), INVALID[policy])


FIG13 = Experiment(
    "fastlibra-fig13",
    "use of device memory and hit rates of the cache policies, by scenario",
    "FastLibra, Figure 13 (§6.4)",
    PolicyGrid(cases, POLICIES, _rows_of_use),
    BarPanels(
        (
            ("used", "memory in use, share"),
            ("kv_hit", "KV hits, share of tokens"),
            ("adapter_hit", "LoRA hits, share"),
        ),
        group="scenario",
        series="policy",
    ),
    (*_use_over_baselines(), lambda rows: [_invalid_share("static-lru", rows)]),
    (
        *NOTES,
        "Use: share of the pool, which is what the weights leave; adapters, history and running KV, sampled every "
        "virtual second.",
        "Hit rate: the mean of the share of prompt tokens whose KV and the share of requests whose adapter is on "
        "the device when they are admitted (the paper does not say how it joins the two).",
    ),
)

# ---------------------------------------------------------------- Figure 14

HALF_HOUR_S = 1800.0
PERIODS_S = ((0, 400), (400, 900), (900, 1300), (1300, 1800))
"""§6.5, of the half hour."""
PAPER_STATIC_KV = 0.8
"""§6.5: vLLM's KV part is exhausted "to its maximum capacity (80%)" from 900 to 1300 s."""
RISING_AND_FALLING = Cell(
    "chatbot", "fastlibra", 1.6, 100, HALF_HOUR_S, model="llama-2-13b", cards=2, arrivals="ramp"
)
"""§6.5 and, for the cards, §6.1."""


def _memory_over_time(setup: Setup) -> GridResult:
    """The same arrivals under each policy; samples every minute's sixth, or a sixtieth of a shorter run."""
    duration_s = setup.pick(HALF_HOUR_S, 90.0, 5.0)
    step_s = setup.pick(10.0, duration_s / 60, duration_s / 20)
    shown = ("fastlibra", "manylora", "static-lru", "s-lora")
    load = RISING_AND_FALLING
    cells = {
        policy: dataclasses.replace(
            load, policy=policy, duration_s=duration_s, seed=setup.seed, sample_s=step_s
        )
        for policy in shown
    }
    results = run_cells(cells.values(), setup.num_workers, setup.show)
    names = ("at_s", "running", "adapters", "history", "waiting")
    rows: list[Row] = [
        {"policy": policy, **{name: round(sample[name], 4) for name in names}}
        for policy, cell in cells.items()
        for sample in results[cell]["samples"]
    ]
    headline = []
    for policy, cell in cells.items():
        headline += _in_periods(policy, rows, results[cell], duration_s / HALF_HOUR_S)
    settings = {
        "scale": setup.scale, "seed": setup.seed, "rate": load.rate, "duration_s": duration_s,
        "arrivals": load.arrivals, "model": load.model, "cards": load.cards, "adapters": load.num_adapters,
        "hardware": load.hardware,
    }  # fmt: skip
    return GridResult(settings, rows, headline)


def _in_periods(policy: str, rows: list[Row], result: CellResult, scale: float) -> list[Headline]:
    """Use in the periods that the paper speaks of, and TTFT in each."""
    mine = [row for row in rows if row["policy"] == policy]
    periods = [
        [row for row in mine if begin * scale <= row["at_s"] < end * scale] for begin, end in PERIODS_S
    ]
    most_kv = max((row["running"] + row["history"] for row in periods[2]), default=None)
    figures = [
        Headline(f"{policy}: LoRA, share of memory, 0-400 s", mean([row["adapters"] for row in periods[0]])),
        Headline(f"{policy}: history, share of memory, 400-900 s", mean([row["history"] for row in periods[1]])),
        Headline(
            f"{policy}: KV at most, share of memory, 900-1300 s", most_kv,
            PAPER_STATIC_KV if policy == "static-lru" else None,
        ),
    ]  # fmt: skip
    for begin, end in PERIODS_S:
        ttft = [ms for at_s, ms in result["ttft_over_time"] if begin * scale <= at_s < end * scale]
        figures.append(Headline(f"{policy}: TTFT, ms, {begin}-{end} s", mean(list(ttft))))
    return figures


FIG14 = Experiment(
    "fastlibra-fig14",
    "device memory by use over time, load rising and falling, chatbot, 13B, 100 adapters",
    "FastLibra, Figure 14 (§6.5)",
    _memory_over_time,
    Areas(
        (("running", "running KV"), ("adapters", "LoRA"), ("history", "history KV")),
        x=("at_s", "time, s"),
        panel="policy",
        unit="share of the pool",
    ),
    notes=(
        *SIMULATION_NOTES,
        WARM_NOTE,
        "The load: the paper speaks of low pressure at first, a rate that rises from 400 s on, pressure from 900 "
        "to 1300 s, and less after. Here a Poisson process whose rate climbs from 0 to twice the mean at half "
        "time and falls again, both linearly.",
        "Shorter runs have the same periods as shares of their time.",
    ),
)

# ---------------------------------------------------------------- Figure 15

SHOWN_VARIANTS = ("fastlibra", *VARIANTS, REFERENCE)


def _rows_of_variants(grid: Grid) -> list[Row]:
    return [_row_of_variant(grid, case, policy) for case in grid.cases for policy in SHOWN_VARIANTS]


def _row_of_variant(grid: Grid, case: str, policy: str) -> Row:
    ttft, tpot = grid.mean(case, policy, "ttft_mean_ms"), grid.mean(case, policy, "tpot_mean_ms")
    # Without limits on memory neither a peak nor invalid KV would say anything.
    is_policy = policy != REFERENCE
    peak = grid.peaks[case, policy] if is_policy else None
    return {
        "case": case, "policy": policy, "ttft_mean_ms": ttft, "tpot_mean_ms": tpot,
        "ttft_ratio": ratio(ttft, grid.mean(case, "fastlibra", "ttft_mean_ms")),
        "tpot_ratio": ratio(tpot, grid.mean(case, "fastlibra", "tpot_mean_ms")),
        "peak_per_s": peak, "peak_change": change(peak, grid.peaks[case, "fastlibra"]),
        "invalid_share": grid.mean(case, policy, "invalid_share") if is_policy else None,
        **grid.parts(case, policy),
    }  # fmt: skip


def _means_of_variants(rows: list[Row]) -> list[Headline]:
    figures = []
    for variant, papers in OF_VARIANTS.items():
        mine = [row for row in rows if row["policy"] == variant]
        columns = (("ttft_ratio", "TTFT ratio"), ("tpot_ratio", "TPOT ratio"), ("peak_change", "peak change"))
        for (field, what), paper in zip(columns, papers, strict=True):
            figures.append(Headline(f"{variant}: {what}", mean([row[field] for row in mine]), paper))
    return [*figures, _invalid_share("fastlibra-wom", rows)]


FIG15 = Experiment(
    "fastlibra-fig15",
    "TTFT and TPOT of FastLibra without its manager, its swapper, its LoRA reward, normalised",
    "FastLibra, Figure 15 (§6.6 to §6.8)",
    PolicyGrid(cases, SHOWN_VARIANTS, _rows_of_variants, peaks_of=VARIANTS),
    BarPanels(
        (("ttft_ratio", "TTFT, normalised"), ("tpot_ratio", "TPOT, normalised")),
        group="case",
        series="policy",
    ),
    (_means_of_variants,),
    NOTES,
)

# ---------------------------------------------------------------- Figure 16

MANY_COLUMNS = (
    "ttft_mean_ms", "tpot_mean_ms", "ttft_queue_ms", "ttft_adapter_ms", "ttft_kv_ms", "adapter_hit_device",
    "adapter_hit_host",
)  # fmt: skip


def _cases_of_many(setup: Setup) -> dict[str, Cell]:
    numbers = setup.pick(MANY_ADAPTERS, MANY_ADAPTERS[:1], (200,))
    names = setup.pick(tuple(POPULARITIES), ("uniform", "distinct", "skewed-0.1"), ("uniform",))
    return cases_of_many(setup, numbers, names)


def _rows_of_many(grid: Grid) -> list[Row]:
    return [
        {"case": case, "policy": policy, **{field: grid.mean(case, policy, field) for field in MANY_COLUMNS}}
        for case in grid.cases
        for policy in SHOWN
    ]


FIG16 = Experiment(
    "fastlibra-fig16",
    "TTFT and TPOT with 1,000 and 2,000 adapters asked for uniformly, in turn, or skewed",
    "FastLibra, Figure 16 (§6.9)",
    PolicyGrid(_cases_of_many, SHOWN, _rows_of_many),
    BarPanels(
        (("ttft_mean_ms", "TTFT, ms"), ("tpot_mean_ms", "TPOT, ms")),
        group="case",
        series="policy",
        is_log=("ttft_mean_ms",),
    ),
    (against_both,),
    (
        *NOTES,
        "Skewed-x: normally distributed around the middle adapter, x as a share of their number; values and unit "
        "of x are assumed.",
        "The paper's decrease is taken as the mean over both baselines and all cases.",
    ),
)
