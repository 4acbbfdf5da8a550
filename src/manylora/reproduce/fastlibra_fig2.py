"""FastLibra's Figure 2: the time to the first token of its vLLM over time, in the three scenarios (§2.2)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from manylora.reproduce import drawing
from manylora.reproduce.cells import REFERENCE
from manylora.reproduce.experiment import Experiment, Setup
from manylora.reproduce.fastlibra_grid import SCENARIOS
from manylora.reproduce.fastlibra_vllm import NOTES, settings, watch, watched_cells
from manylora.reproduce.report import Headline, Report, Row

PAPER_TTFT_MS = {"chatbot": 1032.4, "translation": 1905.1, "agent": 730.8}
"""§2.2: "the TTFT of the three benchmarks ... on average", in the order in which it names them."""
PAPER_WORST_MS = {(700, 1100): 5036.1, (1100, 1800): 8617.9}
"""§2.3.2, translation: it "increases up to", in these seconds of the half hour."""
HALF_HOUR_S = 1800.0


def run(setup: Setup) -> Report:
    """Each scenario once, in windows of a sixtieth of its time."""
    cells = watched_cells(setup, SCENARIOS)
    results = watch(setup, cells)
    rows: list[Row] = [
        {"scenario": scenario, "at_s": at_s, "ttft_mean_ms": ttft_ms}
        for scenario, result in results.items()
        for at_s, ttft_ms in result["ttft_over_time"]
    ]
    # Warmed or not is one to the reference, whose adapters are all there.
    cached = {scenario: dataclasses.replace(cell, policy=REFERENCE) for scenario, cell in cells.items()}
    references = watch(setup, cached)
    headline = []
    for scenario, result in results.items():
        most = max(ttft_ms for _, ttft_ms in result["ttft_over_time"])
        headline.append(
            Headline(f"{scenario}: mean TTFT, ms", result["ttft_mean_ms"], PAPER_TTFT_MS[scenario])
        )
        for name, part in (("queue", "queue"), ("LoRA cold start", "adapter"), ("KV cold start", "kv")):
            headline.append(Headline(f"{scenario}: of it {name}, ms", result[f"ttft_{part}_ms"]))
        headline.append(Headline(f"{scenario}: TTFT in the worst window, ms", round(most, 1)))
        reference_ms = references[scenario]["ttft_mean_ms"]
        headline.append(Headline(f"{scenario}: mean TTFT with all cached (a reference), ms", reference_ms))
    scale = cells["translation"].duration_s / HALF_HOUR_S
    for (begin, end), paper_ms in PAPER_WORST_MS.items():
        windows = results["translation"]["ttft_over_time"]
        during = [ttft_ms for at_s, ttft_ms in windows if begin * scale <= at_s < end * scale]
        name = f"translation: TTFT in the worst window, {begin}-{end} s, ms"
        headline.append(Headline(name, round(max(during), 1) if during else None, paper_ms))
    notes = (*NOTES, "The paper's periods (700 to 1100 s, 1100 to 1800 s) as shares of the run's time.")
    return Report(EXPERIMENT.name, EXPERIMENT.title, settings(setup, cells), rows, headline, notes)


def draw(report: Report, path: Path) -> None:
    """A panel for each scenario, over the time of arrival."""
    drawing.curves(
        report, path, (("ttft_mean_ms", "TTFT"),), x=("at_s", "time, s"), panel="scenario", y="TTFT, ms"
    )


EXPERIMENT = Experiment(
    "fastlibra-fig2",
    "TTFT over time of vLLM with static parts for LoRA and KV (static-lru), in three scenarios",
    ("sim",),
    run,
    draw,
)
