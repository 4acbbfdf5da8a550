"""Punica's Figure 10: one transformer layer with LoRA, by batch, model, length and popularity (§7.1)."""

from __future__ import annotations

from manylora_lab.bench.kernels.settings import POPULARITIES, model_counts
from manylora_lab.pricing.shapes import shape_named
from manylora_lab.reproduce.drawing import LinePanels
from manylora_lab.reproduce.experiment import Experiment, GridResult, Setup
from manylora_lab.reproduce.punica_workload import RANK
from manylora_lab.reproduce.report import Headline, Row, mean, ratio

MODELS = ("llama-2-7b", "llama-2-13b")
LENGTHS = (512, 2048)
PAPER_GROWTH = {("llama-2-7b", 512): 1.72}
"""§7.1: "only increases by 72% when the batch size increases from 1 to 32 when the sequence length is 512"; the
text does not say of which model, so it stands beside the first."""
NUM_LAYERS = 4
NOTES = (
    "The text names no model for 1.72 (an increase of 72 % at length 512): it stands beside 7B's.",
    f"{NUM_LAYERS} layers with weights of their own in one captured graph, cold caches, divided by {NUM_LAYERS}; "
    "dummy weights, rank 16 on all linear modules; embeddings, head and sampler left out.",
    "Every row decodes one token and attends to as many positions as the length says.",
)


def run(setup: Setup) -> GridResult:
    """All popularities of one batch in turn, batch by batch."""
    from manylora_lab.bench.dummies import DEMO
    from manylora_lab.bench.kernels.layers import LayerCase, LayerRig
    from manylora_lab.bench.kernels.timing import device_name

    batches = setup.pick((1, 2, 4, 8, 16, 24, 32), (1, 8, 32), (1, 4))
    lengths, repeats = setup.pick((LENGTHS, 50), (LENGTHS, 15), ((32, 64), 2))
    shapes = setup.pick(
        [shape_named(name) for name in MODELS], [shape_named(name) for name in MODELS], [DEMO]
    )
    rows: list[Row] = []
    machine = ""
    for shape in shapes:
        cases = {
            (length, batch, popularity): LayerCase(length, model_counts(popularity, batch))
            for length in lengths
            for batch in batches
            for popularity in POPULARITIES
        }
        rig = LayerRig(shape, setup.device, RANK, NUM_LAYERS, list(cases.values()))
        machine = device_name(rig.device)
        for length in lengths:
            for batch in batches:
                steps = [rig.step(cases[length, batch, one]) for one in POPULARITIES]
                found = rig.seconds(steps, repeats)
                for popularity, seconds in zip(POPULARITIES, found, strict=True):
                    setting = {
                        "model": shape.name,
                        "length": length,
                        "batch": batch,
                        "popularity": popularity,
                    }
                    rows.append({"case": f"{shape.name}, length {length}", **setting, "ms": 1e3 * seconds})
                setup.show(f"{len(rows)} of {len(shapes) * len(cases)} timed")
        del rig  # before the next one's pool is taken
    settings = {"scale": setup.scale, "device": setup.device, "machine": machine, "repeats": repeats}
    return GridResult(settings, rows)


def _headline(rows: list[Row]) -> list[Headline]:
    at = {(row["case"], row["popularity"], row["batch"]): row for row in rows}
    last = rows[-1]["batch"]
    figures = []
    for case in dict.fromkeys(row["case"] for row in rows):
        several = [at[case, popularity, last]["ms"] for popularity in POPULARITIES]
        grown = [ratio(at[case, one, last]["ms"], at[case, one, 1]["ms"]) for one in POPULARITIES]
        row = at[case, POPULARITIES[0], last]
        stated = PAPER_GROWTH.get((row["model"], row["length"])) if last == 32 else None
        figures.append(Headline(f"{case}: batch {last} over 1, mean of popularities", mean(grown), stated))
        slowest = ratio(max(several), min(several))
        figures.append(Headline(f"{case}: slowest popularity over fastest, batch {last}", slowest))
    return figures


FIG10 = Experiment(
    "punica-fig10",
    "One transformer layer with LoRA, by batch size, model, length and popularity",
    "Punica, Figure 10 (§7.1)",
    run,
    LinePanels(
        panel="case", series="popularity", x=("batch", "batch size"), y=("ms", "ms a layer"), is_shared=False
    ),
    (_headline,),
    notes=NOTES,
    devices=("cuda",),
)
