"""Triton kernels for LoRA over paged cells, driven by the tables of ``lora_work``: shrink and expand.

Shrink computes v = x A into planes of float32 partial results, one plane a split of the long dimension. Expand
adds the planes up in order and writes or adds scale * v B: no atomics, so results do not depend on timing.

Programs take items until the tables' counts end: a launch of any size does all the work. With PDL a kernel
may start before its predecessor in the stream has ended: it loads weights, which no kernel writes, and waits
before it touches anything else. Every program waits, also one without work, so that a kernel's end implies
its predecessor's.

One-token tiles multiply and add without tensor cores, which would pad them to 16 tokens.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import triton
import triton.language as tl

WORDS = tl.constexpr(16)
ROWS = tl.constexpr(16)


@triton.jit
def await_predecessor(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release_successor(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def load_rows(pool, table, row_ok, k0, limit, CELL: tl.constexpr, ALIGN: tl.constexpr, COLUMNS: tl.constexpr):
    """``[rows, COLUMNS]`` elements from k0 on of the rows whose entries in the cell table begin at ``table``.

    ``pool`` already points at the layer. Places past ``limit``, and rows that are not ok, are zero. Tables are
    read again by every layer, weights only once a step: the cache is told so.
    """
    k = k0 + tl.arange(0, COLUMNS)
    ok = row_ok[:, None] & (k < limit)[None, :]
    if CELL % COLUMNS == 0:
        begin = tl.load(table + k0 // CELL, mask=row_ok, other=0, eviction_policy="evict_last")[:, None]
    else:
        begin = tl.load(table[:, None] + (k // CELL)[None, :], mask=ok, other=0, eviction_policy="evict_last")
    # Cells begin at multiples of ALIGN and so do runs inside them. The compiler cannot know it, and would
    # load single elements.
    offsets = tl.max_contiguous(tl.multiple_of(begin + (k % CELL)[None, :], (1, ALIGN)), (1, ALIGN))
    return tl.load(pool + offsets, mask=ok, other=0.0, eviction_policy="evict_first")


@triton.jit
def shrink_kernel(
    x,
    pool,
    cells,
    counts,
    entries,
    partial,
    x_stride,
    plane,
    layer_offset,
    in_features,
    cells_per_row,
    CELL: tl.constexpr,
    ALIGN: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MATRIX_K: tl.constexpr,
    STAGES: tl.constexpr,
    VECTOR: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """partial[split, unit, row] = the split's share of x[token] . A[row]; a split is CHUNK columns.

    Items are entries times SPLITS. ``VECTOR``: one-token tiles are among them (then BLOCKS must be 1).
    """
    release_successor(PDL)
    num_items = tl.load(counts + 2, eviction_policy="evict_last") * SPLITS
    pool += layer_offset
    R: tl.constexpr = BLOCKS * ROWS
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        record = entries + item // SPLITS * WORDS
        split = item % SPLITS
        base = split * CHUNK
        start = tl.load(record, eviction_policy="evict_last")
        count = tl.load(record + 1, eviction_policy="evict_last")
        row = tl.arange(0, R)
        block = record + 4 + 3 * (row // ROWS)
        if BLOCKS == 1:
            row_ok = row < tl.load(record + 4, eviction_policy="evict_last")
            first_cell = tl.load(record + 5, eviction_policy="evict_last")
            unit = tl.load(record + 6, eviction_policy="evict_last")
        else:
            row_ok = row % ROWS < tl.load(block, eviction_policy="evict_last")
            first_cell = tl.load(block + 1, eviction_policy="evict_last")
            unit = tl.load(block + 2, eviction_policy="evict_last")
        table = cells + first_cell + row % ROWS * cells_per_row
        x_row = x + start.to(tl.int64) * x_stride
        target = partial + split.to(tl.int64) * plane
        if VECTOR and count == 1:
            k = tl.arange(0, BLOCK_K)
            a = load_rows(pool, table, row_ok, base, in_features, CELL, ALIGN, BLOCK_K)
            await_predecessor(PDL)
            one = tl.load(x_row + base + k, mask=base + k < in_features, other=0.0)
            products = a.to(tl.float32) * one.to(tl.float32)[None, :]
            for k0 in tl.static_range(BLOCK_K, CHUNK, BLOCK_K):
                at = base + k0
                a = load_rows(pool, table, row_ok, at, in_features, CELL, ALIGN, BLOCK_K)
                one = tl.load(x_row + at + k, mask=at + k < in_features, other=0.0)
                products += a.to(tl.float32) * one.to(tl.float32)[None, :]
            tl.store(target + unit * ROWS + row, tl.sum(products, 1), mask=row_ok)
        else:
            token = tl.arange(0, BLOCK_T)
            token_ok = token < count
            column = tl.arange(0, MATRIX_K)
            several = tl.zeros((BLOCK_T, R), tl.float32)
            await_predecessor(PDL)
            for k0 in tl.range(0, CHUNK, MATRIX_K, num_stages=STAGES):
                at = base + k0
                a = load_rows(pool, table, row_ok, at, in_features, CELL, ALIGN, MATRIX_K)
                rows_x = tl.load(
                    x_row + token[:, None] * x_stride + (at + column)[None, :],
                    mask=token_ok[:, None] & (at + column < in_features)[None, :],
                    other=0.0,
                )
                several = tl.dot(rows_x, tl.trans(a), several, input_precision=PRECISION)
            if BLOCKS == 1:
                places = target + (unit + token)[:, None] * ROWS + row[None, :]
            else:
                places = target + (unit[None, :] + token[:, None]) * ROWS + (row % ROWS)[None, :]
            tl.store(places, several, mask=token_ok[:, None] & row_ok[None, :])
    await_predecessor(PDL)


@triton.jit
def one_token(
    pool, table, partial, unit, rank, n0, outputs, cells_per_row, plane, b,
    CELL: tl.constexpr, ALIGN: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
):  # fmt: skip
    """``[BLOCK_N]`` of v B for a one-token tile; ``b``: the first ROWS rows, loaded already."""
    row = tl.arange(0, ROWS)
    split = tl.arange(0, SPLITS_PADDED)
    places = partial + split[:, None] * plane + row[None, :]
    ok = (split < SPLITS)[:, None]
    v = tl.sum(tl.load(places + unit * ROWS, mask=ok & (row < rank)[None, :], other=0.0), 0)
    total = tl.sum(v[:, None] * b.to(tl.float32), 0)
    for r0 in tl.range(ROWS, rank, ROWS, num_stages=1):
        more_ok = r0 + row < rank
        b = load_rows(pool, table + r0 * cells_per_row, more_ok, n0, outputs, CELL, ALIGN, BLOCK_N)
        parts = tl.load(places + (unit + r0 // ROWS) * ROWS, mask=ok & more_ok[None, :], other=0.0)
        total += tl.sum(tl.sum(parts, 0)[:, None] * b.to(tl.float32), 0)
    return total


@triton.jit
def several_tokens(
    pool, table, partial, unit, count, rank, n0, outputs, cells_per_row, plane,
    CELL: tl.constexpr, ALIGN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``[BLOCK_T, BLOCK_N]`` of v B."""
    row = tl.arange(0, ROWS)
    token = tl.arange(0, BLOCK_T)
    total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for r0 in tl.range(0, rank, ROWS, num_stages=1):
        row_ok = r0 + row < rank
        b = load_rows(pool, table + r0 * cells_per_row, row_ok, n0, outputs, CELL, ALIGN, BLOCK_N)
        places = partial + (unit + r0 // ROWS * count + token)[:, None] * ROWS + row[None, :]
        ok = (token < count)[:, None] & row_ok[None, :]
        v = tl.zeros((BLOCK_T, ROWS), tl.float32)
        for split in tl.static_range(SPLITS):
            v += tl.load(places + split * plane, mask=ok, other=0.0)
        total = tl.dot(v.to(b.dtype), b, total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=["layer"])
def expand_kernel(
    y,
    pool,
    cells,
    counts,
    tiles,
    scales,
    partial,
    y_stride,
    plane,
    layer_offset,
    layer,
    num_layers,
    out_0,
    out_1,
    out_2,
    cells_0,
    cells_1,
    cells_2,
    PROJECTIONS: tl.constexpr,
    CELL: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SUB_N: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    VECTOR: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y[token, columns] = scale * sum over rows of v[token, row] B[row]; ADD: += instead.

    Items are tiles times blocks of BLOCK_N columns of one projection. ADD passes over tokens without adapter,
    else they get zeros.
    """
    release_successor(PDL)
    blocks_0 = tl.cdiv(out_0, BLOCK_N)
    blocks_1 = blocks_0
    if PROJECTIONS > 1:
        blocks_1 += tl.cdiv(out_1, BLOCK_N)
    num_blocks = blocks_1
    if PROJECTIONS > 2:
        num_blocks += tl.cdiv(out_2, BLOCK_N)
    num_tiles = tl.load(counts + (0 if ADD else 1), eviction_policy="evict_last")
    pool += layer_offset
    for item in range(tl.program_id(0), num_tiles * num_blocks, tl.num_programs(0)):
        record = tiles + item // num_blocks * WORDS
        block = item % num_blocks
        # Selected, not branched over: the compiler keeps track of alignment through selects only.
        second = block >= blocks_0
        third = block >= blocks_1
        projection = second.to(tl.int32) + third.to(tl.int32)
        first_block = tl.where(third, blocks_1, tl.where(second, blocks_0, 0))
        column = tl.where(third, out_0 + out_1, tl.where(second, out_0, 0))
        outputs = tl.where(third, out_2, tl.where(second, out_1, out_0))
        cells_per_row = tl.where(third, cells_2, tl.where(second, cells_1, cells_0))
        n0 = (block - first_block) * BLOCK_N
        start = tl.load(record, eviction_policy="evict_last")
        count = tl.load(record + 1, eviction_policy="evict_last")
        scale_row = tl.load(record + 2, eviction_policy="evict_last") + projection
        rank = tl.load(record + 4 + 4 * projection, eviction_policy="evict_last")
        first_cell = tl.load(record + 5 + 4 * projection, eviction_policy="evict_last")
        unit = tl.load(record + 6 + 4 * projection, eviction_policy="evict_last")
        if not ADD or rank > 0:
            row = tl.arange(0, ROWS)
            table = cells + first_cell + row * cells_per_row
            at = scales + scale_row.to(tl.int64) * num_layers + layer
            scale = tl.load(at, eviction_policy="evict_last")
            y_row = y + start.to(tl.int64) * y_stride + column
            if VECTOR and count == 1:
                n = n0 + tl.arange(0, BLOCK_N)
                b = load_rows(pool, table, row < rank, n0, outputs, CELL, ALIGN, BLOCK_N)
                await_predecessor(PDL)
                old = tl.zeros((BLOCK_N,), y.dtype.element_ty)
                if ADD:
                    old = tl.load(y_row + n, mask=n < outputs, other=0.0)
                added = old.to(tl.float32) + scale * one_token(
                    pool, table, partial, unit, rank, n0, outputs, cells_per_row, plane, b,
                    CELL, ALIGN, BLOCK_N, SPLITS, SPLITS_PADDED,
                )  # fmt: skip
                tl.store(y_row + n, added.to(y.dtype.element_ty), mask=n < outputs)
            else:
                token = tl.arange(0, BLOCK_T)
                await_predecessor(PDL)
                for sub in tl.range(0, BLOCK_N, SUB_N, num_stages=1):
                    ns = n0 + sub + tl.arange(0, SUB_N)
                    several = several_tokens(
                        pool, table, partial, unit, count, rank, n0 + sub, outputs, cells_per_row, plane,
                        CELL, ALIGN, BLOCK_T, SUB_N, SPLITS, PRECISION,
                    )  # fmt: skip
                    several *= scale
                    places = y_row + token[:, None] * y_stride + ns[None, :]
                    oks = (token < count)[:, None] & (ns < outputs)[None, :]
                    if ADD:
                        several += tl.load(places, mask=oks, other=0.0).to(tl.float32)
                    tl.store(places, several.to(y.dtype.element_ty), mask=oks)
    await_predecessor(PDL)


@triton.jit(do_not_specialize=["layer"])
def expand_silu_kernel(
    y,
    out,
    pool,
    cells,
    counts,
    tiles,
    scales,
    partial,
    y_stride,
    out_stride,
    plane,
    layer_offset,
    layer,
    num_layers,
    outputs,
    cells_per_row,
    CELL: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SUB_N: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    VECTOR: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out = silu(gate + LoRA) * (up + LoRA), gate and up side by side in y, which stays as it is.

    Both sums are rounded to y's type first, as the two steps apart round them.
    """
    release_successor(PDL)
    num_blocks = tl.cdiv(outputs, BLOCK_N)
    num_tiles = tl.load(counts + 1, eviction_policy="evict_last")
    pool += layer_offset
    for item in range(tl.program_id(0), num_tiles * num_blocks, tl.num_programs(0)):
        record = tiles + item // num_blocks * WORDS
        n0 = item % num_blocks * BLOCK_N
        start = tl.load(record, eviction_policy="evict_last")
        count = tl.load(record + 1, eviction_policy="evict_last")
        scale_row = tl.load(record + 2, eviction_policy="evict_last").to(tl.int64)
        rank_g = tl.load(record + 4, eviction_policy="evict_last")
        cell_g = tl.load(record + 5, eviction_policy="evict_last")
        unit_g = tl.load(record + 6, eviction_policy="evict_last")
        rank_u = tl.load(record + 8, eviction_policy="evict_last")
        cell_u = tl.load(record + 9, eviction_policy="evict_last")
        unit_u = tl.load(record + 10, eviction_policy="evict_last")
        at = scales + scale_row * num_layers + layer
        scale_g = tl.load(at, eviction_policy="evict_last")
        scale_u = tl.load(at + num_layers, eviction_policy="evict_last")
        row = tl.arange(0, ROWS)
        table_g = cells + cell_g + row * cells_per_row
        table_u = cells + cell_u + row * cells_per_row
        y_row = y + start.to(tl.int64) * y_stride
        out_row = out + start.to(tl.int64) * out_stride
        if VECTOR and count == 1:
            n = n0 + tl.arange(0, BLOCK_N)
            b_g = load_rows(pool, table_g, row < rank_g, n0, outputs, CELL, ALIGN, BLOCK_N)
            b_u = load_rows(pool, table_u, row < rank_u, n0, outputs, CELL, ALIGN, BLOCK_N)
            await_predecessor(PDL)
            ok = n < outputs
            old_g = tl.load(y_row + n, mask=ok, other=0.0).to(tl.float32)
            old_u = tl.load(y_row + outputs + n, mask=ok, other=0.0).to(tl.float32)
            g = scale_g * one_token(
                pool, table_g, partial, unit_g, rank_g, n0, outputs, cells_per_row, plane, b_g,
                CELL, ALIGN, BLOCK_N, SPLITS, SPLITS_PADDED,
            )  # fmt: skip
            u = scale_u * one_token(
                pool, table_u, partial, unit_u, rank_u, n0, outputs, cells_per_row, plane, b_u,
                CELL, ALIGN, BLOCK_N, SPLITS, SPLITS_PADDED,
            )  # fmt: skip
            g = (old_g + g).to(y.dtype.element_ty).to(tl.float32)
            u = (old_u + u).to(y.dtype.element_ty).to(tl.float32)
            result = g / (1.0 + tl.exp(-g)) * u
            tl.store(out_row + n, result.to(out.dtype.element_ty), mask=ok)
        else:
            token = tl.arange(0, BLOCK_T)
            await_predecessor(PDL)
            for sub in tl.range(0, BLOCK_N, SUB_N, num_stages=1):
                ns = n0 + sub + tl.arange(0, SUB_N)
                oks = (token < count)[:, None] & (ns < outputs)[None, :]
                places = y_row + token[:, None] * y_stride + ns[None, :]
                gs = scale_g * several_tokens(
                    pool, table_g, partial, unit_g, count, rank_g, n0 + sub, outputs, cells_per_row, plane,
                    CELL, ALIGN, BLOCK_T, SUB_N, SPLITS, PRECISION,
                )  # fmt: skip
                gs = (gs + tl.load(places, mask=oks, other=0.0).to(tl.float32)).to(y.dtype.element_ty)
                us = scale_u * several_tokens(
                    pool, table_u, partial, unit_u, count, rank_u, n0 + sub, outputs, cells_per_row, plane,
                    CELL, ALIGN, BLOCK_T, SUB_N, SPLITS, PRECISION,
                )  # fmt: skip
                us += tl.load(places + outputs, mask=oks, other=0.0).to(tl.float32)
                gs = gs.to(tl.float32)
                results = gs / (1.0 + tl.exp(-gs)) * us.to(y.dtype.element_ty).to(tl.float32)
                target = out_row + token[:, None] * out_stride + ns[None, :]
                tl.store(target, results.to(out.dtype.element_ty), mask=oks)
    await_predecessor(PDL)
