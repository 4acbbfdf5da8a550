"""FastLibra's Figure 12: the parts of the time to the first token, by scenario (§6.4)."""

from __future__ import annotations

from pathlib import Path

from manylora.reproduce import drawing
from manylora.reproduce.experiment import Experiment, Setup
from manylora.reproduce.fastlibra_grid import (
    BASELINES,
    NOTES,
    PAPERS_NAMES,
    SHOWN,
    cases,
    pairs,
    run_grid,
    scenario_rows,
)
from manylora.reproduce.report import Headline, Report, Row, change, mean

PARTS = {"queue": "queue", "adapter": "LoRA cold start", "kv": "KV cold start", "steps": "steps"}
"""The paper's three, and what is left."""


def run(setup: Setup) -> Report:
    """The grid of Figure 11; means over rates, models and numbers of adapters."""
    grid = run_grid(setup, cases(setup), SHOWN)
    fields = {f"{part}_ms": f"ttft_{part}_ms" for part in PARTS}
    rows = scenario_rows(grid, SHOWN, {**fields, "ttft_ms": "ttft_mean_ms"})
    notes = (*NOTES, "steps: the rest of TTFT, which the paper does not show.")
    return Report(EXPERIMENT.name, EXPERIMENT.title, grid.settings(setup), rows, _headline(rows), notes)


def _headline(rows: list[Row]) -> list[Headline]:
    """The paper gives no numbers here: "the lowest in all scenarios"."""
    figures = []
    for ours in ("fastlibra", "manylora"):
        for baseline in BASELINES:
            for part in ("queue", "adapter", "kv"):
                # Means first: in one scenario a part can be next to nothing.
                compared = pairs(rows, ours, baseline, f"{part}_ms", "scenario")
                found = change(mean([a for a, _ in compared]), mean([b for _, b in compared]))
                figures.append(Headline(f"{ours}: {PARTS[part]} against {PAPERS_NAMES[baseline]}", found))
    return figures


def draw(report: Report, path: Path) -> None:
    """Bars of parts, a panel for each scenario."""
    parts = [(f"{part}_ms", label) for part, label in PARTS.items()]
    drawing.stacked_bars(report, path, parts, group="scenario", series="policy", unit="ms")


EXPERIMENT = Experiment(
    "fastlibra-fig12",
    "parts of TTFT (queue, LoRA cold start, KV cold start) of the cache policies, by scenario",
    ("sim",),
    run,
    draw,
)
