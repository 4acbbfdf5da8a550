"""Compiled loops: how Numba compiles them for all rooms, and those of the operations on a CPU.

Numba compiles a loop on first use and keeps it on disk where that can be. A loop runs on its caller's thread,
without the GIL. The operations' loops read keys, values and adapter rows where they lie in the pool, so a step
moves each byte once and no copy of an adapter exists anywhere.

Their arrays are numpy views of tensors and contiguous, or the inner loops would not vectorise (nor would they
with offsets that might be negative, hence the slices). Where rows are strided (q, k, v are parts of one
product) the array is flat and has its row stride beside it. ``pool`` is flat, of float32 or of bfloat16 as
int16; all else is float32. Knows nothing of plans or torch; ``cpu`` calls these loops.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba.core import event

from manylora.devices.preparation import PREPARATION

_OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False}

Loop = TypeVar("Loop", bound=Callable[..., Any])


class _Reporter(event.Listener):  # type: ignore[misc]  # numba has no types
    """Tells the process's meter when Numba compiles: also later, for arguments of new types."""

    def on_start(self, _: event.Event) -> None:
        PREPARATION.begin()

    def on_end(self, _: event.Event) -> None:
        PREPARATION.end()


event.register("numba:compile", _Reporter())


def loop(function: Loop) -> Loop:
    """Compiled, without the GIL, and without looking at the bounds of arrays."""
    return _compiled(function)


def fast_loop(function: Loop) -> Loop:
    """The same, where sums of floats may be taken in any order."""
    return _compiled(function, fastmath=True)


def _compiled(function: Loop, **more: Any) -> Loop:
    try:
        return cast(Loop, numba.njit(**_OPTIONS, **more, cache=True)(function))
    except RuntimeError:  # there is no folder that may be written to
        return cast(Loop, numba.njit(**_OPTIONS, **more)(function))


def _wide(stored: Any) -> Any:
    """A number of the pool as float32. An int16 is a bfloat16: a float32's upper half."""


@numba.extending.overload(_wide, strict=False)  # type: ignore[untyped-decorator]
def _wide_by_type(stored: Any) -> Callable[[Any], Any]:
    if isinstance(stored, numba.types.Integer):
        return lambda stored: np.int32(np.int32(stored) << np.int32(16)).view(np.float32)
    return lambda stored: stored


_LOG2_E = np.float32(1.4426950408889634)
_LN_2 = np.float32(0.6931471805599453)


@fast_loop
def _exp(value: Any) -> Any:
    """exp(value) for a float32 value <= 0, relative error below 2e-7.

    A polynomial on [-ln2/2, ln2/2] and the exponent written as bits: libm's exp does not vectorise.
    """
    z = max(value * _LOG2_E, np.float32(-126.0))
    n = np.float32(math.floor(z + np.float32(0.5)))
    r = (z - n) * _LN_2
    p = np.float32(1.0 / 5040.0)
    p = p * r + np.float32(1.0 / 720.0)
    p = p * r + np.float32(1.0 / 120.0)
    p = p * r + np.float32(1.0 / 24.0)
    p = p * r + np.float32(1.0 / 6.0)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1.0)
    p = p * r + np.float32(1.0)
    return p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@fast_loop
