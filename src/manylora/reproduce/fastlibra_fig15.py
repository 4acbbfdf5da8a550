"""FastLibra's Figure 15: TTFT and TPOT of its variants, normalised to FastLibra's (§6.6 to §6.8)."""

from __future__ import annotations

from pathlib import Path

from manylora.reproduce import drawing
from manylora.reproduce.cells import REFERENCE
from manylora.reproduce.experiment import Experiment, Setup
from manylora.reproduce.fastlibra_grid import NOTES, VARIANTS, Grid, cases, run_grid
from manylora.reproduce.report import Headline, Report, Row, change, mean, ratio

PAPER = {
    "fastlibra-wom": (1.27, 1.18, -0.198),
    "fastlibra-wos": (1.24, 1.15, -0.172),
    "fastlibra-wol": (1.13, 1.11, -0.131),
}
"""§6.6, §6.7, §6.8: TTFT and TPOT as multiples of FastLibra's, and the change of the peak."""
PAPER_INVALID = 0.486
"""§6.6: of FastLibra-WOM's history."""
SHOWN = ("fastlibra", *VARIANTS, REFERENCE)


def run(setup: Setup) -> Report:
    """Rates are shares of ``fastlibra``'s peak for all."""
    grid = run_grid(setup, cases(setup), SHOWN, peaks_of=VARIANTS)
    rows = [_row(grid, case, policy) for case in grid.cases for policy in SHOWN]
    return Report(EXPERIMENT.name, EXPERIMENT.title, grid.settings(setup), rows, _headline(rows), NOTES)


def _row(grid: Grid, case: str, policy: str) -> Row:
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


def _headline(rows: list[Row]) -> list[Headline]:
    figures = []
    for variant in VARIANTS:
        mine = [row for row in rows if row["policy"] == variant]
        stated = zip(("ttft_ratio", "tpot_ratio", "peak_change"), PAPER[variant], strict=True)
        for field, paper in stated:
            what = field.replace("_", " ").replace("ttft", "TTFT").replace("tpot", "TPOT")
            figures.append(Headline(f"{variant}: {what}", mean([row[field] for row in mine]), paper))
    without_manager = [row["invalid_share"] for row in rows if row["policy"] == "fastlibra-wom"]
    figures.append(Headline("fastlibra-wom: invalid share of history", mean(without_manager), PAPER_INVALID))
    return figures


def draw(report: Report, path: Path) -> None:
    """Bars by case: TTFT and TPOT as multiples of ``fastlibra``'s."""
    panels = (("ttft_ratio", "TTFT, normalised"), ("tpot_ratio", "TPOT, normalised"))
    drawing.bars(report, path, panels, group="case", series="policy")


EXPERIMENT = Experiment(
    "fastlibra-fig15",
    "TTFT and TPOT of FastLibra without its manager, its swapper, its LoRA reward, normalised",
    ("sim",),
    run,
    draw,
)
