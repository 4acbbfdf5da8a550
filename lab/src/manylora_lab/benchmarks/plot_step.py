"""Where a decoding step's time goes: a layer's parts over their byte floors, from records of an H200.

    python -m manylora_lab.benchmarks.plot_step --picture docs/results/h200_layer.png

Reads ``h200_ops.json`` (layers in a graph, contexts of 512) and ``kernels_h200.json`` (what LoRA adds to one)
beside the picture. Rank 16 on all seven projections.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

MODEL = "llama-2-7b"
RANK = 16
BATCHES = (32, 128)
POPULARITIES = ("identical", "uniform", "distinct")
PARTS = (
    ("weights: their bytes", "#4c72b0"), ("products above that", "#a8bfdf"), ("KV: its bytes", "#55a868"),
    ("attention and the rest above that", "#b5d9bf"), ("adapters: their bytes", "#c44e52"),
    ("LoRA above that", "#e5a9ab"),
)  # fmt: skip


def parts(layer: dict[str, float], lora: dict[str, Any] | None) -> list[float]:
    """Microseconds, in the order of PARTS."""
    floor, products = layer["floor_products"], layer["products_now"]
    kv_floor = layer["floor"] - floor
    found = [floor, products - floor, kv_floor, layer["now"] - products - kv_floor, 0.0, 0.0]
    if lora is not None:
        found[4:] = [lora["floor_us"], lora["us"] - lora["floor_us"]]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--picture", type=Path, required=True)
    args = parser.parse_args()
    folder = args.picture.parent
    layers = json.loads((folder / "h200_ops.json").read_text())["layers"]
    lora = {
        (row["batch"], row["popularity"]): row
        for row in json.loads((folder / "kernels_h200.json").read_text())["rows"]
        if row["kernel"] == "lora" and row["rank"] == RANK and "prompt" not in row
    }
    bars = []
    for batch in BATCHES:
        layer = layers[f"{MODEL} {batch}"]
        bars.append((f"{batch} rows, no LoRA", parts(layer, None)))
        bars += [
            (f"{batch} rows, {popularity}", parts(layer, lora[batch, popularity]))
            for popularity in POPULARITIES
        ]
    draw(args.picture, bars)


def draw(picture: Path, bars: list[tuple[str, list[float]]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(10, 4.5), layout="constrained")
    left = [0.0] * len(bars)
    for number, (label, color) in enumerate(PARTS):
        widths = [found[number] for _, found in bars]
        axis.barh([name for name, _ in bars], widths, left=left, color=color, label=label)
        left = [at + width for at, width in zip(left, widths)]
    axis.invert_yaxis()
    axis.set_xlabel(f"microseconds a layer, {MODEL}, one H200")
    axis.legend(loc="upper right", fontsize=8)
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
