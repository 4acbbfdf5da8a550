"""Pictures of reports: grouped bars, lines over a number, stacked areas. Needs matplotlib."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from manylora.reproduce.report import Report

Panel = tuple[str, str]
"""A row's field, and what it is, with its unit."""


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def bars(
    report: Report,
    path: Path,
    panels: Sequence[Panel],
    *,
    group: str,
    series: str,
    is_log: Collection[str] = (),
) -> None:
    """A panel under another; in each a group of bars for each value of ``group``, a bar for each of ``series``:
    'n/a' where there is no number, which a bar of no height would say is zero."""
    pyplot = _pyplot()
    groups = list(dict.fromkeys(row[group] for row in report.rows))
    names = list(dict.fromkeys(row[series] for row in report.rows))
    width = max(6.0, 0.3 * len(groups) * len(names) + 2)
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(width, 2.8 * len(panels) + 0.6), layout="constrained", squeeze=False
    )
    for axis, (field, label) in zip(axes[:, 0], panels, strict=True):
        for place, name in enumerate(names):
            values = {row[group]: row[field] for row in report.rows if row[series] == name}
            at = [index + 0.8 * place / len(names) for index in range(len(groups))]
            heights = [math.nan if values.get(g) is None else values[g] for g in groups]
            axis.bar(at, heights, 0.8 / len(names), label=name, align="edge")
            for left, height in zip(at, heights, strict=True):
                if math.isnan(height):
                    axis.text(
                        left + 0.4 / len(names), 0.02, "n/a", transform=axis.get_xaxis_transform(),
                        rotation=90, ha="center", va="bottom", fontsize=6, color="gray",
                    )  # fmt: skip
        axis.set_xticks(
            [index + 0.4 for index in range(len(groups))], groups, rotation=30, ha="right", fontsize=8
        )
        axis.set_xlim(-0.2, len(groups))  # the same for all panels, whichever bars there are
        axis.set_ylabel(label)
        axis.grid(axis="y", alpha=0.3)
        if field in is_log and any(row[field] for row in report.rows):
            axis.set_yscale("log")
    _legend_below(figure, axes[0, 0])
    _finish(pyplot, figure, report, path)


def lines(
    report: Report,
    path: Path,
    panels: Sequence[Panel],
    *,
    x: Panel,
    series: str,
    is_log: Collection[str] = (),
    columns: int = 1,
) -> None:
    """A panel for each field over ``x``, a line for each value of ``series``."""
    pyplot = _pyplot()
    names = list(dict.fromkeys(row[series] for row in report.rows))
    count = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        count, columns, figsize=(5.5 * columns + 1, 3 * count), layout="constrained", squeeze=False
    )
    for axis, (field, label) in zip(axes.flat, panels, strict=False):
        for name in names:
            points = [
                (row[x[0]], row[field])
                for row in report.rows
                if row[series] == name and row[field] is not None
            ]
            axis.plot(
                [a for a, _ in points],
                [b for _, b in points],
                marker="." if len(points) < 40 else "",
                label=name,
            )
        axis.set_xlabel(x[1])
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        if field in is_log:
            axis.set_yscale("log")
    axes[0, 0].legend(fontsize=8)
    _finish(pyplot, figure, report, path)


def curves(report: Report, path: Path, fields: Sequence[Panel], *, x: Panel, panel: str, y: str) -> None:
    """A panel for each value of ``panel``: each of ``fields`` over ``x``; ``y`` is what they are."""
    pyplot = _pyplot()
    names = list(dict.fromkeys(row[panel] for row in report.rows))
    figure, axes = pyplot.subplots(
        len(names), 1, figsize=(8, 2.6 * len(names)), layout="constrained", squeeze=False, sharex=True
    )
    for axis, name in zip(axes[:, 0], names, strict=True):
        rows = [row for row in report.rows if row[panel] == name]
        for field, label in fields:
            axis.plot([row[x[0]] for row in rows], [row[field] for row in rows], label=label)
        axis.set_title(str(name), fontsize=10)
        axis.set_ylabel(y)
        axis.grid(alpha=0.3)
    axes[-1, 0].set_xlabel(x[1])
    if len(fields) > 1:
        _legend_below(figure, axes[0, 0])
    _finish(pyplot, figure, report, path)


