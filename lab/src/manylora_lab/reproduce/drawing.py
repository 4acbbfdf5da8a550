"""Pictures of reports, as data: grouped bars, lines over a number, stacked areas. Needs matplotlib.

Each picture is called with a report and the path to draw to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from manylora_lab.reproduce.report import ExperimentReport, Row

Panel = tuple[str, str]
"""A row's field, and what it is, with its unit."""


@dataclasses.dataclass(frozen=True, slots=True)
class BarPanels:
    """A panel under another; in each a group of bars for each value of ``group``, a bar for each of ``series``:
    'n/a' where there is no number, which a bar of no height would say is zero."""

    panels: Sequence[Panel]
    group: str
    series: str
    is_log: Collection[str] = ()

    def __call__(self, report: ExperimentReport, path: Path) -> None:
        """Draw it."""
        groups, names = _values(report.rows, self.group), _values(report.rows, self.series)
        width = max(6.0, 0.3 * len(groups) * len(names) + 2)
        with _figure(report, path, len(self.panels), 1, (width, 2.8 * len(self.panels) + 0.6)) as drawn:
            for axis, (field, label) in zip(drawn.axes[:, 0], self.panels, strict=True):
                for place, name in enumerate(names):
                    values = {row[self.group]: row[field] for row in _where(report.rows, self.series, name)}
                    at = [index + 0.8 * place / len(names) for index in range(len(groups))]
                    heights = [math.nan if values.get(g) is None else values[g] for g in groups]
                    axis.bar(at, heights, 0.8 / len(names), label=name, align="edge")
                    for left, height in zip(at, heights, strict=True):
                        if math.isnan(height):
                            axis.text(
                                left + 0.4 / len(names), 0.02, "n/a", transform=axis.get_xaxis_transform(),
                                rotation=90, ha="center", va="bottom", fontsize=6, color="gray",
                            )  # fmt: skip
                middles = [index + 0.4 for index in range(len(groups))]
                axis.set_xticks(middles, groups, rotation=30, ha="right", fontsize=8)
                axis.set_xlim(-0.2, len(groups))  # the same for all panels, whichever bars there are
                axis.set_ylabel(label)
                axis.grid(axis="y", alpha=0.3)
                if field in self.is_log and any(row[field] for row in report.rows):
                    axis.set_yscale("log")
            drawn.legend_below()


@dataclasses.dataclass(frozen=True, slots=True)
class StackedBars:
    """A panel beside another for each value of ``group``; in each a bar for each of ``series``, named under it:
    its ``parts`` upon one another."""

    parts: Sequence[Panel]
    group: str
    series: str
    unit: str

    def __call__(self, report: ExperimentReport, path: Path) -> None:
        """Draw it."""
        groups = _values(report.rows, self.group)
        with _figure(report, path, 1, len(groups), (4 * len(groups), 4.4)) as drawn:
            for axis, name in zip(drawn.axes[0], groups, strict=True):
                rows = _where(report.rows, self.group, name)
                labels = [str(row[self.series]) for row in rows]
                below = [0.0] * len(rows)
                for field, label in self.parts:
                    heights = [row[field] or 0.0 for row in rows]
                    axis.bar(labels, heights, 0.7, bottom=below, label=label)
                    below = [a + b for a, b in zip(below, heights, strict=True)]
                axis.tick_params("x", rotation=30, labelsize=8)
                axis.set_title(str(name), fontsize=10)
                axis.set_ylabel(self.unit)
                axis.grid(axis="y", alpha=0.3)
            drawn.legend_below()


@dataclasses.dataclass(frozen=True, slots=True)
class Lines:
    """One panel: ``y`` over ``x``, a line for each value of ``series``; ``y`` is logarithmic."""

    x: Panel
    y: Panel
    series: str

    def __call__(self, report: ExperimentReport, path: Path) -> None:
        """Draw it."""
        with _figure(report, path, 1, 1, (6.5, 3)) as drawn:
            axis = drawn.axes[0, 0]
            for name in _values(report.rows, self.series):
                rows = _known(_where(report.rows, self.series, name), self.y)
                _line(axis, rows, self.x, self.y, label=name, marker="." if len(rows) < 40 else "")
            axis.set_xlabel(self.x[1])
            axis.set_ylabel(self.y[1])
            axis.grid(alpha=0.3)
            axis.set_yscale("log")
            axis.legend(fontsize=8)


