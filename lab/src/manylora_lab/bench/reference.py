"""Every operation in plain torch, one row, one segment, one rank row at a time: the truth for tests.

Owns: the meaning of the operations. It does not know about speed; nothing serves with it. Sums are taken in
float32 (float64 for float64 inputs) and rounded once, so it is at least as exact as any implementation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from manylora.kernels.ops import (
    ACTIVATIONS,
    AttentionLimits,
    AttentionRows,
    LoraLimits,
    LoraSegments,
    LoraSite,
    LoraStep,
    MergedLayer,
    MergePlan,
    Ops,
    Scores,
    Shrunk,
    Summands,
    Weight,
    no_segments,
    of_adapters,
)
from manylora.kernels.shapes import Activation, AdapterGeometry, PageShape, ProjectionGroup


class ReferenceAttentionPlan:
    rows: AttentionRows

    def fill(self, rows: AttentionRows) -> None:
        self.rows = rows


class ReferenceLoraPlan:
    segments: LoraSegments

    def __init__(self, geometry: AdapterGeometry) -> None:
        self.geometry = geometry

    def fill(self, segments: LoraSegments | None, num_tokens: int) -> None:
        if segments is None:
            segments = no_segments(self.geometry, torch.empty(0, dtype=torch.int64))
        self.segments = segments


def wide(x: torch.Tensor) -> torch.Tensor:
    """The tensor in the precision in which sums are taken."""
    return x if x.dtype == torch.float64 else x.float()


class _Adapted(NamedTuple):
    """One projection of one segment that has rows."""

    segment: int
    tokens: slice
    place: int
    entry: int
    first_a: int
    first_b: int
    rank: int


def _parts(group: ProjectionGroup, plan: ReferenceLoraPlan) -> Iterator[_Adapted]:
    segments, geometry = plan.segments, plan.geometry
    for segment, (start, length) in enumerate(zip(segments.start.tolist(), segments.length.tolist())):
        for place, projection in enumerate(group.projections):
            index = geometry.projections.index(projection)
            first_a, first_b, rank = segments.records[segment, index].tolist()
            if rank:
                tokens = slice(start, start + length)
                yield _Adapted(segment, tokens, place, index, first_a, first_b, rank)


class ReferenceOps(Ops):
    """The operations on any device and in any floating dtype."""

    name = "reference"

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        return functional.linear(wide(x), wide(weight.data), None if bias is None else wide(bias)).to(x.dtype)

    def attention_plan(
        self, page: PageShape, device: torch.device, limits: AttentionLimits | None = None
    ) -> ReferenceAttentionPlan:
        return ReferenceAttentionPlan()

    def lora_plan(
        self, geometry: AdapterGeometry, device: torch.device, limits: LoraLimits | None = None
    ) -> ReferenceLoraPlan:
        return ReferenceLoraPlan(geometry)

    def write_kv(
        self, pool: torch.Tensor, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
    ) -> None:
        page_tokens = pool.shape[3]
        for t, slot in enumerate(slots.tolist()):
            pool[slot // page_tokens, layer, 0, slot % page_tokens] = k[t]
            pool[slot // page_tokens, layer, 1, slot % page_tokens] = v[t]

    def attention(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        plan: ReferenceAttentionPlan,
        scores: Scores,
    ) -> torch.Tensor:
        scale, window, soft_cap = scores
        heads, dim = q.shape[1:]
        page_tokens, kv_heads = pool.shape[3:5]
        out = torch.zeros_like(q)
        starts = plan.rows.query_start.tolist()
        for row, kv_len in enumerate(plan.rows.kv_len.tolist()):
            first, last = starts[row], starts[row + 1]
            if first == last:
                continue
            num_pages = -(-kv_len // page_tokens)
            pages = plan.rows.page_table[row, :num_pages].tolist()
            k = torch.cat([pool[p, layer, 0] for p in pages])[:kv_len]  # [kv_len, kv_heads, D]
            v = torch.cat([pool[p, layer, 1] for p in pages])[:kv_len]
            position = torch.arange(kv_len - (last - first), kv_len, device=q.device)[:, None]
            key = torch.arange(kv_len, device=q.device)[None, :]
            visible = key <= position
            if window is not None:
                visible &= key > position - window
            for head in range(heads):
                group = head * kv_heads // heads
                of_keys = wide(q[first:last, head]) @ wide(k[:, group]).T * scale
                if soft_cap is not None:
                    of_keys = soft_cap * torch.tanh(of_keys / soft_cap)
                weights = of_keys.masked_fill(~visible, float("-inf")).softmax(-1)
                out[first:last, head] = (weights @ wide(v[:, group])).to(q.dtype)
        return out.view(q.shape[0], heads * dim)

    def lora_shrink(self, x: torch.Tensor, site: LoraSite, step: LoraStep) -> Shrunk:
        (pool, plan), group, layer = step, site.group, site.layer
        assert isinstance(plan, ReferenceLoraPlan)
        lies = (pool, x.dtype, layer, plan.geometry, plan.segments.cells)
        values = [
            wide(x[part.tokens]) @ wide(self._rows(*lies, part.first_a, part.rank, group.in_features)).T
            for part in _parts(group, plan)
        ]
        empty = wide(x.new_empty(0))
        return Shrunk(torch.cat([empty, *(value.reshape(-1) for value in values)]), None)

    def lora_expand(self, y: torch.Tensor, shrunk: Shrunk, site: LoraSite, step: LoraStep) -> None:
        (pool, plan), group, layer = step, site.group, site.layer
        assert isinstance(plan, ReferenceLoraPlan)
        segments, geometry = plan.segments, plan.geometry
        begin = 0
        for part in _parts(group, plan):
            length = part.tokens.stop - part.tokens.start
            values = shrunk.values[begin : begin + length * part.rank].view(length, part.rank)
            begin += length * part.rank
            width = group.projections[part.place].out_features
            first = group.offsets[part.place]
            b = wide(
                self._rows(pool, y.dtype, layer, geometry, segments.cells, part.first_b, part.rank, width)
            )
            columns = y[part.tokens, first : first + width]
            scale = float(segments.scales[part.segment, part.entry, layer])
            columns.copy_(wide(columns) + values @ b * scale)

    def merge_linears(
        self, layers: Sequence[MergedLayer], pool: torch.Tensor, group: ProjectionGroup, plan: MergePlan
    ) -> None:
        for layer, merged, pristine in layers:
            for place, projection, first_a, first_b, rank, scale in plan.parts(group, layer):
                mine = slice(group.offsets[place], group.offsets[place + 1])
                rows = pristine[mine]
                if rank:
                    lies = (pool, pristine.dtype, layer, plan.geometry, plan.cells)
                    a = self._rows(*lies, first_a, rank, projection.in_features)
                    b = self._rows(*lies, first_b, rank, projection.out_features)
                    rows = wide(rows) + wide(b).T @ wide(a) * scale
                merged[mine].copy_(rows)

    @staticmethod
    def _rows(
        pool: torch.Tensor,
        dtype: torch.dtype,
        layer: int,
        geometry: AdapterGeometry,
        cells: torch.Tensor,
        first: int,
        rank: int,
        elements: int,
    ) -> torch.Tensor:
        """The ``[rank, elements]`` matrix whose cells start at entry ``first`` of the cell table."""
        flat = of_adapters(pool, dtype).view(-1)
        per_row = geometry.cells(elements)
        offset = layer * geometry.slab_elements
        rows = []
        for j in range(rank):
            begins = cells[first + j * per_row : first + (j + 1) * per_row] + offset
            row = torch.cat([flat[begin : begin + geometry.cell_elements] for begin in begins.tolist()])
            rows.append(row[:elements])
        return torch.stack(rows)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        exact = wide(x)
        normal = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
        return (weight * normal.to(weight.dtype)).to(x.dtype)

    def add_rms_norm(
        self, x: Summands, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x.whole + residual
        return self.rms_norm(total, weight, eps), total

    def _rope(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        c, s = wide(cos[positions])[:, None], wide(sin[positions])[:, None]  # [T, 1, D/2]

        def rotate(x: torch.Tensor) -> torch.Tensor:
            left, right = wide(x).chunk(2, dim=-1)
            return torch.cat((left * c - right * s, right * c + left * s), dim=-1).to(x.dtype)

        return rotate(q), rotate(k)

    def gate_mul(self, gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
        gate, up = wide(gate_up).chunk(2, dim=-1)
        return (ACTIVATIONS[activation](gate) * up).to(gate_up.dtype)
