"""The picture of a replay: what can be read of it."""

from __future__ import annotations

import itertools

import pytest
from manylora_lab.bench.picture import _distribution
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


@pytest.mark.parametrize("most_s", [0.0104, 0.08, 0.2, 1.0, 20.0, 3000.0])
def test_labels_do_not_overlap(most_s: float) -> None:
    """Times from 10 ms on, over less than a decade and more than five."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(1, 3)[0]
    _distribution(axes, [0.01 * (most_s / 0.01) ** (i / 50) for i in range(51)], "time to first token, ms")
    canvas.draw()  # type: ignore[no-untyped-call]
    least, most = axes.get_xlim()
    shown = [tick for tick in axes.xaxis.get_major_ticks() if least <= tick.get_loc() <= most]
    boxes = [tick.label1.get_window_extent() for tick in shown]
    assert len(boxes) >= 2
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
    assert not axes.xaxis.get_minorticklabels()
