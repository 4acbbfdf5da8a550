"""S-LoRA's Figure 5: throughput and latency by the number of adapters, beside its own variants (§7.2)."""

from __future__ import annotations

from pathlib import Path

from manylora.reproduce import drawing
from manylora.reproduce.experiment import Experiment, Setup
from manylora.reproduce.report import Headline, Report, Row, ratio
from manylora.reproduce.s_lora_cells import NOTES, SYSTEMS, Case
from manylora.reproduce.s_lora_variants import against_variants, variant_rows

Loads = dict[tuple[str, str], tuple[float, tuple[int, ...]]]
LOADS: Loads = {
    ("S2", "a10"): (2.0, (1, 20, 50, 100, 200)),
    ("S4", "a100-40"): (2.0, (1, 20, 50, 100, 200)),
    ("S2", "a100-80"): (10.0, (1, 20, 50, 100, 200)),
    ("S4", "a100-80"): (6.0, (1, 100, 200, 400)),
}
"""Requests a second and numbers of adapters: the authors' suites a10g-, a100-40-, a100-80-S2- and
a100-80-S4-num-adapter."""


def run(setup: Setup) -> Report:
    """The same load for each system, over the number of adapters."""
    few: Loads = {("S2", "a10"): LOADS["S2", "a10"]}
    fewest: Loads = {("S2", "a10"): (2.0, (1, 8))}
    loads = setup.pick(LOADS, few, fewest)
    duration_s = setup.pick(300.0, 200.0, 10.0)
    cases = [
        Case(*place, num_adapters, rate, duration_s, system, seed=setup.seed)
        for place, (rate, numbers) in loads.items()
        for system in SYSTEMS
        for num_adapters in numbers
    ]
    rows = variant_rows(cases, setup)
    settings = {
        "scale": setup.scale, "seed": setup.seed, "duration_s": duration_s, "cv": 1, "alpha": 1,
        "loads": [[*place, *load] for place, load in loads.items()],
    }  # fmt: skip
    headline = [*against_variants(rows, ("throughput_per_s", "latency_mean_s")), *_most_over_fewest(rows)]
    return Report(EXPERIMENT.name, EXPERIMENT.title, settings, rows, headline, NOTES)


def _most_over_fewest(rows: list[Row]) -> list[Headline]:
    """§7.2 says that throughput falls slightly at first and not beyond some 100 adapters; without numbers."""
    figures = []
    for setting in dict.fromkeys(row["setting"] for row in rows):
        mine = [row for row in rows if (row["setting"], row["system"]) == (setting, "s-lora")]
        fewest, most = mine[0], mine[-1]
        name = (
            f"{setting}: s-lora's throughput, {most['num_adapters']} adapters over {fewest['num_adapters']}"
        )
        figures.append(Headline(name, ratio(most["throughput_per_s"], fewest["throughput_per_s"])))
    return figures


def draw(report: Report, path: Path) -> None:
    """Throughput above latency, a column a setting."""
    panels = (("throughput_per_s", "throughput, requests/s"), ("latency_mean_s", "mean latency, s"))
    drawing.grid(report, path, panels, x=("num_adapters", "adapters"), series="system", column="setting")


EXPERIMENT = Experiment(
    "s-lora-fig5",
    "Throughput and latency of S-LoRA and its own variants, by number of adapters",
    ("sim",),
    run,
    draw,
)
