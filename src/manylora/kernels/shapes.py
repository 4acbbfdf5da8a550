"""The shapes that kernels, models, adapters and the pool agree on. No tensors here.

Owns: what one page is, which projections a decoder layer has, how they group, the cell (the unit in which
adapter rows are laid into pages), and the one rule by which N ranks cut a length. A rank (of an engine; an
adapter's rank is another thing) is one of N equal processes, each with a part of every matrix. Does not know which
adapter lies where.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

MOST_RANKS = 16
"""More processes of one host exchange more than they compute."""

CELL_ALIGNMENT_BYTES = 16
LARGEST_CELL_ELEMENTS = 1024
SLACK_TARGET = 0.02

Activation = Literal["silu", "relu", "gelu", "gelu_tanh"]
"""Of an MLP."""


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
    def slab_bytes(self) -> int:
        return self.slab_elements * self.itemsize

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
class AdapterCut:
    """What one of N ranks has of an adapter's projection, which in its file is ``whole``: columns of A, rows
    of B."""

    whole: Projection
    a_columns: range
    b_rows: range


class RankPlace(NamedTuple):
    """Which of how many ranks."""

    rank: int = 0
    num_ranks: int = 1

    def cut(self, length: int, unit: int = 1) -> range:
        """This rank's part of ``length`` elements: whole units, the first ranks having one more where they do not
        come out even. Units are halved until every rank has one."""
        while unit > 1 and length < unit * self.num_ranks:
            unit //= 2
        units = -(-length // unit)
        size, over = divmod(units, self.num_ranks)
        begin = self.rank * size + min(self.rank, over)
        end = begin + size + (self.rank < over)
        return range(min(begin * unit, length), min(end * unit, length))

    def heads(self, heads: int) -> range:
        """This rank's part of ``heads``; of fewer heads than ranks the one that it shares with its neighbours."""
        if heads >= self.num_ranks:
            return self.cut(heads)
        first = self.rank * heads // self.num_ranks
        return range(first, first + 1)


def possible_counts(heads: int, kv_heads: int, most: int) -> list[int]:
    """The numbers of ranks, up to ``most``, among which the heads can be shared out: equal parts of the query
    heads, and equal parts of the KV heads or equal numbers of ranks to each."""
    return [
        count
        for count in range(1, most + 1)
        if heads % count == 0 and (kv_heads % count == 0 or count % kv_heads == 0)
    ]


def distinct_groups(layers: Iterable[Iterable[ProjectionGroup]]) -> tuple[ProjectionGroup, ...]:
    """The groups of all layers, each once, in the order in which they first come."""
    return tuple(dict.fromkeys(group for layer in layers for group in layer))


