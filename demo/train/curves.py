"""Draw the recorded loss curves.

Run `python -m demo.train.curves`.
"""

import json

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from demo.train.recipe import CURVES, load_recipe


def draw_base(axes: Axes) -> None:
    """Training, validation and held-out loss of the base, with the schedule's phases."""
    epochs = json.loads((CURVES / "base.json").read_text())
    numbers = [epoch["number"] for epoch in epochs]
    for series in ("training", "validation", "held_out"):
        axes.plot(numbers, [e[series] for e in epochs], marker="o", label=series.replace("_", "-"))
    for phase, shade in (("decay", 0.06), ("floor", 0.14)):
        inside = [epoch["number"] for epoch in epochs if epoch["phase"] == phase]
        if inside:
            axes.axvspan(inside[0] - 1, inside[-1], color="black", alpha=shade, lw=0)
            axes.text(inside[0] - 0.9, axes.get_ylim()[1], phase, va="top", fontsize=8)
    axes.set(title="base", xlabel="epoch", ylabel="cross-entropy (nats per token)")
    axes.legend()


def draw_adapters(axes: Axes) -> None:
    """Validation loss of each adapter; epoch 0 is the bare base."""
    for name in load_recipe().adapters:
        curve = json.loads((CURVES / "adapters" / f"{name}.json").read_text())
        losses = [curve["base"], *(epoch["validation"] for epoch in curve["epochs"])]
        axes.plot(range(len(losses)), losses, marker=".", label=name)
    axes.set(title="adapters, validation", xlabel="epoch")
    axes.legend(fontsize=8)


def main() -> None:
    """Write the picture as SVG and PNG."""
    plt.switch_backend("agg")
    plt.rcParams["svg.hashsalt"] = "manylora"  # the same curves give the same file
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    draw_base(left)
    draw_adapters(right)
    figure.savefig(CURVES / "losses.svg", metadata={"Date": None})
    figure.savefig(CURVES / "losses.png", dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
