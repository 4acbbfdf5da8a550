"""A stream as a picture: arrivals over time, popularity by rank, lengths. Needs matplotlib, imported on use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from manylora.config.declaring import ConfigError
from manylora_lab.workloads.describe import popularity_counts
from manylora_lab.workloads.stream import Stream, prompt_tokens

_BINS = 60


def draw(stream: Stream, path: Path) -> None:
    """Writes the picture, in the format that the file's name ends in. Raises ConfigError."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(13, 4), layout="constrained")
    known = FigureCanvasAgg(figure).get_supported_filetypes()
    if path.suffix[1:] not in known:
        raise ConfigError(f"cannot write {path}: name it *.png, *.svg or *.pdf")
    figure.suptitle(f"{stream.name}: {len(stream.requests):,} requests")
    over_time, popularity, lengths = figure.subplots(1, 3)
    _arrivals(over_time, stream)
    _popularity(popularity, stream)
    _lengths(lengths, stream)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _arrivals(axes: Any, stream: Stream) -> None:
    bin_s = stream.duration_s / _BINS or 1.0
    counts = [0] * _BINS
    for request in stream.requests:
        counts[min(int(request.arrival_s / bin_s), _BINS - 1)] += 1
    edges = [index * bin_s for index in range(_BINS + 1)]
    axes.stairs([count / bin_s for count in counts], edges, fill=True, alpha=0.7)
    axes.set(title="arrivals", xlabel="time (s)", ylabel="requests a second")


def _popularity(axes: Any, stream: Stream) -> None:
    counts = popularity_counts(stream)
    axes.set(title="popularity", xlabel="adapter by rank", ylabel="requests")
    if counts:
        axes.loglog(range(1, len(counts) + 1), counts, marker=".")
        axes.set_ylim(0.8, 1.5 * counts[0])  # else the axis spans what there is, and even counts look steep
    else:
        axes.text(0.5, 0.5, "no adapters", transform=axes.transAxes, ha="center")


def _lengths(axes: Any, stream: Stream) -> None:
    parts = {"prompt": prompt_tokens(stream.requests)}
    new = [request.new_tokens for request in stream.requests]
    if new != parts["prompt"]:  # else it would hide the prompts' line
        parts["new"] = new
    parts["output"] = [request.output_tokens for request in stream.requests]
    most = max(map(max, parts.values()))
    for label, values in parts.items():
        axes.hist(values, bins=_BINS, range=(0, most), histtype="step", label=label)
    axes.set(title="lengths", xlabel="tokens", ylabel="requests", yscale="log")
    axes.locator_params(axis="x", nbins=6)
    axes.legend()
