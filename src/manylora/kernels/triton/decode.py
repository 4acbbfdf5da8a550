"""A Triton kernel for attention of rows with one query each over paged keys and values.

The host cuts the rows' contexts into pieces of about equal length (``attention_plans``); a program takes one piece
and one key head, with all query heads that share it as rows of the tensor-core product (flash-decoding). A row's
pieces are joined, in order, by the program that arrives last, so results do not depend on timing and no second
launch is needed. A record of 8 int32 per piece:

    0 token, -1: no piece   1 first entry in the page table   2 context length   3 number of the piece
    4 pieces of the row   5 the row's first place in ``partial``   6, 7 unused

Everything that changes from step to step is in device memory: a launch may be captured and replayed with other
rows. Slots past the context, and pages outside the window, are never loaded: stale bytes cannot reach a result.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from manylora.kernels.triton.dependent import ask_for

RECORD = tl.constexpr(8)


@triton.jit(do_not_specialize=["window"])
def decode_kernel(
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
    window,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOWED: tl.constexpr,
    DEPENDENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (pieces, kv_heads). ``out`` [T, heads, DIM]; float32 ``partial`` [places, kv_heads, HEADS, DIM] and
    ``statistics`` [places, kv_heads, HEADS, 2] (largest exponent, sum); ``arrivals`` int32 [places, kv_heads]
    is zero before and after. A row without context gets zeros. BLOCK_M >= HEADS, and 16 for tensor cores."""
    if DEPENDENT:
        gdc_launch_dependents()
    record = records + tl.program_id(0) * RECORD
    token = tl.load(record).to(tl.int64)
    table = page_table + tl.load(record + 1)
    context = tl.load(record + 2)
    piece = tl.load(record + 3)
    pieces = tl.load(record + 4)
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)

    low = 0
    if WINDOWED:
        low = tl.maximum(context - window, 0)
    # Whole blocks; in a short window the last pieces of a long context may be left with nothing.
    length = tl.cdiv(tl.cdiv(context - low, pieces), BLOCK_N) * BLOCK_N
    begin = low + piece * length
    stop = tl.minimum(begin + length, context)
    keys = pool + layer_offset + kv_head * DIM
    if DEPENDENT:
        # No kernel writes the tables, and only the last key and value are of this step.
        row_bytes: tl.constexpr = DIM * pool.dtype.element_ty.primitive_bitwidth // 8
        if (begin < stop) & (token >= 0) & (row_bytes % 16 == 0):
            n = tl.minimum(begin + tl.arange(0, BLOCK_N), stop - 1)
            pages = tl.load(table + n // PAGE_TOKENS).to(tl.int64)
            rows = keys + pages * page_stride + n % PAGE_TOKENS * token_stride
            ask_for(rows, row_bytes)
            ask_for(rows + value_offset, row_bytes)
        gdc_wait()
    if token < 0:
        return

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, DIM_PADDED)
    head_ok = m < HEADS
    stored_ok = head_ok[:, None] & (d < DIM)[None, :]
    inside = m[:, None] * DIM + d[None, :]
    head_inside = kv_head * HEADS * DIM + inside
    q_tile = tl.load(q + token * q_stride + head_inside, mask=stored_ok, other=0.0)
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
        scores = tl.dot(q_tile, tl.trans(k), input_precision=PRECISION) * scale_log2
        # The first position of a block is always there, so the largest score is a number.
        scores = tl.where(n_ok[None, :], scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - larger[:, None])
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(keys + value_offset + places, mask=loaded, other=0.0)
        result = tl.dot(weights.to(v.dtype), v, result * shrink[:, None], input_precision=PRECISION)
        largest = larger

    target = out + token * (kv_heads * HEADS * DIM) + head_inside
    if pieces == 1:
        result = result / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(target, result.to(q_tile.dtype), mask=stored_ok)
    else:
        first = tl.load(record + 5).to(tl.int64)
        mine = (first + piece) * kv_heads + kv_head
        tl.store(partial + mine * (HEADS * DIM) + inside, result, mask=stored_ok)
        tl.store(statistics + (mine * HEADS + m) * 2, largest, mask=head_ok)
        tl.store(statistics + (mine * HEADS + m) * 2 + 1, total, mask=head_ok)
        # All threads' results must lie in memory before one thread says so.
        tl.debug_barrier()
        counter = arrivals + first * kv_heads + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == pieces - 1:
            largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
            result = tl.zeros((BLOCK_M, DIM_PADDED), tl.float32)
            for other in range(pieces):
                theirs = (first + other) * kv_heads + kv_head
                rows = statistics + (theirs * HEADS + m) * 2
                top = tl.load(rows, mask=head_ok, other=float("-inf"), cache_modifier=".cg")
                part = tl.load(rows + 1, mask=head_ok, other=0.0, cache_modifier=".cg")
                larger = tl.maximum(largest, top)
                base = tl.where(larger == float("-inf"), 0.0, larger)
                shrink, grow = tl.exp2(largest - base), tl.exp2(top - base)
                begins = partial + theirs * (HEADS * DIM)
                values = tl.load(begins + inside, mask=stored_ok, other=0.0, cache_modifier=".cg")
                result = result * shrink[:, None] + values * grow[:, None]
                total = total * shrink + part * grow
                largest = larger
            result = result / tl.where(total > 0.0, total, 1.0)[:, None]
            tl.store(target, result.to(q_tile.dtype), mask=stored_ok)
            tl.store(counter, 0)
