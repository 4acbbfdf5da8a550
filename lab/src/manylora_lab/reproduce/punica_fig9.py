"""Punica's Figure 9: the batched LoRA operator by rank, batch and popularity (§7.1)."""

from __future__ import annotations

from manylora_lab.bench.kernels.settings import POPULARITIES, model_counts
from manylora_lab.reproduce.drawing import LinePanels
from manylora_lab.reproduce.experiment import Experiment, GridResult, Setup
from manylora_lab.reproduce.punica_fig8 import SIZES
from manylora_lab.reproduce.report import Headline, Row, ratio

RANKS = (8, 16, 32, 64)
PAPER_ONE_US = 42.0
"""§7.1: a single request, "around 42 us for all four ranks"."""
PAPER_DISTINCT_US = {8: 72.0, 16: 75.0, 32: 89.0, 64: 118.0}
"""§7.1: Distinct at batch 64. Where models are shared: "around 42 us to 45 us" throughout."""
NOTES = (
    "The paper states times alone, around 42 us at batch 1 and, distinct at 64, 72, 75, 89 and 118 us with ranks "
    "8, 16, 32 and 64: 1.7, 1.8, 2.1 and 2.8 times.",
    "Input and output size as in Figure 8, from the published benchmark; the text names none.",
    "On CUDA: device time of captured launches with cold caches; the paper's times hold the launches, which make "
    "up much of a small batch's. On a CPU: wall time of one thread, warm caches; a core is busy at batch 1 "
    "already, which the paper's GPU is not, so times grow with the batch.",
)


def run(setup: Setup) -> GridResult:
    """All ranks of one batch in turn, batch by batch."""
    from manylora_lab.reproduce.lora_rig import LoraRig

    batches = setup.pick((1, 2, 4, 8, 16, 24, 32, 48, 64), (1, 4, 16, 64), (1, 8))
    (h1, h2), repeats = setup.pick((SIZES, 100), (SIZES, 15), ((256, 688), 3))
    rig = LoraRig(setup.device, h1, h2, batches[-1], RANKS[-1])
    rows: list[Row] = []
    for popularity in POPULARITIES:
        for batch in batches:
            cases = [rig.case(model_counts(popularity, batch), rank) for rank in RANKS]
            found = rig.seconds([rig.sgmv(case) for case in cases], repeats)
            for rank, case, seconds in zip(RANKS, cases, found, strict=True):
                setting = {"popularity": popularity, "rank": rank, "batch": batch, "models": len(case.counts)}
                rows.append({**setting, "us": seconds * 1e6, **rig.errors(case)})
            setup.show(f"{len(rows)} of {len(POPULARITIES) * len(batches) * len(RANKS)} timed")
    settings = {
        "scale": setup.scale, "device": setup.device, "h1": h1, "h2": h2, "repeats": repeats, **rig.description,
    }  # fmt: skip
    headline = _headline(rows, setup.device == "cuda")
    return GridResult(settings, rows, headline)


def _headline(rows: list[Row], is_gpu: bool) -> list[Headline]:
    """Growth with the batch; absolute times beside the paper's only where a GPU ran."""
    at = {(row["popularity"], row["rank"], row["batch"]): row["us"] for row in rows}
    last = rows[-1]["batch"]
    figures = []
    for rank in RANKS:
        stated = PAPER_DISTINCT_US[rank] if last == 64 else None
        for popularity in POPULARITIES:
            one, many = at[popularity, rank, 1], at[popularity, rank, last]
            is_stated = popularity == "distinct" and stated is not None
            name = f"{popularity}, rank {rank}"
            figures.append(Headline(f"{name}: batch {last} over 1", ratio(many, one)))
            if is_gpu:
                figures.append(Headline(f"{name}: batch 1, us", one, PAPER_ONE_US))
                figures.append(Headline(f"{name}: batch {last}, us", many, stated if is_stated else None))
    return figures


FIG9 = Experiment(
    "punica-fig9",
    "The batched LoRA operator by rank and batch size, by popularity of the adapters",
    "Punica, Figure 9 (§7.1)",
    run,
    LinePanels(panel="popularity", series="rank", x=("batch", "batch size"), y=("us", "us")),
    notes=NOTES,
    devices=("cpu", "cuda"),
)
