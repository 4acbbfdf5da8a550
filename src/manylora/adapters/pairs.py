"""What rows of others than the merged adapter need: one entry that takes the merged adapter off and their own on.

Owns how such an entry is put together of the cells that the two adapters have already; no weight is copied. Knows
no tables and no steps.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from manylora.adapters.pack import AdapterLayout, layout_for
from manylora.kernels.shapes import AdapterGeometry


@dataclasses.dataclass(frozen=True, eq=False)
class Placed:
    """An adapter's layout, and where its cells lie: ``offsets`` as ``cell_offsets`` gives them."""

    layout: AdapterLayout
    offsets: np.ndarray


def nothing(geometry: AdapterGeometry) -> Placed:
    """The base's own: no projection is adapted."""
    num_projections = len(geometry.projections)
    scales = np.zeros((num_projections, geometry.page.layers), np.float32)
    return Placed(layout_for([0] * num_projections, scales, geometry), np.zeros(0, np.int64))


def correction(merged: Placed, own: Placed, geometry: AdapterGeometry) -> Placed:
    """In each projection the rows of ``merged``, whose scales are negated, then those of ``own``, which have the
    second scale. Neither has rows of a second scale itself."""
    first, second = merged.layout, own.layout
    records = np.zeros_like(first.records)
    parts: list[np.ndarray] = []
    num_cells = 0
    for index, projection in enumerate(geometry.projections):
        ranks = first.records[index, 2], second.records[index, 2]
        if not any(ranks):
            continue
        records[index, 2:] = sum(ranks), ranks[0]
        for side, length in enumerate((projection.in_features, projection.out_features)):
            records[index, side] = num_cells
            for placed, rank in zip((merged, own), ranks):
                begin, count = placed.layout.records[index, side], rank * geometry.cells(length)
                parts.append(placed.offsets[begin : begin + count])
                num_cells += count
    scales = np.stack((-first.scales[:, 0], second.scales[:, 0]), axis=1)
    offsets = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    return Placed(AdapterLayout(num_cells, 0, records, scales), offsets)
