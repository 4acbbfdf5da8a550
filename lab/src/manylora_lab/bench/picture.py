"""A replay as a picture: distributions of TTFT and ITL, requests over time. Needs matplotlib, imported on use."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from manylora.config.declaring import ConfigError
from manylora_lab.bench.replay import RequestResult

_BINS = 60
"""So many at most, and none shorter than a second: single requests would be all there is to see."""


def check_plot(path: Path) -> None:
    """Raise ConfigError where no picture could be written there, before anything is measured."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a plot needs matplotlib: pip install manylora-lab[plot]") from error
    if path.suffix[1:] not in FigureCanvasAgg(Figure()).get_supported_filetypes():
        raise ConfigError(f"cannot write {path}: name it *.png, *.svg or *.pdf")
    check_writable(path)


def check_writable(path: Path) -> None:
    """Raise ConfigError where no file could be written, before anything is measured."""
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no such folder")
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"cannot write {path}: no permission")


def draw(results: Sequence[RequestResult], title: str, path: Path) -> None:
    """Writes the picture, in the format that the file's name ends in. Raises ConfigError."""
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    ttft, itl, over_time = figure.subplots(1, 3)
    done = [result for result in results if result.error is None]
    _distribution(ttft, [result.ttft_s for result in done], "time to first token, ms")
    _distribution(itl, [itl_s for result in done for itl_s in result.itls_s], "time between tokens, ms")
    _over_time(over_time, results, done)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _distribution(axes: Any, seconds: Sequence[float], label: str) -> None:
    axes.set_xlabel(label)
    axes.set_ylabel("share of values that are no greater")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    if seconds:
        ordered = 1e3 * np.sort(seconds)
        axes.step(ordered, np.arange(1, len(ordered) + 1) / len(ordered), where="post")
        decades = np.log10(ordered[-1] / ordered[0]) if ordered[0] > 0 else 0
        if decades > 1:
            _log_scale(axes.xaxis, is_wide=decades > 2)


def _log_scale(axis: Any, is_wide: bool) -> None:
    """Ticks where their labels, plain numbers, have room; matplotlib's own overlap within a decade or two."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    axis.axes.set_xscale("log")
    axis.set_major_locator(LogLocator(subs=(1,) if is_wide else (1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))


def _over_time(axes: Any, results: Sequence[RequestResult], done: Sequence[RequestResult]) -> None:
    """Requests a second that were handed over, that ended and that failed."""
    last_s = max((result.end_s for result in results), default=0.0) or 1.0
    edges = np.linspace(0, last_s, max(1, min(_BINS, int(last_s))) + 1)
    failed = [result.end_s for result in results if result.error is not None]
    for label, moments in (
        ("handed over", [result.handed_s for result in results]),
        ("done", [result.end_s for result in done]),
        ("failed", failed),
    ):
        if moments:
            counts, _ = np.histogram(moments, edges)
            axes.step(edges[:-1], counts / edges[1], where="post", label=label)
    axes.set_xlabel("seconds since the start")
    axes.set_ylabel("requests a second")
    axes.grid(alpha=0.3)
    if results:
        axes.legend()
