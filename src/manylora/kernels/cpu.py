"""The operations on the CPU, in vectorised torch: few large calls, because a call costs 5 to 40 us.

Owns: how keys, values and adapter rows come out of the paged pool into dense matrices. It does not know what
a page belongs to.

Both attention and LoRA follow one scheme. The pool is seen as a matrix of equal pieces (a token's keys; a
cell), a plan holds the piece numbers of layer 0, and a layer's pieces are the same numbers in a view that
begins later. So a plan serves every layer, and one ``index_select`` brings all that a group of rows needs.

Stale bytes: slots past a row's context are never read (their places in the gathered matrix repeat the row's
last valid slot, and the mask hides those), so no garbage, NaN or infinity can reach a result. In LoRA the
tail of a row's last cell is cut off before any arithmetic, and padding repeats rows and tokens of the same
batch. Adapter weights themselves must be finite: padding is multiplied by zero, and 0 * inf is NaN. The
adapter loader refuses weights that are not finite.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from manylora.kernels.cpu_attention import CpuAttentionPlan, group_rows
from manylora.kernels.cpu_lora import CpuLoraPlan, LoraBlock, plan_blocks
from manylora.kernels.ops import (
    AttentionRows,
    ComposedLora,
    HeadNorm,
    LoraSegments,
    MergedLayer,
    MergePlan,
    Rotary,
    Shrunk,
    Summands,
    of_adapters,
    rotated_then_stored,
)
from manylora.kernels.shapes import AdapterGeometry, PageShape, ProjectionGroup
from manylora.kernels.weight import Weight

_MERGED_ELEMENTS = 2**18
"""Elements of a weight that are merged at a time."""


class CpuOps(ComposedLora):
    """The Ops protocol on the CPU, in float64, float32, bfloat16 and float16."""

    name = "cpu"

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def _buffer(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Scratch of this shape; reused, because fresh large allocations cost a page fault per 4 KiB."""
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < rows * columns:
            buffer = self._buffers[name, dtype] = torch.empty(rows * columns, dtype=dtype)
        return buffer[: rows * columns].view(rows, columns)

    # ---- attention -------------------------------------------------------------------------------------

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, weight.data, bias)

    def plan_attention(self, rows: AttentionRows, page: PageShape, device: torch.device) -> CpuAttentionPlan:
        return CpuAttentionPlan(rows, page)

    def write_kv(
        self, pool: torch.Tensor, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
    ) -> None:
        layers, _, page_tokens, kv_heads, dim = pool.shape[1:]
        tokens = pool.view(-1, kv_heads * dim)
        pages = torch.div(slots, page_tokens, rounding_mode="floor")
        where = slots + pages * ((2 * layers - 1) * page_tokens)
        for kind, values in enumerate((k, v)):
            start = (2 * layer + kind) * page_tokens
            tokens[start:].index_copy_(0, where, values.reshape(-1, kv_heads * dim))

    def attention(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        plan: CpuAttentionPlan,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        num_tokens, heads, dim = q.shape
        page_tokens, kv_heads = pool.shape[3:5]
        if window not in plan.groups:
            plan.groups[window] = group_rows(plan.rows, plan.page, window)
        tokens = pool.view(-1, kv_heads * dim)
        keys = tokens[2 * layer * page_tokens :]
        values = tokens[(2 * layer + 1) * page_tokens :]
        out = q.new_zeros(num_tokens + 1, heads * dim)
        for group in plan.groups[window]:
            batch, _, _, length, context = group.visible.shape
            k = self._buffer("k", batch * context, kv_heads * dim, q.dtype)
            v = self._buffer("v", batch * context, kv_heads * dim, q.dtype)
            torch.index_select(keys, 0, group.slots, out=k)
            torch.index_select(values, 0, group.slots, out=v)
            shape = (batch, length, kv_heads, heads // kv_heads, dim)
            # The heads that share a key head become more queries of it: grouped attention without copies.
            folded = q.index_select(0, group.queries).view(shape).permute(0, 2, 3, 1, 4)
            result = F.scaled_dot_product_attention(
                folded.reshape(batch, kv_heads, -1, dim),
                k.view(batch, context, kv_heads, dim).transpose(1, 2),
                v.view(batch, context, kv_heads, dim).transpose(1, 2),
                attn_mask=group.additive_mask(heads // kv_heads, q.dtype),
                scale=scale,
            )
            result = result.view(batch, kv_heads, -1, length, dim).permute(0, 3, 1, 2, 4)
            out.index_copy_(0, group.targets, result.reshape(batch * length, heads * dim))
        return out[:num_tokens]

    # ---- LoRA ------------------------------------------------------------------------------------------

    def plan_lora(
        self, segments: LoraSegments, geometry: AdapterGeometry, device: torch.device
    ) -> CpuLoraPlan | None:
        if len(segments.start) == 0:
            return None
        return plan_blocks(segments, geometry)

    def lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        group: ProjectionGroup,
        plan: CpuLoraPlan,
    ) -> None:
        pieces = of_adapters(pool, x.dtype).view(-1, plan.piece)
        for block in plan.blocks[group.name]:
            cells = self._cells(pieces, layer, block.pieces, plan)
            shrunk = _shrink_block(x, layer, group, block, cells, plan.geometry)
            _expand_block(y, shrunk, group, block, cells, plan.geometry)

    def lora_shrink(
        self, x: torch.Tensor, pool: torch.Tensor, layer: int, group: ProjectionGroup, plan: CpuLoraPlan
    ) -> Shrunk:
        pieces = of_adapters(pool, x.dtype).view(-1, plan.piece)
        parts = []
        for block in plan.blocks[group.name]:
            of_a = block.num_a_cells(plan.geometry.cells(group.in_features)) * plan.pieces_per_cell
            cells = self._cells(pieces, layer, block.pieces[:of_a], plan)
            parts.append(_shrink_block(x, layer, group, block, cells, plan.geometry))
        if not parts:
            return Shrunk(x.new_empty(0), ())
        values = torch.cat([part.reshape(-1) for part in parts])
        if x.dtype.itemsize < 4:
            values = values.float()  # rounded once more only when the ranks' parts are added up
        return Shrunk(values, tuple(part.shape for part in parts))

    def lora_expand(
        self,
        y: torch.Tensor,
        shrunk: Shrunk,
        pool: torch.Tensor,
        layer: int,
        group: ProjectionGroup,
        plan: CpuLoraPlan,
    ) -> None:
        pieces = of_adapters(pool, y.dtype).view(-1, plan.piece)
        values = shrunk.values.to(y.dtype)
        begin = 0
        for block, shape in zip(plan.blocks[group.name], shrunk.parts, strict=True):
            of_a = block.num_a_cells(plan.geometry.cells(group.in_features))
            cells = self._cells(pieces, layer, block.pieces[of_a * plan.pieces_per_cell :], plan)
            end = begin + shape.numel()
            _expand_block(y, values[begin:end].view(shape), group, block, cells, plan.geometry, of_a)
            begin = end

    def _cells(
        self, pieces: torch.Tensor, layer: int, wanted: torch.Tensor, plan: CpuLoraPlan
    ) -> torch.Tensor:
        """Cells ``[n, cell_elements]`` by these of a block's pieces, out of the whole pool in pieces, in
        scratch that the next call overwrites."""
        offset = layer * plan.geometry.slab_elements // plan.piece
        scratch = self._buffer("lora", len(wanted), plan.piece, pieces.dtype)
        torch.index_select(pieces[offset:], 0, wanted, out=scratch)
        return scratch.view(-1, plan.geometry.cell_elements)

    def merge_linears(
        self, layers: Sequence[MergedLayer], pool: torch.Tensor, group: ProjectionGroup, plan: MergePlan
    ) -> None:
        for layer, merged, pristine in layers:
            lies = (of_adapters(pool, merged.dtype), layer, plan)
            for place, projection, first_a, first_b, rank, scale in plan.parts(group, layer):
                begin, end = group.offsets[place], group.offsets[place + 1]
                if rank == 0:
                    merged[begin:end].copy_(pristine[begin:end])
                    continue
                a = _adapter_rows(*lies, first_a, rank, projection.in_features)
                b = _adapter_rows(*lies, first_b, rank, projection.out_features)
                _merge(merged[begin:end], pristine[begin:end], a, b, scale)

    # ---- small operations ------------------------------------------------------------------------------

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        adapted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual.add_(Summands(x, adapted).whole)
        return F.rms_norm(residual, (residual.shape[-1],), weight, eps), residual

    def _rope(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        c, s = cos.index_select(0, positions)[:, None], sin.index_select(0, positions)[:, None]
        both = adjacent_heads(q, k)
        if both is not None:
            turned = rotate(both, c, s)
            return turned[:, : q.shape[1]], turned[:, q.shape[1] :]
        return rotate(q, c, s), rotate(k, c, s)

    def rotate_and_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        rotary: Rotary,
        positions: torch.Tensor,
        slots: torch.Tensor,
        norm: HeadNorm | None,
        adapted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return rotated_then_stored(
            self, self._rope, q, k, v, pool, layer, rotary, positions, slots, norm, adapted
        )

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


def _merge(
    merged: torch.Tensor, pristine: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float
) -> None:
    """Rows of one projection, so many at a time that their sums stay in the processor's cache."""
    rows = max(1, _MERGED_ELEMENTS // merged.shape[1])
    for part, loaded, b_part in zip(
        torch.split(merged, rows), torch.split(pristine, rows), torch.split(b, rows, 1)
    ):
        part.copy_((b_part.T @ a).mul_(scale).add_(loaded))


def _adapter_rows(
    pool: torch.Tensor, layer: int, plan: MergePlan, first: int, rank: int, elements: int
) -> torch.Tensor:
    """The ``[rank, elements]`` matrix whose cells start at entry ``first`` of the cell table, in float32."""
    geometry = plan.geometry
    piece = geometry.alignment
    begins = plan.cells[first : first + rank * geometry.cells(elements)] + layer * geometry.slab_elements
    pieces = (begins // piece)[:, None] + torch.arange(geometry.cell_elements // piece)
    rows = pool.view(-1, piece).index_select(0, pieces.view(-1)).view(rank, -1)[:, :elements]
    return rows.double() if pool.dtype is torch.float64 else rows.float()


def _shrink_block(
    x: torch.Tensor,
    layer: int,
    group: ProjectionGroup,
    block: LoraBlock,
    cells: torch.Tensor,
    geometry: AdapterGeometry,
) -> torch.Tensor:
    """Scaled: of a single segment, whose tokens are neighbours, ``[n, R]``; else of a padded batch ``[U, N, R]``.
    ``cells``: A's, and any after them."""
    batch, ranks = block.segments, block.scales.shape[-1]
    scales = block.scales[layer if len(block.scales) > 1 else 0]
    a = cells[: block.num_a_cells(geometry.cells(group.in_features))]
    if block.tokens is None:
        a = a.view(ranks, -1)[:, : group.in_features]
        return (x[block.start : block.stop] @ a.T).mul_(scales[0])
    a = a.view(batch, ranks, -1)[:, :, : group.in_features]
    inputs = x.index_select(0, block.tokens).view(batch, -1, group.in_features)
    shrunk = torch.bmm(inputs, a.transpose(1, 2))
    if block.lent is not None:
        shrunk.masked_fill_(block.lent, 0)  # by a scale of zero what is infinite would become NaN
    return shrunk.mul_(scales)


def _expand_block(
    y: torch.Tensor,
    shrunk: torch.Tensor,
    group: ProjectionGroup,
    block: LoraBlock,
    cells: torch.Tensor,
    geometry: AdapterGeometry,
    skipped: int = 0,
) -> None:
    """Plain products added in place where ``shrunk`` is of a single segment, else batched products whose rows are
    added to the tokens they belong to. ``skipped``: cells of the block before the first of ``cells``."""
    batch = block.segments
    added = []
    for share in block.shares:
        outputs, first = share.projection.out_features, share.first_cell - skipped
        b = cells[first : first + batch * share.rank * geometry.cells(outputs)]
        mine = shrunk[..., share.first_column : share.first_column + share.rank]
        if block.tokens is None:
            columns = y[block.start : block.stop, share.first_output : share.first_output + outputs]
            columns.addmm_(mine, b.view(share.rank, -1)[:, :outputs])
        else:
            added.append(torch.bmm(mine, b.view(batch, share.rank, -1)[:, :, :outputs]).view(-1, outputs))
    if block.tokens is None:
        return
    if len(added) == len(group.projections):
        # Whole rows: index_add_ into a slice of the columns is several times slower.
        y.index_add_(0, block.tokens, torch.cat(added, dim=1) if len(added) > 1 else added[0])
        return
    for share, part in zip(block.shares, added):
        columns = y[:, share.first_output : share.first_output + share.projection.out_features]
        columns.index_add_(0, block.tokens, part)


def adjacent_heads(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """``[T, heads + kv_heads, D]`` over the memory of q and k, where k directly follows q in each row (views
    of one fused projection): half the calls. None elsewhere."""
    same_rows = q.stride() == k.stride() and q.stride(1) == q.shape[2] and q.stride(2) == 1
    storage = q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    if not (same_rows and storage and k.storage_offset() == q.storage_offset() + q.shape[1] * q.shape[2]):
        return None
    return q.as_strided((q.shape[0], q.shape[1] + k.shape[1], q.shape[2]), q.stride())


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x ``[T, heads, D]`` turned by cos, sin ``[T, 1, D/2]`` in their precision, in x's dtype."""
    left, right = x.to(cos.dtype).chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=cos.dtype)
    low, high = out.chunk(2, dim=-1)
    torch.mul(left, cos, out=low).addcmul_(right, sin, value=-1)
    torch.mul(right, cos, out=high).addcmul_(left, sin)
    return out.to(x.dtype)