def _attend_head(
    q: np.ndarray, query: int, dim: int, out: np.ndarray, token: int, first_head: int, heads: int,
    pool: np.ndarray, keys: int, page_stride: int, page_tokens: int, token_stride: int, pages: np.ndarray,
    begin: int, end: int, scale: float, soft_cap: float, scores: np.ndarray,
) -> None:  # fmt: skip
    """One key head of one query token: the query heads that share it, over positions [begin, end)."""
    value_shift = page_tokens * token_stride
    for position in range(begin, end):
        at = keys + pages[position // page_tokens] * page_stride + (position % page_tokens) * token_stride
        key = pool[at : at + dim]
        for head in range(heads):
            mine = q[query + head * dim : query + (head + 1) * dim]
            total = np.float32(0.0)
            for d in range(dim):
                total += mine[d] * _wide(key[d])
            scores[head, position - begin] = total * np.float32(scale)
    for head in range(heads):
        row = scores[head, : end - begin]
        if soft_cap > 0.0:
            for i in range(row.shape[0]):
                row[i] = np.float32(soft_cap) * np.float32(math.tanh(row[i] / np.float32(soft_cap)))
        highest = row[0]
        for i in range(1, row.shape[0]):
            highest = max(highest, row[i])
        total = np.float32(0.0)
        for i in range(row.shape[0]):
            row[i] = _exp(row[i] - highest)
            total += row[i]
        for i in range(row.shape[0]):
            row[i] /= total
    column = first_head * dim
    result = out[token, column : column + heads * dim]
    result[:] = np.float32(0.0)
    for position in range(begin, end):
        page = pages[position // page_tokens]
        at = keys + value_shift + page * page_stride + (position % page_tokens) * token_stride
        value = pool[at : at + dim]
        for head in range(heads):
            weight = scores[head, position - begin]
            mine = result[head * dim : (head + 1) * dim]
            for d in range(dim):
                mine[d] += weight * _wide(value[d])


@fast_loop
def attend(
    q: np.ndarray, q_stride: int, heads: int, dim: int, out: np.ndarray, pool: np.ndarray,
    layer_keys: int, page_stride: int, page_tokens: int, kv_heads: int, tokens: np.ndarray,
    lengths: np.ndarray, page_table: np.ndarray, window: int, scale: float, soft_cap: float,
    scores: np.ndarray,
) -> None:  # fmt: skip
    """Attention of single query tokens. q: rows of heads * D; out [T, heads * D], written for ``tokens`` only.

    ``tokens``, ``lengths`` int64 [R]: a query's place in the batch and its context, itself included;
    ``page_table`` int32 [R, W]; ``layer_keys``: where the layer's keys begin in a page; ``window``,
    ``soft_cap``: 0 for none; ``scores`` float32 [heads / kv_heads, longest] is scratch.
    """
    shared = heads // kv_heads
    for row in range(tokens.shape[0]):
        end = lengths[row]
        begin = max(0, end - window) if window > 0 else 0
        for kv_head in range(kv_heads):
            _attend_head(
                q, tokens[row] * q_stride + kv_head * shared * dim, dim,
                out, tokens[row], kv_head * shared, shared, pool, layer_keys + kv_head * dim,
                page_stride, page_tokens, kv_heads * dim, page_table[row], begin, end, scale,
                soft_cap, scores,
            )  # fmt: skip


@fast_loop
def _run_end(cells: np.ndarray, first: int, stop: int, cell: int) -> int:
    """The end of the run of cells from ``first`` that lie side by side in the pool."""
    end = first + 1
    while end < stop and cells[end] == cells[end - 1] + cell:
        end += 1
    return end


@fast_loop
def _shrink(
    x: np.ndarray, start: int, stop: int, pool: np.ndarray, offset: int, cells: np.ndarray, first: int,
    rank: int, cell: int, shrunk: np.ndarray, scale: np.float32,
) -> None:  # fmt: skip
    """shrunk[t - start, j] = scale * x[t] . A[j], four tokens at a time, each row of A read once for them."""
    width = x.shape[1]
    a_cells = (width + cell - 1) // cell
    for j in range(rank):
        row = first + j * a_cells
        for t in range(start, stop, 4):
            # Past the end the last token is computed again: cheaper than a branch inside the loop.
            t1, t2, t3 = min(t + 1, stop - 1), min(t + 2, stop - 1), min(t + 3, stop - 1)
            s0, s1, s2, s3 = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
            c = row
            while c < row + a_cells:
                end = _run_end(cells, c, row + a_cells, cell)
                at, low = cells[c] + offset, (c - row) * cell
                high = min(low + (end - c) * cell, width)
                a = pool[at : at + high - low]
                x0, x1, x2, x3 = x[t, low:high], x[t1, low:high], x[t2, low:high], x[t3, low:high]
                for i in range(a.shape[0]):
                    weight = _wide(a[i])
                    s0 += weight * x0[i]
                    s1 += weight * x1[i]
                    s2 += weight * x2[i]
                    s3 += weight * x3[i]
                c = end
            shrunk[t - start, j] = s0 * scale
            shrunk[t1 - start, j] = s1 * scale if t1 > t else shrunk[t - start, j]
            shrunk[t2 - start, j] = s2 * scale if t2 > t1 else shrunk[t1 - start, j]
            shrunk[t3 - start, j] = s3 * scale if t3 > t2 else shrunk[t2 - start, j]


@fast_loop
def _expand(
    y: np.ndarray, start: int, stop: int, column: int, width: int, pool: np.ndarray, offset: int,
    cells: np.ndarray, first: int, rank: int, cell: int, shrunk: np.ndarray,
) -> None:  # fmt: skip
    """y[t, column:column + width] += shrunk[t - start] @ B, a row of B at a time."""
    b_cells = (width + cell - 1) // cell
    for j in range(rank):
        row = first + j * b_cells
        c = row
        while c < row + b_cells:
            end = _run_end(cells, c, row + b_cells, cell)
            at, low = cells[c] + offset, (c - row) * cell
            count = min((end - c) * cell, width - low)
            b = pool[at : at + count]
            for t in range(start, stop):
                weight = shrunk[t - start, j]
                mine = y[t, column + low : column + low + count]
                for i in range(count):
                    mine[i] += weight * _wide(b[i])
            c = end


@fast_loop
def shrink_lora(
    x: np.ndarray, pool: np.ndarray, offset: int, cells: np.ndarray, cell: int, starts: np.ndarray,
    stops: np.ndarray, records: np.ndarray, scales: np.ndarray, shrunk: np.ndarray,
) -> None:  # fmt: skip
    """scale * (x[t] A_p) of every token t of every item and every projection p, one after another in ``shrunk``.

    ``starts``, ``stops`` int64 [N]: each item's tokens; ``records`` int64 [N, P, 3] and ``scales`` float32
    [N, P] as in LoraSegments, of one group's projections and one layer; ``offset``: the layer's, in elements;
    ``shrunk`` float32 [sum of tokens * ranks].
    """
    begin = 0
    for item in range(starts.shape[0]):
        start, stop = starts[item], stops[item]
        for p in range(records.shape[1]):
            a_first, rank = records[item, p, 0], records[item, p, 2]
            if rank == 0:
                continue
            end = begin + (stop - start) * rank
            mine = shrunk[begin:end].reshape((stop - start, rank))
            _shrink(x, start, stop, pool, offset, cells, a_first, rank, cell, mine, scales[item, p])
            begin = end


@fast_loop
def expand_lora(
    y: np.ndarray, pool: np.ndarray, offset: int, cells: np.ndarray, cell: int, starts: np.ndarray,
    stops: np.ndarray, records: np.ndarray, first_column: int, columns: np.ndarray, shrunk: np.ndarray,
) -> None:  # fmt: skip
    """y[t, columns of p] += shrunk B_p, of what ``shrink_lora`` of the same items has written.

    ``columns`` int64 [P + 1]: where each projection's begin; the first of them is ``first_column`` of y.
    """
    begin = 0
    for item in range(starts.shape[0]):
        start, stop = starts[item], stops[item]
        for p in range(records.shape[1]):
            b_first, rank = records[item, p, 1], records[item, p, 2]
            if rank == 0:
                continue
            end = begin + (stop - start) * rank
            mine = shrunk[begin:end].reshape((stop - start, rank))
            column, width = first_column + columns[p], columns[p + 1] - columns[p]
            _expand(y, start, stop, column, width, pool, offset, cells, b_first, rank, cell, mine)
            begin = end


@fast_loop
def store_kv(
    pool: np.ndarray, layer_keys: int, page_stride: int, page_tokens: int, k: np.ndarray, k_stride: int,
    v: np.ndarray, v_stride: int, width: int, slots: np.ndarray,
) -> None:  # fmt: skip
    """k, v (rows of ``width`` = kv_heads * D) to their slots of a layer."""
    for t in range(slots.shape[0]):
        page, place = slots[t] // page_tokens, slots[t] % page_tokens
        at = page * page_stride + layer_keys + place * width
        behind = at + page_tokens * width
        pool[at : at + width] = k[t * k_stride : t * k_stride + width]
        pool[behind : behind + width] = v[t * v_stride : t * v_stride + width]


@fast_loop
def rotate_in_place(
    x: np.ndarray, x_stride: int, heads: int, cos: np.ndarray, sin: np.ndarray, positions: np.ndarray
) -> None:
    """Rotary embedding of rows of heads * D by cos, sin [positions, D / 2]; two halves, not interleaved."""
    half = cos.shape[1]
    for t in range(positions.shape[0]):
        at = positions[t]
        for h in range(heads):
            first = t * x_stride + h * 2 * half
            low, high = x[first : first + half], x[first + half : first + 2 * half]
            for d in range(half):
                left, right = low[d], high[d]
                low[d] = left * cos[at, d] - right * sin[at, d]
                high[d] = right * cos[at, d] + left * sin[at, d]


@fast_loop
def add_norm(x: np.ndarray, residual: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray) -> None:
    """residual += x; out = residual / rms(residual) * weight. All [T, hidden]."""
    width = x.shape[1]
    for t in range(x.shape[0]):
        total = np.float32(0.0)
        for i in range(width):
            value = residual[t, i] + x[t, i]
            residual[t, i] = value
            total += value * value
        factor = np.float32(1.0) / np.float32(math.sqrt(total / np.float32(width) + np.float32(eps)))
        for i in range(width):
            out[t, i] = weight[i] * (residual[t, i] * factor)


@fast_loop
def gate(gate_up: np.ndarray, out: np.ndarray) -> None:
    """out = silu(gate) * up for gate_up [T, 2 I]."""
    width = out.shape[1]
    for t in range(out.shape[0]):
        first, second, row = gate_up[t, :width], gate_up[t, width:], out[t]
        for i in range(width):
            g = first[i]
            # sigmoid from exp(-|g|), which cannot overflow.
            e = _exp(-abs(g))
            top = np.float32(1.0) if g >= 0 else e
            row[i] = g * top / (np.float32(1.0) + e) * second[i]
