"""The shapes that kernels, models, adapters and the pool agree on. No tensors here.

Owns: what one page is, which projections a decoder layer has, how they group, and the cell: the unit in
which adapter rows are laid into pages. Does not know which adapter lies where.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property

CELL_ALIGNMENT_BYTES = 16
LARGEST_CELL_ELEMENTS = 1024
SLACK_TARGET = 0.02


@dataclasses.dataclass(frozen=True)
class PageShape:
    """One page: ``[layers, 2, page_tokens, kv_heads, head_dim]``, contiguous, keys before values."""

    layers: int
    page_tokens: int
    kv_heads: int
    head_dim: int
    itemsize: int

    @property
    def slab_elements(self) -> int:
        """Elements that one layer owns of a page."""
        return 2 * self.page_tokens * self.kv_heads * self.head_dim

    @property
    def page_elements(self) -> int:
        return self.layers * self.slab_elements

    @property
    def page_bytes(self) -> int:
        return self.page_elements * self.itemsize


@dataclasses.dataclass(frozen=True)
class Projection:
    """One linear layer: ``module`` is its path inside a decoder layer ("self_attn.q_proj")."""

    module: str
    in_features: int
    out_features: int


@dataclasses.dataclass(frozen=True)
class ProjectionGroup:
    """Projections that read the same input and whose outputs lie side by side: one shrink, one expand.

    A fused linear gives ``[tokens, sum(out_features)]``; projection i owns columns from ``offsets[i]``.
    """

    name: str
    projections: tuple[Projection, ...]

    @property
    def in_features(self) -> int:
        return self.projections[0].in_features

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        ends = [0]
        for projection in self.projections:
            ends.append(ends[-1] + projection.out_features)
        return tuple(ends)


@dataclasses.dataclass(frozen=True)
class AdapterGeometry:
    """How adapters of one model are laid into its pages (design §3).

    A page's slab of one layer is cut into ``cells_per_page`` cells of ``cell_elements``; a row of length h
    takes ``ceil(h / cell_elements)`` whole cells, so none straddles a page and all layers share one table.
    Cell n of an adapter lies in its page ``n // cells_per_page`` at cell ``n % cells_per_page``.
    """

    page: PageShape
    groups: tuple[ProjectionGroup, ...]
    cell_elements: int

    @property
    def cells_per_page(self) -> int:
        return self.page.slab_elements // self.cell_elements

    @cached_property
    def projections(self) -> tuple[Projection, ...]:
        """All projections in table order."""
        return tuple(projection for group in self.groups for projection in group.projections)

    def cells(self, elements: int) -> int:
        """Whole cells that a row of this length takes."""
        return -(-elements // self.cell_elements)

    @property
    def slack(self) -> float:
        """Share of the cells' bytes that hold nothing, for an adapter on every projection."""
        return _slack(self.page, self.projections, self.cell_elements)


def adapter_geometry(page: PageShape, groups: tuple[ProjectionGroup, ...]) -> AdapterGeometry:
    """The largest power-of-two cell whose slack stays under SLACK_TARGET, else the one with least slack.

    Large cells mean few pointers for the kernels to load; every supported shape stays under 5 % slack.
    """
    projections = tuple(projection for group in groups for projection in group.projections)
    candidates = []
    size = CELL_ALIGNMENT_BYTES // page.itemsize
    while size <= min(LARGEST_CELL_ELEMENTS, page.slab_elements):
        candidates.append(size)
        size *= 2
    if not candidates:
        raise ValueError(
            f"a page of {page.page_tokens} tokens holds {page.slab_elements} elements a layer, "
            "too few for one adapter cell: raise page_tokens"
        )
    good = [c for c in candidates if _slack(page, projections, c) < SLACK_TARGET]
    best = max(good) if good else min(candidates, key=lambda c: _slack(page, projections, c))
    return AdapterGeometry(page=page, groups=groups, cell_elements=best)


def _slack(page: PageShape, projections: tuple[Projection, ...], cell: int) -> float:
    lengths = [length for p in projections for length in (p.in_features, p.out_features)]
    used = sum(lengths)
    cells = sum(-(-length // cell) for length in lengths)
    slab_share = (page.slab_elements // cell) * cell / page.slab_elements
    return 1.0 - used / (cells * cell) * slab_share
