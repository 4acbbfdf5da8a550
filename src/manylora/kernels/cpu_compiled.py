"""The operations on the CPU in float32 with compiled loops where they win; vectorised torch elsewhere.

Owns the choice: single query tokens and short adapter segments run in place over the pool (``compiled``);
long ones, other dtypes and unusual strides take the path of ``CpuOps``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from manylora.kernels import compiled
from manylora.kernels.cpu import CpuOps, adjacent_heads
from manylora.kernels.cpu_attention import CpuAttentionPlan
from manylora.kernels.cpu_lora import CpuLoraPlan
from manylora.kernels.ops import AttentionRows, LoraSegments, Rotary, Shrunk, Summands, of_adapters
from manylora.kernels.shapes import AdapterGeometry, PageShape, ProjectionGroup

SHORT_SEGMENT = 32
"""Tokens of one adapter from which gathering its rows for a matrix product pays."""


@dataclasses.dataclass(frozen=True)
class _Singles:
    """Rows of one query: place in the batch, context, pages."""

    tokens: np.ndarray
    lengths: np.ndarray
    page_table: np.ndarray
    longest: int


@dataclasses.dataclass(frozen=True)
class CompiledAttentionPlan:
    """Rows of one query for the compiled loop, the others for torch (``places``: their tokens)."""

    singles: _Singles | None
    others: CpuAttentionPlan | None
    places: torch.Tensor | None
    everything: CpuAttentionPlan


@dataclasses.dataclass(frozen=True)
class _GroupItems:
    """One group's short segments; ``scales[l]`` [N, P] is layer l's."""

    records: np.ndarray
    scales: np.ndarray
    columns: np.ndarray


@dataclasses.dataclass(frozen=True)
class CompiledLoraPlan:
    """Short segments for the compiled loop, long ones for torch."""

    starts: np.ndarray
    stops: np.ndarray
    cells: np.ndarray
    cell_elements: int
    slab_elements: int
    groups: dict[str, _GroupItems]
    shrunk: np.ndarray
    long: CpuLoraPlan | None


class CompiledOps(CpuOps):
    """The Ops protocol on the CPU. Until it ``is_ready`` it does as ``CpuOps``; what was planned so runs so."""

    name = "cpu (compiled)"

    def __init__(self, *, waits: bool = True) -> None:
        """``waits``: compile the loops now, or load what an earlier run compiled."""
        super().__init__()
        self.is_ready = waits
        if waits:
            _warm_up(self)

    def use_loops(self) -> None:
        """Compile, or load, on the caller's thread; steps that are planned afterwards run in loops."""
        CompiledOps()
        self.is_ready = True

    # ---- attention -------------------------------------------------------------------------------------

    def plan_attention(  # type: ignore[override]  # plans are opaque to their users
        self, rows: AttentionRows, page: PageShape, device: torch.device
    ) -> CompiledAttentionPlan:
        everything = super().plan_attention(rows, page, device)
        if not self.is_ready:
            return CompiledAttentionPlan(None, None, None, everything)
        counts = np.diff(rows.query_start)
        is_single = counts == 1
        singles = None
        if page.itemsize == 4 and is_single.any():
            lengths = rows.kv_len[is_single].astype(np.int64)
            longest = int(lengths.max())
            singles = _Singles(
                rows.query_start[:-1][is_single].astype(np.int64),
                lengths,
                np.ascontiguousarray(rows.page_table[is_single]),
                longest,
            )
        if singles is None or is_single.all():
            return CompiledAttentionPlan(singles, None, None, everything)
        starts = rows.query_start[:-1][~is_single]
        counts = counts[~is_single]
        places = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts)])
        others = AttentionRows(
            np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
            rows.kv_len[~is_single],
            rows.page_table[~is_single],
        )
        plan = super().plan_attention(others, page, device)
        return CompiledAttentionPlan(singles, plan, torch.from_numpy(places), everything)

    def attention(
        self, q: torch.Tensor, pool: torch.Tensor, layer: int, plan: Any, scale: float, window: int | None
    ) -> torch.Tensor:
        singles = plan.singles
        if singles is None or q.dtype is not torch.float32:
            return super().attention(q, pool, layer, plan.everything, scale, window)
        num_tokens, heads, dim = q.shape
        page_tokens, kv_heads = pool.shape[3:5]
        out = torch.empty(num_tokens, heads * dim)
        if plan.others is not None:
            rest = q.index_select(0, plan.places)
            out.index_copy_(0, plan.places, super().attention(rest, pool, layer, plan.others, scale, window))
        compiled.attend(
            _flat(q),
            q.stride(0),
            heads,
            dim,
            out.numpy(),
            pool.view(-1).numpy(),
            2 * layer * page_tokens * kv_heads * dim,
            pool.stride(0),
            page_tokens,
            kv_heads,
            singles.tokens,
            singles.lengths,
            singles.page_table,
            window or 0,
            scale,
            np.empty((heads // kv_heads, singles.longest), np.float32),
            np.empty(singles.longest, np.int32),
        )
        return out

    def write_kv(
        self, pool: torch.Tensor, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
    ) -> None:
        if pool.dtype is not torch.float32 or not self.is_ready:
            super().write_kv(pool, layer, k, v, slots)
            return
        page_tokens, kv_heads, dim = pool.shape[3:]
        keys = 2 * layer * page_tokens * kv_heads * dim
        compiled.store_kv(
            pool.view(-1).numpy(),
            keys,
            pool.stride(0),
            page_tokens,
            _flat(k),
            k.stride(0),
            _flat(v),
            v.stride(0),
            kv_heads * dim,
            slots.numpy(),
        )

    # ---- LoRA ------------------------------------------------------------------------------------------

    def plan_lora(  # type: ignore[override]  # plans are opaque to their users
        self, segments: LoraSegments, geometry: AdapterGeometry, device: torch.device
    ) -> CompiledLoraPlan | None:
        if len(segments.start) == 0:
            return None
        is_float32 = geometry.itemsize == 4
        is_short = (segments.length <= SHORT_SEGMENT) & (is_float32 and self.is_ready)
        short, long = _subset(segments, is_short), _subset(segments, ~is_short)
        groups = {}
        first = 0
        for group in geometry.groups:
            last = first + len(group.projections)
            groups[group.name] = _GroupItems(
                np.ascontiguousarray(short.records[:, first:last]),
                np.ascontiguousarray(short.scales[:, first:last].transpose(2, 0, 1)),
                np.array(group.offsets, np.int64),
            )
            first = last
        most_tokens = int(short.length.max(initial=1))
        largest_rank = int(short.records[:, :, 2].max(initial=1))
        return CompiledLoraPlan(
            starts=short.start.astype(np.int64),
            stops=(short.start + short.length).astype(np.int64),
            cells=segments.cells.numpy(),
            cell_elements=geometry.cell_elements,
            slab_elements=geometry.slab_elements,
            groups=groups,
            shrunk=np.empty((most_tokens, largest_rank), np.float32),
            long=super().plan_lora(long, geometry, device),
        )

    def lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        group: ProjectionGroup,
        plan: Any,
    ) -> None:
        if plan.long is not None:
            super().lora(y, x, pool, layer, group, plan.long)
        if len(plan.starts):
            items = plan.groups[group.name]
            compiled.add_lora(
                y.numpy(),
                x.numpy(),
                of_adapters(pool, x.dtype).view(-1).numpy(),
                layer * plan.slab_elements,
                plan.cells,
                plan.cell_elements,
                plan.starts,
                plan.stops,
                items.records,
                items.scales[layer],
                items.columns,
                plan.shrunk,
            )

    def lora_shrink(
        self, x: torch.Tensor, pool: torch.Tensor, layer: int, group: ProjectionGroup, plan: Any
    ) -> Shrunk:
        x = x.contiguous()
        items = plan.groups[group.name]
        ranks = items.records[:, :, 2].sum(axis=1)
        short = torch.empty(int(((plan.stops - plan.starts) * ranks).sum()), dtype=torch.float32)
        if len(short):
            compiled.shrink_lora(
                x.numpy(),
                of_adapters(pool, x.dtype).view(-1).numpy(),
                layer * plan.slab_elements,
                plan.cells,
                plan.cell_elements,
                plan.starts,
                plan.stops,
                items.records,
                items.scales[layer],
                short.numpy(),
            )
        if plan.long is None:
            return Shrunk(short, (len(short), ()))
        long = super().lora_shrink(x, pool, layer, group, plan.long)
        return Shrunk(torch.cat((short, long.values)), (len(short), long.parts))

    def lora_expand(
        self,
        y: torch.Tensor,
        shrunk: Shrunk,
        pool: torch.Tensor,
        layer: int,
        group: ProjectionGroup,
        plan: Any,
    ) -> None:
        num_short, parts = shrunk.parts
        if plan.long is not None:
            super().lora_expand(y, Shrunk(shrunk.values[num_short:], parts), pool, layer, group, plan.long)
        if num_short:
            items = plan.groups[group.name]
            rows, first = _whole_rows(y)
            compiled.expand_lora(
                rows.numpy(),
                of_adapters(pool, y.dtype).view(-1).numpy(),
                layer * plan.slab_elements,
                plan.cells,
                plan.cell_elements,
                plan.starts,
                plan.stops,
                items.records,
                first,
                items.columns,
                shrunk.values[:num_short].numpy(),
            )

    # ---- small operations ------------------------------------------------------------------------------

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        adapted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_plain = x.dim() == 2 and x.is_contiguous() and residual.is_contiguous()
        if x.dtype is not torch.float32 or not is_plain or not self.is_ready:
            return super().add_rms_norm(x, residual, weight, eps, adapted)
        x = Summands(x, adapted).whole
        out = torch.empty_like(x)
        compiled.add_norm(x.numpy(), residual.numpy(), weight.numpy(), eps, out.numpy())
        return out, residual

    def _rope(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if q.dtype is not torch.float32 or not self.is_ready:
            return super()._rope(q, k, cos, sin, positions)
        both = adjacent_heads(q, k)
        for x in (q, k) if both is None else (both,):
            compiled.rotate_in_place(
                _flat(x), x.stride(0), x.shape[1], cos.numpy(), sin.numpy(), positions.numpy()
            )
        return q, k

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        if gate_up.dtype is not torch.float32 or not self.is_ready:
            return super().silu_mul(gate_up)
        inner = gate_up.shape[1] // 2
        out = torch.empty(gate_up.shape[0], inner)
        compiled.gate(gate_up.numpy(), out.numpy(), np.empty(inner, np.int32))
        return out


def _flat(x: torch.Tensor) -> np.ndarray:
    """x ``[T, heads, D]``, dense but for its row stride, as one array that begins at its first element."""
    size = (x.shape[0] - 1) * x.stride(0) + x.shape[1] * x.shape[2]
    flat: np.ndarray = x.as_strided((size,), (1,)).numpy()
    return flat


def _whole_rows(y: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The contiguous tensor of whose columns y is some, and the first of them."""
    width = y.stride(0)
    if y.is_contiguous() or not len(y):
        return y, 0
    begin, first = divmod(int(y.storage_offset()), width)
    return y.as_strided((len(y), width), (width, 1), begin * width), first


def _subset(segments: LoraSegments, chosen: np.ndarray) -> LoraSegments:
    return LoraSegments(
        segments.start[chosen],
        segments.length[chosen],
        segments.records[chosen],
        segments.scales[chosen],
        segments.cells,
    )


def _warm_up(ops: CompiledOps) -> None:
    """Run every loop once on almost nothing, with the layouts that decoding uses."""
    pool = torch.zeros(1, 1, 2, 1, 1, 4)
    fused = torch.zeros(1, 12)
    q, k, v = (part.view(1, 1, 4) for part in fused.split_with_sizes([4, 4, 4], dim=1))
    zero = torch.zeros(1, dtype=torch.int64)
    rotary = Rotary(torch.zeros(1, 2), torch.zeros(1, 2))
    q = ops.rotate_and_store(q, k, v, pool, 0, rotary, zero, zero, None)
    page = PageShape(1, 1, 1, 4, 4)
    rows = AttentionRows(np.array([0, 1], np.int32), np.ones(1, np.int32), np.zeros((1, 1), np.int32))
    ops.attention(q, pool, 0, ops.plan_attention(rows, page, zero.device), 1.0, None)
    ops.add_rms_norm(torch.zeros(1, 4), torch.zeros(1, 4), torch.zeros(4), 1e-6)
    ops.silu_mul(torch.zeros(1, 8))
    nothing = np.zeros((1, 1, 3), np.int64)
    compiled.add_lora(
        torch.zeros(1, 4).numpy(), torch.zeros(1, 4).numpy(), pool.view(-1).numpy(), 0, np.zeros(1, np.int64),
        4, np.zeros(1, np.int64), np.ones(1, np.int64), nothing, np.zeros((1, 1), np.float32),
        np.array([0, 4]), np.zeros((1, 1), np.float32),
    )  # fmt: skip
