"""Pictures of reports: grouped bars, lines over a number, stacked areas. Needs matplotlib."""

from __future__ import annotations

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
    """A panel under another; in each a group of bars for each value of ``group``, a bar for each of ``series``."""
    pyplot = _pyplot()
    groups = list(dict.fromkeys(row[group] for row in report.rows))
    names = list(dict.fromkeys(row[series] for row in report.rows))
    width = max(6.0, 0.3 * len(groups) * len(names) + 2)
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(width, 2.8 * len(panels)), layout="constrained", squeeze=False
    )
    for axis, (field, label) in zip(axes[:, 0], panels, strict=True):
        for place, name in enumerate(names):
            values = {row[group]: row[field] for row in report.rows if row[series] == name}
            at = [index + 0.8 * place / len(names) for index in range(len(groups))]
            axis.bar(at, [values.get(g) or 0.0 for g in groups], 0.8 / len(names), label=name, align="edge")
        axis.set_xticks(
            [index + 0.4 for index in range(len(groups))], groups, rotation=30, ha="right", fontsize=8
        )
        axis.set_ylabel(label)
        axis.grid(axis="y", alpha=0.3)
        if field in is_log:
            axis.set_yscale("log")
    axes[0, 0].legend(fontsize=8, ncols=len(names))
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


def stacked(report: Report, path: Path, parts: Sequence[Panel], *, x: Panel, panel: str, unit: str) -> None:
    """A panel for each value of ``panel``: ``parts`` upon one another over ``x``."""
    pyplot = _pyplot()
    names = list(dict.fromkeys(row[panel] for row in report.rows))
    figure, axes = pyplot.subplots(
        len(names), 1, figsize=(8, 2.6 * len(names)), layout="constrained", squeeze=False, sharex=True
    )
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
    axes[0, 0].legend(fontsize=8, loc="upper left")
    _finish(pyplot, figure, report, path)


def _finish(pyplot: Any, figure: Any, report: Report, path: Path) -> None:
    device = report.settings.get("device", "simulated")
    figure.suptitle(f"{report.experiment}: {report.title} ({device})", fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
