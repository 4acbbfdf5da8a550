"""S-LoRA's Figure 6: throughput, first-token latency and attainment by rate, beside its own variants (§7.2)."""

from __future__ import annotations

from pathlib import Path

from manylora.reproduce import drawing
from manylora.reproduce.experiment import Experiment, Setup
from manylora.reproduce.report import Report
from manylora.reproduce.s_lora_cells import NOTES, SYSTEMS, Case
from manylora.reproduce.s_lora_variants import against_variants, variant_rows

Loads = dict[tuple[str, str], tuple[int, tuple[float, ...]]]
LOADS: Loads = {
    ("S2", "a10"): (200, (1.0, 1.5, 2.0, 2.5)),
    ("S4", "a100-80"): (400, (1.0, 2.0, 4.0, 6.0, 8.0)),
}
"""Adapters and requests a second: the authors' suites a10g-req-rate and a100-80-S4-req-rate."""


def run(setup: Setup) -> Report:
    """The same load for each system, over the rate."""
    few: Loads = {("S2", "a10"): LOADS["S2", "a10"]}
    fewest: Loads = {("S2", "a10"): (8, (1.0, 4.0))}
    loads = setup.pick(LOADS, few, fewest)
    duration_s = setup.pick(300.0, 200.0, 8.0)
    cases = [
        Case(*place, num_adapters, rate, duration_s, system, seed=setup.seed)
        for place, (num_adapters, rates) in loads.items()
        for system in SYSTEMS
        for rate in rates
    ]
    rows = variant_rows(cases, setup)
    settings = {
        "scale": setup.scale, "seed": setup.seed, "duration_s": duration_s, "cv": 1, "alpha": 1,
        "loads": [[*place, *load] for place, load in loads.items()],
    }  # fmt: skip
    headline = against_variants(rows, ("throughput_per_s", "ttft_mean_s", "attainment"))
    return Report(EXPERIMENT.name, EXPERIMENT.title, settings, rows, headline, NOTES)


def draw(report: Report, path: Path) -> None:
    """Throughput, time to the first token and attainment, a column a setting."""
    panels = (
        ("throughput_per_s", "throughput, requests/s"),
        ("ttft_mean_s", "mean TTFT, s"),
        ("attainment", "SLO attainment"),
    )
    drawing.grid(report, path, panels, x=("rate_per_s", "requests/s"), series="system", column="setting")


EXPERIMENT = Experiment(
    "s-lora-fig6",
    "Throughput, TTFT and attainment of S-LoRA and its own variants, by request rate",
    ("sim",),
    run,
    draw,
)
