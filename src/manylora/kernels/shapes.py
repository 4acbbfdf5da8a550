"""Describes the shapes that kernels, models, adapters and the pool agree on.

Owns the shape of a page, projections and their groups, the cell (the unit in which adapter rows are laid into
pages), and the one rule by which N ranks cut a length. A rank of an engine is one of N equal processes, each
with a part of every matrix; an adapter's rank is another thing. Holds no tensors, and does not know which
adapter is in which pages.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

MOST_RANKS = 16
"""The most ranks of an engine. More processes on one host spend more time on exchanges than on computing."""

CELL_ALIGNMENT_BYTES = 16
"""Bytes of the smallest cell. Larger cells are multiples of it."""
LARGEST_CELL_ELEMENTS = 1024
"""Adapter elements of the largest cell."""
SLACK_TARGET = 0.02
"""The share of unused bytes under which a larger cell is preferred to a smaller one."""

Activation = Literal["silu", "relu", "gelu", "gelu_tanh"]
"""The activation function of an MLP."""


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
        """Elements of one layer's share of a page."""
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
    """One linear that adapters can change. ``module``: its path inside a decoder layer ("self_attn.q_proj"),
    or inside the model if the model has it once ("lm_head")."""

    module: str
    in_features: int
    out_features: int


@dataclasses.dataclass(frozen=True)
class ProjectionGroup:
    """Projections of the same input, with their outputs side by side: one shrink and one expand for them all.

    Their fused linear returns ``[tokens, sum(out_features)]``. Projection i has the columns from
    ``offsets[i]`` to ``offsets[i + 1]``.
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
    """One rank's part of an adapter's projection: columns of A and rows of B. ``whole``: the projection as in
    the adapter's file."""

    whole: Projection
    a_columns: range
    b_rows: range


