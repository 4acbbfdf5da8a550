"""S-LoRA's Table 3: throughput by the number of adapters, beside PEFT and vLLM with merged copies (§7.2)."""

from __future__ import annotations

from manylora_lab.reproduce.cells import in_parallel
from manylora_lab.reproduce.drawing import BarPanels
from manylora_lab.reproduce.experiment import Experiment, GridResult, Setup
from manylora_lab.reproduce.report import Headline, Row, ratio
from manylora_lab.reproduce.s_lora_baselines import measure_packed, measure_peft
from manylora_lab.reproduce.s_lora_cells import NOTES, ServingCase, measure

SYSTEMS = ("s-lora", "vllm-packed", "peft")
Loads = dict[str, tuple[float, tuple[int, ...]]]
LOADS: Loads = {
    "S1": (10.0, (5, 100, 1000, 2000)),
    "S2": (10.0, (5, 100, 1000, 2000)),
    "S4": (6.0, (2, 100, 1000)),
}
"""Requests a second and numbers of adapters on an A100-80 (recalled; the authors' suites run 2 minutes)."""
PAPER: dict[tuple[str, int], tuple[float | None, ...]] = {
    ("S1", 5): (8.05, 2.04, 0.88), ("S1", 100): (7.99, None, 0.25), ("S1", 1000): (7.64, None, None),
    ("S1", 2000): (7.61, None, None), ("S2", 5): (7.48, 2.04, 0.74), ("S2", 100): (7.29, None, 0.24),
    ("S2", 1000): (6.69, None, None), ("S2", 2000): (6.71, None, None), ("S4", 2): (4.49, 3.83, 0.54),
    ("S4", 100): (4.28, None, 0.13), ("S4", 1000): (3.96, None, None),
}  # fmt: skip
"""Requests a second of SYSTEMS; recalled (the table is lost in the text at hand). None: out of memory, or not
there."""
MOST_PEFT_ADAPTERS = 100
"""The table has no PEFT beyond."""
OVER_PACKED, OVER_PEFT = 4.0, 30.0
"""§7.2: up to so many times the throughput of vLLM-packed and of PEFT."""


def run(setup: Setup) -> GridResult:
    """Simulates as the paper did; measures on a CPU with the demo model and the real PEFT."""
    if setup.device == "cpu":
        # Brings torch, transformers and PEFT.
        from manylora_lab.reproduce.s_lora_cpu import measure_all

        rows, settings, notes = measure_all(setup)
    else:
        rows, settings, notes = _simulated(setup)
    settings = {"scale": setup.scale, "seed": setup.seed, "device": setup.device, **settings}
    return GridResult(settings, rows, _headline(rows, setup.device == "sim"), notes)


def _simulated(setup: Setup) -> tuple[list[Row], dict[str, object], tuple[str, ...]]:
    few: Loads = {"S1": (10.0, (5, 100)), "S4": (6.0, (2,))}
    fewest: Loads = {"S1": (10.0, (5,))}
    loads = setup.pick(LOADS, few, fewest)
    duration_s = setup.pick(120.0, 120.0, 5.0)
    cases = [
        ServingCase(setting, "a100-80", num_adapters, rate, duration_s, system, seed=setup.seed)
        for setting, (rate, numbers) in loads.items()
        for num_adapters in numbers
        for system in SYSTEMS
    ]
    results = in_parallel(
        _measure, {case: case for case in cases}, setup.num_workers, setup.show, "simulations done"
    )
    rows: list[Row] = [
        {
            "case": f"{case.setting}, {case.num_adapters}", "system": case.system,
            "num_adapters": case.num_adapters, **(result or {"throughput_per_s": None}),
        }
        for case, result in results.items()
    ]  # fmt: skip
    settings = {
        "hardware": "a100-80",
        "duration_s": duration_s,
        "loads": {k: list(v) for k, v in loads.items()},
    }
    notes = (
        *NOTES[:3],
        "vllm-packed: an engine of its own for each adapter with merged weights, an equal share of 95 % of the "
        "memory and an ideal share of the card's rates, no LoRA; null where a copy and one request do not fit.",
        "peft: as the authors' run_exp_peft.py: batches of one adapter, padded, at most 50 (7B) or 35 (13B) "
        "requests; 80 ms a step beside the device's work, fitted to their result for S1 with 5 adapters.",
        "The simulated card is not filled by 10 requests a second of S1 and S2: s-lora then serves what comes.",
        "The paper's values are recalled; those of S-LoRA for S1 and S2 agree with the authors' result files.",
    )
    return rows, settings, notes


def _measure(case: ServingCase) -> Row | None:
    if case.system == "vllm-packed":
        return measure_packed(case)
    if case.system == "peft":
        return measure_peft(case) if case.num_adapters <= MOST_PEFT_ADAPTERS else None
    return measure(case)


def _headline(rows: list[Row], is_papers: bool) -> list[Headline]:
    by_case: dict[str, dict[str, float | None]] = {}
    for row in rows:
        by_case.setdefault(row["case"], {})[row["system"]] = row["throughput_per_s"]
    figures = []
    for other, stated in (("vllm-packed", OVER_PACKED), ("peft", OVER_PEFT)):
        ratios = [ratio(found["s-lora"], found[other]) for found in by_case.values()]
        there = [value for value in ratios if value is not None]
        figures.append(
            Headline(f"most throughput of s-lora over {other}'s", max(there, default=None), stated)
        )
    for case, found in by_case.items():
        papers: tuple[float | None, ...] = (None,) * len(SYSTEMS)
        if is_papers:
            setting, _, number = case.partition(", ")
            papers = PAPER.get((setting, int(number)), papers)
        for system, paper in zip(SYSTEMS, papers, strict=True):
            if found[system] is not None or paper is not None:
                name = f"{case} adapters: requests/s of {system}"
                figures.append(Headline(name, found[system], paper, is_recalled=paper is not None))
    return figures


TABLE3 = Experiment(
    "s-lora-table3",
    "Throughput by number of adapters, beside PEFT and merged copies",
    "S-LoRA, Table 3 (§7.2)",
    run,
    # No bar: out of memory, or not run.
    BarPanels((("throughput_per_s", "throughput, requests/s"),), group="case", series="system"),
    devices=("cpu", "sim"),
)
