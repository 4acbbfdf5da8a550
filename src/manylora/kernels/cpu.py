"""Implements the operations on a CPU: compiled loops do short work, and torch does long work.

Owns the choice between the two, and the gathering of keys, values and adapter rows from the pool into dense
matrices. Rows of one query and segments of few tokens run in loops directly over the pool (``loops``), in
float32 and bfloat16. Torch computes all other rows and segments, and all other dtypes, one row or segment at
a time: keys and values or the adapter's rows are gathered first. Does not know to what a page belongs.

Slots past a row's context and the tail of an adapter row's last cell may hold stale bytes. These are cut off
before any arithmetic, so no garbage, NaN or infinity can reach a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from manylora.kernels import loops, ops
from manylora.kernels.shapes import Activation, AdapterGeometry, PageShape, ProjectionGroup

SHORT_CONTEXT = 2**20
"""The most elements of a row's keys for which attention runs in a loop, on one thread. Longer rows use
torch's threads."""

SHORT_SEGMENT = 2**22
"""The most multiply-adds of a segment's tokens with its adapter in one layer for which LoRA runs in a loop.
Longer segments use torch's threads."""

QUERY_TILE = 128
"""The queries of a prompt for which attention is computed at once. Tiles keep the mask small, and skip the
keys that follow a tile."""

_IN_LOOPS = (torch.float32, torch.bfloat16)

_Shared = tuple[np.ndarray, int, np.ndarray, int, np.ndarray, np.ndarray, np.ndarray]

_MERGED_ELEMENTS = 2**18
"""The elements of a weight that are merged at once, few enough to stay in the processor's cache."""


class CpuAttentionPlan:
    """A step's rows, divided into short rows of one query for the loop, and others for torch.

    ``tokens``, ``lengths``, ``page_table``: the loop's rows: places in the batch, context lengths, pages.
    ``others``: the rows with queries that torch computes.
    """

    def __init__(self, page: PageShape) -> None:
        self._short = SHORT_CONTEXT // (page.kv_heads * page.head_dim)

    def fill(self, rows: ops.AttentionRows) -> None:
        counts, is_short = np.diff(rows.query_start), rows.kv_len <= self._short
        singles = np.flatnonzero((counts == 1) & is_short)
        self.rows = rows
        self.tokens = rows.query_start[singles].astype(np.int64)
        self.lengths = rows.kv_len[singles].astype(np.int64)
        self.page_table = np.ascontiguousarray(rows.page_table[singles])
        self.others: list[int] = np.flatnonzero((counts > 1) | (counts == 1) & ~is_short).tolist()


class _Items(NamedTuple):
    """The loops' N segments at one group of P projections. ``records`` [N, P, 3]. ``scales[l]`` [N, P]: the
    scales of layer l. ``columns`` [P + 1]: the group's offsets. ``size``: how many numbers shrink returns."""

    records: np.ndarray
    scales: np.ndarray
    columns: np.ndarray
    size: int


class _Block(NamedTuple):
    """One group of one segment, for torch. ``pieces`` int64: the pool's pieces with layer 0 of A, R rows for
    all projections together. ``scales`` float32 [L, R]. ``outputs``: each projection's columns, rank and
    pieces of B."""

    tokens: slice
    pieces: torch.Tensor
    scales: torch.Tensor
    outputs: list[tuple[slice, int, torch.Tensor]]


