"""Triton kernels for attention over paged keys and values, of rows with several queries.

A tile is a run of at most TILE queries of one row. Where there are few tiles, a tile's context is cut into pieces
of ``chunk`` slots. A program takes one piece of a tile, BLOCK_Q of its queries and one key head; the HEADS query
heads that share the key head stand side by side with the queries as rows of the tensor-core product. The result
of an only piece is final; several are joined in order by ``combine_kernel`` (flash-decoding), so results do not
depend on timing. What there is to do stands in device memory, so a captured launch is no larger than the work that
its tokens can be: a record of 8 int32 per piece:

    0 first entry in the page table   1 first token   2 tokens   3 position of the first query
    4 number of the piece   5 pieces of the tile   6 first place of its partial result

``sizes``: the chunk. Slots past the context, and pages outside the window, are never loaded: stale bytes cannot
reach a result.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import triton
import triton.language as tl

RECORD = tl.constexpr(8)


@triton.jit
def attend_kernel(
    q,
    pool,
    page_table,
    records,
    sizes,
    out,
    partial,
    statistics,
    q_stride,
    num_heads,
    layer_offset,
    value_offset,
    page_stride,
    token_stride,
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
    PRECISION: tl.constexpr,
):
    """Grid (pieces * TILE / BLOCK_Q, kv_heads). ``out`` [T, heads, DIM].

    Where a tile has several pieces, each writes float32 ``partial`` [places, heads, DIM] and ``statistics``
    [places, heads, 2] (largest exponent, sum). BLOCK_M is at least BLOCK_Q * HEADS_PADDED and at least 16,
    as tensor cores demand."""
    record = records + tl.program_id(0) // (TILE // BLOCK_Q) * RECORD
    skipped = tl.program_id(0) % (TILE // BLOCK_Q) * BLOCK_Q
    table = page_table + tl.load(record)
    first_token = tl.load(record + 1) + skipped
    count = tl.minimum(tl.load(record + 2) - skipped, BLOCK_Q)
    position = tl.load(record + 3) + skipped
    kv_head = tl.program_id(1)
    if count <= 0:
        return
    piece = tl.load(record + 4)
    num_pieces = tl.load(record + 5)
    first_place = tl.load(record + 6) + skipped
    chunk = tl.load(sizes)

    end = position + count
    low = 0
    if WINDOWED:
        low = tl.maximum(position - window + 1, 0)
    begin = low + piece * chunk
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
    if num_pieces == 1:
        # Rows that only pad the tile have seen nothing; they are not stored.
        result = result / tl.where(total > 0.0, total, 1.0)[:, None]
        target = out + ((token * num_heads + heads) * DIM)[:, None] + d[None, :]
        tl.store(target, result.to(q_tile.dtype), mask=store_ok)
    else:
        place = (first_place.to(tl.int64) + query) * num_heads + heads
        tl.store(partial + (place * DIM)[:, None] + d[None, :], result, mask=store_ok)
        tl.store(statistics + place * 2, largest, mask=row_ok)
        tl.store(statistics + place * 2 + 1, total, mask=row_ok)


@triton.jit
def combine_kernel(
    out,
    partial,
    statistics,
    joined,
    sizes,
    num_heads,
    window,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    JOINED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Join the pieces of one token and head; grid (T, heads). ``joined`` [JOINED]: the first records of tiles with
    several pieces; records of no tokens are none."""
    token = tl.program_id(0)
    each = joined + tl.arange(0, JOINED) * RECORD
    first = tl.load(each + 1)
    inside = (first <= token) & (token < first + tl.load(each + 2))
    found = tl.max(tl.where(inside, tl.arange(0, JOINED), -1), 0)
    if found < 0:
        return
    record = joined + found * RECORD
    tile_tokens = tl.load(record + 2)
    query = token - tl.load(record + 1)
    # The pieces of this token were counted from its block of queries.
    skipped = query // BLOCK_Q * BLOCK_Q
    position = tl.load(record + 3) + skipped
    count = tl.minimum(tile_tokens - skipped, BLOCK_Q)
    low = 0
    if WINDOWED:
        low = tl.maximum(position - window + 1, 0)
    pieces = tl.cdiv(position + count - low, tl.load(sizes))
    d = tl.arange(0, DIM_PADDED)
    place = (tl.load(record + 6) + query).to(tl.int64) * num_heads + tl.program_id(1)
    plane = tile_tokens.to(tl.int64) * num_heads
    # As scalars of one element, so that loops may carry them.
    largest = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    result = tl.zeros((DIM_PADDED,), tl.float32)
    one = tl.arange(0, 1)
    for piece in range(pieces):
        where = piece * plane + place
        top = tl.load(statistics + where * 2 + one)
        larger = tl.maximum(largest, top)
        base = tl.where(larger == float("-inf"), 0.0, larger)
        shrink = tl.exp2(largest - base)
        grow = tl.exp2(top - base)
        total = total * shrink + tl.load(statistics + where * 2 + 1 + one) * grow
        result = result * shrink + tl.load(partial + where * DIM + d, mask=d < DIM, other=0.0) * grow
        largest = larger
    target = out + (token.to(tl.int64) * num_heads + tl.program_id(1)) * DIM + d
    tl.store(target, (result / total).to(out.dtype.element_ty), mask=d < DIM)
