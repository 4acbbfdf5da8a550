"""Computes the operations that only memory limits: norms, gates, rope with head norms, storing K and V."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def added(one, other):
    """Return the sum of both, rounded once to the type of ``one``."""
    return (one.to(tl.float32) + other.to(tl.float32)).to(one.dtype)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Apply an ``Activation`` to float32 values."""
    if ACTIVATION == "gelu_tanh":
        # (1 + tanh(z)) / 2 is the sigmoid of 2 z.
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "relu":
        y = tl.maximum(x, 0.0)
    else:
        y = x / (1.0 + tl.exp(-x))
    return y


@triton.jit
def rounded_for(normal, x, weight):
    """Round float32 ``normal`` to x's type before a norm's weight is applied to it, as transformers does.

    Where the weight is kept in float32 (Gemma), ``normal`` stays as it is."""
    if weight.dtype.element_ty != tl.float32:
        normal = normal.to(x.dtype).to(tl.float32)
    return normal


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    adapted,
    weight,
    out,
    inner,
    x_outer_stride,
    x_inner_stride,
    size,
    eps,
    ADD: tl.constexpr,
    ADAPTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the RMSNorm of one row per program.

    Row r of x is at (r // inner) * x_outer_stride + (r % inner) * x_inner_stride. Rows of ``residual``,
    ``adapted`` and ``out`` are contiguous. ADAPTED: ``adapted`` is added to x first. ADD: then ``residual``
    becomes x + residual, and the norm is of that sum."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    ok = column < size
    begin = row // inner * x_outer_stride + row % inner * x_inner_stride
    value = tl.load(x + begin + column, mask=ok, other=0.0)
    if ADAPTED:
        value = added(value, tl.load(adapted + row * size + column, mask=ok, other=0.0))
    if ADD:
        old = tl.load(residual + row * size + column, mask=ok, other=0.0)
        value = added(value, old)
        tl.store(residual + row * size + column, value, mask=ok)
    exact = value.to(tl.float32)
    normal = exact * tl.rsqrt(tl.sum(exact * exact, 0) / size + eps)
    factor = tl.load(weight + column, mask=ok, other=0.0).to(tl.float32)
    scaled = rounded_for(normal, value, weight) * factor
    tl.store(out + row * size + column, scaled.to(out.dtype.element_ty), mask=ok)


@triton.jit
def gate_mul_kernel(gate_up, out, stride, size, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr = "silu"):
    """Compute activation(gate) * up of one token's block of columns; the grid is (T, blocks of columns)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = column < size
    gate = tl.load(gate_up + token * stride + column, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * stride + size + column, mask=ok, other=0.0).to(tl.float32)
    value = activated(gate, ACTIVATION) * up
    tl.store(out + token * size + column, value.to(out.dtype.element_ty), mask=ok)


@triton.jit
def write_kv_kernel(
    k,
    v,
    pool,
    slots,
    k_stride,
    v_stride,
    layer_offset,
    value_offset,
    page_stride,
    PAGE_TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store one token's K and V, each of ``WIDTH`` = kv_heads * head_dim contiguous elements.

    The grid is (T,). A token with a negative slot stores nothing."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    target = pool + slot // PAGE_TOKENS * page_stride + layer_offset + slot % PAGE_TOKENS * WIDTH
    column = tl.arange(0, BLOCK)
    ok = column < WIDTH
    tl.store(target + column, tl.load(k + token * k_stride + column, mask=ok), mask=ok)
    tl.store(target + value_offset + column, tl.load(v + token * v_stride + column, mask=ok), mask=ok)


@triton.jit
def _normed(left, right, weight, half, half_ok, eps, HALF: tl.constexpr):
    """Compute the RMSNorm of heads given as two halves, rounded where transformers rounds."""
    wide_left, wide_right = left.to(tl.float32), right.to(tl.float32)
    squares = tl.sum(wide_left * wide_left, 1) + tl.sum(wide_right * wide_right, 1)
    factor = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
    by_left = tl.load(weight + half, mask=half_ok, other=0.0).to(tl.float32)[None, :]
    by_right = tl.load(weight + HALF + half, mask=half_ok, other=0.0).to(tl.float32)[None, :]
    wide_left = rounded_for(wide_left * factor, left, weight) * by_left
    wide_right = rounded_for(wide_right * factor, left, weight) * by_right
    return wide_left.to(left.dtype), wide_right.to(left.dtype)


@triton.jit
def rotate_and_store_kernel(
    q,
    k,
    v,
    adapted,
    pool,
    cos,
    sin,
    positions,
    slots,
    query_norm,
    key_norm,
    eps,
    q_stride,
    k_stride,
    v_stride,
    adapted_stride,
    layer_offset,
    value_offset,
    page_stride,
    PAGE_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    NORMED: tl.constexpr,
    ADAPTED: tl.constexpr,
):
    """Rotate q in place, and write rotated k and unrotated v to the pool, for a block of one token's heads.

    The grid is (T, blocks of q's heads + of k's + of v's). A token with a negative slot stores nothing in the
    pool. ADAPTED: the token's row of ``adapted``, which has q, k and v side by side, is added first. NORMED:
    the heads of q and k are normed before the rotation."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    kv_blocks: tl.constexpr = (KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    half = tl.arange(0, BLOCK_HALF)
    half_ok = half < HALF
    head = tl.arange(0, BLOCK_HEADS)
    slot = tl.load(slots + token).to(tl.int64)
    # C's division would round a negative slot towards zero, into a page that exists.
    place = tl.maximum(slot, 0)
    width: tl.constexpr = KV_HEADS * 2 * HALF
    stored = pool + place // PAGE_TOKENS * page_stride + layer_offset + place % PAGE_TOKENS * width

    is_query = block < q_blocks
    is_value = block >= q_blocks + kv_blocks
    if is_query:
        first = block * BLOCK_HEADS
        source = q + token * q_stride
        target = source
        column = 0
        heads = HEADS - first
    elif is_value:
        first = (block - q_blocks - kv_blocks) * BLOCK_HEADS
        source = v + token * v_stride
        target = stored + value_offset
        column = (HEADS + KV_HEADS) * (2 * HALF)
        heads = KV_HEADS - first
    else:
        first = (block - q_blocks) * BLOCK_HEADS
        source = k + token * k_stride
        target = stored
        column = HEADS * (2 * HALF)
        heads = KV_HEADS - first
    ok = (head < heads)[:, None] & half_ok[None, :]
    inside = ((first + head) * (2 * HALF))[:, None] + half[None, :]
    left = tl.load(source + inside, mask=ok, other=0.0)
    right = tl.load(source + inside + HALF, mask=ok, other=0.0)
    if ADAPTED:
        sides = adapted + token * adapted_stride + column + inside
        left = added(left, tl.load(sides, mask=ok, other=0.0))
        right = added(right, tl.load(sides + HALF, mask=ok, other=0.0))
    if not is_value:
        if NORMED:
            if is_query:
                left, right = _normed(left, right, query_norm, half, half_ok, eps, HALF)
            else:
                left, right = _normed(left, right, key_norm, half, half_ok, eps, HALF)
        position = tl.load(positions + token).to(tl.int64)
        c = tl.load(cos + position * HALF + half, mask=half_ok, other=0.0)[None, :]
        s = tl.load(sin + position * HALF + half, mask=half_ok, other=0.0)[None, :]
        turned = left.to(tl.float32) * c - right.to(tl.float32) * s
        right = (right.to(tl.float32) * c + left.to(tl.float32) * s).to(right.dtype)
        left = turned.to(left.dtype)
    ok &= is_query | (slot >= 0)
    tl.store(target + inside, left, mask=ok)
    tl.store(target + inside + HALF, right, mask=ok)