def points(report: Report, path: Path, pairs: Sequence[tuple[Panel, Panel]], *, series: str) -> None:
    """A panel beside another for each pair of fields: a point for each row, coloured by ``series``."""
    pyplot = _pyplot()
    names = list(dict.fromkeys(row[series] for row in report.rows))
    figure, axes = pyplot.subplots(
        1, len(pairs), figsize=(4 * len(pairs), 4.4), layout="constrained", squeeze=False
    )
    for axis, (x, y) in zip(axes[0], pairs, strict=True):
        for name in names:
            rows = [row for row in report.rows if row[series] == name]
            axis.scatter([row[x[0]] for row in rows], [row[y[0]] for row in rows], s=4, alpha=0.5, label=name)
        axis.set_xlabel(x[1])
        axis.set_ylabel(y[1])
    _legend_below(figure, axes[0, 0])
    _finish(pyplot, figure, report, path)


def stacked_bars(
    report: Report, path: Path, parts: Sequence[Panel], *, group: str, series: str, unit: str
) -> None:
    """Groups of bars as in ``bars``, each bar its ``parts`` upon one another; series are named under the bars."""
    pyplot = _pyplot()
    groups = list(dict.fromkeys(row[group] for row in report.rows))
    figure, axes = pyplot.subplots(
        1, len(groups), figsize=(4 * len(groups), 4.4), layout="constrained", squeeze=False
    )
    for axis, name in zip(axes[0], groups, strict=True):
        rows = [row for row in report.rows if row[group] == name]
        labels = [str(row[series]) for row in rows]
        below = [0.0] * len(rows)
        for field, label in parts:
            heights = [row[field] or 0.0 for row in rows]
            axis.bar(labels, heights, 0.7, bottom=below, label=label)
            below = [a + b for a, b in zip(below, heights, strict=True)]
        axis.tick_params("x", rotation=30, labelsize=8)
        axis.set_title(str(name), fontsize=10)
        axis.set_ylabel(unit)
        axis.grid(axis="y", alpha=0.3)
    _legend_below(figure, axes[0, 0])
    _finish(pyplot, figure, report, path)


def stacked(report: Report, path: Path, parts: Sequence[Panel], *, x: Panel, panel: str, unit: str) -> None:
    """A panel for each value of ``panel``: ``parts`` upon one another over ``x``."""
    pyplot = _pyplot()
    names = list(dict.fromkeys(row[panel] for row in report.rows))
    figure, axes = pyplot.subplots(
        len(names), 1, figsize=(8, 2.6 * len(names)), layout="constrained", squeeze=False,
        sharex=True, sharey=True,
    )  # fmt: skip
    for axis, name in zip(axes[:, 0], names, strict=True):
        rows = [row for row in report.rows if row[panel] == name]
        axis.stackplot(
            [row[x[0]] for row in rows],
            [[row[field] for row in rows] for field, _ in parts],
            labels=[label for _, label in parts],
        )
        axis.set_title(str(name), fontsize=10)
        axis.set_ylabel(unit)
    axes[-1, 0].set_xlabel(x[1])
    _legend_below(figure, axes[0, 0])
    _finish(pyplot, figure, report, path)


