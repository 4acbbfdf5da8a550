"""FastLibra's Figure 9: the time to the first token of its vLLM by the share of memory for adapters (§5.1)."""

from __future__ import annotations

from pathlib import Path

from manylora.reproduce import drawing
from manylora.reproduce.cells import REFERENCE, Cell, run_cells
from manylora.reproduce.experiment import Experiment, Setup
from manylora.reproduce.fastlibra_grid import SIMULATION_NOTES, WARM_NOTE
from manylora.reproduce.report import Headline, Report, Row, ratio

RATE = 2.0
ADAPTERS = (50, 100)
"""§5.1, both."""
ENOUGH = 1.05
"""A share is enough when its TTFT is within 5 % of the best."""
FIELDS = ("ttft_mean_ms", "ttft_queue_ms", "ttft_adapter_ms", "ttft_kv_ms", "adapter_hit_device")
NOTES = (
    *SIMULATION_NOTES,
    WARM_NOTE,
    "The model is the 7B one (the paper names none here). A share is called enough, the paper's target ratio, "
    "when its mean TTFT is within 5 % of the best (our criterion).",
)


def run(setup: Setup) -> Report:
    """``static-lru`` under the same arrivals with each share."""
    shares = setup.pick(
        (0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
        (0.02, 0.04, 0.08, 0.12, 0.2, 0.3, 0.5, 0.8),
        (0.04, 0.2),
    )
    duration_s = setup.pick(1800.0, 60.0, 4.0)
    cells = {
        (num, share): Cell(
            "chatbot", "static-lru", RATE, num, duration_s, adapter_share=share, seed=setup.seed
        )
        for num in ADAPTERS
        for share in shares
    }  # fmt: skip
    cached = {num: Cell("chatbot", REFERENCE, RATE, num, duration_s, seed=setup.seed) for num in ADAPTERS}
    results = run_cells([*cells.values(), *cached.values()], setup.num_workers, setup.show)
    rows: list[Row] = [
        {
            "adapters": f"{num} adapters", "share": share,
            **{field: results[cell][field] for field in FIELDS},
        }
        for (num, share), cell in cells.items()
    ]  # fmt: skip
    headline = _headline(rows) + [
        Headline(
            f"{num} adapters: mean TTFT with all cached (a reference), ms", results[cell]["ttft_mean_ms"]
        )
        for num, cell in cached.items()
    ]
    settings = {
        "scale": setup.scale, "seed": setup.seed, "rate": RATE, "duration_s": duration_s, "model": "llama-2-7b",
        "hardware": "fastlibra-npu",
    }  # fmt: skip
    return Report(EXPERIMENT.name, EXPERIMENT.title, settings, rows, headline, NOTES)


def _headline(rows: list[Row]) -> list[Headline]:
    """The paper shows its target ratios in the picture alone."""
    figures = []
    for num in ADAPTERS:
        mine = [row for row in rows if row["adapters"] == f"{num} adapters"]
        best_ms = min(row["ttft_mean_ms"] for row in mine)
        enough = next(row["share"] for row in mine if row["ttft_mean_ms"] <= ENOUGH * best_ms)
        figures.append(Headline(f"{num} adapters: least share that is enough", enough))
        least = ratio(mine[0]["ttft_mean_ms"], best_ms)
        figures.append(Headline(f"{num} adapters: TTFT at the least share over the best", least))
    return figures


def draw(report: Report, path: Path) -> None:
    """A line for each number of adapters."""
    drawing.lines(
        report, path, (("ttft_mean_ms", "TTFT, ms"),), x=("share", "share of memory for adapters"),
        series="adapters", is_log=("ttft_mean_ms",),
    )  # fmt: skip


EXPERIMENT = Experiment(
    "fastlibra-fig9",
    "TTFT of vLLM (static-lru) over the share of memory that adapters get, chatbot",
    ("sim",),
    run,
    draw,
)
