"""Routers as a picture: times to the first token and between tokens, and what each replica did.

Needs matplotlib, imported on use.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from manylora.config.declaring import ConfigError
from manylora_lab.sim.cluster import VirtualCluster


def draw_routers(clusters: Mapping[str, VirtualCluster], title: str, path: Path) -> None:
    """Writes the picture of finished runs, in the format that the file's name ends in. Raises ConfigError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    ttft, tpot, busy = figure.subplots(1, 3)
    for name, cluster in clusters.items():
        served = [outcome for outcome in cluster.front.outcomes if not outcome.is_dropped]
        between_s = [outcome.tpot_s for outcome in served if outcome.tpot_s is not None]
        for axes, seconds in ((ttft, [outcome.ttft_s for outcome in served]), (tpot, between_s)):
            ordered = 1e3 * np.sort(np.array(seconds))
            axes.step(
                ordered, np.arange(1, len(ordered) + 1) / max(len(ordered), 1), where="post", label=name
            )
        end_s = max(outcome.end_s for outcome in cluster.front.outcomes)
        shares = sorted((loop.busy_s / end_s for loop in cluster.loops), reverse=True)
        busy.plot(range(1, len(shares) + 1), shares, marker=".", label=name)
    for axes, label in ((ttft, "time to first token, ms"), (tpot, "time per token after the first, ms")):
        axes.set_xlabel(label)
        axes.set_xscale("log")
        axes.set_ylabel("share of requests that took no longer")
        axes.set_ylim(0, 1)
    busy.set_xlabel("replica, the busiest first")
    busy.set_ylabel("share of time in which steps ran")
    for axes in (ttft, tpot, busy):
        axes.grid(alpha=0.3)
    busy.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
