"""Punica's Figure 8: the batched LoRA operator against Loop, Gather-BMM and its two parts (§7.1)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from manylora_lab.bench.kernels.settings import POPULARITIES, model_counts
from manylora_lab.reproduce.drawing import LinePanels
from manylora_lab.reproduce.experiment import Experiment, GridResult, Setup
from manylora_lab.reproduce.punica_workload import RANK
from manylora_lab.reproduce.report import Headline, Row, ratio

if TYPE_CHECKING:
    from manylora_lab.reproduce.lora_rig import LoraBatch, LoraRig

SIZES = (4096, 11008)
"""The operator's input and output size, which the text does not state: the published
benchmarks/bench_lora_op_impls.py has these."""
OPERATORS = ("sgmv", "loop", "gather-bmm", "gather", "bmm")
PAPER_US = {"distinct": 116.0, "uniform": 46.0, "skewed": 46.0, "identical": 40.0}
"""§7.1: SGMV at the largest batch; 37 us at batch 1."""
PAPER_ONE_US = 37.0
NOTES = (
    "The paper states times alone, 37 us at batch 1 and 116, 46, 46 and 40 us at 64 (distinct, uniform, skewed, "
    "identical): 3.1, 1.2, 1.2 and 1.1 times.",
    "sgmv: the engine's kernels, which read adapters from scattered pages. The others get the same adapters as "
    "dense tensors, laid out beforehand at no cost to them.",
    "gather copies each input's matrices (reads n models, writes one per input); gather-bmm is gather and bmm one "
    "after the other; gather and bmm alone are no whole operators and only there for reference, as in the paper. "
    "weight_bytes: what each moves of weights, copies included.",
    "Input and output size from the published benchmark; the text names none.",
    "On CUDA: device time of captured launches with cold caches, so that loop is spared the launches that the "
    "paper's timing counts. On a CPU: wall time of one thread, warm caches; its kernels first copy adapters out "
    "of their pages, which loop need not, and a core is busy at batch 1 already, which the paper's GPU is not.",
)


def run(setup: Setup) -> GridResult:
    """All operators on one batch in turn, batch by batch."""
    from manylora_lab.reproduce.lora_rig import LoraRig

    batches = setup.pick((1, 2, 4, 8, 16, 24, 32, 48, 64), (1, 4, 16, 64), (1, 8))
    (h1, h2), repeats = setup.pick((SIZES, 100), (SIZES, 15), ((256, 688), 3))
    rig = LoraRig(setup.device, h1, h2, batches[-1], RANK)
    rows: list[Row] = []
    for popularity in POPULARITIES:
        for batch in batches:
            rows += _rows(rig, popularity, batch, repeats)
            setup.show(f"{len(rows)} of {len(POPULARITIES) * len(batches) * len(OPERATORS)} timed")
    settings = {
        "scale": setup.scale, "device": setup.device, "h1": h1, "h2": h2, "rank": RANK, "repeats": repeats,
        **rig.description,
    }  # fmt: skip
    headline = _headline(rows, setup.device == "cuda")
    return GridResult(settings, rows, headline)


def _rows(rig: LoraRig, popularity: str, batch: int, repeats: int) -> list[Row]:
    from manylora_lab.reproduce.lora_operators import weight_elements

    case = rig.case(model_counts(popularity, batch), RANK)
    found = rig.seconds([step_of(rig, case, operator) for operator in OPERATORS], repeats)
    per_model = RANK * (rig.h1 + rig.h2)
    return [
        {
            "popularity": popularity, "batch": batch, "models": len(case.counts), "operator": operator,
            "us": seconds * 1e6,
            "weight_bytes": weight_elements(operator, case.counts, per_model) * rig.dtype.itemsize,
        }
        for operator, seconds in zip(OPERATORS, found, strict=True)
    ]  # fmt: skip


def step_of(rig: LoraRig, case: LoraBatch, operator: str) -> Callable[[], object]:
    """What to time: the operator on every layer of the rig."""
    import torch

    from manylora_lab.reproduce import lora_operators as operators

    if operator == "sgmv":
        return rig.sgmv(case)
    dense = [rig.dense(case, layer) for layer in range(rig.layers)]
    counts = torch.tensor(case.counts, device=rig.device)
    models = torch.repeat_interleave(torch.arange(len(case.counts), device=rig.device), counts)
    call: Callable[..., object]
    match operator:
        case "loop":
            call = functools.partial(operators.loop, counts=case.counts)
        case "gather-bmm":
            call = functools.partial(operators.gather_bmm, models=models)
        case "gather":
            call = functools.partial(_gather, models=models)
        case _:
            dense = [operators.gather(a, b, models) for a, b in dense]
            call = operators.bmm

    def step() -> None:
        for a, b in dense:
            call(case.y, case.x, a, b)

    return step


def _gather(y: object, x: object, a: Any, b: Any, models: Any) -> None:
    from manylora_lab.reproduce.lora_operators import gather

    gather(a, b, models)


def _headline(rows: list[Row], is_gpu: bool) -> list[Headline]:
    """Growth from batch 1 to the largest; absolute times beside the paper's only where a GPU ran."""
    at = {(row["popularity"], row["batch"], row["operator"]): row["us"] for row in rows}
    last = rows[-1]["batch"]
    figures = []
    for popularity in POPULARITIES:
        one, many = at[popularity, 1, "sgmv"], at[popularity, last, "sgmv"]
        stated = PAPER_US[popularity] if last == 64 else None
        figures.append(Headline(f"{popularity}: sgmv, batch {last} over 1", ratio(many, one)))
        if is_gpu:
            figures.append(Headline(f"{popularity}: sgmv, batch 1, us", one, PAPER_ONE_US))
            figures.append(Headline(f"{popularity}: sgmv, batch {last}, us", many, stated))
        for other in ("loop", "gather-bmm"):
            times = ratio(at[popularity, last, other], many)
            figures.append(Headline(f"{popularity}: {other} over sgmv, batch {last}", times))
    return figures


FIG8 = Experiment(
    "punica-fig8",
    "The batched LoRA operator against a loop over adapters and against Gather-BMM",
    "Punica, Figure 8 (§7.1)",
    run,
    LinePanels(
        panel="popularity", series="operator", x=("batch", "batch size"), y=("us", "us"), is_log=("us",)
    ),
    notes=NOTES,
    devices=("cpu", "cuda"),
)