class CpuLoraPlan:
    """A step's segments, divided into short ones for the loops, and others for torch.

    ``starts``, ``stops``: tokens of the loops' segments; ``items``: these segments at each group; ``scratch``:
    room for one shrunk segment at one projection. ``others``: the remaining segments. A plan is valid as long
    as the cells in it hold the same adapters.
    """

    def __init__(self, geometry: AdapterGeometry) -> None:
        self.geometry = geometry
        self._pool: torch.Tensor | None = None

    def fill(self, segments: ops.LoraSegments | None, num_tokens: int) -> None:
        geometry = self.geometry
        if segments is None:
            segments = ops.no_segments(geometry, torch.empty(0, dtype=torch.int64))
        widths = np.array([p.in_features + p.out_features for p in geometry.projections])
        is_short = segments.length * (segments.records[:, :, 2] @ widths) <= SHORT_SEGMENT
        starts, lengths = (n[is_short].astype(np.int64) for n in (segments.start, segments.length))
        records, scales = segments.records[is_short], segments.scales[is_short]
        self.segments, self._pool = segments, None
        self.starts, self.stops = starts, starts + lengths
        self.scratch = np.empty((lengths.max(initial=0), records[:, :, 2].max(initial=0)), np.float32)
        self.items: dict[str, _Items] = {}
        first = 0
        for group in geometry.groups:
            last = first + len(group.projections)
            self.items[group.name] = _Items(
                np.ascontiguousarray(records[:, first:last]),
                np.ascontiguousarray(scales[:, first:last].transpose(2, 0, 1)),
                np.array(group.offsets, np.int64),
                int(lengths @ records[:, first:last, 2].sum(axis=1)),
            )
            first = last
        self.others: list[int] = np.flatnonzero(~is_short).tolist()
        self.blocks: dict[str, list[_Block]] = {}

    def by_torch(self, group: ProjectionGroup, dtype: torch.dtype) -> list[_Block]:
        """Return the group's blocks that no loop computes, because of their length or ``dtype``."""
        if group.name not in self.blocks:
            chosen = self.others if dtype in _IN_LOOPS else range(len(self.segments.start))
            blocks = [self._block(group, segment) for segment in chosen]
            self.blocks[group.name] = [block for block in blocks if block.outputs]
        return self.blocks[group.name]

    def shared(self, pool: torch.Tensor, dtype: torch.dtype, layer: int, group: ProjectionGroup) -> _Shared:
        """Return the arguments that the loops share at a group: the pool, the cells and the segments."""
        if self._pool is not pool:  # once a step: views of tensors cost as much as a short loop
            self._pool, self._elements = pool, _numbers(ops.of_adapters(pool, dtype).view(-1))
            self._cells = self.segments.cells.numpy()
        offset, cell = layer * self.geometry.slab_elements, self.geometry.cell_elements
        records = self.items[group.name].records
        return self._elements, offset, self._cells, cell, self.starts, self.stops, records

    def _block(self, group: ProjectionGroup, segment: int) -> _Block:
        segments, geometry = self.segments, self.geometry
        pieces = [torch.empty(0, dtype=torch.int64)]
        scales = [np.empty((geometry.page.layers, 0), np.float32)]
        outputs = []
        for place, projection in enumerate(group.projections):
            index = geometry.projections.index(projection)
            first_a, first_b, rank = segments.records[segment, index].tolist()
            if rank == 0:
                continue
            pieces.append(_pieces(segments.cells, first_a, rank, group.in_features, geometry))
            scales.append(np.repeat(segments.scales[segment, index][:, None], rank, axis=1))
            of_b = _pieces(segments.cells, first_b, rank, projection.out_features, geometry)
            outputs.append((slice(*group.offsets[place : place + 2]), rank, of_b))
        start = int(segments.start[segment])
        tokens = slice(start, start + int(segments.length[segment]))
        return _Block(tokens, torch.cat(pieces), torch.from_numpy(np.concatenate(scales, axis=1)), outputs)


