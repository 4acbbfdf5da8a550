"""FastLibra's Figure 11: mean TTFT, mean TPOT and peak rate by scenario, model and number of adapters (§6.3)."""

from __future__ import annotations

from pathlib import Path

from manylora.reproduce import drawing
from manylora.reproduce.cells import REFERENCE
from manylora.reproduce.experiment import Experiment, Setup
from manylora.reproduce.fastlibra_grid import BASELINES, NOTES, POLICIES, SHOWN, Grid, cases, pairs, run_grid
from manylora.reproduce.report import Headline, Report, Row, change, mean, ratio

PAPER = {
    "static-lru": ("vLLM", -0.603, -0.339, 1.7),
    "s-lora": ("S-LoRA", -0.501, -0.286, 1.6),
}
"""§6.3: FastLibra against each: TTFT, TPOT, peak."""
PAPER_BY_SCENARIO = {"static-lru": ("translation", -0.689, -0.525), "s-lora": ("agent", -0.811, -0.346)}
"""§6.3: FastLibra's TTFT against each in the scenario where it gains most, and in the others."""
PEAK_TTFT_MS = 500.0


def run(setup: Setup) -> Report:
    """Peaks first, then every policy at the same shares of ``fastlibra``'s peak."""
    grid = run_grid(setup, cases(setup), SHOWN, peaks_of=POLICIES)
    rows = [_row(grid, case, policy) for case in grid.cases for policy in SHOWN]
    return Report(EXPERIMENT.name, EXPERIMENT.title, grid.settings(setup), rows, _headline(rows), NOTES)


def _row(grid: Grid, case: str, policy: str) -> Row:
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


def _headline(rows: list[Row]) -> list[Headline]:
    """Means over all cases of the changes in each."""
    figures = []
    for ours in ("fastlibra", "manylora"):
        for baseline in BASELINES:
            name, ttft, tpot, peak = PAPER[baseline]
            is_papers = ours == "fastlibra"
            for metric, paper in (("ttft", ttft), ("tpot", tpot)):
                for over, stated in (("mean", paper), ("sustained", None)):
                    compared = pairs(rows, ours, baseline, f"{metric}_{over}_ms", "case")
                    figures.append(
                        Headline(
                            f"{ours}: {metric.upper()} against {name}, {over} rates",
                            mean([change(a, b) for a, b in compared]), stated if is_papers else None,
                        )
                    )  # fmt: skip
            ratios = [ratio(a, b) for a, b in pairs(rows, ours, baseline, "peak_per_s", "case")]
            figures.append(Headline(f"{ours}: peak over {name}'s", mean(ratios), peak if is_papers else None))
    for baseline, (scenario, most, elsewhere) in PAPER_BY_SCENARIO.items():
        for there, is_most, paper in ((scenario, True, most), (f"without {scenario}", False, elsewhere)):
            mine = [row for row in rows if row["case"].startswith(scenario) == is_most]
            compared = pairs(mine, "fastlibra", baseline, "ttft_mean_ms", "case")
            name = f"fastlibra: TTFT against {PAPER[baseline][0]}, {there}"
            figures.append(Headline(name, mean([change(a, b) for a, b in compared]), paper))
    for other in ("fastlibra", REFERENCE):
        compared = pairs(rows, "manylora", other, "ttft_mean_ms", "case")
        changes = [change(a, b) for a, b in compared]
        figures.append(Headline(f"manylora: TTFT against {other}, mean rates", mean(changes)))
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
