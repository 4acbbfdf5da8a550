"""Computes LoRA over paged cells by two Triton kernels, shrink and expand, which read the tables of
``lora_plan``.

Shrink computes v = x A into planes of float32 partial results, one plane for each split of the long
dimension. Expand adds up the planes in order, and writes or adds scale * v B. It uses no atomics, so results
do not depend on timing.

Programs take items until the number in the tables is reached, so a launch of any size does all the work. With
programmatic dependent launch (PDL), a kernel may start before its predecessor in the stream has ended. It
loads tables and adapter weights, which the predecessor does not write, and waits before any other access.
Every program waits, even one without work, so that a kernel's end implies its predecessor's end.

Tiles of one token are computed without tensor cores, which would pad them to 16 tokens. The longest chain
of loads (record, cell, weight) starts first: a program's time depends on this chain, not on the sums.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import triton
import triton.language as tl

from manylora.kernels.triton.small import activated

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
def load_word(record, place):
    """Load a word of a table. Every layer reads tables again, so the cache keeps them longer than weights."""
    return tl.load(record + place, eviction_policy="evict_last")


@triton.jit
def load_rows(
    pool, table, row_ok, k0, limit,
    CELL: tl.constexpr, ALIGN: tl.constexpr, COLUMNS: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """Load ``[rows, COLUMNS]`` elements, from k0 on, of rows whose cell table entries begin at ``table``.

    ``pool`` already points at the layer. Elements past ``limit`` and of rows without ``row_ok`` are zero.
    ``ONCE``: no other program reads them. (A flag rather than a policy's name, as Triton 3.6 takes no string
    as a default.)
    """
    k = k0 + tl.arange(0, COLUMNS)
    ok = row_ok[:, None] & (k < limit)[None, :]
    if CELL % COLUMNS == 0:
        cell_ok = row_ok & (k0 < limit)
        begin = tl.load(table + k0 // CELL, mask=cell_ok, other=0, eviction_policy="evict_last")[:, None]
    else:
        begin = tl.load(table[:, None] + (k // CELL)[None, :], mask=ok, other=0, eviction_policy="evict_last")
    # Cells begin at multiples of ALIGN, and so do runs inside them. Without this hint, the compiler would
    # load single elements.
    offsets = tl.max_contiguous(tl.multiple_of(begin + (k % CELL)[None, :], (1, ALIGN)), (1, ALIGN))
    return tl.load(pool + offsets, mask=ok, other=0.0, eviction_policy="evict_first" if ONCE else "")


@triton.jit
def load_tokens(x_row, token, count, stride, k0, limit, COLUMNS: tl.constexpr):
    """Load ``[tokens, COLUMNS]`` of the rows that begin at ``x_row``; zero past ``count`` and ``limit``."""
    k = k0 + tl.arange(0, COLUMNS)
    ok = (token < count)[:, None] & (k < limit)[None, :]
    return tl.load(x_row + token[:, None] * stride + k[None, :], mask=ok, other=0.0)


@triton.jit
def store_tokens(y_row, token, count, stride, k0, limit, value, COLUMNS: tl.constexpr):
    k = k0 + tl.arange(0, COLUMNS)
    ok = (token < count)[:, None] & (k < limit)[None, :]
    tl.store(y_row + token[:, None] * stride + k[None, :], value.to(y_row.dtype.element_ty), mask=ok)


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
    """Compute partial[split, unit, row], the split's share of x[token] . A[row]; a split is CHUNK columns.

    Items are entries times SPLITS. Rows past an adapter's rank become zero. ``VECTOR``: entries of one token
    are computed without tensor cores; BLOCKS must then be 1. ``STAGES``: pipeline stages of the loads for
    other entries; 1: one block is loaded ahead, in registers.
    """
    release_successor(PDL)
    num_items = load_word(counts, 2) * SPLITS
    pool += layer_offset
    R: tl.constexpr = BLOCKS * ROWS
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        record = entries + item // SPLITS * WORDS
        split = item % SPLITS
        base = split * CHUNK
        start = load_word(record, 0)
        count = load_word(record, 1)
        row = tl.arange(0, R)
        if BLOCKS == 1:
            row_ok = row < load_word(record, 4)
            first_cell = load_word(record, 5)
            unit = load_word(record, 6)
        else:
            block = record + 3 * (row // ROWS)
            row_ok = row % ROWS < load_word(block, 4)
            first_cell = load_word(block, 5)
            unit = load_word(block, 6)
        table = cells + first_cell + row % ROWS * cells_per_row
        x_row = x + start.to(tl.int64) * x_stride
        target = partial + split.to(tl.int64) * plane
        if VECTOR and count == 1:
            k = tl.arange(0, BLOCK_K)
            a = load_rows(pool, table, row_ok, base, in_features, CELL, ALIGN, BLOCK_K, True)
            await_predecessor(PDL)
            one = tl.load(x_row + base + k, mask=base + k < in_features, other=0.0)
            products = tl.zeros((ROWS, BLOCK_K), tl.float32)
            for k0 in tl.range(BLOCK_K, CHUNK, BLOCK_K, num_stages=1):
                at = base + k0
                next_a = load_rows(pool, table, row_ok, at, in_features, CELL, ALIGN, BLOCK_K, True)
                next_one = tl.load(x_row + at + k, mask=at + k < in_features, other=0.0)
                products += a.to(tl.float32) * one.to(tl.float32)[None, :]
                a = next_a
                one = next_one
            products += a.to(tl.float32) * one.to(tl.float32)[None, :]
            tl.store(target + unit * ROWS + row, tl.sum(products, 1))
        else:
            token = tl.arange(0, BLOCK_T)
            several = tl.zeros((BLOCK_T, R), tl.float32)
            if STAGES == 1:
                ahead = load_rows(pool, table, row_ok, base, in_features, CELL, ALIGN, MATRIX_K, False)
                await_predecessor(PDL)
                for k0 in tl.range(0, CHUNK, MATRIX_K, num_stages=1):
                    at = base + k0
                    rows_x = load_tokens(x_row, token, count, x_stride, at, in_features, MATRIX_K)
                    rows_a = ahead
                    if MATRIX_K < CHUNK:
                        following = tl.where(k0 + MATRIX_K < CHUNK, at + MATRIX_K, in_features)
                        ahead = load_rows(
                            pool, table, row_ok, following, in_features, CELL, ALIGN, MATRIX_K, False
                        )
                    several = tl.dot(rows_x, tl.trans(rows_a), several, input_precision=PRECISION)
            else:
                await_predecessor(PDL)
                for k0 in tl.range(0, CHUNK, MATRIX_K, num_stages=STAGES):
                    at = base + k0
                    rows_a = load_rows(pool, table, row_ok, at, in_features, CELL, ALIGN, MATRIX_K, False)
                    rows_x = load_tokens(x_row, token, count, x_stride, at, in_features, MATRIX_K)
                    several = tl.dot(rows_x, tl.trans(rows_a), several, input_precision=PRECISION)
            if BLOCKS == 1:
                places = target + (unit + token)[:, None] * ROWS + row[None, :]
                is_used = True
            else:
                places = target + (unit[None, :] + token[:, None]) * ROWS + (row % ROWS)[None, :]
                is_used = (load_word(block, 4) > 0)[None, :]
            tl.store(places, several, mask=(token < count)[:, None] & is_used)
    await_predecessor(PDL)


@triton.jit
def one_token(
    pool, table, partial, unit, rank, n0, outputs, cells_per_row, plane, b,
    CELL: tl.constexpr, ALIGN: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
):  # fmt: skip
    """Return ``[BLOCK_N]`` of v B for a tile of one token. ``b``: B's first ROWS rows, already loaded."""
    row = tl.arange(0, ROWS)
    split = tl.arange(0, SPLITS_PADDED)
    places = partial + split[:, None] * plane + row[None, :]
    ok = (split < SPLITS)[:, None]
    v = tl.sum(tl.load(places + unit * ROWS, mask=ok & (rank > 0), other=0.0), 0)
    total = tl.sum(v[:, None] * b.to(tl.float32), 0)
    for r0 in tl.range(ROWS, rank, ROWS, num_stages=1):
        more_ok = r0 + row < rank
        more_b = load_rows(pool, table + r0 * cells_per_row, more_ok, n0, outputs, CELL, ALIGN, BLOCK_N, True)
        parts = tl.load(places + (unit + r0 // ROWS) * ROWS, mask=ok, other=0.0)
        total += tl.sum(tl.sum(parts, 0)[:, None] * more_b.to(tl.float32), 0)
    return total


@triton.jit
def summed(
    partial, unit, count, rank, plane,
    BLOCK_T: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PADDED: tl.constexpr,
):  # fmt: skip
    """Return ``[BLOCK_T, ROWS]`` of v: one block of rank rows, its splits added up; zero where rank <= 0."""
    place = tl.arange(0, BLOCK_T * ROWS)
    split = tl.arange(0, SPLITS_PADDED)
    place_ok = (place // ROWS < count) & (rank > 0)
    # Load all splits at once: in a loop, each would need its own register or wait for the one before.
    parts = tl.load(
        partial + unit * ROWS + split[:, None] * plane + place[None, :],
        mask=(split < SPLITS)[:, None] & place_ok[None, :],
        other=0.0,
    )
    return tl.reshape(tl.sum(parts, 0), (BLOCK_T, ROWS))


@triton.jit
def several_tokens(
    pool, table, partial, unit, size, count, rank, n0, outputs, cells_per_row, plane, v, b,
    CELL: tl.constexpr, ALIGN: tl.constexpr, BLOCK_T: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr, SPLITS_PADDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return ``[BLOCK_T, COLUMNS]`` of v B for ``count`` tokens from ``unit`` on, in a tile of ``size``
    tokens.

    ``v``, ``b``: the parts of the first ROWS rank rows, already loaded.
    """
    total = tl.dot(v.to(b.dtype), b, input_precision=PRECISION)
    row = tl.arange(0, ROWS)
    for r0 in tl.range(ROWS, rank, ROWS, num_stages=1):
        more_b = load_rows(
            pool, table + r0 * cells_per_row, r0 + row < rank, n0, outputs, CELL, ALIGN, COLUMNS, False
        )
        more_v = summed(
            partial, unit + r0 // ROWS * size, count, rank - r0, plane,
            BLOCK_T, SPLITS, SPLITS_PADDED,
        )  # fmt: skip
        total = tl.dot(more_v.to(b.dtype), more_b, total, input_precision=PRECISION)
    return total


@triton.jit
def place_of(
    item, tile_items, large_tiles, tile_blocks, blocks, out_0, out_1, out_2,
    TILE_N: tl.constexpr, BLOCK_N: tl.constexpr, PROJECTIONS: tl.constexpr,
):  # fmt: skip
    """Return (tile, projection, first column in it, largest number of columns) of an item of expand.

    Items of large tiles (several tokens with an adapter) come first, with TILE_N columns each.
    """
    is_large = item < tile_items
    within = tl.where(is_large, item, item - tile_items)
    per_tile = tl.where(is_large, tile_blocks, blocks)
    width = tl.where(is_large, TILE_N, BLOCK_N)
    tile = within // per_tile + tl.where(is_large, 0, large_tiles)
    block = within % per_tile
    # Selects instead of branches, because the compiler tracks alignment through selects only.
    blocks_0 = tl.where(is_large, tl.cdiv(out_0, TILE_N), tl.cdiv(out_0, BLOCK_N))
    blocks_1 = blocks_0
    if PROJECTIONS > 1:
        blocks_1 += tl.where(is_large, tl.cdiv(out_1, TILE_N), tl.cdiv(out_1, BLOCK_N))
    second = (block >= blocks_0) & (PROJECTIONS > 1)
    third = (block >= blocks_1) & (PROJECTIONS > 2)
    projection = second.to(tl.int32) + third.to(tl.int32)
    first_block = tl.where(third, blocks_1, tl.where(second, blocks_0, 0))
    return tile, projection, (block - first_block) * width, width


@triton.jit
def chosen(projection, of_0, of_1, of_2):
    return tl.where(projection == 2, of_2, tl.where(projection == 1, of_1, of_0))


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
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_N: tl.constexpr,
    SUB_N: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    VECTOR: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write y[token, columns] = scale * sum over rows of v[token, row] B[row]; ADD: add it to y instead.

    Items are tiles times blocks of one projection's columns: TILE_N columns for tiles of several tokens with
    an adapter, BLOCK_N for others. A tile has up to TOKENS tokens, which are computed BLOCK_T at a time with
    the same SUB_N columns of B. Tokens without an adapter get zeros; ADD leaves them alone.
    """
    release_successor(PDL)
    tile_blocks = tl.cdiv(out_0, TILE_N)
    blocks = tl.cdiv(out_0, BLOCK_N)
    if PROJECTIONS > 1:
        tile_blocks += tl.cdiv(out_1, TILE_N)
        blocks += tl.cdiv(out_1, BLOCK_N)
    if PROJECTIONS > 2:
        tile_blocks += tl.cdiv(out_2, TILE_N)
        blocks += tl.cdiv(out_2, BLOCK_N)
    large_tiles = load_word(counts, 3)
    tile_items = large_tiles * tile_blocks
    num_items = tile_items + (load_word(counts, 0 if ADD else 1) - large_tiles) * blocks
    pool += layer_offset
    row = tl.arange(0, ROWS)
    WIDEST: tl.constexpr = TILE_N if TILE_N > BLOCK_N else BLOCK_N
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        tile, projection, n0, width = place_of(
            item, tile_items, large_tiles, tile_blocks, blocks, out_0, out_1, out_2,
            TILE_N, BLOCK_N, PROJECTIONS,
        )  # fmt: skip
        record = tiles + tile * WORDS
        column = chosen(projection, 0, out_0, out_0 + out_1)
        outputs = chosen(projection, out_0, out_1, out_2)
        cells_per_row = chosen(projection, cells_0, cells_1, cells_2)
        start = load_word(record, 0)
        count = load_word(record, 1)
        scale_row = load_word(record, 2) + projection
        rank = load_word(record, 4 + 3 * projection)
        first_cell = load_word(record, 5 + 3 * projection)
        unit = load_word(record, 6 + 3 * projection)
        if not ADD or rank > 0:
            table = cells + first_cell + row * cells_per_row
            scale = load_word(scales + scale_row.to(tl.int64) * num_layers, layer)
            y_row = y + start.to(tl.int64) * y_stride + column
            if VECTOR and count == 1:
                n = n0 + tl.arange(0, BLOCK_N)
                b = load_rows(pool, table, row < rank, n0, outputs, CELL, ALIGN, BLOCK_N, True)
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
                end = tl.minimum(n0 + width, outputs)
                rows_b = load_rows(pool, table, row < rank, n0, end, CELL, ALIGN, SUB_N, False)
                await_predecessor(PDL)
                olds = tl.zeros((BLOCK_T, SUB_N), y.dtype.element_ty)
                if ADD:
                    olds = load_tokens(y_row, token, count, y_stride, n0, end, SUB_N)
                vs = summed(
                    partial, unit, count, rank, plane,
                    BLOCK_T, SPLITS, SPLITS_PADDED,
                )  # fmt: skip
                for sub in tl.range(0, end - n0, SUB_N, num_stages=1):
                    at = n0 + sub
                    these_b = rows_b
                    if SUB_N < WIDEST:
                        rows_b = load_rows(
                            pool, table, row < rank, at + SUB_N, end, CELL, ALIGN, SUB_N, False
                        )
                    for t0 in tl.range(0, count if TOKENS > BLOCK_T else 1, BLOCK_T, num_stages=1):
                        several = olds.to(tl.float32) + scale * several_tokens(
                            pool, table, partial, unit + t0, count, count - t0, rank, at, end, cells_per_row,
                            plane, vs, these_b,
                            CELL, ALIGN, BLOCK_T, SUB_N, SPLITS, SPLITS_PADDED, PRECISION,
                        )  # fmt: skip
                        # The next turn's operands are loaded into registers that this turn no longer needs.
                        next_t = 0
                        next_at = at + SUB_N
                        if TOKENS > BLOCK_T:
                            next_t = tl.where(t0 + BLOCK_T < count, t0 + BLOCK_T, 0)
                            next_at = tl.where(next_t > 0, at, at + SUB_N)
                            vs = summed(
                                partial, unit + next_t, count - next_t, rank, plane,
                                BLOCK_T, SPLITS, SPLITS_PADDED,
                            )  # fmt: skip
                        if ADD and (TOKENS > BLOCK_T or SUB_N < WIDEST):
                            olds = load_tokens(
                                y_row + next_t * y_stride,
                                token,
                                count - next_t,
                                y_stride,
                                next_at,
                                end,
                                SUB_N,
                            )
                        store_tokens(
                            y_row + t0 * y_stride, token, count - t0, y_stride, at, end, several, SUB_N
                        )
    await_predecessor(PDL)


@triton.jit
def gated_sum_kernel(
    y, delta, out, y_stride, delta_stride, size, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr
):
    """Compute out = activation(gate) * up, where gate and up are the halves of y + delta rounded to y's type.

    The grid is (T, blocks of out's columns)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = column < size
    y += token * y_stride + column
    delta += token * delta_stride + column
    g = tl.load(y, mask=ok, other=0.0).to(tl.float32) + tl.load(delta, mask=ok, other=0.0).to(tl.float32)
    u = tl.load(y + size, mask=ok, other=0.0).to(tl.float32)
    u += tl.load(delta + size, mask=ok, other=0.0).to(tl.float32)
    g, u = g.to(y.dtype.element_ty).to(tl.float32), u.to(y.dtype.element_ty).to(tl.float32)
    value = activated(g, ACTIVATION) * u
    tl.store(out + token * size + column, value.to(out.dtype.element_ty), mask=ok)
