"""Punica's Figure 7: roofline of the SGMV kernel under four popularities (§7.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from manylora_lab.bench.kernels.settings import POPULARITIES, model_counts
from manylora_lab.reproduce.drawing import Roofline
from manylora_lab.reproduce.experiment import Experiment, GridResult, Setup
from manylora_lab.reproduce.punica_workload import RANK
from manylora_lab.reproduce.report import Headline, Row, ratio

if TYPE_CHECKING:
    from manylora_lab.reproduce.lora_rig import LoraRig

HIDDEN = 4096
"""h_o; h_i is the rank, 16 (§7.1)."""
NOTES = (
    "The engine's operator is a shrink (h to rank) and an expand (rank to h), timed together: each has the "
    "paper's FLOP and I/O, of which the rows count both.",
    "I/O is the paper's formula with this device's element size; what the kernels move beside it (the output read "
    "before it is added to, partial sums) is not counted.",
    "The roof: a copy's bandwidth and a large matrix product's rate, both measured in the same run, not a data "
    "sheet's.",
    "On CUDA: device time of captured launches with cold caches. On a CPU: wall time of one thread, warm caches, "
    "so small batches can lie above the slope of memory bandwidth.",
)


def sgmv_flop(inputs: int, h_in: int, h_out: int) -> int:
    """§7.1: s_n x h_i x h_o x 2."""
    return inputs * h_in * h_out * 2


def sgmv_bytes(inputs: int, models: int, h_in: int, h_out: int, itemsize: int) -> int:
    """§7.1: [s_n x (h_i + h_o) + n x h_i x h_o] x 2, the 2 being the bytes of an element."""
    return (inputs * (h_in + h_out) + models * h_in * h_out) * itemsize


def run(setup: Setup) -> GridResult:
    """Each batch under all four popularities, in turn."""
    from manylora_lab.bench.kernels.timing import ceilings
    from manylora_lab.reproduce.lora_rig import LoraRig

    batches = setup.pick((1, 2, 4, 8, 16, 24, 32, 48, 64), (1, 4, 16, 64), (1, 8))
    hidden, repeats = setup.pick((HIDDEN, 100), (HIDDEN, 30), (256, 3))
    rig = LoraRig(setup.device, hidden, hidden, batches[-1], RANK)
    bytes_per_s, flops = ceilings(rig.device, rig.dtype, setup.pick(20, 5, 1), setup.scale == "smoke")
    rows: list[Row] = []
    for batch in batches:
        rows += _rows(rig, batch, repeats)
        setup.show(f"{len(rows)} of {len(batches) * len(POPULARITIES)} timed")
    for row in rows:
        roof = min(flops, row["flop_per_byte"] * bytes_per_s)
        row["share_of_roof"] = round(row["flop_per_s"] / roof, 4)
    settings = {
        "scale": setup.scale, "device": setup.device, "h_in": RANK, "h_out": hidden, "repeats": repeats,
        "bytes_per_s": bytes_per_s, "flops": flops, **rig.description,
    }  # fmt: skip
    return GridResult(settings, rows)


def _rows(rig: LoraRig, batch: int, repeats: int) -> list[Row]:
    counts = {popularity: model_counts(popularity, batch) for popularity in POPULARITIES}
    cases = [rig.case(counts[popularity], RANK) for popularity in POPULARITIES]
    found = rig.seconds([rig.sgmv(case) for case in cases], repeats)
    rows = []
    for popularity, case, seconds in zip(POPULARITIES, cases, found, strict=True):
        flop = 2 * sgmv_flop(batch, RANK, rig.h2)
        num_bytes = 2 * sgmv_bytes(batch, len(case.counts), RANK, rig.h2, rig.dtype.itemsize)
        rows.append(
            {
                "popularity": popularity, "batch": batch, "models": len(case.counts),
                "flop": flop, "io_bytes": num_bytes, "flop_per_byte": flop / num_bytes,
                "us": seconds * 1e6, "flop_per_s": flop / seconds, **rig.errors(case),
            }
        )  # fmt: skip
    return rows


def _headline(rows: list[Row]) -> list[Headline]:
    """The text states no figure of this plot, only its shape."""
    at = {(row["popularity"], row["batch"]): row for row in rows}
    last = rows[-1]["batch"]
    figures = []
    for popularity in POPULARITIES:
        one, many = at[popularity, 1], at[popularity, last]
        grown = ratio(many["flop_per_s"], one["flop_per_s"])
        figures.append(Headline(f"{popularity}: FLOP/s, batch {last} over 1", grown))
        figures.append(Headline(f"{popularity}: share of the roof, batch {last}", many["share_of_roof"]))
    return figures


FIG7 = Experiment(
    "punica-fig7",
    "Roofline of the batched LoRA operator, by popularity of the adapters",
    "Punica, Figure 7 (§7.1)",
    run,
    Roofline(x=("flop_per_byte", "FLOP per byte"), y=("flop_per_s", "FLOP/s"), series="popularity"),
    (_headline,),
    notes=NOTES,
    devices=("cpu", "cuda"),
)
