"""Triton kernels for attention over paged keys and values: one design for prefill and decode.

A tile is a run of at most TILE queries of one row. A program takes BLOCK_Q queries of a tile, one key head,
and one chunk of the context; the HEADS query heads that share the key head stand side by side with the
queries as rows of the tensor-core product. With one chunk the result is final; with several,
``combine_kernel`` joins them in order (flash-decoding), so results do not depend on timing. A record of
4 int32 per tile:

    0 first entry in the page table   1 first token   2 tokens   3 position of the first query

Slots past the context, and pages outside the window, are never loaded: stale bytes cannot reach a result.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import triton
import triton.language as tl

RECORD = tl.constexpr(4)


@triton.jit(do_not_specialize=["num_tokens"])
def attend_kernel(
    q,
    pool,
    page_table,
    records,
    out,
    partial,
    statistics,
    q_stride,
    num_tokens,
    num_heads,
    layer_offset,
    value_offset,
    page_stride,
    token_stride,
    chunk,
    scale_log2,
    window,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr,
    FINAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (tiles * TILE / BLOCK_Q, kv_heads, splits). ``out`` [T, heads, DIM].

    Where there are several splits, each writes float32 ``partial`` [splits, T, heads, DIM] and ``statistics``
    [splits, T, heads, 2] (largest exponent, sum). BLOCK_M is at least BLOCK_Q * HEADS_PADDED and at least 16,
    as tensor cores demand."""
    record = records + tl.program_id(0) // (TILE // BLOCK_Q) * RECORD
    skipped = tl.program_id(0) % (TILE // BLOCK_Q) * BLOCK_Q
    table = page_table + tl.load(record)
    first_token = tl.load(record + 1) + skipped
    count = tl.minimum(tl.load(record + 2) - skipped, BLOCK_Q)
    position = tl.load(record + 3) + skipped
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if count <= 0:
        return

    end = position + count
    low = 0
    if WINDOWED:
        low = tl.maximum(position - window + 1, 0)
    begin = low + split * chunk
    stop = tl.minimum(begin + chunk, end)
    if begin >= end:
        return

    m = tl.arange(0, BLOCK_M)
    query = m // HEADS_PADDED
    head = m % HEADS_PADDED
    row_ok = (query < count) & (head < HEADS)
    d = tl.arange(0, DIM_PADDED)
    d_ok = d < DIM
    token = first_token.to(tl.int64) + query
    heads = kv_head * HEADS + head
    q_tile = tl.load(
        q + (token * q_stride + heads * DIM)[:, None] + d[None, :],
        mask=row_ok[:, None] & d_ok[None, :],
        other=0.0,
    )
    keys = pool + layer_offset + kv_head * DIM
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    result = tl.zeros((BLOCK_M, DIM_PADDED), tl.float32)
    for n0 in range(begin, stop, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        n_ok = n < stop
        pages = tl.load(table + n // PAGE_TOKENS, mask=n_ok, other=0).to(tl.int64)
        places = (pages * page_stride + n % PAGE_TOKENS * token_stride)[:, None] + d[None, :]
        loaded = n_ok[:, None] & d_ok[None, :]
        k = tl.load(keys + places, mask=loaded, other=0.0)
        scores = tl.dot(q_tile, tl.trans(k), input_precision=PRECISION) * scale_log2
        visible = n_ok[None, :] & (n[None, :] <= (position + query)[:, None])
        if WINDOWED:
            visible &= n[None, :] > (position + query - window)[:, None]
        scores = tl.where(visible, scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        # A query that has seen nothing yet has no largest score; inf - inf must not arise.
        base = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(keys + value_offset + places, mask=loaded, other=0.0)
        result = tl.dot(weights.to(v.dtype), v, result * shrink[:, None], input_precision=PRECISION)
        largest = larger

    store_ok = row_ok[:, None] & d_ok[None, :]
    if FINAL:
        # Rows that only pad the tile have seen nothing; they are not stored.
        result = result / tl.where(total > 0.0, total, 1.0)[:, None]
        target = out + ((token * num_heads + heads) * DIM)[:, None] + d[None, :]
        tl.store(target, result.to(q_tile.dtype), mask=store_ok)
    else:
        place = (split.to(tl.int64) * num_tokens + token) * num_heads + heads
        tl.store(partial + (place * DIM)[:, None] + d[None, :], result, mask=store_ok)
        tl.store(statistics + place * 2, largest, mask=row_ok)
        tl.store(statistics + place * 2 + 1, total, mask=row_ok)


@triton.jit(do_not_specialize=["num_tokens"])
def combine_kernel(
    out,
    partial,
    statistics,
    records,
    num_tokens,
    num_heads,
    chunk,
    window,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Join the chunks of one token and head; grid (tiles * TILE, heads)."""
    record = records + tl.program_id(0) // TILE * RECORD
    query = tl.program_id(0) % TILE
    first_token = tl.load(record + 1)
    count = tl.load(record + 2)
    if query >= count:
        return
    # The chunks of this token were counted from its block of queries.
    skipped = query // BLOCK_Q * BLOCK_Q
    position = tl.load(record + 3) + skipped
    count = tl.minimum(count - skipped, BLOCK_Q)
    low = 0
    if WINDOWED:
        low = tl.maximum(position - window + 1, 0)
    splits = tl.cdiv(position + count - low, chunk)
    d = tl.arange(0, DIM_PADDED)
    place = (first_token.to(tl.int64) + query) * num_heads + tl.program_id(1)
    plane = num_tokens.to(tl.int64) * num_heads
    # As scalars of one element, so that loops may carry them.
    largest = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    result = tl.zeros((DIM_PADDED,), tl.float32)
    one = tl.arange(0, 1)
    for split in range(splits):
        where = split * plane + place
        top = tl.load(statistics + where * 2 + one)
        larger = tl.maximum(largest, top)
        base = tl.where(larger == float("-inf"), 0.0, larger)
        shrink = tl.exp2(largest - base)
        grow = tl.exp2(top - base)
        total = total * shrink + tl.load(statistics + where * 2 + 1 + one) * grow
        result = result * shrink + tl.load(partial + where * DIM + d, mask=d < DIM, other=0.0) * grow
        largest = larger
    tl.store(out + place * DIM + d, (result / total).to(out.dtype.element_ty), mask=d < DIM)
