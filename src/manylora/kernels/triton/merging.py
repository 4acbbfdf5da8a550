"""Merges an adapter into linears' weights in one pass, reading the adapter's rows from its pages.

Owns the kernel and its block sizes. Does not know which adapter is merged, or where the pristine weights are
kept.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from manylora.kernels.ops import MergedLayer, MergePart, MergePlan, of_adapters
from manylora.kernels.shapes import Projection, ProjectionGroup
from manylora.kernels.triton.launch import ceil_div, precision, upload
from manylora.kernels.triton.lora import block_of, padded
from manylora.kernels.triton.lora_rows import ROWS, chosen, load_rows

BLOCK_ROWS, BLOCK_COLUMNS, WARPS = 64, 128, 4
"""The block of the weight that a program writes, and its warps. The block is so large that the adapter's
rows, which every program reads again, cost little beside the weights. The best of twenty sizes on an H200."""

_UNWANTED = MergePart(0, Projection("", 0, 0), 0, 0, 0, 0.0)


@triton.jit(
    do_not_specialize=[
        "row_0", "row_1", "row_2", "a_0", "a_1", "a_2", "b_0", "b_1", "b_2",
        "rank_0", "rank_1", "rank_2",
    ]
)  # fmt: skip
def merge_kernel(
    merged,
    pristine,
    pool,
    cells,
    places,
    scales,
    in_features,
    out_0,
    out_1,
    out_2,
    row_0,
    row_1,
    row_2,
    a_0,
    a_1,
    a_2,
    b_0,
    b_1,
    b_2,
    rank_0,
    rank_1,
    rank_2,
    a_cells,
    cells_0,
    cells_1,
    cells_2,
    PARTS: tl.constexpr,
    CELL: tl.constexpr,
    ALIGN: tl.constexpr,
    WEIGHT_ALIGN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute merged[n, k] = pristine[n, k] + scale * sum over rank rows of B[row, n] A[row, k].

    The grid is (blocks of the rows of PARTS projections, blocks of columns, layers). Projection i has the
    ``out_i`` rows from ``row_i`` on. ``places`` int64 [3, layers]: the offsets, in elements, of each layer's
    matrices from ``merged`` and ``pristine``, and of its slab from the pool's first. ``scales`` float32
    [PARTS, layers].

    Rank 0 stores the loaded values unchanged; adding zero would turn a negative zero into a positive one.
    """
    layer = tl.program_id(2)
    layers = tl.num_programs(2)
    merged += tl.multiple_of(tl.load(places + layer), WEIGHT_ALIGN)
    pristine += tl.multiple_of(tl.load(places + layers + layer), WEIGHT_ALIGN)
    pool += tl.multiple_of(tl.load(places + 2 * layers + layer), ALIGN)
    block = tl.program_id(0)
    blocks_0 = tl.cdiv(out_0, BLOCK_N)
    blocks_1 = blocks_0
    if PARTS > 1:
        blocks_1 += tl.cdiv(out_1, BLOCK_N)
    second = (block >= blocks_0) & (PARTS > 1)
    third = (block >= blocks_1) & (PARTS > 2)
    part = second.to(tl.int32) + third.to(tl.int32)
    n0 = (block - tl.where(third, blocks_1, tl.where(second, blocks_0, 0))) * BLOCK_N
    k0 = tl.program_id(1) * BLOCK_K
    outputs = chosen(part, out_0, out_1, out_2)
    first_row = chosen(part, row_0, row_1, row_2)
    rank = chosen(part, rank_0, rank_1, rank_2)
    first_a = chosen(part, a_0, a_1, a_2)
    first_b = chosen(part, b_0, b_1, b_2)
    b_cells = chosen(part, cells_0, cells_1, cells_2)
    scale = tl.load(scales + part * layers + layer)
    n = n0 + tl.arange(0, BLOCK_N)
    k = k0 + tl.arange(0, BLOCK_K)
    ok = (n < outputs)[:, None] & (k < in_features)[None, :]
    place = (first_row + n).to(tl.int64)[:, None] * in_features + k[None, :]
    rows = tl.load(pristine + place, mask=ok, other=0.0, eviction_policy="evict_first")
    if rank > 0:
        row = tl.arange(0, ROWS)
        total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for r0 in tl.range(0, rank, ROWS, num_stages=1):
            is_row = r0 + row < rank
            a = load_rows(
                pool, cells + first_a + (r0 + row) * a_cells, is_row, k0, in_features,
                CELL, ALIGN, BLOCK_K, False,
            )  # fmt: skip
            b = load_rows(
                pool, cells + first_b + (r0 + row) * b_cells, is_row, n0, outputs, CELL, ALIGN, BLOCK_N, False
            )
            total = tl.dot(tl.trans(b), a, total, input_precision=PRECISION)
        rows = (rows.to(tl.float32) + scale * total).to(merged.dtype.element_ty)
    tl.store(merged + place, rows, mask=ok)


