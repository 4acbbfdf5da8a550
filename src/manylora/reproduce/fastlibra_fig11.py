"""FastLibra's Figure 11: mean TTFT, mean TPOT and peak rate by scenario, model and number of adapters (§6.3)."""

from __future__ import annotations

from pathlib import Path

from manylora.reproduce import drawing
from manylora.reproduce.cells import CellResult, run_cells
from manylora.reproduce.experiment import Experiment, Setup
from manylora.reproduce.fastlibra_grid import (
    BASELINES,
    NOTES,
    POLICIES,
    Case,
    cases,
    duration_s,
    peaks,
    rate_shares,
)
from manylora.reproduce.report import Headline, Report, Row, change, mean, ratio

PAPER = {
    "static-lru": ("vLLM", -0.603, -0.339, 1.7),
    "s-lora": ("S-LoRA", -0.501, -0.286, 1.6),
}
"""§6.3: FastLibra against each: TTFT, TPOT, peak."""
PEAK_TTFT_MS = 500.0


def run(setup: Setup) -> Report:
    """Peaks first, then every policy at the same shares of ``fastlibra``'s peak."""
    found = cases(setup)
    peak = peaks([(case, policy) for case in found for policy in POLICIES], setup)
    rates = {case: [share * peak[case, "fastlibra"] for share in rate_shares(setup)] for case in found}
    cells = {
        (case, policy, rate): case.cell(policy, rate, setup)
        for case in found
        for policy in POLICIES
        for rate in rates[case]
    }
    results = run_cells(cells.values(), setup.num_workers, setup.show)
    rows: list[Row] = []
    for case in found:
        runs = {policy: [results[cells[case, policy, rate]] for rate in rates[case]] for policy in POLICIES}
        for policy in POLICIES:
            rows.append(_row(case, policy, rates[case], runs, peak[case, policy]))
    settings = {
        "scale": setup.scale, "seed": setup.seed, "duration_s": duration_s(setup),
        "rate_shares": list(rate_shares(setup)), "hardware": "fastlibra-npu",
        "rates": {case.name: rates[case] for case in found},
    }  # fmt: skip
    return Report(EXPERIMENT.name, EXPERIMENT.title, settings, rows, _headline(rows), NOTES)


def _row(case: Case, policy: str, rates: list[float], runs: dict[str, list[CellResult]], peak: float) -> Row:
    sustained = [
        index
        for index in range(len(rates))
        if all(of[index]["ttft_mean_ms"] < PEAK_TTFT_MS for of in runs.values())
    ]
    mine = runs[policy]
    return {
        "case": case.name, "policy": policy, "peak_per_s": round(peak, 3),
        "ttft_mean_ms": mean([run["ttft_mean_ms"] for run in mine]),
        "tpot_mean_ms": mean([run["tpot_mean_ms"] for run in mine]),
        "ttft_sustained_ms": mean([mine[index]["ttft_mean_ms"] for index in sustained]),
        "tpot_sustained_ms": mean([mine[index]["tpot_mean_ms"] for index in sustained]),
        "ttft_ms_by_rate": [run["ttft_mean_ms"] for run in mine],
    }  # fmt: skip


def _headline(rows: list[Row]) -> list[Headline]:
    """Means over all cases of the changes in each."""
    by_case: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_case.setdefault(row["case"], {})[row["policy"]] = row
    figures = []
    for ours in ("fastlibra", "manylora"):
        for baseline in BASELINES:
            name, ttft, tpot, peak = PAPER[baseline]
            is_papers = ours == "fastlibra"
            pairs = [(of[ours], of[baseline]) for of in by_case.values()]
            for metric, paper in (("ttft", ttft), ("tpot", tpot)):
                for over, stated in (("mean", paper), ("sustained", None)):
                    changes = [change(a[f"{metric}_{over}_ms"], b[f"{metric}_{over}_ms"]) for a, b in pairs]
                    figures.append(
                        Headline(
                            f"{ours}: {metric.upper()} against {name}, {over} rates", mean(changes),
                            stated if is_papers else None,
                        )
                    )  # fmt: skip
            ratios = [ratio(a["peak_per_s"], b["peak_per_s"]) for a, b in pairs]
            figures.append(Headline(f"{ours}: peak over {name}'s", mean(ratios), peak if is_papers else None))
    against = [
        change(of["manylora"]["ttft_mean_ms"], of["fastlibra"]["ttft_mean_ms"]) for of in by_case.values()
    ]
    figures.append(Headline("manylora: TTFT against fastlibra, mean rates", mean(against)))
    return figures


def draw(report: Report, path: Path) -> None:
    """Bars by case: TTFT, TPOT and peak, as in the paper."""
    panels = (("ttft_mean_ms", "TTFT, ms"), ("tpot_mean_ms", "TPOT, ms"), ("peak_per_s", "peak, requests/s"))
    drawing.bars(report, path, panels, group="case", series="policy", is_log=("ttft_mean_ms",))


EXPERIMENT = Experiment(
    "fastlibra-fig11",
    "TTFT, TPOT and peak rate of the cache policies, by scenario, model and number of adapters",
    ("sim",),
    run,
    draw,
)
