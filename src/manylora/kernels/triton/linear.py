"""A linear layer for few tokens, which is the reading of its weights: every program reads an equal share.

The product is cut into tiles of BLOCK_N output columns (all tokens stand in one tile, so weights are read
once) and each tile into steps of BLOCK_K; a program takes an equal run of all tiles' steps, wherever tiles
begin and end (Stream-K, Osama et al. 2023), so that no multiprocessor idles in a last wave. A tile that several
programs share is added up by the one that arrives last, in the order of the steps: results do not depend on
timing. The shares' float32 sums go through ``partial``; ``arrivals`` counts, and is left at zero.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens", "share"])
def linear_kernel(
    x,
    weight,
    bias,
    out,
    partial,
    arrivals,
    num_tokens,
    out_features,
    in_features,
    share,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    BIASED: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    DESCRIBED: tl.constexpr,
    ROWS_DESCRIBED: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``out`` [T, N] = ``x`` [T, K] times ``weight`` [N, K] transposed (+ ``bias`` [N]); grid (programs,).

    ``share``: steps of one program. WEIGHTS_FIRST: weights are the left operand, so that few tokens do not
    waste the tensor cores' rows; DESCRIBED: ``weight`` is a tensor descriptor of blocks [BLOCK_N, BLOCK_K], and
    ROWS_DESCRIBED: ``x`` one of blocks [BLOCK_M, BLOCK_K].
    ``partial`` float32 [2 * programs, BLOCK_N * BLOCK_M], where a tile has several programs.
    """
    program = tl.program_id(0)
    tile_steps = tl.cdiv(in_features, BLOCK_K)
    tiles = tl.cdiv(out_features, BLOCK_N)
    begin = program * share
    end = tl.minimum(begin + share, tiles * tile_steps)
    if begin >= end:
        return
    m = tl.arange(0, BLOCK_M)
    k_inside = tl.arange(0, BLOCK_K)
    for tile in range(begin // tile_steps, (end - 1) // tile_steps + 1):
        first_step = tl.maximum(begin - tile * tile_steps, 0)
        last_step = tl.minimum(end - tile * tile_steps, tile_steps)
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        n_ok = n < out_features
        total = tl.zeros((BLOCK_N, BLOCK_M) if WEIGHTS_FIRST else (BLOCK_M, BLOCK_N), tl.float32)
        for step in tl.range(first_step, last_step, num_stages=STAGES):
            k = step * BLOCK_K + k_inside
            if DESCRIBED:
                w = weight.load([tile * BLOCK_N, step * BLOCK_K])
            else:
                w_ok = n_ok[:, None] if EVEN_K else n_ok[:, None] & (k < in_features)[None, :]
                rows_and_steps = n.to(tl.int64)[:, None] * in_features + k[None, :]
                w = tl.load(weight + rows_and_steps, mask=w_ok, other=0.0, eviction_policy="evict_first")
            x_ok = (m < num_tokens)[:, None]
            if not EVEN_K:
                x_ok &= (k < in_features)[None, :]
            if ROWS_DESCRIBED:
                rows = x.load([0, step * BLOCK_K])
            else:
                rows = tl.load(
                    x + m[:, None] * x_stride + k[None, :], mask=x_ok, other=0.0, eviction_policy="evict_last"
                )
            if WEIGHTS_FIRST:
                total = tl.dot(w, tl.trans(rows), total, input_precision=PRECISION)
            else:
                total = tl.dot(rows, tl.trans(w), total, input_precision=PRECISION)

        place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        if not WEIGHTS_FIRST:
            place = tl.trans(place)
        first = tile * tile_steps // share
        last = (tile * tile_steps + tile_steps - 1) // share
        finished = first == last
        if not finished:
            # A program ends one tile and begins another: of its two places the second is for the latter.
            mine = 2 * program + (program == first).to(tl.int32)
            tl.store(partial + mine.to(tl.int64) * (BLOCK_N * BLOCK_M) + place, total)
            # All threads' sums must lie in memory before one thread says so.
            tl.debug_barrier()
            finished = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == last - first
            if finished:
                total = tl.zeros_like(total)
                for other in range(first, last + 1):
                    theirs = 2 * other + (other == first).to(tl.int32)
                    begins = partial + theirs.to(tl.int64) * (BLOCK_N * BLOCK_M)
                    total += tl.load(begins + place, cache_modifier=".cg")
                tl.store(arrivals + tile, 0)
        if finished:
            _store(total, bias, out, m, n, n_ok, num_tokens, out_features, BIASED, WEIGHTS_FIRST)


@triton.jit
def _store(
    total,
    bias,
    out,
    m,
    n,
    n_ok,
    num_tokens,
    out_features,
    BIASED: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
):
    if WEIGHTS_FIRST:
        total = tl.trans(total)
    if BIASED:
        total += tl.load(bias + n, mask=n_ok, other=0.0).to(tl.float32)[None, :]
    place = m.to(tl.int64)[:, None] * out_features + n[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(m < num_tokens)[:, None] & n_ok[None, :])
