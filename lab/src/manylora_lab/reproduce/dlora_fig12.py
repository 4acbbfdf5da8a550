"""dLoRA's Figure 12: throughput over the number of adapters, at one rate (§7.5)."""

from __future__ import annotations

from manylora_lab.reproduce.dlora_cells import CLUSTER_NOTES, FUNCTIONS, SKEWNESS, DloraCase, measure
from manylora_lab.reproduce.drawing import Lines
from manylora_lab.reproduce.experiment import Experiment, GridResult, Setup
from manylora_lab.reproduce.parts import run_cases
from manylora_lab.reproduce.report import Headline, Row, ratio

SYSTEMS = ("dlora", "manylora", "peft", "vllm-uniform")
REPLICAS, REPLICA_RATE = 8, 6.0
PAPER_FALLS = {"vllm-uniform": 3.0, "peft": 1.5}
"""§7.5: how many times less throughput at the most adapters than at the fewest."""


def _grid(setup: Setup) -> GridResult:
    counts = setup.pick((8, 16, 32, 64, 128), (8, 32, 128), (4, 16))
    duration_s, replicas = setup.pick(60.0, 15.0, 3.0), setup.pick(REPLICAS, 2, 2)
    cases = [
        DloraCase(system, count, replicas * REPLICA_RATE, duration_s, replicas, setup.seed)
        for system in SYSTEMS
        for count in counts
    ]
    rows: list[Row] = [
        {"system": case.system, "num_adapters": case.num_adapters, **row}
        for case, row in run_cases(measure, cases, setup).items()
    ]
    settings = {
        "scale": setup.scale, "seed": setup.seed, "replicas": replicas, "duration_s": duration_s,
        "rate_per_s": replicas * REPLICA_RATE, "num_adapters": list(counts), "functions": FUNCTIONS,
        "skewness": SKEWNESS,
    }  # fmt: skip
    return GridResult(settings, rows)


def _falls(rows: list[Row]) -> list[Headline]:
    figures = []
    for system in dict.fromkeys(row["system"] for row in rows):
        mine = [row for row in rows if row["system"] == system]
        few, many = (pick(mine, key=lambda row: row["num_adapters"]) for pick in (min, max))
        fall = ratio(few["done_per_s"], many["done_per_s"])
        what = (
            f"{system}: throughput with {few['num_adapters']} adapters over that with {many['num_adapters']}"
        )
        figures.append(Headline(what, fall, PAPER_FALLS.get(system)))
    return figures


FIG12 = Experiment(
    "dlora-fig12",
    "Throughput over the number of adapters, at one rate",
    "dLoRA, Figure 12 (§7.5)",
    _grid,
    Lines(("num_adapters", "adapters"), ("done_per_s", "requests done a second"), "system"),
    (_falls,),
    (
        *CLUSTER_NOTES,
        "Throughput: requests until the last has ended, so a system that falls behind is measured by its "
        "backlog. The paper prints neither the rate nor the number of GPUs; 8 replicas at 6 requests a second "
        "each are ours.",
    ),
    is_stored=True,
)