@dataclasses.dataclass(frozen=True, slots=True)
class Curves:
    """A panel for each value of ``panel``: each of ``fields`` over ``x``; ``y`` is what they are."""

    fields: Sequence[Panel]
    x: Panel
    panel: str
    y: str

    def __call__(self, report: ExperimentReport, path: Path) -> None:
        """Draw it."""
        names = _values(report.rows, self.panel)
        with _figure(report, path, len(names), 1, (8, 2.6 * len(names)), sharex=True) as drawn:
            for axis, name in zip(drawn.axes[:, 0], names, strict=True):
                rows = _where(report.rows, self.panel, name)
                for field, label in self.fields:
                    _line(axis, rows, self.x, (field, label), label=label)
                axis.set_title(str(name), fontsize=10)
                axis.set_ylabel(self.y)
                axis.grid(alpha=0.3)
            drawn.axes[-1, 0].set_xlabel(self.x[1])
            if len(self.fields) > 1:
                drawn.legend_below()


@dataclasses.dataclass(frozen=True, slots=True)
class Areas:
    """A panel for each value of ``panel``: ``parts`` upon one another over ``x``."""

    parts: Sequence[Panel]
    x: Panel
    panel: str
    unit: str

    def __call__(self, report: ExperimentReport, path: Path) -> None:
        """Draw it."""
        names = _values(report.rows, self.panel)
        with _figure(report, path, len(names), 1, (8, 2.6 * len(names)), sharex=True, sharey=True) as drawn:
            for axis, name in zip(drawn.axes[:, 0], names, strict=True):
                rows = _where(report.rows, self.panel, name)
                heights = [[row[field] for row in rows] for field, _ in self.parts]
                axis.stackplot(
                    [row[self.x[0]] for row in rows], heights, labels=[label for _, label in self.parts]
                )
                axis.set_title(str(name), fontsize=10)
                axis.set_ylabel(self.unit)
            drawn.axes[-1, 0].set_xlabel(self.x[1])
            drawn.legend_below()


@dataclasses.dataclass(frozen=True, slots=True)
class Points:
    """A panel beside another for each pair of fields: a point for each row, coloured by ``series``."""

    pairs: Sequence[tuple[Panel, Panel]]
    series: str

    def __call__(self, report: ExperimentReport, path: Path) -> None:
        """Draw it."""
        with _figure(report, path, 1, len(self.pairs), (4 * len(self.pairs), 4.4)) as drawn:
            for axis, (x, y) in zip(drawn.axes[0], self.pairs, strict=True):
                for name in _values(report.rows, self.series):
                    rows = _where(report.rows, self.series, name)
                    at = [row[x[0]] for row in rows], [row[y[0]] for row in rows]
                    axis.scatter(*at, s=4, alpha=0.5, label=name)
                axis.set_xlabel(x[1])
                axis.set_ylabel(y[1])
            drawn.legend_below()


