"""Merging by strips: a program keeps its share of an adapter's B in registers and goes over several blocks of
columns with it, while what it needs of the next ones is on its way.

Owns the kernel. Its sizes are ``merging``'s.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import triton
import triton.language as tl

from manylora.kernels.triton.lora_rows import chosen, load_rows


@triton.jit(
    do_not_specialize=[
        "row_0", "row_1", "row_2", "a_0", "a_1", "a_2", "b_0", "b_1", "b_2",
        "rank_0", "rank_1", "rank_2",
    ]
)  # fmt: skip
def merge_strips_kernel(
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
    STRIP: tl.constexpr,
    RANK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """As ``merge_kernel``; grid (strips of STRIP blocks of columns, blocks of rows, layers). ``RANK``: a power of
    two, at least the ranks."""
    layer = tl.program_id(2)
    layers = tl.num_programs(2)
    merged += tl.multiple_of(tl.load(places + layer), WEIGHT_ALIGN)
    pristine += tl.multiple_of(tl.load(places + layers + layer), WEIGHT_ALIGN)
    pool += tl.multiple_of(tl.load(places + 2 * layers + layer), ALIGN)
    block = tl.program_id(1)
    blocks_0 = tl.cdiv(out_0, BLOCK_N)
    blocks_1 = blocks_0
    if PARTS > 1:
        blocks_1 += tl.cdiv(out_1, BLOCK_N)
    second = (block >= blocks_0) & (PARTS > 1)
    third = (block >= blocks_1) & (PARTS > 2)
    part = second.to(tl.int32) + third.to(tl.int32)
    n0 = (block - tl.where(third, blocks_1, tl.where(second, blocks_0, 0))) * BLOCK_N
    first_k = tl.program_id(0) * BLOCK_K * STRIP
    outputs = chosen(part, out_0, out_1, out_2)
    first_row = chosen(part, row_0, row_1, row_2)
    rank = chosen(part, rank_0, rank_1, rank_2)
    a_table = cells + chosen(part, a_0, a_1, a_2)
    b_table = cells + chosen(part, b_0, b_1, b_2)
    b_cells = chosen(part, cells_0, cells_1, cells_2)
    scale = tl.load(scales + part * layers + layer)
    row = tl.arange(0, RANK)
    n = n0 + tl.arange(0, BLOCK_N)
    b = tl.trans(
        load_rows(pool, b_table + row * b_cells, row < rank, n0, outputs, CELL, ALIGN, BLOCK_N, False)
    )
    last_k = tl.minimum(first_k + BLOCK_K * STRIP, in_features)
    for k0 in tl.range(first_k, last_k, BLOCK_K, num_stages=STAGES):
        k = k0 + tl.arange(0, BLOCK_K)
        ok = (n < outputs)[:, None] & (k < in_features)[None, :]
        place = (first_row + n).to(tl.int64)[:, None] * in_features + k[None, :]
        rows = tl.load(pristine + place, mask=ok, other=0.0, eviction_policy="evict_first")
        a = load_rows(pool, a_table + row * a_cells, row < rank, k0, in_features, CELL, ALIGN, BLOCK_K, False)
        total = tl.dot(b, a, input_precision=PRECISION)
        summed = (rows.to(tl.float32) + scale * total).to(merged.dtype.element_ty)
        # Without an adapter: what was loaded, for there is a negative zero.
        tl.store(merged + place, tl.where(rank > 0, summed, rows), mask=ok)
