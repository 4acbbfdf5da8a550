"""FastLibra's Figure 14: what the device's memory holds over time, while the load rises and falls (§6.5)."""

from __future__ import annotations

from pathlib import Path

from manylora.reproduce import drawing
from manylora.reproduce.cells import Cell, CellResult, run_cells
from manylora.reproduce.experiment import Experiment, Setup
from manylora.reproduce.fastlibra_grid import SIMULATION_NOTES, WARM_NOTE
from manylora.reproduce.report import Headline, Report, Row, mean

RATE = 1.6
NUM_ADAPTERS = 100
MODEL, CARDS = "llama-2-13b", 2
"""§6.5 and, for the cards, §6.1."""
POLICIES = ("fastlibra", "manylora", "static-lru", "s-lora")
HALF_HOUR_S = 1800.0
PERIODS_S = ((0, 400), (400, 900), (900, 1300), (1300, 1800))
"""§6.5, of the half hour."""
PAPER_STATIC_KV = 0.8
"""§6.5: vLLM's KV part is exhausted "to its maximum capacity (80%)" from 900 to 1300 s."""
NOTES = (
    *SIMULATION_NOTES,
    WARM_NOTE,
    "The load: the paper speaks of low pressure at first, a rate that rises from 400 s on, pressure from 900 to "
    "1300 s, and less after. Here a Poisson process whose rate climbs from 0 to twice the mean at half time and "
    "falls again, both linearly.",
    "Shorter runs have the same periods as shares of their time.",
)


def run(setup: Setup) -> Report:
    """The same arrivals under each policy; samples every minute's sixth, or a sixtieth of a shorter run."""
    duration_s = setup.pick(HALF_HOUR_S, 90.0, 5.0)
    step_s = setup.pick(10.0, duration_s / 60, duration_s / 20)
    cells = {
        policy: Cell(
            "chatbot", policy, RATE, NUM_ADAPTERS, duration_s, model=MODEL, cards=CARDS, arrivals="ramp",
            seed=setup.seed, sample_s=step_s,
        )
        for policy in POLICIES
    }  # fmt: skip
    results = run_cells(cells.values(), setup.num_workers, setup.show)
    rows: list[Row] = [
        {
            "policy": policy,
            **{
                name: round(sample[name], 4) for name in ("at_s", "running", "adapters", "history", "waiting")
            },
        }
        for policy, cell in cells.items()
        for sample in results[cell]["samples"]
    ]
    headline = []
    for policy, cell in cells.items():
        headline += _headline(policy, rows, results[cell], duration_s / HALF_HOUR_S)
    settings = {
        "scale": setup.scale, "seed": setup.seed, "rate": RATE, "duration_s": duration_s, "arrivals": "ramp",
        "model": MODEL, "cards": CARDS, "adapters": NUM_ADAPTERS, "hardware": "fastlibra-npu",
    }  # fmt: skip
    return Report(EXPERIMENT.name, EXPERIMENT.title, settings, rows, headline, NOTES)


def _headline(policy: str, rows: list[Row], result: CellResult, scale: float) -> list[Headline]:
    """Use in the periods that the paper speaks of, and TTFT in each."""
    mine = [row for row in rows if row["policy"] == policy]
    periods = [
        [row for row in mine if begin * scale <= row["at_s"] < end * scale] for begin, end in PERIODS_S
    ]
    most_kv = max((row["running"] + row["history"] for row in periods[2]), default=None)
    figures = [
        Headline(f"{policy}: LoRA, share of memory, 0-400 s", mean([row["adapters"] for row in periods[0]])),
        Headline(f"{policy}: history, share of memory, 400-900 s", mean([row["history"] for row in periods[1]])),
        Headline(
            f"{policy}: KV at most, share of memory, 900-1300 s", most_kv,
            PAPER_STATIC_KV if policy == "static-lru" else None,
        ),
    ]  # fmt: skip
    for begin, end in PERIODS_S:
        ttft = [ms for at_s, ms in result["ttft_over_time"] if begin * scale <= at_s < end * scale]
        figures.append(Headline(f"{policy}: TTFT, ms, {begin}-{end} s", mean(list(ttft))))
    return figures


def draw(report: Report, path: Path) -> None:
    """A panel for each policy, areas upon one another."""
    parts = (("running", "running KV"), ("adapters", "LoRA"), ("history", "history KV"))
    drawing.stacked(report, path, parts, x=("at_s", "time, s"), panel="policy", unit="share of the pool")


EXPERIMENT = Experiment(
    "fastlibra-fig14",
    "device memory by use over time, load rising and falling, chatbot, 13B, 100 adapters",
    ("sim",),
    run,
    draw,
)
