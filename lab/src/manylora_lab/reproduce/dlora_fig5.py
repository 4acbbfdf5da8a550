"""dLoRA's Figure 5 (§3.1): the time of an adapter's product BAx beside the base's Wx, by batch."""

from __future__ import annotations

from manylora_lab.reproduce.drawing import Lines
from manylora_lab.reproduce.experiment import Experiment, GridResult, Setup
from manylora_lab.reproduce.report import Headline, Row, mean, ratio

SIZE, RANK = 4096, 8
BATCHES = (2, 4, 6, 8, 10, 12, 14, 16)
PAPER_SHARE = 0.389
BASE, TORCH, ENGINE = "Wx", "BAx", "BAx, the engine's kernel"


def _grid(setup: Setup) -> GridResult:
    import torch

    from manylora_lab.reproduce.lora_rig import LoraRig

    size, repeats = setup.pick((SIZE, 100), (SIZE, 20), (256, 3))
    batches = setup.pick(BATCHES, (2, 4, 8, 16), (2, 16))
    rig = LoraRig(setup.device, size, size, 1, RANK)
    weights = torch.randn(rig.layers, size, size, dtype=rig.dtype, device=rig.device)
    rows: list[Row] = []
    for batch in batches:
        case = rig.case((batch,), RANK)
        dense = [rig.dense(case, layer) for layer in range(rig.layers)]

        def base(x: torch.Tensor = case.x) -> None:
            for weight in weights:
                x @ weight

        def adapter(x: torch.Tensor = case.x, pairs: list[tuple[torch.Tensor, torch.Tensor]] = dense) -> None:
            for a, b in pairs:
                (x @ a[0]) @ b[0]

        seconds = rig.seconds([base, adapter, rig.sgmv(case)], repeats)
        rows += [
            {"batch": batch, "product": product, "us": 1e6 * each, "share": ratio(each, seconds[0])}
            for product, each in zip((BASE, TORCH, ENGINE), seconds, strict=True)
        ]
        setup.show(f"{len(rows) // 3} of {len(batches)} batches timed")
    settings = {
        "scale": setup.scale, "device": setup.device, "size": size, "rank": RANK, "repeats": repeats,
        **rig.description,
    }  # fmt: skip
    return GridResult(settings, rows)


def _shares(rows: list[Row]) -> list[Headline]:
    figures = []
    for product, paper in ((TORCH, PAPER_SHARE), (ENGINE, None)):
        shares = [row["share"] for row in rows if row["product"] == product]
        figures.append(Headline(f"{product} over Wx, mean of batches", mean(shares), paper))
    return figures


FIG5 = Experiment(
    "dlora-fig5",
    "An adapter's product beside the base's, by batch",
    "dLoRA, Figure 5 (§3.1)",
    _grid,
    Lines(x=("batch", "batch"), y=("us", "us"), series="product"),
    (_shares,),
    (
        "Rank 8 as the text has it; the authors' script has 16. W is 4096 x 4096. BAx is two dense "
        "products of one adapter; the engine's kernel reads the adapter from pages and adds to y.",
        "The authors' script runs in float32 and waits for the device after each call, so their share "
        "holds what two launches take beside one. On CUDA ours is float16, captured, with cold caches: "
        "device time alone. On a CPU: float32, one thread.",
    ),
    devices=("cpu", "cuda"),
)
