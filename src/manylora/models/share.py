"""Decides which part of each linear, of the heads and of the vocabulary a rank has (S-LoRA §6, Megatron).

A rank has all inputs and a part of the outputs of a column linear (q, k, v; the MLP's first). It has a part
of the inputs of a row linear (the attention's output, the MLP's second), and computes a summand of all its
outputs. Norms, positions and projections of embeddings are whole on every rank.

Adapters are cut in one of two ways. **Sharded** (S-LoRA's memory, 1/N a rank): every A is cut by its inputs,
every B by its outputs, and between the two the ranks add up their products. S-LoRA cuts the A of column
linears by its rows instead. Cut by inputs, an adapter of any LoRA rank has equal parts, and one kind of
exchange serves all linears. **Replicated** (Punica §7.2): A and B are cut as the linear is. So A is whole for
column linears, and B for row linears. The ranks exchange nothing more, since they add up a row linear's
outputs anyway, the adapter's among them.

Owns these rules. Knows no tensors and no processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property

from manylora.kernels.shapes import (
    MOST_RANKS,
    AdapterCut,
    AdapterGeometry,
    PageShape,
    Projection,
    ProjectionGroup,
    RankPlace,
    adapter_geometry,
    distinct_groups,
    possible_counts,
)
from manylora.models.spec import Cut, Heads, LinearSpec, ModelConfig, ModelError


@dataclasses.dataclass(frozen=True, eq=False)
class LinearShare:
    """A rank's part of one fused linear, and of the adapters on it.

    ``group``: the linear's widths on this rank. ``outputs``: for each projection, its outputs on this rank;
    ``inputs``: the linear's inputs on this rank. ``adapted``: the adapters' widths on this rank, under the
    same modules and group name. Adapters read the columns ``read`` of this rank's x and add to the columns
    ``added`` of its y.
    """

    kind: Cut
    group: ProjectionGroup
    outputs: tuple[range, ...]
    inputs: range
    adapted: ProjectionGroup
    a_columns: range
    """The inputs of A on this rank, counted as in the adapter's file."""
    b_rows: tuple[range, ...]
    """For each projection, the outputs of B on this rank."""
    read: range
    added: range