class CpuOps(ops.Ops):
    """The operations of a CPU, in float64, float32, bfloat16 and float16."""

    name = "cpu"

    def __init__(self) -> None:
        """Compile the loops, or load them as an earlier run compiled them."""
        _compile_loops()

    def linear(self, x: torch.Tensor, weight: ops.Weight, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, weight.data, bias)

    # ---- attention -------------------------------------------------------------------------------------

    def attention_plan(
        self, page: PageShape, device: torch.device, limits: ops.AttentionLimits | None = None
    ) -> CpuAttentionPlan:
        return CpuAttentionPlan(page)

    def write_kv(
        self, pool: torch.Tensor, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
    ) -> None:
        page_tokens, kv_heads, dim = pool.shape[3:]
        width = kv_heads * dim
        place = _numbers(pool.view(-1)), 2 * layer * page_tokens * width, pool.stride(0), page_tokens
        loops.store_kv(*place, _flat(k), k.stride(0), _flat(v), v.stride(0), width, slots.numpy())

    def attention(
        self, q: torch.Tensor, pool: torch.Tensor, layer: int, plan: CpuAttentionPlan, scores: ops.Scores
    ) -> torch.Tensor:
        others = plan.others
        if q.dtype in _IN_LOOPS and len(plan.tokens):
            out = _attend_singles(q.float(), pool, layer, plan, scores).to(q.dtype)
        else:
            out = q.new_empty(len(q), q.shape[1] * q.shape[2])
        if q.dtype not in _IN_LOOPS:
            others = np.flatnonzero(np.diff(plan.rows.query_start)).tolist()
        for row in others:
            tokens = slice(*plan.rows.query_start[row : row + 2].tolist())
            context = int(plan.rows.kv_len[row])
            _attend(q[tokens], pool, layer, plan.rows.page_table[row], context, scores, out[tokens])
        return out

    # ---- LoRA ------------------------------------------------------------------------------------------

    def lora_plan(
        self, geometry: AdapterGeometry, device: torch.device, limits: ops.LoraLimits | None = None
    ) -> CpuLoraPlan:
        return CpuLoraPlan(geometry)

    def lora(self, y: torch.Tensor, x: torch.Tensor, site: ops.LoraSite, step: ops.LoraStep) -> None:
        """Add LoRA, by one loop where all segments are short and no number changes its type."""
        (pool, plan), group = step, site.group
        assert isinstance(plan, CpuLoraPlan)
        if x.dtype != torch.float32 or plan.by_torch(group, x.dtype):
            super().lora(y, x, site, step)
            return
        items, (rows, first) = plan.items[group.name], _whole_rows(y)
        if not items.size:
            return
        shared = plan.shared(pool, x.dtype, site.layer, group)
        scales, columns = items.scales[site.layer], items.columns
        numbers = x.contiguous().numpy()
        loops.add_lora(rows.numpy(), numbers, *shared, scales, first, columns, plan.scratch)

    def lora_shrink(self, x: torch.Tensor, site: ops.LoraSite, step: ops.LoraStep) -> ops.Shrunk:
        (pool, plan), group, layer = step, site.group, site.layer
        assert isinstance(plan, CpuLoraPlan)
        parts = []
        items = plan.items[group.name]
        if x.dtype in _IN_LOOPS and items.size:
            parts.append(torch.empty(items.size))
            shared = plan.shared(pool, x.dtype, layer, group)
            loops.shrink_lora(x.float().contiguous().numpy(), *shared, items.scales[layer], parts[0].numpy())
        for block in plan.by_torch(group, x.dtype):
            in_layer = _layer_pieces(pool, x.dtype, layer, plan.geometry)
            a = _matrix(in_layer, block.pieces, block.scales.shape[1], group.in_features)
            parts.append(_wide(x[block.tokens] @ a.T).mul_(block.scales[layer]).view(-1))
        if len(parts) == 1:
            return ops.Shrunk(parts[0], None)
        return ops.Shrunk(torch.cat(parts) if parts else _wide(x.new_empty(0)), None)

    def lora_expand(
        self, y: torch.Tensor, shrunk: ops.Shrunk, site: ops.LoraSite, step: ops.LoraStep
    ) -> None:
        (pool, plan), group, layer = step, site.group, site.layer
        assert isinstance(plan, CpuLoraPlan)
        begin = 0
        items = plan.items[group.name]
        if y.dtype in _IN_LOOPS and items.size:
            begin = items.size
            wide = y.float()
            rows, first = _whole_rows(wide)
            shared = plan.shared(pool, y.dtype, layer, group)
            loops.expand_lora(rows.numpy(), *shared, first, items.columns, shrunk.values[:begin].numpy())
            if wide is not y:
                y.copy_(wide)
        for block in plan.by_torch(group, y.dtype):
            in_layer = _layer_pieces(pool, y.dtype, layer, plan.geometry)
            rows, ranks = y[block.tokens], block.scales.shape[1]
            end = begin + len(rows) * ranks
            values = shrunk.values[begin:end].view(-1, ranks).to(y.dtype)
            begin, done = end, 0
            for columns, rank, pieces in block.outputs:
                b = _matrix(in_layer, pieces, rank, columns.stop - columns.start)
                rows[:, columns].addmm_(values[:, done : done + rank], b)
                done += rank

    def merge_linears(
        self,
        layers: Sequence[ops.MergedLayer],
        pool: torch.Tensor,
        group: ProjectionGroup,
        plan: ops.MergePlan,
    ) -> None:
        for layer, merged, pristine in layers:
            in_layer = _layer_pieces(pool, merged.dtype, layer, plan.geometry)
            for place, projection, first_a, first_b, rank, scale in plan.parts(group, layer):
                begin, end = group.offsets[place], group.offsets[place + 1]
                if rank == 0:
                    merged[begin:end].copy_(pristine[begin:end])
                    continue
                of_a = _pieces(plan.cells, first_a, rank, projection.in_features, plan.geometry)
                of_b = _pieces(plan.cells, first_b, rank, projection.out_features, plan.geometry)
                a = _wide(_matrix(in_layer, of_a, rank, projection.in_features))
                b = _wide(_matrix(in_layer, of_b, rank, projection.out_features))
                _merge(merged[begin:end], pristine[begin:end], a, b, scale)

    # ---- small operations ------------------------------------------------------------------------------

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if weight.dtype != x.dtype:
            return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, eps).to(x.dtype)
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def add_rms_norm(
        self, x: ops.Summands, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        whole = x.whole
        is_plain = whole.dim() == 2 and whole.is_contiguous() and residual.is_contiguous()
        if whole.dtype is torch.float32 and is_plain:
            out = torch.empty_like(whole)
            loops.add_norm(whole.numpy(), residual.numpy(), weight.numpy(), eps, out.numpy())
            return out, residual
        residual.add_(whole)
        return self.rms_norm(residual, weight, eps), residual

    def _rope(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both = _adjacent_heads(q, k)
        if q.dtype is torch.float32:
            for x in (q, k) if both is None else (both,):
                loops.rotate_in_place(
                    _flat(x), x.stride(0), x.shape[1], cos.numpy(), sin.numpy(), positions.numpy()
                )
            return q, k
        c, s = cos.index_select(0, positions)[:, None], sin.index_select(0, positions)[:, None]
        if both is not None:
            turned = _rotate(both, c, s)
            return turned[:, : q.shape[1]], turned[:, q.shape[1] :]
        return _rotate(q, c, s), _rotate(k, c, s)

    def gate_mul(self, gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
        if gate_up.dtype is not torch.float32 or activation != "silu":
            gate, up = gate_up.chunk(2, dim=-1)
            return ops.ACTIVATIONS[activation](gate).mul_(up)
        inner = gate_up.shape[1] // 2
        out = torch.empty(gate_up.shape[0], inner)
        loops.gate(gate_up.numpy(), out.numpy())
        return out


def _attend_singles(
    q: torch.Tensor, pool: torch.Tensor, layer: int, plan: CpuAttentionPlan, scores: ops.Scores
) -> torch.Tensor:
    """Compute attention for the plan's rows of one query in the loop. Returns float32 ``[T, heads * D]``, in
    which the other rows are not written."""
    num_tokens, heads, dim = q.shape
    page_tokens, kv_heads = pool.shape[3:5]
    out = torch.empty(num_tokens, heads * dim)
    loops.attend(
        _flat(q), q.stride(0), heads, dim, out.numpy(), _numbers(pool.view(-1)),
        2 * layer * page_tokens * kv_heads * dim, pool.stride(0), page_tokens, kv_heads,
        plan.tokens, plan.lengths, plan.page_table, scores.window or 0, scores.scale, scores.soft_cap or 0.0,
        np.empty((heads // kv_heads, int(plan.lengths.max())), np.float32),
    )  # fmt: skip
    return out


def _attend(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    page_table: np.ndarray,
    context: int,
    scores: ops.Scores,
    out: torch.Tensor,
) -> None:
    """Compute attention for one row of a batch into ``out``. Its last query is the context's last token."""
    scale, window, soft_cap = scores
    num_queries, heads, dim = q.shape
    page_tokens, kv_heads = pool.shape[3:5]
    pages = torch.from_numpy(page_table[: -(-context // page_tokens)])
    shape = (-1, kv_heads, 1, dim)
    keys, values = (pool[:, layer, kind].index_select(0, pages).view(shape) for kind in (0, 1))
    grouped = (-1, kv_heads, heads // kv_heads, dim)
    for begin in range(0, num_queries, QUERY_TILE):
        length = min(QUERY_TILE, num_queries - begin)
        end = context - (num_queries - begin - length)
        low = 0 if window is None else max(0, end - length - window + 1)
        taken = (
            q[begin : begin + length].view(grouped).permute(1, 2, 0, 3),
            keys[low:end].permute(1, 2, 0, 3).expand(-1, heads // kv_heads, -1, -1),
            values[low:end].permute(1, 2, 0, 3).expand(-1, heads // kv_heads, -1, -1),
        )
        mask = _mask(length, end - low, window, q.dtype)
        if soft_cap is None:
            result = F.scaled_dot_product_attention(*taken, attn_mask=mask, scale=scale)
        else:
            result = _capped_attention(*taken, mask, scale, soft_cap)
        out[begin : begin + length].view(grouped).copy_(result.permute(2, 0, 1, 3))


def _capped_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, cap: float
) -> torch.Tensor:
    """Return attention with capped scores, which torch's own function cannot compute."""
    scores = (_wide(q) @ _wide(k).mT).mul_(scale / cap).tanh_().mul_(cap)
    if mask is not None:
        scores += mask
    return (scores.softmax(-1) @ _wide(v)).to(q.dtype)


def _mask(num_queries: int, context: int, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a mask ``[Q, S]`` with -inf where one of the last Q of S positions does not see a key, and else
    0. Return None for one query, whose keys are all visible."""
    if num_queries == 1:
        return None
    mask = torch.full((num_queries, context), -torch.inf, dtype=dtype).triu_(context - num_queries + 1)
    if window is not None:
        mask += torch.full_like(mask, -torch.inf).tril_(context - num_queries - window)
    return mask


def _pieces(
    cells: torch.Tensor, first: int, rank: int, elements: int, geometry: AdapterGeometry
) -> torch.Tensor:
    """Return the pool's pieces, int64, that hold layer 0 of the matrix whose cells begin at entry ``first``.

    A piece has ``geometry.alignment`` elements. It may be smaller than a cell, because cells are not aligned
    to their own length where a slab is no multiple of it.
    """
    piece = geometry.alignment
    begins = cells[first : first + rank * geometry.cells(elements)].div(piece, rounding_mode="floor")
    return (begins[:, None] + torch.arange(geometry.cell_elements // piece)).view(-1)


def _layer_pieces(
    pool: torch.Tensor, dtype: torch.dtype, layer: int, geometry: AdapterGeometry
) -> torch.Tensor:
    """Return the pool as pieces of adapters' ``dtype``, from the layer's first one on."""
    piece = geometry.alignment
    return ops.of_adapters(pool, dtype).view(-1, piece)[layer * geometry.slab_elements // piece :]


def _matrix(in_layer: torch.Tensor, pieces: torch.Tensor, rank: int, elements: int) -> torch.Tensor:
    """Gather a layer's matrix ``[rank, elements]`` from these of its pieces."""
    return in_layer.index_select(0, pieces).view(rank, -1)[:, :elements]


def _merge(
    merged: torch.Tensor, pristine: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float
) -> None:
    """Merge an adapter into one projection, a few rows at a time, so that their sums stay in the processor's
    cache."""
    rows = max(1, _MERGED_ELEMENTS // merged.shape[1])
    for part, loaded, b_part in zip(
        torch.split(merged, rows), torch.split(pristine, rows), torch.split(b, rows, 1)
    ):
        part.copy_((b_part.T @ a).mul_(scale).add_(loaded))


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor in the precision of sums: float64 as it is, and all others as float32."""
    return x if x.dtype is torch.float64 else x.float()


def _numbers(x: torch.Tensor) -> np.ndarray:
    """Return the tensor's memory as loops take it, with elements of 16 bits as int16."""
    array: np.ndarray = (x.view(torch.int16) if x.itemsize == 2 else x).numpy()
    return array


def _flat(x: torch.Tensor) -> np.ndarray:
    """Return x ``[T, heads, D]``, dense except for its row stride, as one array from its first element on."""
    size = (x.shape[0] - 1) * x.stride(0) + x.shape[1] * x.shape[2]
    return _numbers(x.as_strided((size,), (1,)))


def _whole_rows(y: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the contiguous tensor that contains y as some of its columns, and the first of these columns."""
    width = y.stride(0)
    if y.is_contiguous() or not len(y):
        return y, 0
    begin, first = divmod(int(y.storage_offset()), width)
    return y.as_strided((len(y), width), (width, 1), begin * width), first


def _adjacent_heads(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """Return a view ``[T, heads + kv_heads, D]`` of q and k together, which halves the calls. Return None
    where k does not directly follow q in each row, as views of one fused projection do."""
    same_rows = q.stride() == k.stride() and q.stride(1) == q.shape[2] and q.stride(2) == 1
    storage = q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    if not (same_rows and storage and k.storage_offset() == q.storage_offset() + q.shape[1] * q.shape[2]):
        return None
    return q.as_strided((q.shape[0], q.shape[1] + k.shape[1], q.shape[2]), q.stride())


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x ``[T, heads, D]``, rotated by cos and sin ``[T, 1, D/2]`` in their precision, in x's dtype."""
    left, right = x.to(cos.dtype).chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=cos.dtype)
    low, high = out.chunk(2, dim=-1)
    torch.mul(left, cos, out=low).addcmul_(right, sin, value=-1)
    torch.mul(right, cos, out=high).addcmul_(left, sin)
    return out.to(x.dtype)


def _compile_loops() -> None:
    """Run every loop once on tiny arrays, with the types and layouts that serving uses."""
    zero, one, wide = np.zeros(1, np.int64), np.ones(1, np.int64), np.zeros((1, 4), np.float32)
    line = np.zeros(4, np.float32)
    records, scales = np.zeros((1, 1, 3), np.int64), np.zeros((1, 1), np.float32)
    for pool in (np.zeros(8, np.float32), np.zeros(8, np.int16)):
        loops.store_kv(pool, 0, 8, 1, pool[:4], 4, pool[4:], 4, 4, zero)
        loops.attend(
            line, 4, 1, 4, wide, pool, 0, 8, 1, 1, zero, one, np.zeros((1, 1), np.int32), 0, 1.0, 0.0, wide
        )
        loops.shrink_lora(wide, pool, 0, zero, 4, zero, one, records, scales, line)
        loops.expand_lora(wide, pool, 0, zero, 4, zero, one, records, 0, np.array([0, 4]), line)
    first = 0, np.array([0, 4])
    loops.add_lora(wide, wide, np.zeros(8, np.float32), 0, zero, 4, zero, one, records, scales, *first, wide)
    half = np.zeros((1, 2), np.float32)
    loops.rotate_in_place(line, 4, 1, half, half, zero)
    loops.add_norm(wide, wide, line, 1e-6, wide)
    loops.gate(np.zeros((1, 8), np.float32), wide)
