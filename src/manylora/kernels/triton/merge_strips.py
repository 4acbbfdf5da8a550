"""Merging by strips: a program keeps its share of one of the adapter's two factors in registers and goes over
several blocks of the weight with it, while what it needs of the next blocks is on its way.

Owns the kernel. Which of its sizes is best, and whether it is better than ``merging``'s, is for
``manylora_lab.benchmarks.merge_kernels`` to say.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import triton
import triton.language as tl

from manylora.kernels.triton.lora_rows import ROWS, chosen, load_rows


@triton.jit(
    do_not_specialize=[
        "row_0", "row_1", "row_2", "a_0", "a_1", "a_2", "b_0", "b_1", "b_2",
        "rank_0", "rank_1", "rank_2", "items",
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
    layers,
    items,
    PARTS: tl.constexpr,
    CELL: tl.constexpr,
    ALIGN: tl.constexpr,
    WEIGHT_ALIGN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STRIP: tl.constexpr,
    HOLDS: tl.constexpr,
    RANK: tl.constexpr,
    STAGES: tl.constexpr,
    STORES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """As ``merge_kernel``. ``HOLDS`` "b": a strip is STRIP blocks of columns of one block of rows; "a": STRIP
    blocks of rows of one block of columns; "": as "b", any rank, 16 of its rows at a time, and the next
    block's weights are loaded ahead. ``RANK``: the rows that are held, a power of two and at least the
    ranks. ``items``: strips of all parts and layers; programs take them in turn. ``STORES``: the eviction
    policy of what is written.
    """
    N: tl.constexpr = BLOCK_N * (STRIP if HOLDS == "a" else 1)
    K: tl.constexpr = BLOCK_K * (1 if HOLDS == "a" else STRIP)
    strips_k = tl.cdiv(in_features, K)
    blocks_0 = tl.cdiv(out_0, N)
    blocks_1 = blocks_0
    if PARTS > 1:
        blocks_1 += tl.cdiv(out_1, N)
    blocks = blocks_1
    if PARTS > 2:
        blocks += tl.cdiv(out_2, N)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        if HOLDS == "a":  # side by side run those that read the same columns of A
            block = item % blocks
            strip = item // blocks % strips_k
        else:
            strip = item % strips_k
            block = item // strips_k % blocks
        layer = item // (strips_k * blocks)
        to = merged + tl.multiple_of(tl.load(places + layer), WEIGHT_ALIGN)
        source = pristine + tl.multiple_of(tl.load(places + layers + layer), WEIGHT_ALIGN)
        slabs = pool + tl.multiple_of(tl.load(places + 2 * layers + layer), ALIGN)
        second = (block >= blocks_0) & (PARTS > 1)
        third = (block >= blocks_1) & (PARTS > 2)
        part = second.to(tl.int32) + third.to(tl.int32)
        n_first = (block - tl.where(third, blocks_1, tl.where(second, blocks_0, 0))) * N
        k_first = strip * K
        outputs = chosen(part, out_0, out_1, out_2)
        first_row = chosen(part, row_0, row_1, row_2)
        rank = chosen(part, rank_0, rank_1, rank_2)
        a_table = cells + chosen(part, a_0, a_1, a_2)
        b_table = cells + chosen(part, b_0, b_1, b_2)
        b_cells = chosen(part, cells_0, cells_1, cells_2)
        scale = tl.load(scales + part * layers + layer)
        if HOLDS == "a":
            row = tl.arange(0, RANK)
            k = k_first + tl.arange(0, BLOCK_K)
            a = load_rows(
                slabs, a_table + row * a_cells, row < rank, k_first, in_features,
                CELL, ALIGN, BLOCK_K, False,
            )  # fmt: skip
            for n0 in tl.range(n_first, tl.minimum(n_first + N, outputs), BLOCK_N, num_stages=STAGES):
                n = n0 + tl.arange(0, BLOCK_N)
                ok = (n < outputs)[:, None] & (k < in_features)[None, :]
                place = (first_row + n).to(tl.int64)[:, None] * in_features + k[None, :]
                rows = tl.load(source + place, mask=ok, other=0.0, eviction_policy="evict_first")
                b = load_rows(
                    slabs, b_table + row * b_cells, row < rank, n0, outputs, CELL, ALIGN, BLOCK_N, False
                )
                total = tl.dot(tl.trans(b), a, input_precision=PRECISION)
                summed = (rows.to(tl.float32) + scale * total).to(merged.dtype.element_ty)
                tl.store(to + place, tl.where(rank > 0, summed, rows), mask=ok, eviction_policy=STORES)
        elif HOLDS == "b":
            row = tl.arange(0, RANK)
            n = n_first + tl.arange(0, BLOCK_N)
            b = tl.trans(
                load_rows(
                    slabs, b_table + row * b_cells, row < rank, n_first, outputs, CELL, ALIGN, BLOCK_N, False
                )
            )
            for k0 in tl.range(k_first, tl.minimum(k_first + K, in_features), BLOCK_K, num_stages=STAGES):
                k = k0 + tl.arange(0, BLOCK_K)
                ok = (n < outputs)[:, None] & (k < in_features)[None, :]
                place = (first_row + n).to(tl.int64)[:, None] * in_features + k[None, :]
                rows = tl.load(source + place, mask=ok, other=0.0, eviction_policy="evict_first")
                a = load_rows(
                    slabs, a_table + row * a_cells, row < rank, k0, in_features,
                    CELL, ALIGN, BLOCK_K, False,
                )  # fmt: skip
                total = tl.dot(b, a, input_precision=PRECISION)
                summed = (rows.to(tl.float32) + scale * total).to(merged.dtype.element_ty)
                tl.store(to + place, tl.where(rank > 0, summed, rows), mask=ok, eviction_policy=STORES)
        else:
            row = tl.arange(0, ROWS)
            n = n_first + tl.arange(0, BLOCK_N)
            begins = (first_row + n).to(tl.int64)[:, None] * in_features
            k = k_first + tl.arange(0, BLOCK_K)
            ok = (n < outputs)[:, None] & (k < in_features)[None, :]
            ahead = tl.load(source + begins + k[None, :], mask=ok, other=0.0, eviction_policy="evict_first")
            last = tl.minimum(k_first + K, in_features)
            for k0 in tl.range(k_first, last, BLOCK_K, num_stages=1):
                rows = ahead
                k = k0 + tl.arange(0, BLOCK_K)
                ok = (n < outputs)[:, None] & (k < in_features)[None, :]
                following = (n < outputs)[:, None] & (k + BLOCK_K < last)[None, :]
                ahead = tl.load(
                    source + begins + (k + BLOCK_K)[None, :], mask=following, other=0.0,
                    eviction_policy="evict_first",
                )  # fmt: skip
                total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
                for r0 in tl.range(0, rank, ROWS, num_stages=1):
                    is_row = r0 + row < rank
                    a = load_rows(
                        slabs, a_table + (r0 + row) * a_cells, is_row, k0, in_features,
                        CELL, ALIGN, BLOCK_K, False,
                    )  # fmt: skip
                    b = load_rows(
                        slabs, b_table + (r0 + row) * b_cells, is_row, n_first, outputs,
                        CELL, ALIGN, BLOCK_N, False,
                    )  # fmt: skip
                    total = tl.dot(tl.trans(b), a, total, input_precision=PRECISION)
                summed = (rows.to(tl.float32) + scale * total).to(merged.dtype.element_ty)
                written = tl.where(rank > 0, summed, rows)
                tl.store(to + begins + k[None, :], written, mask=ok, eviction_policy=STORES)