@dataclasses.dataclass(frozen=True)
class ModelShare:
    """One rank's share of the model ``whole``.

    ``unit``: intermediate sizes and the vocabulary are cut at multiples of this many elements. It is halved
    where some rank would have none.
    """

    whole: ModelConfig
    place: RankPlace
    is_sharded: bool
    """Whether adapters are sharded; otherwise they are replicated."""
    unit: int = 1
    head_fixed_by: str = ""
    """The option that excludes adapters on the output head; empty: no option does."""

    @cached_property
    def heads(self) -> range:
        return self.place.heads(self.whole.num_heads)

    @cached_property
    def kv_heads(self) -> range:
        return self.place.heads(self.whole.num_kv_heads)

    @cached_property
    def vocab(self) -> range:
        return self.place.cut(self.whole.vocab_size, self.unit)

    @cached_property
    def config(self) -> ModelConfig:
        """The model with this rank's heads and widths. Vocabulary and hidden size stay the whole model's."""

        def mine(linear: LinearSpec) -> LinearSpec:
            return dataclasses.replace(linear, group=self.linear(linear).group)

        layers = tuple(layer.with_linears(mine) for layer in self.whole.layers)
        return dataclasses.replace(
            self.whole,
            layers=layers,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.place.cut(self.whole.intermediate_size, self.unit)),
        )

    def whole_page(self, page_tokens: int, itemsize: int) -> PageShape:
        """Return the shape of a page of all ranks together. A KV head counts once per rank that holds it."""
        mine = self.config.page_shape(page_tokens, itemsize)
        return dataclasses.replace(mine, kv_heads=mine.kv_heads * self.place.num_ranks)

    def whole_geometry(self, page_tokens: int, itemsize: int) -> AdapterGeometry:
        """Return the geometry of whole adapters in whole pages, to inspect adapters' files with.

        Raises ValueError where a page is too small for one cell.
        """
        is_fixed = self.place.num_ranks > 1 or self.head_fixed_by
        return adapter_geometry(
            self.whole_page(page_tokens, itemsize),
            self.whole.layer_groups,
            model=() if is_fixed else (self.whole.head_group,),
            fixed_by=self.head_fixed_by,
        )

    def geometry(self, page_tokens: int, itemsize: int) -> AdapterGeometry:
        """Return the geometry of adapters in this rank's parts of pages.

        An adapter takes equally many pages on every rank: as many as on rank 0, which has the longest rows.
        Raises ValueError where a page is too small for one cell.
        """
        if self.place.num_ranks == 1:
            return self.whole_geometry(page_tokens, itemsize)
        widest = ModelShare(self.whole, RankPlace(0, self.place.num_ranks), self.is_sharded, self.unit)
        page = widest.config.page_shape(page_tokens, itemsize)
        wide = adapter_geometry(page, widest.adapted_layers, itemsize)
        if self.place.rank == 0:
            return dataclasses.replace(wide, cuts=self.cuts)
        return dataclasses.replace(wide, layers=self.adapted_layers, widest=wide, cuts=self.cuts)

    @cached_property
    def adapted_layers(self) -> tuple[tuple[ProjectionGroup, ...], ...]:
        """Each layer's groups, with the adapters' widths on this rank."""
        return tuple(
            tuple(self.linear(linear).adapted for linear in layer.linears) for layer in self.whole.layers
        )

    @cached_property
    def cuts(self) -> tuple[AdapterCut, ...]:
        """This rank's part of each projection, in the order of the adapters' table."""
        found = {
            share.adapted: (linear.group, share)
            for layer in self.whole.layers
            for linear in layer.linears
            for share in (self.linear(linear),)
        }
        return tuple(
            AdapterCut(whole, share.a_columns, rows)
            for group, share in (found[adapted] for adapted in distinct_groups(self.adapted_layers))
            for whole, rows in zip(group.projections, share.b_rows, strict=True)
        )

    def linear(self, linear: LinearSpec) -> LinearShare:
        """Return this rank's part of a linear of the whole model."""
        group = linear.group
        b_rows: tuple[range, ...]
        if linear.cut == "row":
            inputs = self._part(group.in_features, linear.heads[0] if linear.heads else None)
            outputs = tuple(range(p.out_features) for p in group.projections)
            added = self.place.cut(len(outputs[0])) if self.is_sharded else outputs[0]
            read, a_columns, b_rows = range(len(inputs)), inputs, (added,)
        else:
            inputs = range(group.in_features)
            parts = zip(group.projections, linear.heads or [None] * len(group.projections), strict=True)
            outputs = tuple(self._part(p.out_features, heads) for p, heads in parts)
            added = range(sum(map(len, outputs)))
            read = self.place.cut(len(inputs)) if self.is_sharded else inputs
            a_columns, b_rows = read, outputs
        own, adapted = _of_widths(group, len(inputs), outputs), _of_widths(group, len(a_columns), b_rows)
        return LinearShare(linear.cut, own, outputs, inputs, adapted, a_columns, b_rows, read, added)

    def _part(self, features: int, heads: Heads | None) -> range:
        """Return this rank's range of the features: its heads' features, or any where no heads own them."""
        if heads is None:
            return self.place.cut(features, self.unit)
        mine, size = self.heads if heads == "query" else self.kv_heads, self.whole.head_dim
        return range(mine.start * size, mine.stop * size)


def check_count(config: ModelConfig, count: int, most: int = MOST_RANKS) -> None:
    """Raise ModelError if ``count`` ranks cannot share the model or are more than ``most``."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    possible = possible_counts(heads, kv_heads, most)
    if count in possible:
        return
    works = ", ".join(map(str, possible))
    if heads % count:
        why = f"its {heads} heads cannot be shared out equally"
    elif kv_heads % count and count % kv_heads:
        why = f"of its {kv_heads} KV heads and {count} neither is a multiple of the other"
    else:
        why = f"at most {most} ranks are supported here"
    raise ModelError(f"--tensor-parallel-size {count} does not fit the model: {why}; these do: {works}")


def _of_widths(group: ProjectionGroup, inputs: int, outputs: Sequence[range]) -> ProjectionGroup:
    projections = (
        Projection(p.module, inputs, len(columns))
        for p, columns in zip(group.projections, outputs, strict=True)
    )
    return ProjectionGroup(group.name, tuple(projections))