@dataclasses.dataclass(frozen=True, slots=True)
class LinePanels:
    """Two panels in a row, one for each value of ``panel``: ``y`` over ``x``, a line for each value of ``series``.

    ``is_shared``: all panels have the same axes.
    """

    panel: str
    series: str
    x: Panel
    y: Panel
    is_log: Collection[str] = ()
    is_shared: bool = True

    def __call__(self, report: ExperimentReport, path: Path) -> None:
        """Draw it."""
        names = _values(report.rows, self.panel)
        num_rows = -(-len(names) // 2)
        shared = {"sharex": self.is_shared, "sharey": self.is_shared}
        with _figure(report, path, num_rows, 2, (9, 2.8 * num_rows), **shared) as drawn:
            for axis, name in zip(drawn.axes.flat, names, strict=False):
                rows = _known(_where(report.rows, self.panel, name), self.y)
                for line in _values(rows, self.series):
                    mine = sorted(
                        _where(rows, self.series, line), key=lambda row: (row[self.x[0]], row[self.y[0]])
                    )
                    _line(axis, mine, self.x, self.y, label=str(line), marker=".")
                axis.set_title(str(name), fontsize=10)
                axis.grid(alpha=0.3)
                if self.x[0] in self.is_log:
                    axis.set_xscale("log", base=2)
                if self.y[0] in self.is_log:
                    axis.set_yscale("log")
            for axis in drawn.axes[-1]:
                axis.set_xlabel(self.x[1])
            for axis in drawn.axes[:, 0]:
                axis.set_ylabel(self.y[1])
            drawn.axes[0, 0].legend(fontsize=8, title=self.series)


@dataclasses.dataclass(frozen=True, slots=True)
class Matrix:
    """A row of panels for each field, a column for each value of ``column``; a line for each of ``series``."""

    panels: Sequence[Panel]
    x: Panel
    series: str
    column: str

    def __call__(self, report: ExperimentReport, path: Path) -> None:
        """Draw it."""
        columns, names = _values(report.rows, self.column), _values(report.rows, self.series)
        size = (max(7.0, 3.6 * len(columns) + 1), 2.6 * len(self.panels))
        with _figure(report, path, len(self.panels), len(columns), size, sharex="col") as drawn:
            for place, value in enumerate(columns):
                inside = _where(report.rows, self.column, value)
                for axis, (field, label) in zip(drawn.axes[:, place], self.panels, strict=True):
                    for name in names:
                        rows = _known(_where(inside, self.series, name), (field, label))
                        _line(axis, rows, self.x, (field, label), label=name, marker=".")
                    axis.set_ylabel(label if place == 0 else "")
                    axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
                    axis.grid(alpha=0.3)
                drawn.axes[0, place].set_title(str(value), fontsize=10)
                drawn.axes[-1, place].set_xlabel(self.x[1])
            drawn.axes[0, 0].legend(fontsize=8)


@dataclasses.dataclass(frozen=True, slots=True)
class Distributions:
    """A row of panels for each field, a column for each value of ``column``; a line for each of ``series``: the
    share of all that lies below. A row has a list for each field: its values at the ``quantiles`` of the report's
    settings, in percent."""

    panels: Sequence[Panel]
    series: str
    column: str

    def __call__(self, report: ExperimentReport, path: Path) -> None:
        """Draw it."""
        columns = _values(report.rows, self.column)
        shares = [quantile / 100 for quantile in report.settings["quantiles"]]
        size = (max(7.0, 3.2 * len(columns) + 1), 2.6 * len(self.panels))
        with _figure(report, path, len(self.panels), len(columns), size) as drawn:
            for place, value in enumerate(columns):
                for axis, (field, label) in zip(drawn.axes[:, place], self.panels, strict=True):
                    for row in _where(report.rows, self.column, value):
                        if row[field]:
                            axis.plot(row[field], shares, label=row[self.series], linewidth=1)
                    axis.set_xlabel(label, fontsize=8)
                    axis.grid(alpha=0.3)
                drawn.axes[0, place].set_title(str(value), fontsize=9)
            drawn.legend_below()


@dataclasses.dataclass(frozen=True, slots=True)
class Roofline:
    """``y`` over ``x``, a line for each value of ``series``, under the roof of bandwidth and arithmetic, which the
    report's settings have as ``bytes_per_s`` and ``flops``."""

    x: Panel
    y: Panel
    series: str

    def __call__(self, report: ExperimentReport, path: Path) -> None:
        """Draw it."""
        bytes_per_s, flops = report.settings["bytes_per_s"], report.settings["flops"]
        with _figure(report, path, 1, 1, (6.5, 4.5)) as drawn:
            axis = drawn.axes[0, 0]
            for name in _values(report.rows, self.series):
                _line(axis, _where(report.rows, self.series, name), self.x, self.y, label=name, marker=".")
            along = [row[self.x[0]] for row in report.rows]
            ends = [0.7 * min(along), 1.4 * max(along)]
            axis.plot(ends, [end * bytes_per_s for end in ends], "k:", label="memory bandwidth")
            axis.plot(ends, [flops, flops], "k--", linewidth=1, label="peak arithmetic")
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xlabel(self.x[1])
            axis.set_ylabel(self.y[1])
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)


# ---------------------------------------------------------------- what all pictures share


@dataclasses.dataclass(frozen=True, slots=True)
class _Figure:
    """Matplotlib's figure and its axes, rows by columns."""

    figure: Any
    axes: Any

    def legend_below(self) -> None:
        """Draws the legend under all panels, since filled ones leave it no room; rows as wide as the picture
        allows."""
        handles, labels = self.axes[0, 0].get_legend_handles_labels()
        widest = 0.4 + 0.07 * max(map(len, labels))  # inches, about
        columns = max(1, min(len(labels), int(self.figure.get_figwidth() / widest)))
        self.figure.legend(handles, labels, loc="outside lower center", fontsize=8, ncols=columns)


@contextlib.contextmanager
def _figure(
    report: ExperimentReport,
    path: Path,
    num_rows: int,
    num_columns: int,
    size: tuple[float, float],
    **shared: Any,
) -> Iterator[_Figure]:
    """An empty figure of panels; it gets its title and is written at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        num_rows, num_columns, figsize=size, layout="constrained", squeeze=False, **shared
    )
    yield _Figure(figure, axes)
    device = report.settings.get("device", "simulated")
    title = f"{report.experiment}: {report.title} ({device})"
    figure.suptitle(textwrap.fill(title, int(15 * figure.get_figwidth())), fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _values(rows: Iterable[Row], field: str) -> list[Any]:
    """The values of a field, each once, in the rows' order."""
    return list(dict.fromkeys(row[field] for row in rows))


def _where(rows: Iterable[Row], field: str, value: object) -> list[Row]:
    return [row for row in rows if row[field] == value]


def _known(rows: Iterable[Row], panel: Panel) -> list[Row]:
    """The rows that have a number in the panel's field."""
    return [row for row in rows if row[panel[0]] is not None]


def _line(axis: Any, rows: Sequence[Row], x: Panel, y: Panel, **style: Any) -> None:
    axis.plot([row[x[0]] for row in rows], [row[y[0]] for row in rows], **style)
