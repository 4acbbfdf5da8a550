"""Computes attention over paged keys and values in one Triton launch, for rows of one query and for prompts.

The host cuts each row into tiles of neighbouring queries, and a tile with a long context into pieces of that
context (``attention_plan``). A program takes one piece and one key head. The rows of its tensor-core product
are the tile's queries times the HEADS query heads that share the key head. A tile of one query takes as few
rows as tensor cores allow, so memory bandwidth is its only limit; a tile of several queries fills the rows.
The program that finishes last joins the pieces of its tile, in order (flash-decoding). So results do not
depend on timing, and no second launch is needed. Each piece has a record of 8 int32:

    0 first entry in the page table   1 first token   2 tokens, 0: no piece   3 position of the first query
    4 number of the piece   5 pieces of the tile   6 first place of its partial results   7 its counter

All that changes from step to step is in device memory, so a captured launch can be replayed with other rows.
Slots past the context and pages outside the window are never loaded, so stale bytes cannot reach a result.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import triton
import triton.language as tl

RECORD = tl.constexpr(8)


@triton.jit(do_not_specialize=["window"])
def attend_kernel(
    q,
    pool,
    page_table,
    records,
    out,
    partial,
    statistics,
    arrivals,
    q_stride,
    layer_offset,
    value_offset,
    page_stride,
    token_stride,
    scale_log2,
    before_cap,
    window,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    TILE_BLOCK_N: tl.constexpr,
    TILE_STAGES: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute every tile's attention into ``out`` [T, heads, DIM]; a tile without context gets zeros.

    The grid is (pieces * TILE / BLOCK_Q, kv_heads). Where TILE > 1 its axes are swapped, so that programs of
    the first records start first, for all heads.

    ``partial`` float32 [places, heads, DIM] and ``statistics`` float32 [places, heads, 2] (largest exponent,
    sum) hold partial results. ``arrivals`` int32 [counters, TILE / BLOCK_Q, kv_heads] is zero before and
    after. BLOCK_N and STAGES are for tiles of one query, TILE_BLOCK_N and TILE_STAGES for others.
    ``scale_log2``, the scores' scale times log2(e), is positive. CAPPED: ``scale_log2`` is the soft cap times
    log2(e), and a score times ``before_cap`` is the argument of the cap's tanh."""
    PARTS: tl.constexpr = TILE // BLOCK_Q
    if TILE == 1:
        program, kv_head, kv_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    else:
        program, kv_head, kv_heads = tl.program_id(1), tl.program_id(0), tl.num_programs(0)
    record = records + program // PARTS * RECORD
    part = program % PARTS
    tokens = tl.load(record + 2)
    if tokens <= part * BLOCK_Q:
        return
    several = tokens > 1 if TILE > 1 else False
    tensors = q, pool, page_table, record, out, partial, statistics, arrivals
    strides = q_stride, layer_offset, value_offset, page_stride, token_stride
    rest = scale_log2, before_cap, window, tokens, part, kv_head, kv_heads
    if several:
        _attend(
            *tensors, *strides, *rest, PARTS, HEADS, HEADS_PADDED, DIM, DIM_PADDED, PAGE_TOKENS,
            BLOCK_Q, TILE_BLOCK_N, TILE_STAGES, WINDOWED, CAPPED, PRECISION,
        )  # fmt: skip
    else:
        _attend(
            *tensors, *strides, *rest, PARTS, HEADS, HEADS_PADDED, DIM, DIM_PADDED, PAGE_TOKENS,
            1, BLOCK_N, STAGES, WINDOWED, CAPPED, PRECISION,
        )  # fmt: skip