@dataclasses.dataclass(frozen=True)
class AdapterGeometry:
    """How adapters of one model are laid into its pages (docs/architecture.md, "Memory").

    A page's slab of one layer is cut into ``cells_per_page`` cells of ``cell_elements``; a row of length h
    takes ``ceil(h / cell_elements)`` whole cells, so none straddles a page and all layers share one table.
    Cell n of an adapter lies in its page ``n // cells_per_page`` at cell ``n % cells_per_page``. An adapter's
    element has ``itemsize`` bytes, which may differ from the page's; where cells lie is told in adapter elements.
    ``layers``: the groups that each layer has. The layers' common table has a place for every projection of any,
    and behind these one for every projection of ``model``: the groups that the model has once. Rows of theirs lie
    across the layers: entry k of their part of an adapter's table is a cell in slab ``k % layers``, the
    adapter's cell ``k // layers`` behind those of the layers' rows. ``fixed_by``: where ``model`` is empty, the
    option beside which no adapter changes what the model has once.
    ``widest``: of N ranks, each with its part of a page and of an adapter, the one with the longest rows,
    which says how many pages an adapter takes on all of them; None: this one. ``cuts``: what this rank has of
    each projection, in table order; empty: all.

    Raises ValueError where the slabs of a page's layers do not begin at whole elements, where ``layers`` are not
    the page's, and where two groups share a name or a projection.
    """

    page: PageShape
    layers: tuple[tuple[ProjectionGroup, ...], ...]
    cell_elements: int
    itemsize: int
    widest: AdapterGeometry | None = None
    cuts: tuple[AdapterCut, ...] = ()
    model: tuple[ProjectionGroup, ...] = ()
    fixed_by: str = ""

    def __post_init__(self) -> None:
        if len(self.layers) != self.page.layers:
            raise ValueError(f"{len(self.layers)} layers are described, a page has {self.page.layers}")
        names = [group.name for group in (*self.groups, *self.model)]
        if len(set(names)) < len(names) or len(set(self.projections)) < len(self.projections):
            raise ValueError(
                f"different groups of projections share a name or a projection: {', '.join(names)}"
            )
        if self.page.slab_bytes % self.itemsize:
            raise ValueError(
                f"a page's layers of {self.page.slab_bytes} bytes are no whole numbers of adapter elements "
                f"of {self.itemsize} bytes"
            )

    @property
    def slab_elements(self) -> int:
        """Adapter elements that one layer's share of a page has room for."""
        return self.page.slab_bytes // self.itemsize

    @property
    def page_elements(self) -> int:
        """Adapter elements that a page has room for."""
        return self.page.page_bytes // self.itemsize

    @property
    def alignment(self) -> int:
        """Every cell of every layer begins at a multiple of so many adapter elements in the pool: a power of two
        where a cell has one."""
        return math.gcd(self.slab_elements, self.cell_elements)

    @property
    def cells_per_page(self) -> int:
        return self.slab_elements // self.cell_elements

    @cached_property
    def groups(self) -> tuple[ProjectionGroup, ...]:
        """The groups that some layer has."""
        return distinct_groups(self.layers)

    @cached_property
    def projections(self) -> tuple[Projection, ...]:
        """The projections that some layer has, and then the model's, in table order."""
        groups = (*self.groups, *self.model)
        return tuple(projection for group in groups for projection in group.projections)

    @cached_property
    def num_of_layers(self) -> int:
        """How many of the projections are the layers'."""
        return sum(len(group.projections) for group in self.groups)

    @cached_property
    def of_layers(self) -> AdapterGeometry:
        """The geometry of the layers' part of adapters' tables."""
        return dataclasses.replace(self, model=()) if self.model else self

    @cached_property
    def of_model(self) -> AdapterGeometry:
        """The geometry of the model's part of adapters' tables, which kernels take for layer 0's."""
        return dataclasses.replace(self, layers=(self.model,) * self.page.layers, model=())

    @cached_property
    def wholes(self) -> tuple[Projection, ...]:
        """The projections as adapters' files have them, in table order."""
        return tuple(cut.whole for cut in self.cuts) or self.projections

    def cut(self, index: int) -> AdapterCut:
        """What this geometry has of the projection at this place of the table."""
        if self.cuts:
            return self.cuts[index]
        whole = self.projections[index]
        return AdapterCut(whole, range(whole.in_features), range(whole.out_features))

    def cells(self, elements: int) -> int:
        """Whole cells that a row of this length takes."""
        return -(-elements // self.cell_elements)

    @property
    def slack(self) -> float:
        """Share of the cells' bytes that hold nothing, for an adapter on every projection of the layers."""
        return _slack(self.slab_elements, self.projections[: self.num_of_layers], self.cell_elements)


def adapter_geometry(
    page: PageShape,
    layers: Sequence[tuple[ProjectionGroup, ...]],
    itemsize: int | None = None,
    model: tuple[ProjectionGroup, ...] = (),
    fixed_by: str = "",
) -> AdapterGeometry:
    """The largest power-of-two cell whose slack stays under SLACK_TARGET, else the one with least slack.

    Large cells mean few pointers for the kernels to load; every supported shape stays under 5 % slack.
    The layers' rows alone choose it. ``layers``: the groups of each of the page's layers; ``model``,
    ``fixed_by``: see AdapterGeometry. ``itemsize``: bytes of an adapter's element; None: as the page's. Raises
    ValueError where a page's share of a layer has no room for a cell.
    """
    itemsize = page.itemsize if itemsize is None else itemsize
    slab = page.slab_bytes // itemsize
    projections = tuple(p for group in distinct_groups(layers) for p in group.projections)
    candidates = []
    size = CELL_ALIGNMENT_BYTES // itemsize
    while size <= min(LARGEST_CELL_ELEMENTS, slab):
        candidates.append(size)
        size *= 2
    if not candidates:
        raise ValueError(
            f"a page of {page.page_tokens} tokens holds {slab} elements a layer, "
            "too few for one adapter cell: raise page_tokens"
        )
    good = [c for c in candidates if _slack(slab, projections, c) < SLACK_TARGET]
    best = max(good) if good else min(candidates, key=lambda c: _slack(slab, projections, c))
    return AdapterGeometry(page, tuple(layers), best, itemsize, model=model, fixed_by=fixed_by)


def _slack(slab: int, projections: tuple[Projection, ...], cell: int) -> float:
    lengths = [length for p in projections for length in (p.in_features, p.out_features)]
    used = sum(lengths)
    cells = sum(-(-length // cell) for length in lengths)
    slab_share = (slab // cell) * cell / slab
    return 1.0 - used / (cells * cell) * slab_share