def merge_linears(
    layers: Sequence[MergedLayer], pool: torch.Tensor, group: ProjectionGroup, plan: MergePlan
) -> None:
    """Compute ``Ops.merge_linears`` in one launch: one per linear takes the host longer than the device."""
    parts = {part.place: part for part in plan.parts(group, layers[0].layer)}
    if not parts:
        return
    merged, pristine = layers[0].merged, layers[0].pristine
    geometry, projections = plan.geometry, group.projections
    cell, numbers = geometry.cell_elements, range(len(projections))
    block_n = block_of(cell, BLOCK_ROWS, max(p.out_features for p in projections))
    block_k = block_of(cell, BLOCK_COLUMNS, group.in_features)
    # An unwanted projection gets no rows, so that every adapter uses the same variant of the kernel.
    outputs = [projections[number].out_features if number in parts else 0 for number in numbers]
    described = [parts.get(number, _UNWANTED) for number in numbers]
    places, scales, align = _of_layers(layers, group, plan, merged.device)
    blocks = sum(ceil_div(n, block_n) for n in outputs)
    merge_kernel[(blocks, ceil_div(group.in_features, block_k), len(layers))](
        merged,
        pristine,
        of_adapters(pool, merged.dtype),
        plan.cells,
        places,
        scales,
        group.in_features,
        *padded(outputs),
        *padded(group.offsets[:-1]),
        *padded([part.first_a for part in described]),
        *padded([part.first_b for part in described]),
        *padded([part.rank for part in described]),
        geometry.cells(group.in_features),
        *padded([geometry.cells(p.out_features) for p in projections]),
        PARTS=len(projections),
        CELL=cell,
        ALIGN=math.gcd(geometry.alignment, geometry.slab_elements, 16),
        WEIGHT_ALIGN=align,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        PRECISION=precision(merged.dtype),
        num_warps=WARPS,
    )


def _of_layers(
    layers: Sequence[MergedLayer], group: ProjectionGroup, plan: MergePlan, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the kernel's ``places`` and ``scales``, and a divisor of all distances between the weights."""
    first = layers[0]
    size = first.merged.element_size()
    places = np.array(
        [
            [(each.merged.data_ptr() - first.merged.data_ptr()) // size for each in layers],
            [(each.pristine.data_ptr() - first.pristine.data_ptr()) // size for each in layers],
            [each.layer * plan.geometry.slab_elements for each in layers],
        ]
    )
    rows = [plan.geometry.projections.index(projection) for projection in group.projections]
    scales = plan.scales[rows][:, [each.layer for each in layers]].astype(np.float32)
    on_device = upload([places.view(np.int32), np.ascontiguousarray(scales).view(np.int32)], device)
    align = math.gcd(16, *places[:2].reshape(-1).tolist())
    return on_device[0].view(torch.int64), on_device[1].view(torch.float32), align