def line_panels(
    report: Report,
    path: Path,
    *,
    panel: str,
    series: str,
    x: Panel,
    y: Panel,
    is_log: Collection[str] = (),
    is_shared: bool = True,
    columns: int = 2,
) -> None:
    """A panel for each value of ``panel``: ``y`` over ``x``, a line for each value of ``series``.

    ``is_shared``: all panels have the same axes.
    """
    pyplot = _pyplot()
    names = list(dict.fromkeys(row[panel] for row in report.rows))
    count = -(-len(names) // columns)
    figure, axes = pyplot.subplots(
        count, columns, figsize=(4 * columns + 1, 2.8 * count), layout="constrained", squeeze=False,
        sharex=is_shared, sharey=is_shared,
    )  # fmt: skip
    for axis, name in zip(axes.flat, names, strict=False):
        rows = [row for row in report.rows if row[panel] == name and row[y[0]] is not None]
        for line in dict.fromkeys(row[series] for row in rows):
            points = sorted((row[x[0]], row[y[0]]) for row in rows if row[series] == line)
            axis.plot([a for a, _ in points], [b for _, b in points], marker=".", label=str(line))
        axis.set_title(str(name), fontsize=10)
        axis.grid(alpha=0.3)
        if x[0] in is_log:
            axis.set_xscale("log", base=2)
        if y[0] in is_log:
            axis.set_yscale("log")
    for axis in axes[-1]:
        axis.set_xlabel(x[1])
    for axis in axes[:, 0]:
        axis.set_ylabel(y[1])
    axes[0, 0].legend(fontsize=8, title=series)
    _finish(pyplot, figure, report, path)


def roofline(
    report: Report, path: Path, *, x: Panel, y: Panel, series: str, bytes_per_s: float, flops: float
) -> None:
    """``y`` over ``x``, a line for each value of ``series``, under the roof of bandwidth and arithmetic."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(6.5, 4.5), layout="constrained")
    for name in dict.fromkeys(row[series] for row in report.rows):
        points = [(row[x[0]], row[y[0]]) for row in report.rows if row[series] == name]
        axis.plot([a for a, _ in points], [b for _, b in points], marker=".", label=name)
    ends = [edge(row[x[0]] for row in report.rows) * pad for edge, pad in ((min, 0.7), (max, 1.4))]
    axis.plot(ends, [end * bytes_per_s for end in ends], "k:", label="memory bandwidth")
    axis.plot(ends, [flops, flops], "k--", linewidth=1, label="peak arithmetic")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel(x[1])
    axis.set_ylabel(y[1])
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    _finish(pyplot, figure, report, path)


def _legend_below(figure: Any, axis: Any) -> None:
    """Under all panels, since filled ones leave it no room; rows as wide as the picture allows."""
    handles, labels = axis.get_legend_handles_labels()
    widest = 0.4 + 0.07 * max(map(len, labels))  # inches, about
    columns = max(1, min(len(labels), int(figure.get_figwidth() / widest)))
    figure.legend(handles, labels, loc="outside lower center", fontsize=8, ncols=columns)


def _finish(pyplot: Any, figure: Any, report: Report, path: Path) -> None:
    device = report.settings.get("device", "simulated")
    title = f"{report.experiment}: {report.title} ({device})"
    figure.suptitle(textwrap.fill(title, int(15 * figure.get_figwidth())), fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def grid(report: Report, path: Path, panels: Sequence[Panel], *, x: Panel, series: str, column: str) -> None:
    """A row of panels for each field, a column for each value of ``column``; a line for each of ``series``."""
    pyplot = _pyplot()
    columns = list(dict.fromkeys(row[column] for row in report.rows))
    names = list(dict.fromkeys(row[series] for row in report.rows))
    figure, axes = pyplot.subplots(
        len(panels),
        len(columns),
        figsize=(max(7.0, 3.6 * len(columns) + 1), 2.6 * len(panels)),
        layout="constrained",
        squeeze=False,
        sharex="col",
    )
    for place, value in enumerate(columns):
        for axis, (field, label) in zip(axes[:, place], panels, strict=True):
            for name in names:
                rows = [
                    r for r in report.rows if (r[column], r[series]) == (value, name) and r[field] is not None
                ]
                axis.plot([row[x[0]] for row in rows], [row[field] for row in rows], marker=".", label=name)
            axis.set_ylabel(label if place == 0 else "")
            axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
            axis.grid(alpha=0.3)
        axes[0, place].set_title(str(value), fontsize=10)
        axes[-1, place].set_xlabel(x[1])
    axes[0, 0].legend(fontsize=8)
    _finish(pyplot, figure, report, path)
