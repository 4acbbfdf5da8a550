"""FastLibra's Figure 4: use of the LoRA and the KV part of its vLLM's memory over time, translation (§2.3.2)."""

from __future__ import annotations

from pathlib import Path

from manylora.reproduce import drawing
from manylora.reproduce.cells import Cell, cell_stream
from manylora.reproduce.experiment import Experiment, Setup
from manylora.reproduce.fastlibra_vllm import ADAPTER_SHARE, NOTES, settings, watch, watched_cells
from manylora.reproduce.report import Headline, Report, Row, mean

SCENARIO = "translation"
PAPER_LORA_USE = 0.589
"""§2.3.2: of the LoRA part from 700 to 1100 s."""
PAPER_ASKED = (41, 75)
"""§2.3.2: adapters asked for before 1100 s, and after."""
KV_PRESSURE = (700 / 1800, 1100 / 1800)
"""As shares of the half hour, for shorter runs."""


def run(setup: Setup) -> Report:
    """The translation run of Figure 2."""
    cells = watched_cells(setup, (SCENARIO,))
    result = watch(setup, cells)[SCENARIO]
    rows: list[Row] = [
        {
            "scenario": SCENARIO, "at_s": sample["at_s"],
            "lora_use": round(sample["adapters"] / ADAPTER_SHARE, 4),
            "kv_use": round((sample["running"] + sample["history"]) / (1 - ADAPTER_SHARE), 4),
            "running_kv_use": round(sample["running"] / (1 - ADAPTER_SHARE), 4),
            "running_adapters": sample["running_adapters"],
        }
        for sample in result["samples"]
    ]  # fmt: skip
    notes = (
        *NOTES,
        "The paper's periods (700 to 1100 s, 1100 to 1800 s) as shares of the run's time.",
        "KV in use: of running requests, and history.",
    )
    headline = _headline(rows, cells[SCENARIO])
    return Report(EXPERIMENT.name, EXPERIMENT.title, settings(setup, cells), rows, headline, notes)


def _headline(rows: list[Row], cell: Cell) -> list[Headline]:
    begin_s, end_s = (share * cell.duration_s for share in KV_PRESSURE)
    during = [row for row in rows if begin_s <= row["at_s"] < end_s]
    after = [row for row in rows if end_s <= row["at_s"] < cell.duration_s]
    requests = cell_stream(cell).requests
    asked_before = {request.adapter for request in requests if request.arrival_s < end_s}
    asked_after = {request.adapter for request in requests if request.arrival_s >= end_s}
    return [
        Headline("LoRA part in use, 700-1100 s", mean([row["lora_use"] for row in during]), PAPER_LORA_USE),
        Headline("KV part in use, 700-1100 s", mean([row["kv_use"] for row in during])),
        Headline("LoRA part in use, 1100-1800 s", mean([row["lora_use"] for row in after])),
        Headline("KV part in use, 1100-1800 s", mean([row["kv_use"] for row in after])),
        Headline("adapters asked for before 1100 s", len(asked_before), PAPER_ASKED[0]),
        Headline("adapters asked for after 1100 s", len(asked_after), PAPER_ASKED[1]),
    ]


def draw(report: Report, path: Path) -> None:
    """Both parts' use over time."""
    drawing.curves(
        report, path,
        (("lora_use", "LoRA part"), ("kv_use", "KV part"), ("running_kv_use", "KV part, running requests alone")),
        x=("at_s", "time, s"), panel="scenario", y="share in use",
    )  # fmt: skip


EXPERIMENT = Experiment(
    "fastlibra-fig4",
    "use of the LoRA and the KV part of vLLM's memory (static-lru) over time, translation",
    ("sim",),
    run,
    draw,
)
