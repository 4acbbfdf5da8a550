"""Triton kernels for LoRA over paged cells: shrink (x A) and expand (y += scale v B).

A tile is a run of at most BLOCK_T tokens of one segment. A record of 16 int32 per tile and projection holds
all that a program must know, so that one load leads to the cell table and a second one to the data:

    0 first token   1 tokens    2 rank          3 first A cell      4 first B cell     5 scale row
    6 first slot    7 outputs   8 first column  9 cells per B row   10-15 unused

6 is in units of SLOTS, 7 and 8 in units of OUT_ALIGN: a factor that the compiler sees lets it load 16 bytes
at once. Slots are columns of the partial results ``[splits, tokens, slots]`` (float32): each projection of
the group owns as many as its largest rank in the step. Shrink splits the long dimension; every split stores
its own plane, and expand adds the planes up in order, so results do not depend on timing and nothing needs
zeroing.

Programs past a segment's rank or a projection's columns return at once: mixed ranks are not padded.

One-token tiles multiply and add without tensor cores, which would pad them to 16 tokens.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import triton
import triton.language as tl

RECORD = tl.constexpr(16)
SLOTS = tl.constexpr(16)


@triton.jit
def load_rows(pool, table, row_ok, k0, limit, CELL: tl.constexpr, ALIGN: tl.constexpr, COLUMNS: tl.constexpr):
    """``[rows, COLUMNS]`` elements from k0 on of the rows whose entries in the cell table begin at ``table``.

    ``pool`` already points at the layer. Places past ``limit``, and rows that are not ok, are zero.
    """
    k = k0 + tl.arange(0, COLUMNS)
    ok = row_ok[:, None] & (k < limit)[None, :]
    if CELL % COLUMNS == 0:
        begin = tl.load(table + k0 // CELL, mask=row_ok, other=0)[:, None]
    else:
        begin = tl.load(table[:, None] + (k // CELL)[None, :], mask=ok, other=0)
    # Cells begin at multiples of ALIGN and so do runs inside them. The compiler cannot know it, and would
    # load single elements.
    offsets = tl.max_contiguous(tl.multiple_of(begin + (k % CELL)[None, :], (1, ALIGN)), (1, ALIGN))
    return tl.load(pool + offsets, mask=ok, other=0.0)


@triton.jit(do_not_specialize=["num_tokens", "rank_blocks"])
def shrink_kernel(
    x,
    pool,
    cells,
    records,
    partial,
    x_stride,
    num_tokens,
    num_slots,
    layer_offset,
    rank_blocks,
    in_features,
    cells_per_row,
    PROJECTIONS: tl.constexpr,
    CELL: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    VECTOR: tl.constexpr,
    MATRIX: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """partial[split, token, slot] = the split's share of x[token] . A[row].

    Grid (tiles, PROJECTIONS * rank_blocks, splits); a split is STEPS steps of BLOCK_K columns.
    """
    tile = tl.program_id(0)
    projection = tl.program_id(1) // rank_blocks
    first_row = tl.program_id(1) % rank_blocks * BLOCK_R
    split = tl.program_id(2)
    record = records + (tile * PROJECTIONS + projection) * RECORD
    start = tl.load(record)
    count = tl.load(record + 1)
    rank = tl.load(record + 2)
    first_cell = tl.load(record + 3)
    first_slot = tl.load(record + 6) * SLOTS
    if first_row >= rank:
        return
    rows = first_row + tl.arange(0, BLOCK_R)
    row_ok = rows < rank
    table = cells + first_cell + rows * cells_per_row
    pool += layer_offset
    plane = partial + (split.to(tl.int64) * num_tokens + start) * num_slots + first_slot
    base = split * (STEPS * BLOCK_K)
    x_row = x + start.to(tl.int64) * x_stride
    k = tl.arange(0, BLOCK_K)
    if VECTOR and (count == 1 or not MATRIX):
        one = tl.zeros((BLOCK_R, BLOCK_K), tl.float32)
        for step in range(STEPS):
            k0 = base + step * BLOCK_K
            a = load_rows(pool, table, row_ok, k0, in_features, CELL, ALIGN, BLOCK_K)
            x_one = tl.load(x_row + k0 + k, mask=k0 + k < in_features, other=0.0)
            one += a.to(tl.float32) * x_one.to(tl.float32)[None, :]
        tl.store(plane + rows, tl.sum(one, 1), mask=row_ok)
    elif MATRIX:
        token = tl.arange(0, BLOCK_T)
        token_ok = token < count
        several = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
        for step in range(STEPS):
            k0 = base + step * BLOCK_K
            a = load_rows(pool, table, row_ok, k0, in_features, CELL, ALIGN, BLOCK_K)
            x_several = tl.load(
                x_row + token[:, None] * x_stride + (k0 + k)[None, :],
                mask=token_ok[:, None] & (k0 + k < in_features)[None, :],
                other=0.0,
            )
            several = tl.dot(x_several, tl.trans(a), several, input_precision=PRECISION)
        places = plane + token[:, None] * num_slots + rows[None, :]
        tl.store(places, several, mask=token_ok[:, None] & row_ok[None, :])


@triton.jit(do_not_specialize=["num_tokens", "layer"])
def expand_kernel(
    y,
    pool,
    cells,
    records,
    scales,
    partial,
    y_stride,
    num_tokens,
    num_slots,
    layer_offset,
    layer,
    num_layers,
    column_blocks,
    PROJECTIONS: tl.constexpr,
    CELL: tl.constexpr,
    ALIGN: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    VECTOR: tl.constexpr,
    MATRIX: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y[token, columns] += scale * sum over rows of v[token, row] B[row].

    Grid (PROJECTIONS * column_blocks, tiles).
    """
    tile = tl.program_id(1)
    projection = tl.program_id(0) // column_blocks
    n0 = tl.program_id(0) % column_blocks * BLOCK_N
    record = records + (tile * PROJECTIONS + projection) * RECORD
    start = tl.load(record)
    count = tl.load(record + 1)
    rank = tl.load(record + 2)
    first_cell = tl.load(record + 4)
    scale_row = tl.load(record + 5)
    first_slot = tl.load(record + 6) * SLOTS
    outputs = tl.load(record + 7) * OUT_ALIGN
    first_column = tl.load(record + 8) * OUT_ALIGN
    cells_per_row = tl.load(record + 9)
    if n0 >= outputs or rank == 0:
        return
    scale = tl.load(scales + scale_row.to(tl.int64) * num_layers + layer)
    pool += layer_offset
    plane = partial + start.to(tl.int64) * num_slots + first_slot
    plane_size = num_tokens.to(tl.int64) * num_slots
    n = n0 + tl.arange(0, BLOCK_N)
    if VECTOR and (count == 1 or not MATRIX):
        one = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
        split = tl.arange(0, SPLITS_PADDED)
        for r0 in range(0, rank, BLOCK_R):
            rows = r0 + tl.arange(0, BLOCK_R)
            row_ok = rows < rank
            table = cells + first_cell + rows * cells_per_row
            b = load_rows(pool, table, row_ok, n0, outputs, CELL, ALIGN, BLOCK_N)
            parts = tl.load(
                plane + split[:, None] * plane_size + rows[None, :],
                mask=(split < SPLITS)[:, None] & row_ok[None, :],
                other=0.0,
            )
            one += tl.sum(parts, 0)[:, None] * b.to(tl.float32)
        target = y + start.to(tl.int64) * y_stride + first_column + n
        old_one = tl.load(target, mask=n < outputs, other=0.0)
        new_one = old_one.to(tl.float32) + tl.sum(one, 0) * scale
        tl.store(target, new_one.to(old_one.dtype), mask=n < outputs)
    elif MATRIX:
        token = tl.arange(0, BLOCK_T)
        token_ok = token < count
        several = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
        for r0 in range(0, rank, BLOCK_R):
            rows = r0 + tl.arange(0, BLOCK_R)
            row_ok = rows < rank
            table = cells + first_cell + rows * cells_per_row
            b = load_rows(pool, table, row_ok, n0, outputs, CELL, ALIGN, BLOCK_N)
            v = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
            for split in range(SPLITS):
                v += tl.load(
                    plane + split * plane_size + token[:, None] * num_slots + rows[None, :],
                    mask=token_ok[:, None] & row_ok[None, :],
                    other=0.0,
                )
            several = tl.dot(v.to(b.dtype), b, several, input_precision=PRECISION)
        targets = y + (start + token).to(tl.int64)[:, None] * y_stride + (first_column + n)[None, :]
        ok = token_ok[:, None] & (n < outputs)[None, :]
        old = tl.load(targets, mask=ok, other=0.0)
        tl.store(targets, (old.to(tl.float32) + several * scale).to(old.dtype), mask=ok)
