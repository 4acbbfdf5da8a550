"""The operations on the CPU, in vectorised torch: few large calls, because a call costs 5 to 40 us.

Owns: how a step's rows and segments are gathered out of the paged pool into dense matrices. It does not know
what a page belongs to, and it keeps nothing between steps but scratch memory.

Both attention and LoRA follow one scheme. The pool is seen as a matrix of equal pieces (a token's keys; a
cell), a plan holds the piece numbers of layer 0, and a layer's pieces are the same numbers in a view that
begins later. So a plan serves every layer, and one ``index_select`` brings all that a group of rows needs.

Stale bytes: slots past a row's context are never read (their places in the gathered matrix repeat the row's
last valid slot, and the mask hides those), so no garbage, NaN or infinity can reach a result. In LoRA the
tail of a row's last cell is cut off before any arithmetic. Adapter weights themselves must be finite: where
several adapters share one product, a token's product with a foreign adapter is multiplied by zero, and
0 * inf is NaN. The adapter loader refuses weights that are not finite.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from manylora.kernels.ops import AttentionRows, LoraSegments
from manylora.kernels.shapes import AdapterGeometry, PageShape, Projection, ProjectionGroup

Ints = npt.NDArray[np.int64]

# Longer queries are cut into tiles, so that the mask stays small and a tile skips the keys that follow it.
QUERY_TILE = 128
# Context lengths are rounded up to this before rows are grouped, which bounds the grouping's own work.
CONTEXT_BUCKET = 32
# What one more group costs (about 8 calls), in units of one gathered and attended context slot (50 ns).
GROUP_COST_SLOTS = 1000
# Scores of one more query cost this share of a slot.
QUERY_COST = 0.1
# Elements of K (and as many of V) that one group may gather, and elements of a mask.
GATHER_LIMIT = 1 << 23
# One more torch call costs as much as this many multiply-adds of a matrix product (10 us of float32, two
# threads; bfloat16 products are slower, and so are its calls).
CALL_COST = 1_000_000


@dataclasses.dataclass
class RowGroup:
    """Rows of similar lengths that attend in one call: B rows, Q queries each, S context slots each.

    ``queries`` int64 [B*Q]: the batch's token of each place (padding repeats the row's last token).
    ``targets`` int64 [B*Q]: where its result goes (padding goes to the extra last row of the output).
    ``slots`` int64 [B*S]: a token's K of layer 0 in the pool seen as [-1, kv_heads * head_dim].
    ``visible`` bool [B, 1, 1, Q, S].
    """

    queries: torch.Tensor
    targets: torch.Tensor
    slots: torch.Tensor
    visible: torch.Tensor
    mask: torch.Tensor | None = None

    def additive_mask(self, heads_per_kv: int, dtype: torch.dtype) -> torch.Tensor:
        """``[B, 1, heads_per_kv * Q, S]`` of 0 and -inf; built at the first layer, reused by the others."""
        if self.mask is None:
            batch, _, _, num_queries, context = self.visible.shape
            mask = torch.zeros(self.visible.shape, dtype=dtype).masked_fill_(~self.visible, -math.inf)
            mask = mask.expand(batch, 1, heads_per_kv, num_queries, context)
            self.mask = mask.reshape(batch, 1, heads_per_kv * num_queries, context)
        return self.mask


@dataclasses.dataclass
class CpuAttentionPlan:
    """The rows of a step, and their groups for each window that a layer has asked for."""

    rows: AttentionRows
    page: PageShape
    groups: dict[int | None, list[RowGroup]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Share:
    """What one projection takes of a gathered block: its cells of B and its columns of the shrunk batch."""

    index: int
    projection: Projection
    first_cell: int
    first_column: int
    rank: int


@dataclasses.dataclass(frozen=True)
class LoraBlock:
    """Neighbouring segments that share one shrink and one expand of one projection group.

    ``pieces`` int64: the pool's pieces of layer 0, first all rows of A (projection, segment, row), then of B.
    ``scales`` float32 [L or 1, tokens or 1, ranks]: scale where the token owns the rank row, else zero.
    """

    start: int
    stop: int
    pieces: torch.Tensor
    scales: torch.Tensor
    shares: tuple[Share, ...]


@dataclasses.dataclass(frozen=True)
class CpuLoraPlan:
    geometry: AdapterGeometry
    piece: int
    blocks: dict[str, list[LoraBlock]]


def ragged_arange(first: Ints, count: Ints) -> Ints:
    """first[0], first[0]+1, ... (count[0] of them), then first[1], ..."""
    ends = np.cumsum(count)
    inside: Ints = np.arange(ends[-1] if len(ends) else 0) + np.repeat(first - (ends - count), count)
    return inside


class CpuOps:
    """The Ops protocol on the CPU, in float64, float32, bfloat16 and float16."""

    name = "cpu"

    def __init__(self) -> None:
        self._scratch: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def _buffer(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Scratch of this shape; reused, because fresh large allocations cost a page fault per 4 KiB."""
        buffer = self._scratch.get((name, dtype))
        if buffer is None or buffer.numel() < rows * columns:
            buffer = self._scratch[name, dtype] = torch.empty(rows * columns, dtype=dtype)
        return buffer[: rows * columns].view(rows, columns)

    # ---- attention -------------------------------------------------------------------------------------

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
        # Cells need not be aligned to their own size where a slab is no multiple of it.
        piece = math.gcd(geometry.page.slab_elements, geometry.cell_elements)
        blocks: dict[str, list[LoraBlock]] = {}
        first = 0
        for group in geometry.groups:
            indices = range(first, first + len(group.projections))
            first = indices.stop
            blocks[group.name] = [
                lora_block(segments, geometry, group, indices, chosen, piece)
                for chosen in share_products(segments, geometry, group, indices)
            ]
        return CpuLoraPlan(geometry, piece, blocks)

    def lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        group: ProjectionGroup,
        plan: CpuLoraPlan,
    ) -> None:
        cell = plan.geometry.cell_elements
        offset = layer * plan.geometry.page.slab_elements // plan.piece
        pieces = pool.view(-1, plan.piece)[offset:]
        a_cells = plan.geometry.cells(group.in_features)
        for block in plan.blocks[group.name]:
            gathered = self._buffer("lora", len(block.pieces), plan.piece, pool.dtype)
            torch.index_select(pieces, 0, block.pieces, out=gathered)
            cells = gathered.view(-1, cell)
            ranks = block.scales.shape[-1]
            a = cells[: ranks * a_cells].view(ranks, a_cells * cell)[:, : group.in_features]
            shrunk = x[block.start : block.stop] @ a.T
            shrunk.mul_(block.scales[layer if len(block.scales) > 1 else 0])
            for share in block.shares:
                per_row = plan.geometry.cells(share.projection.out_features)
                b = cells[share.first_cell : share.first_cell + share.rank * per_row]
                b = b.view(share.rank, per_row * cell)[:, : share.projection.out_features]
                begin = group.offsets[share.index]
                columns = y[block.start : block.stop, begin : begin + share.projection.out_features]
                columns.addmm_(shrunk[:, share.first_column : share.first_column + share.rank], b)

    # ---- small operations ------------------------------------------------------------------------------

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual.add_(x)
        return F.rms_norm(residual, (residual.shape[-1],), weight, eps), residual

    def rope(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        c, s = cos.index_select(0, positions)[:, None], sin.index_select(0, positions)[:, None]
        both = adjacent_heads(q, k)
        if both is not None:
            turned = rotate(both, c, s)
            return turned[:, : q.shape[1]], turned[:, q.shape[1] :]
        return rotate(q, c, s), rotate(k, c, s)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


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


def query_tiles(rows: AttentionRows, window: int | None) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Cut rows into tiles of at most QUERY_TILE queries.

    Returns per tile: its row, first token, number of queries, first visible context slot, context end.
    """
    start = rows.query_start[:-1].astype(np.int64)
    total = np.diff(rows.query_start).astype(np.int64)
    tiles = -(-total // QUERY_TILE)
    row = np.repeat(np.arange(len(total)), tiles)
    begin = ragged_arange(np.zeros(len(total), np.int64), tiles) * QUERY_TILE
    length = np.minimum(QUERY_TILE, total[row] - begin)
    end = rows.kv_len[row].astype(np.int64) - (total[row] - begin - length)
    low = np.zeros_like(end) if window is None else np.maximum(0, end - length - window + 1)
    return row, start[row] + begin, length, low, end


def group_rows(rows: AttentionRows, page: PageShape, window: int | None) -> list[RowGroup]:
    """Groups of tiles whose padding costs less than another group's calls would."""
    row, token, length, low, end = query_tiles(rows, window)
    context = end - low
    bucket = -(-context // CONTEXT_BUCKET)
    order = np.lexsort((token, -bucket, -length))
    if len(order) == 0:
        return []
    # Tiles that agree in both are one run; runs are merged while that is cheaper.
    edges = np.flatnonzero(np.diff(length[order]) | np.diff(bucket[order])) + 1
    width = page.kv_heads * page.head_dim
    chosen: list[Ints] = []
    current, size = order[:0], (0, 0)
    for run in np.split(order, edges):
        queries, slots = int(length[run[0]]), int(bucket[run[0]]) * CONTEXT_BUCKET
        # Sorted by length: the first run of a group has its most queries.
        merged = (max(size[0], queries), max(size[1], slots))
        together = _tile_cost(len(current) + len(run), merged)
        apart = _tile_cost(len(current), size) + _tile_cost(len(run), (queries, slots))
        limit = max(1, GATHER_LIMIT // max(merged[1] * width, merged[0] * merged[1]))
        if len(current) and (together > apart or len(current) + len(run) > limit):
            chosen.append(current)
            current, merged = order[:0], (queries, slots)
            limit = max(1, GATHER_LIMIT // max(slots * width, queries * slots))
        while len(run) > limit:
            chosen.append(run[:limit])
            run = run[limit:]
        current, size = np.concatenate((current, run)), merged
    chosen.append(current)
    tiles = (row, token, length, low, end)
    num_tokens = int(rows.query_start[-1])
    return [row_group(rows, page, window, num_tokens, tuple(t[np.sort(c)] for t in tiles)) for c in chosen]


def _tile_cost(tiles: int, size: tuple[int, int]) -> float:
    return GROUP_COST_SLOTS + tiles * size[1] * (1 + QUERY_COST * size[0])


def row_group(
    rows: AttentionRows, page: PageShape, window: int | None, num_tokens: int, tiles: tuple[Ints, ...]
) -> RowGroup:
    """Index tensors of one group of tiles (see ``query_tiles`` for their columns)."""
    row, token, length, low, end = tiles
    num_queries, context = int(length.max()), int((end - low).max())
    place = np.arange(num_queries)
    inside = np.minimum(place, length[:, None] - 1)  # [B, Q]: padding repeats the last query
    queries = token[:, None] + inside
    targets = np.where(place < length[:, None], queries, num_tokens)
    position = (end - length)[:, None] + inside
    # [B, S]: padding repeats the last valid slot, which is finite; the mask hides it.
    slot = low[:, None] + np.arange(context)
    valid = np.minimum(slot, end[:, None] - 1)
    pages = rows.page_table[row[:, None], valid // page.page_tokens].astype(np.int64)
    slots = pages * (2 * page.layers * page.page_tokens) + valid % page.page_tokens
    visible = slot[:, None, :] <= position[:, :, None]
    if window is not None:
        visible &= slot[:, None, :] > position[:, :, None] - window
    return RowGroup(
        queries=torch.from_numpy(queries.reshape(-1)),
        targets=torch.from_numpy(targets.reshape(-1)),
        slots=torch.from_numpy(slots.reshape(-1)),
        visible=torch.from_numpy(visible[:, None, None]),
    )


def share_products(
    segments: LoraSegments, geometry: AdapterGeometry, group: ProjectionGroup, indices: range
) -> list[Ints]:
    """Which neighbouring segments share one product.

    Sharing saves calls but multiplies every token by every adapter's rows; it pays for few tokens and small
    ranks. The same rule makes long segments work alone, and keeps a gather within GATHER_LIMIT.
    """
    ranks = segments.records[:, indices.start : indices.stop, 2].astype(np.int64)
    widths = np.array([p.in_features + p.out_features for p in group.projections], dtype=np.int64)
    work = (ranks @ widths).tolist()  # multiply-adds of one token, and elements to gather, per segment
    start, length = segments.start.tolist(), segments.length.tolist()
    saved = (3 + len(group.projections)) * CALL_COST
    chosen: list[Ints] = []
    current: list[int] = []
    tokens = total = 0
    for segment, weight in enumerate(work):
        if weight == 0 or length[segment] == 0:
            continue
        if current:
            reach = start[segment] + length[segment] - start[current[0]]
            wasted = reach * (total + weight) - tokens * total - length[segment] * weight
            if wasted > saved or total + weight > GATHER_LIMIT:
                chosen.append(np.array(current))
                current = []
        if not current:
            reach, total = length[segment], 0
        current.append(segment)
        tokens, total = reach, total + weight
    if current:
        chosen.append(np.array(current))
    return chosen


def lora_block(
    segments: LoraSegments,
    geometry: AdapterGeometry,
    group: ProjectionGroup,
    indices: range,
    chosen: Ints,
    piece: int,
) -> LoraBlock:
    """Index and scale tensors of the chosen segments, for one projection group."""
    records = segments.records[chosen][:, indices.start : indices.stop].astype(np.int64)
    ranks = records[:, :, 2].T  # [projections, segments]; rows are laid out in this order
    a_cells = geometry.cells(group.in_features)
    b_cells = np.array([[geometry.cells(p.out_features)] for p in group.projections], dtype=np.int64)
    first = np.concatenate((records[:, :, 0].T.reshape(-1), records[:, :, 1].T.reshape(-1)))
    count = np.concatenate(((ranks * a_cells).reshape(-1), (ranks * b_cells).reshape(-1)))
    offsets = segments.cells[torch.from_numpy(ragged_arange(first, count))]
    pieces = torch.div(offsets, piece, rounding_mode="floor")
    if piece != geometry.cell_elements:
        pieces = (pieces[:, None] + torch.arange(geometry.cell_elements // piece)).view(-1)

    start = int(segments.start[chosen[0]])
    stop = int(segments.start[chosen[-1]] + segments.length[chosen[-1]])
    owner = np.tile(np.arange(len(chosen)), len(group.projections))
    scales = segments.scales[chosen][:, indices.start : indices.stop].transpose(1, 0, 2)  # [P, S, L]
    scales = np.repeat(scales.reshape(-1, scales.shape[2]), ranks.reshape(-1), axis=0).T  # [L, ranks]
    if (scales == scales[:1]).all():
        scales = scales[:1]
    scales = scales[:, None, :]
    if len(chosen) > 1:
        holder = np.full(stop - start, -1)
        lengths = segments.length[chosen].astype(np.int64)
        tokens = ragged_arange(segments.start[chosen].astype(np.int64) - start, lengths)
        holder[tokens] = np.repeat(np.arange(len(chosen)), lengths)
        scales = scales * (holder[:, None] == np.repeat(owner, ranks.reshape(-1)))
    return LoraBlock(
        start=start,
        stop=stop,
        pieces=pieces,
        scales=torch.from_numpy(np.ascontiguousarray(scales, dtype=np.float32)),
        shares=_shares(group, geometry, ranks.sum(axis=1).tolist(), a_cells),
    )


def _shares(
    group: ProjectionGroup, geometry: AdapterGeometry, ranks: list[int], a_cells: int
) -> tuple[Share, ...]:
    shares = []
    cell, column = sum(ranks) * a_cells, 0
    for index, (projection, rank) in enumerate(zip(group.projections, ranks)):
        if rank:
            shares.append(Share(index, projection, cell, column, rank))
        cell += rank * geometry.cells(projection.out_features)
        column += rank
    return tuple(shares)
