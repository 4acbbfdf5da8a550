"""FastLibra's Figure 16: TTFT and TPOT with 1,000 and 2,000 adapters, by how they are asked for (§6.9)."""

from __future__ import annotations

from pathlib import Path

from manylora.reproduce import drawing
from manylora.reproduce.cells import Cell
from manylora.reproduce.experiment import Experiment, Setup
from manylora.reproduce.fastlibra_grid import (
    BASELINES,
    FIRST_RATES,
    PAPERS_NAMES,
    SHOWN,
    duration_s,
    pairs,
    run_grid,
)
from manylora.reproduce.fastlibra_grid import NOTES as GRID_NOTES
from manylora.reproduce.report import Headline, Report, Row, change, mean

ADAPTERS = (1000, 2000)
POPULARITIES = {
    "uniform": "uniform",
    "distinct": "round-robin",
    "skewed-0.05": "gaussian(0.05)",
    "skewed-0.1": "gaussian(0.1)",
    "skewed-0.2": "gaussian(0.2)",
}
"""§6.9; the paper's x are in its picture alone."""
PAPER = {"ttft_mean_ms": -0.554, "tpot_mean_ms": -0.162}
"""§6.9: FastLibra's average decrease, of vLLM and S-LoRA together."""
FIELDS = (
    "ttft_mean_ms", "tpot_mean_ms", "ttft_queue_ms", "ttft_adapter_ms", "ttft_kv_ms", "adapter_hit_device",
    "adapter_hit_host",
)  # fmt: skip
NOTES = (
    *GRID_NOTES,
    "Skewed-x: normally distributed around the middle adapter, x as a share of their number; values and unit of x "
    "are assumed.",
    "The paper's decrease is taken as the mean over both baselines and all cases.",
)


def run(setup: Setup) -> Report:
    """Chatbot and the 7B model, at shares of ``fastlibra``'s peak in each case."""
    adapters = setup.pick(ADAPTERS, ADAPTERS[:1], (200,))
    names = setup.pick(tuple(POPULARITIES), ("uniform", "distinct", "skewed-0.1"), ("uniform",))
    found = {
        f"{num} {name}": Cell(
            "chatbot", "fastlibra", FIRST_RATES["chatbot"], num, duration_s(setup),
            popularity=POPULARITIES[name], seed=setup.seed,
        )
        for num in adapters
        for name in names
    }  # fmt: skip
    grid = run_grid(setup, found, SHOWN)
    rows = [
        {"case": case, "policy": policy, **{field: grid.mean(case, policy, field) for field in FIELDS}}
        for case in found
        for policy in SHOWN
    ]
    return Report(EXPERIMENT.name, EXPERIMENT.title, grid.settings(setup), rows, _headline(rows), NOTES)


def _headline(rows: list[Row]) -> list[Headline]:
    """Means over cases of the changes in each."""
    figures = []
    for ours in ("fastlibra", "manylora"):
        for field, paper in PAPER.items():
            what = field[:4].upper()
            found = {
                baseline: mean([change(a, b) for a, b in pairs(rows, ours, baseline, field, "case")])
                for baseline in BASELINES
            }
            stated = paper if ours == "fastlibra" else None
            figures.append(Headline(f"{ours}: {what} against both", mean(list(found.values())), stated))
            for baseline, changed in found.items():
                figures.append(Headline(f"{ours}: {what} against {PAPERS_NAMES[baseline]}", changed))
    return figures


def draw(report: Report, path: Path) -> None:
    """Bars by case."""
    panels = (("ttft_mean_ms", "TTFT, ms"), ("tpot_mean_ms", "TPOT, ms"))
    drawing.bars(report, path, panels, group="case", series="policy", is_log=("ttft_mean_ms",))


EXPERIMENT = Experiment(
    "fastlibra-fig16",
    "TTFT and TPOT with 1,000 and 2,000 adapters asked for uniformly, in turn, or skewed",
    ("sim",),
    run,
    draw,
)
