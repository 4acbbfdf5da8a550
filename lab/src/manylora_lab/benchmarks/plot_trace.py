"""A picture of what ``manylora_lab.benchmarks.h200_trace`` measured: where the device's time goes, step by step.

python -m manylora_lab.benchmarks.plot_trace docs/results/h200_trace.json docs/results/h200_trace.png
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

KINDS = {
    "products": ("nvjet", "linear_kernel", "cublas", "gemm"),
    "attention": ("decode_kernel", "attend", "combine", "flashinfer"),
    "LoRA": ("shrink", "expand"),
    "norms, rope, SiLU": ("rms_norm", "rotate", "silu", "gated_sum"),
}
"""By how kernels' names begin."""


def parts_us(step: Mapping[str, Any]) -> dict[str, float]:
    """Of a step's kernels by kind, and the rest. LoRA is what is left where there are adapters: its kernels begin
    while others end, so that their own times hold waiting."""
    found = dict.fromkeys(KINDS, 0.0)
    for name, (us, _) in step["by_name"].items():
        kind = next((kind for kind, starts in KINDS.items() if name.startswith(starts)), None)
        if kind is not None:
            found[kind] += us
    if step["adapters"]:
        found["LoRA"] += step["busy_us"] - sum(found.values())
    return {**found, "gaps and others": step["busy_us"] + step["gaps_us"] - sum(found.values())}


def main() -> None:
    source, target = sys.argv[1:]
    with open(source) as file:
        steps = json.load(file)["steps"]
    names = list(dict.fromkeys(step["step"] for step in steps))
    figure, axes = plt.subplots(1, len(names), figsize=(2.0 * len(names), 4.2))
    for name, axis in zip(names, axes):
        bars = [step for step in steps if step["step"] == name]
        bottoms = [0.0] * len(bars)
        for number, kind in enumerate([*KINDS, "gaps and others"]):
            heights = [parts_us(step)[kind] / 1e3 for step in bars]
            axis.bar(range(len(bars)), heights, 0.7, bottom=bottoms, label=kind, color=f"C{number}")
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights)]
        axis.set_xticks(range(len(bars)), ["LoRA" if step["adapters"] else "base" for step in bars])
        axis.set_title(name.replace(", ", ",\n"), fontsize=8)
    axes[0].set_ylabel("ms on the device")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="lower center", ncols=5, fontsize=8, frameon=False
    )
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()
