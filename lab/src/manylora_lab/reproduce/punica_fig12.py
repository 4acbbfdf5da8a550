"""Punica's Figure 12 (§7.2): text generation of a 70B model that eight cards share by tensor parallelism."""

from __future__ import annotations

import dataclasses

from manylora.config.sections import LoraSharding
from manylora_lab.bench.closed_loop import LoopResult
from manylora_lab.bench.kernels.settings import POPULARITIES
from manylora_lab.pricing.shapes import shape_named
from manylora_lab.reproduce.cells import PAGE_TOKENS, in_parallel
from manylora_lab.reproduce.drawing import BarPanels
from manylora_lab.reproduce.experiment import Experiment, GridResult, Setup
from manylora_lab.reproduce.punica_fig11 import AT_ONCE, BACKBONE, MIXED, SINGLE, gated, simulated
from manylora_lab.reproduce.punica_workload import LENGTHS_NOTE, RANK, text_requests
from manylora_lab.reproduce.report import Headline, Row, ratio
from manylora_lab.sim.hardware import HARDWARE
from manylora_lab.sim.parallel import ParallelCosts, adapter_pages

MODEL, HARDWARE_NAME, CARDS = "llama-2-70b", "a100-40", 8
SHARDED = "mixed adapters, sharded"
SYSTEMS = (MIXED, SHARDED, SINGLE, BACKBONE)
PAPER_MIXED = (441.0, 446.0)
"""§7.2: tokens per second of Punica, whatever the popularity."""
PAPER_SINGLE = (21.0, 25.0)
"""§7.2: vLLM, "in the presence of multiple LoRA models"."""
PAPER_BACKBONE = 457.0
"""§7.2: vLLM, backbone only."""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorParallelRun:
    """One bar, of the workload's first ``num_requests``."""

    popularity: str
    system: str
    total: int
    num_requests: int
    seed: int


def simulate(run: TensorParallelRun) -> LoopResult:
    """Equal runs give equal results."""
    shape, card = shape_named(MODEL), HARDWARE[HARDWARE_NAME]
    sharding: LoraSharding = "sharded" if run.system == SHARDED else "replicated"
    modules = tuple(shape.modules)
    costs = ParallelCosts(shape, card, CARDS, modules, sharding)
    requests = text_requests(run.popularity, run.total, run.seed)[: run.num_requests]
    gate, loop = gated(requests, run.system in (MIXED, SHARDED), run.system == BACKBONE)
    return simulated(costs, gate, loop, adapter_pages(shape, CARDS, sharding, RANK, PAGE_TOKENS, modules))


def _grid(setup: Setup) -> GridResult:
    total, slow = setup.pick((1000, 200), (100, 30), (12, 6))
    runs = [
        TensorParallelRun(
            popularity, system, total,
            total if system in (MIXED, SHARDED) or popularity == "identical" else slow, setup.seed,
        )
        for popularity in POPULARITIES
        for system in SYSTEMS
    ]  # fmt: skip
    found = in_parallel(simulate, {run: run for run in runs}, setup.num_workers, setup.show, "runs done")
    rows: list[Row] = [
        {
            "popularity": run.popularity, "system": run.system, "requests": run.num_requests,
            "tokens_per_s": result.output_tokens / result.duration_s,
            "mean_batch": result.output_tokens / result.num_steps,
            "output_tokens": result.output_tokens, "duration_s": result.duration_s,
        }
        for run, result in found.items()
    ]  # fmt: skip
    link = HARDWARE[HARDWARE_NAME].interconnect
    settings = {
        "scale": setup.scale, "seed": setup.seed, "model": MODEL, "hardware": f"{CARDS} x {HARDWARE_NAME}",
        "link": None if link is None else link.name, "at_once": AT_ONCE, "rank": RANK, "requests": total,
    }  # fmt: skip
    return GridResult(settings, rows)


def _headline(rows: list[Row]) -> list[Headline]:
    at = {(row["popularity"], row["system"]): row["tokens_per_s"] for row in rows}
    mixed = [at[popularity, MIXED] for popularity in POPULARITIES]
    single = [at[popularity, SINGLE] for popularity in POPULARITIES if popularity != "identical"]
    return [
        Headline("tokens/s, mixed adapters, least of popularities", min(mixed), PAPER_MIXED[0]),
        Headline("tokens/s, mixed adapters, most of popularities", max(mixed), PAPER_MIXED[1]),
        Headline("tokens/s, backbone alone, identical", at["identical", BACKBONE], PAPER_BACKBONE),
        Headline(
            "mixed adapters over backbone alone, identical",
            ratio(at["identical", MIXED], at["identical", BACKBONE]), ratio(PAPER_MIXED[1], PAPER_BACKBONE),
        ),
        Headline("tokens/s, one adapter a batch, least but for identical", min(single), PAPER_SINGLE[0]),
        Headline("tokens/s, one adapter a batch, most but for identical", max(single), PAPER_SINGLE[1]),
        *(
            Headline(f"sharded over replicated, {each}", ratio(at[each, SHARDED], at[each, MIXED]))
            for each in POPULARITIES
        ),
    ]  # fmt: skip


FIG12 = Experiment(
    "punica-fig12",
    "Text generation of a 70B model on eight cards, by popularity",
    "Punica, Figure 12 (§7.2)",
    _grid,
    BarPanels((("tokens_per_s", "tokens/s"),), group="popularity", series="system"),
    (_headline,),
    (
        "Simulated: the engine's own policy on eight A100-40 of assumed costs that exchange over an assumed link "
        "(manylora_lab.sim.parallel). Not measured on any GPU. Levels are an eager engine's of today, not of the "
        "paper's: 446 tokens a second at 32 rows are 72 ms a step, five times what the weights' bytes take.",
        "The gate before the engine is punica-fig11's. Mixed adapters replicate one side, as Punica does; sharded "
        "is S-LoRA's partition, beside. One adapter a batch stands for the paper's vLLM.",
        LENGTHS_NOTE,
    ),
)