class RankPlace(NamedTuple):
    """The place of a rank among ``num_ranks`` ranks."""

    rank: int = 0
    num_ranks: int = 1

    def cut(self, length: int, unit: int = 1) -> range:
        """Return this rank's part of ``length`` elements, in whole units. Where the units cannot be shared
        out equally, the first ranks have one more. Where there are fewer units than ranks, the unit is halved
        until every rank has one."""
        while unit > 1 and length < unit * self.num_ranks:
            unit //= 2
        units = -(-length // unit)
        size, over = divmod(units, self.num_ranks)
        begin = self.rank * size + min(self.rank, over)
        end = begin + size + (self.rank < over)
        return range(min(begin * unit, length), min(end * unit, length))

    def heads(self, heads: int) -> range:
        """Return this rank's part of ``heads``. Where there are fewer heads than ranks, return the one head
        that this rank shares with its neighbours."""
        if heads >= self.num_ranks:
            return self.cut(heads)
        first = self.rank * heads // self.num_ranks
        return range(first, first + 1)


def possible_counts(heads: int, kv_heads: int, most: int) -> list[int]:
    """Return the numbers of ranks, up to ``most``, that can share the heads. All ranks must have equally many
    query heads. They must also have equally many KV heads, or each KV head must be on equally many ranks."""
    return [
        count
        for count in range(1, most + 1)
        if heads % count == 0 and (kv_heads % count == 0 or count % kv_heads == 0)
    ]


def distinct_groups(layers: Iterable[Iterable[ProjectionGroup]]) -> tuple[ProjectionGroup, ...]:
    """Return the groups of all layers, each once, in the order in which they first appear."""
    return tuple(dict.fromkeys(group for layer in layers for group in layer))


@dataclasses.dataclass(frozen=True)
class AdapterGeometry:
    """The rules by which the adapters of one model are laid into its pages (docs/architecture.md, "Memory").

    A slab (one layer's share of a page) is cut into ``cells_per_page`` cells of ``cell_elements``. A rank row
    of length h takes ``ceil(h / cell_elements)`` whole cells. So no cell straddles a page, and one cell table
    serves all layers: in every layer, cell n of an adapter is cell ``n % cells_per_page`` of its page
    ``n // cells_per_page``. An adapter's element has ``itemsize`` bytes, which may differ from the page's.
    Places of cells count adapter elements.

    ``layers``: the groups of each layer. ``model``: the groups that the model has only once (the output
    head). Tables have one place for every projection that some layer has, and then one for every projection
    of ``model``. The rows of ``model`` follow the layers' rows, and are spread over the slabs of all layers:
    if the layers' rows take n cells, cell k of the model's rows is cell ``n + k // L`` in the slab of layer
    ``k % L``, of L layers.
    ``fixed_by``: the option that excludes adapters on the output head, so that ``model`` is empty; or "".

    ``widest``: the geometry of the rank with the longest rows, which determines how many pages an adapter
    takes on every rank; None: this one. ``cuts``: this rank's part of each projection, in table order; empty:
    all of it.

    Raises ValueError where the slabs of a page do not begin at whole adapter elements, where the number of
    ``layers`` is not the page's, or where two groups share a name or a projection.
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
        """Adapter elements for which one layer's share of a page has room."""
        return self.page.slab_bytes // self.itemsize

    @property
    def page_elements(self) -> int:
        """Adapter elements for which a page has room."""
        return self.page.page_bytes // self.itemsize

    @property
    def alignment(self) -> int:
        """A number of adapter elements: in the pool, every cell of every layer begins at one of its
        multiples. A power of two where ``cell_elements`` is a power of two."""
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
        """The projections in table order: the layers', each once, and then the model's."""
        groups = (*self.groups, *self.model)
        return tuple(projection for group in groups for projection in group.projections)

    @cached_property
    def num_layer_projections(self) -> int:
        """The number of the layers' projections, which come first in ``projections``."""
        return sum(len(group.projections) for group in self.groups)

    @cached_property
    def of_layers(self) -> AdapterGeometry:
        """The geometry of the layers' projections alone."""
        return dataclasses.replace(self, model=()) if self.model else self

    @cached_property
    def of_model(self) -> AdapterGeometry:
        """The geometry of the model's projections alone, which kernels treat as those of layer 0."""
        return dataclasses.replace(self, layers=(self.model,) * self.page.layers, model=())

    @cached_property
    def wholes(self) -> tuple[Projection, ...]:
        """The projections as in adapters' files, not cut among ranks, in table order."""
        return tuple(cut.whole for cut in self.cuts) or self.projections

    def cut(self, index: int) -> AdapterCut:
        """Return this rank's part of the projection at ``index`` in table order."""
        if self.cuts:
            return self.cuts[index]
        whole = self.projections[index]
        return AdapterCut(whole, range(whole.in_features), range(whole.out_features))

    def cells(self, elements: int) -> int:
        """Return how many whole cells a row of this length takes."""
        return -(-elements // self.cell_elements)

    @property
    def slack(self) -> float:
        """The share of bytes in slabs that hold nothing, for an adapter on every projection of the layers."""
        return _slack(self.slab_elements, self.projections[: self.num_layer_projections], self.cell_elements)


def adapter_geometry(
    page: PageShape,
    layers: Sequence[tuple[ProjectionGroup, ...]],
    itemsize: int | None = None,
    model: tuple[ProjectionGroup, ...] = (),
    fixed_by: str = "",
) -> AdapterGeometry:
    """Choose the cell's length, and return the geometry with it.

    The cell is the largest power of two whose slack stays under SLACK_TARGET, or else the one with the least
    slack. Large cells mean few pointers for the kernels to load; every supported shape stays under 5 % slack.
    Only the layers' rows count for the choice. ``layers``: the groups of each of the page's layers.
    ``model``, ``fixed_by``: as in AdapterGeometry. ``itemsize``: bytes of an adapter's element; None: as the
    page's. Raises ValueError where a page's share of a layer has no room for a cell.
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