@triton.jit
def _attend(
    q,
    pool,
    page_table,
    record,
    out,
    partial,
    statistics,
    arrivals,
    q_stride,
    layer_offset,
    value_offset,
    page_stride,
    token_stride,
    scale_log2,
    before_cap,
    window,
    tokens,
    part,
    kv_head,
    kv_heads,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute one program's share: at most BLOCK_Q of the tile's queries, from ``part * BLOCK_Q`` on."""
    BLOCK_M: tl.constexpr = max(16, BLOCK_Q * HEADS_PADDED)
    table = page_table + tl.load(record)
    skipped = part * BLOCK_Q
    token = tl.load(record + 1).to(tl.int64) + skipped
    position = tl.load(record + 3) + skipped
    piece = tl.load(record + 4)
    pieces = tl.load(record + 5)
    count = tl.minimum(tokens - skipped, BLOCK_Q)
    end = position + count
    low = 0
    if WINDOWED:
        low = tl.maximum(position - window + 1, 0)
    # A piece has whole blocks. In a short window, the last pieces of a long context may be empty.
    length = tl.cdiv(tl.cdiv(end - low, pieces), BLOCK_N) * BLOCK_N
    begin = low + piece * length
    stop = tl.minimum(begin + length, end)
    keys = pool + layer_offset + kv_head * DIM

    m = tl.arange(0, BLOCK_M)
    query = m // HEADS_PADDED
    head = kv_head * HEADS + m % HEADS_PADDED
    row_ok = (query < count) & (m % HEADS_PADDED < HEADS)
    d = tl.arange(0, DIM_PADDED)
    stored_ok = row_ok[:, None] & (d < DIM)[None, :]
    q_rows = q + (token + query) * q_stride + head * DIM
    q_tile = tl.load(q_rows[:, None] + d[None, :], mask=stored_ok, other=0.0)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    result = tl.zeros((BLOCK_M, DIM_PADDED), tl.float32)
    for n0 in tl.range(begin, stop, BLOCK_N, num_stages=STAGES):
        n = n0 + tl.arange(0, BLOCK_N)
        n_ok = n < stop
        pages = tl.load(table + n // PAGE_TOKENS, mask=n_ok, other=0).to(tl.int64)
        places = (pages * page_stride + n % PAGE_TOKENS * token_stride)[:, None] + d[None, :]
        loaded = n_ok[:, None] & (d < DIM)[None, :]
        k = tl.load(keys + places, mask=loaded, other=0.0)
        scores = tl.dot(q_tile, tl.trans(k), input_precision=PRECISION)
        if CAPPED:
            scores = 1.0 - 2.0 / (tl.exp(2.0 * before_cap * scores) + 1.0)  # tanh
        # Only a context's last blocks contain tokens after a query. Rows that pad a tile may see such tokens,
        # but their results are not stored.
        visible = n_ok[None, :] if BLOCK_Q == 1 else n[None, :] <= (position + query)[:, None]
        if WINDOWED and BLOCK_Q > 1:
            visible &= n[None, :] > (position + query - window)[:, None]
        scores = tl.where(visible, scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1) * scale_log2)
        # A query that has seen no token yet has a largest score of -inf, and inf - inf would be NaN.
        base = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(scores * scale_log2 - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(keys + value_offset + places, mask=loaded, other=0.0)
        result = tl.dot(weights.to(v.dtype), v, result * shrink[:, None], input_precision=PRECISION)
        largest = larger

    out_rows = out + (token + query) * (kv_heads * HEADS * DIM) + head * DIM
    if pieces > 1:
        # A place holds one query's partial results for all heads.
        first = (tl.load(record + 6) + skipped + query).to(tl.int64) * (kv_heads * HEADS) + head
        between = tokens * (kv_heads * HEADS)
        mine = first + piece * between
        tl.store(partial + mine[:, None] * DIM + d[None, :], result, mask=stored_ok)
        tl.store(statistics + mine * 2, largest, mask=row_ok)
        tl.store(statistics + mine * 2 + 1, total, mask=row_ok)
        # The results of all threads must be in memory before one thread counts this piece as finished.
        tl.debug_barrier()
        counter = arrivals + (tl.load(record + 7) * PARTS + part) * kv_heads + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == pieces - 1:
            largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
            result = tl.zeros((BLOCK_M, DIM_PADDED), tl.float32)
            for other in range(pieces):
                theirs = first + other * between
                top = tl.load(statistics + theirs * 2, row_ok, float("-inf"), cache_modifier=".cg")
                sums = tl.load(statistics + theirs * 2 + 1, row_ok, 0.0, cache_modifier=".cg")
                values = tl.load(
                    partial + theirs[:, None] * DIM + d[None, :], stored_ok, 0.0, cache_modifier=".cg"
                )
                larger = tl.maximum(largest, top)
                base = tl.where(larger == float("-inf"), 0.0, larger)
                shrink, grow = tl.exp2(largest - base), tl.exp2(top - base)
                result = result * shrink[:, None] + values * grow[:, None]
                total = total * shrink + sums * grow
                largest = larger
            result = result / tl.where(total > 0.0, total, 1.0)[:, None]
            tl.store(out_rows[:, None] + d[None, :], result.to(q_tile.dtype), mask=stored_ok)
            tl.store(counter, 0)
    else:
        result = result / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(out_rows[:, None] + d[None, :], result.to(q_tile.dtype), mask=stored_ok)
