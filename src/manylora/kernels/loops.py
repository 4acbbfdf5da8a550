"""Compiles loops with Numba for all packages, and holds the loops of the operations on a CPU.

Numba compiles a loop at its first use and caches it on disk where it can write. A loop runs on its caller's
thread, without the GIL. The operations' loops read keys, values and adapter rows directly from the pool, so a
step moves each byte once and no copy of an adapter exists anywhere.

These loops' arrays are contiguous numpy views of tensors, because the inner loops would not vectorise
otherwise. They use slices, because offsets that might be negative would also prevent vectorising. Where rows
are strided (q, k and v are parts of one product), the array is flat and its row stride is a separate
argument. ``pool`` is flat, of float32 or of bfloat16 as int16; floating-point arrays are otherwise float32.
The module knows nothing of plans or torch; ``cpu`` calls these loops. The loops at the end are for CPU LoRA's
threads (``executor.cpu_lora``), whose pool may also be float16, as uint16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba.core import cgutils, event

from manylora.devices.preparation import PREPARATION

_OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False}

Loop = TypeVar("Loop", bound=Callable[..., Any])


class _Reporter(event.Listener):  # type: ignore[misc]  # numba has no types
    """A listener that reports Numba's compilation to the process's meter.

    Compilation also happens later, for arguments of new types.
    """

    def on_start(self, _: event.Event) -> None:
        PREPARATION.begin()

    def on_end(self, _: event.Event) -> None:
        PREPARATION.end()


event.register("numba:compile", _Reporter())


def loop(function: Loop) -> Loop:
    """Compile the function to run without the GIL and without bounds checks."""
    return _compiled(function)


def fast_loop(function: Loop) -> Loop:
    """Compile the function as ``loop`` does, with sums of floats in any order."""
    return _compiled(function, fastmath=True)


def _compiled(function: Loop, **more: Any) -> Loop:
    try:
        return cast(Loop, numba.njit(**_OPTIONS, **more, cache=True)(function))
    except RuntimeError:  # no cache folder is writable
        return cast(Loop, numba.njit(**_OPTIONS, **more)(function))


def _wide(stored: Any) -> Any:
    """Return a number of the pool as float32. An int16 holds a bfloat16, the upper half of a float32.

    A uint16 holds a finite float16.
    """


def _wide_half(stored: Any) -> Any:
    # Move exponent and fraction to their places in a float32, whose exponent has a bias larger by 112.
    bits = np.uint32(stored)
    wide = np.uint32((bits & np.uint32(0x7FFF)) << np.uint32(13)).view(np.float32) * np.float32(2.0**112)
    return -wide if bits & np.uint32(0x8000) else wide


@numba.extending.overload(_wide, strict=False)  # type: ignore[untyped-decorator]
def _wide_by_type(stored: Any) -> Callable[[Any], Any]:
    if stored == numba.types.uint16:
        return _wide_half
    if isinstance(stored, numba.types.Integer):
        return lambda stored: np.int32(np.int32(stored) << np.int32(16)).view(np.float32)
    return lambda stored: stored


_LOG2_E = np.float32(1.4426950408889634)
_LN_2 = np.float32(0.6931471805599453)


@fast_loop
def _exp(value: Any) -> Any:
    """Return exp(value) for a float32 value <= 0, with a relative error below 2e-7.

    The result is a polynomial on [-ln2/2, ln2/2] with the exponent written as bits: libm's exp does not
    vectorise.
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
    """Attend from one query token to positions [begin, end), for the query heads that share one key head."""
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
    """Compute the attention of single query tokens into ``out`` [T, heads * D], for ``tokens`` only.

    ``q``: rows of heads * D, ``q_stride`` elements apart. ``tokens``, ``lengths`` int64 [R]: a query's place
    in the batch, and its context length including itself. ``page_table`` int32 [R, W]. ``layer_keys``: offset
    of the layer's keys in a page. ``window``, ``soft_cap``: 0 for none. ``scores`` float32 [heads / kv_heads,
    longest context] is scratch.
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
    """Return the end of the run of cells from ``first`` on that are contiguous in the pool."""
    end = first + 1
    while end < stop and cells[end] == cells[end - 1] + cell:
        end += 1
    return end


@fast_loop
def _shrink(
    x: np.ndarray, start: int, stop: int, pool: np.ndarray, offset: int, cells: np.ndarray, first: int,
    rank: int, cell: int, shrunk: np.ndarray, scale: np.float32,
) -> None:  # fmt: skip
    """Compute shrunk[t - start, j] = scale * x[t] . A[j], four tokens for each read of a row of A."""
    width = x.shape[1]
    a_cells = (width + cell - 1) // cell
    for j in range(rank):
        row = first + j * a_cells
        for t in range(start, stop, 4):
            # Past the end, the last token is computed again, which is cheaper than a branch inside the loop.
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
    """Add shrunk[t - start] @ B to y[t, column:column + width], one row of B at a time."""
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
    """Compute scale * (x[t] A_p) for every item's tokens t and every projection p.

    ``starts``, ``stops`` int64 [N]: each item's tokens. ``records`` int64 [N, P, 3] and ``scales`` float32
    [N, P] are as in LoraSegments, for one group's projections and one layer. ``offset``: the layer's offset
    in elements. ``shrunk`` float32 [sum of tokens * ranks]: a block for each item and projection, in order.
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
    """Add shrunk B_p to y[t, columns of p], where ``shrink_lora`` has written ``shrunk`` for the same items.

    ``columns`` int64 [P + 1]: the first column of each projection and the end, from ``first_column`` of y on.
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
def add_lora(
    y: np.ndarray, x: np.ndarray, pool: np.ndarray, offset: int, cells: np.ndarray, cell: int,
    starts: np.ndarray, stops: np.ndarray, records: np.ndarray, scales: np.ndarray, first_column: int,
    columns: np.ndarray, shrunk: np.ndarray,
) -> None:  # fmt: skip
    """Do the work of ``shrink_lora`` and ``expand_lora`` in one call. ``shrunk`` float32 [an item's most tokens,
    the largest rank] is scratch."""
    for item in range(starts.shape[0]):
        start, stop = starts[item], stops[item]
        for p in range(records.shape[1]):
            a_first, b_first, rank = records[item, p, 0], records[item, p, 1], records[item, p, 2]
            if rank == 0:
                continue
            column, width = first_column + columns[p], columns[p + 1] - columns[p]
            _shrink(x, start, stop, pool, offset, cells, a_first, rank, cell, shrunk, scales[item, p])
            _expand(y, start, stop, column, width, pool, offset, cells, b_first, rank, cell, shrunk)


@fast_loop
def store_kv(
    pool: np.ndarray, layer_keys: int, page_stride: int, page_tokens: int, k: np.ndarray, k_stride: int,
    v: np.ndarray, v_stride: int, width: int, slots: np.ndarray,
) -> None:  # fmt: skip
    """Store k and v, rows of ``width`` = kv_heads * D, in their slots of a layer."""
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
    """Rotate rows of heads * D by cos, sin [positions, D / 2]; two halves, not interleaved."""
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
    """Compute residual += x; out = residual / rms(residual) * weight. All but ``weight`` are [T, hidden]."""
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
    """Compute out = silu(gate) * up for gate_up [T, 2 I]."""
    width = out.shape[1]
    for t in range(out.shape[0]):
        first, second, row = gate_up[t, :width], gate_up[t, width:], out[t]
        for i in range(width):
            g = first[i]
            # The sigmoid is computed from exp(-|g|), which cannot overflow.
            e = _exp(-abs(g))
            top = np.float32(1.0) if g >= 0 else e
            row[i] = g * top / (np.float32(1.0) + e) * second[i]


# ---------------------------------------------------------------- threads that compute cold rows

POSTED, ABANDONED = 0, 1
"""Words of the first row: the number of jobs posted in all steps, and the last step that was abandoned."""
DONE, BUSY_NS, ENDED = 0, 1, 2
"""Words of each thread's row: its last computed job, nanoseconds spent on all jobs, the last step it left."""

_SPIN_NS = 200_000
_PAUSE_US = 30
_MONOTONIC = 1
_ROWS, _COLUMNS = 8, 1024
"""Rows of A or B that are widened at a time, and about how many numbers of each: they fit the L1 cache."""

_clock_gettime = numba.types.ExternalFunction(
    "clock_gettime", numba.types.int32(numba.types.int32, numba.types.intp)
)
_sched_yield = numba.types.ExternalFunction("sched_yield", numba.types.int32())
_usleep = numba.types.ExternalFunction("usleep", numba.types.int32(numba.types.uint32))


def _word_at(context: Any, builder: Any, kinds: Any, values: Any) -> Any:
    """Return a pointer to ``words[row, place]``."""
    words = cgutils.create_struct_proxy(kinds[0])(context, builder, value=values[0])
    strides = cgutils.unpack_tuple(builder, words.strides)
    shape = cgutils.unpack_tuple(builder, words.shape)
    places = [
        context.cast(builder, value, kind, numba.types.intp) for kind, value in zip(kinds[1:3], values[1:3])
    ]
    return cgutils.get_item_pointer2(context, builder, words.data, shape, strides, kinds[0].layout, places)


@numba.extending.intrinsic  # type: ignore[untyped-decorator]
def _load(_: Any, words: Any, row: Any, place: Any) -> Any:
    """Load ``words[row, place]`` atomically, with acquire order: later reads see no older values."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(_word_at(context, builder, signature.args, values), "acquire", 8)

    return numba.types.int64(words, row, place), generate


@numba.extending.intrinsic  # type: ignore[untyped-decorator]
def _store(_: Any, words: Any, row: Any, place: Any, number: Any) -> Any:
    """Store ``number`` in ``words[row, place]`` atomically, with release order: after all earlier writes."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        number = context.cast(builder, values[3], signature.args[3], numba.types.int64)
        builder.store_atomic(number, _word_at(context, builder, signature.args, values), "release", 8)
        return context.get_dummy_value()

    return numba.types.void(words, row, place, number), generate


@loop
def _now(clock: np.ndarray) -> int:
    """Return the nanoseconds of a monotonic clock. ``clock`` int64 [2] is scratch."""
    _clock_gettime(_MONOTONIC, clock.ctypes.data)
    return int(clock[0] * 1_000_000_000 + clock[1])


@loop
def _rest(waited_ns: int) -> None:
    """Let other threads run: yield the core in the first ``_SPIN_NS`` of a wait, then sleep ``_PAUSE_US``."""
    if waited_ns < _SPIN_NS:
        _sched_yield()
    else:
        _usleep(_PAUSE_US)


@loop
def set_word(words: np.ndarray, row: int, place: int, number: int) -> None:
    """Store ``number`` in ``words[row, place]`` after all earlier writes."""
    _store(words, row, place, number)


@loop
def await_words(
    words: np.ndarray, count: int, place: int, number: int, most_ns: int, clock: np.ndarray
) -> int:
    """Wait until word ``place`` of each of the first ``count`` threads is at least ``number``.

    Returns the nanoseconds waited, or -1 after more than ``most_ns``.
    """
    began, row = _now(clock), 1
    while True:
        while row <= count and _load(words, row, place) >= number:
            row += 1
        waited = _now(clock) - began
        if row > count:
            return waited
        if waited > most_ns:
            return -1
        _rest(waited)


@fast_loop
def _widen(pool: np.ndarray, offset: int, cells: np.ndarray, first: int, cell: int, into: np.ndarray) -> None:
    """Convert a part of a row to float32 in ``into``; the part's cells begin at entry ``first``."""
    for low in range(0, into.shape[0], cell):
        target = into[low : low + cell]
        at = cells[first] + offset
        source = pool[at : at + target.shape[0]]
        for i in range(target.shape[0]):
            target[i] = _wide(source[i])
        first += 1


@fast_loop
def _shrink_cold(
    x: np.ndarray, pool: np.ndarray, offset: int, cells: np.ndarray, first: int, rank: int, cell: int,
    part: np.ndarray, shrunk: np.ndarray,
) -> None:  # fmt: skip
    """Add x[t] . A[j] to shrunk[t, j], four tokens and two rows of A at a time."""
    last, width = x.shape[0] - 1, x.shape[1]
    a_cells, step = (width + cell - 1) // cell, max(1, _COLUMNS // cell)
    for c in range(0, a_cells, step):
        low, high = c * cell, min((c + step) * cell, width)
        for j in range(0, rank, _ROWS):
            count = min(_ROWS, rank - j)
            for k in range(count):
                _widen(pool, offset, cells, first + (j + k) * a_cells + c, cell, part[k, : high - low])
            for t in range(0, last + 1, 4):
                # Past the end, the last token is computed again: cheaper than a branch inside the loop.
                t1, t2, t3 = min(t + 1, last), min(t + 2, last), min(t + 3, last)
                x0, x1, x2, x3 = x[t, low:high], x[t1, low:high], x[t2, low:high], x[t3, low:high]
                for k in range(0, count, 2):
                    a, b = part[k, : high - low], part[min(k + 1, count - 1), : high - low]
                    a0, a1, a2, a3 = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
                    b0, b1, b2, b3 = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
                    for i in range(a.shape[0]):
                        a0 += a[i] * x0[i]
                        a1 += a[i] * x1[i]
                        a2 += a[i] * x2[i]
                        a3 += a[i] * x3[i]
                        b0 += b[i] * x0[i]
                        b1 += b[i] * x1[i]
                        b2 += b[i] * x2[i]
                        b3 += b[i] * x3[i]
                    for n, of_a, of_b in ((0, a0, b0), (1, a1, b1), (2, a2, b2), (3, a3, b3)):
                        if t + n <= last:
                            shrunk[t + n, j + k] += of_a
                            if k + 1 < count:
                                shrunk[t + n, j + k + 1] += of_b


@fast_loop
def _expand_cold(
    y: np.ndarray, column: int, width: int, pool: np.ndarray, offset: int, cells: np.ndarray, first: int,
    rank: int, cell: int, part: np.ndarray, shrunk: np.ndarray,
) -> None:  # fmt: skip
    """Add shrunk[t] @ B to y[t, column:column + width], eight rows of B at a time.

    ``shrunk`` is 0 past the rank."""
    b_cells, step = (width + cell - 1) // cell, max(1, _COLUMNS // cell)
    for c in range(0, b_cells, step):
        low, high = c * cell, min((c + step) * cell, width)
        for j in range(0, rank, _ROWS):
            count = min(_ROWS, rank - j)
            for k in range(_ROWS):
                if k < count:
                    _widen(pool, offset, cells, first + (j + k) * b_cells + c, cell, part[k, : high - low])
                else:
                    part[k, : high - low] = np.float32(0.0)
            size = high - low
            b0, b1, b2, b3 = part[0, :size], part[1, :size], part[2, :size], part[3, :size]
            b4, b5, b6, b7 = part[4, :size], part[5, :size], part[6, :size], part[7, :size]
            for t in range(y.shape[0]):
                mine, s = y[t, column + low : column + high], shrunk[t, j : j + _ROWS]
                s0, s1, s2, s3, s4, s5, s6, s7 = s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]
                for i in range(size):
                    mine[i] += (s0 * b0[i] + s1 * b1[i] + s2 * b2[i] + s3 * b3[i]) + (
                        s4 * b4[i] + s5 * b5[i] + s6 * b6[i] + s7 * b7[i]
                    )


@fast_loop
def compute_cold(
    layer: int, features: int, first_p: int, end_p: int, slices: np.ndarray, columns: np.ndarray,
    records: np.ndarray, scales: np.ndarray, cells: np.ndarray, cell: int, slab: int, pool: np.ndarray,
    rows: np.ndarray, results: np.ndarray,
) -> None:  # fmt: skip
    """Compute one job of ``serve_cold``: projections [first_p, end_p) of a layer, for all ``slices``."""
    width = columns[end_p - 1, 0] + columns[end_p - 1, 1]
    part = np.empty((_ROWS, max(_COLUMNS, cell)), np.float32)
    for own in range(slices.shape[0]):
        adapter, start, stop = slices[own, 0], slices[own, 1], slices[own, 2]
        x = np.empty((stop - start, features), np.float32)
        given = rows[start * features : stop * features].reshape(x.shape)
        for t in range(x.shape[0]):
            for i in range(features):
                x[t, i] = _wide(given[t, i])
        y = results[start * width : stop * width].reshape((stop - start, width))
        y[:] = np.float32(0.0)
        for p in range(first_p, end_p):
            a_first, b_first, rank = records[adapter, p, 0], records[adapter, p, 1], records[adapter, p, 2]
            if rank > 0:
                shrunk = np.zeros((stop - start, rank + _ROWS), np.float32)
                _shrink_cold(x, pool, layer * slab, cells, a_first, rank, cell, part, shrunk)
                shrunk *= scales[adapter, p, layer]
                _expand_cold(
                    y, columns[p, 0], columns[p, 1], pool, layer * slab, cells, b_first, rank, cell, part, shrunk
                )  # fmt: skip


@loop
def serve_cold(
    words: np.ndarray, own: int, step: int, first_job: int, jobs: np.ndarray, groups: np.ndarray,
    slices: np.ndarray, columns: np.ndarray, records: np.ndarray, scales: np.ndarray, cells: np.ndarray,
    cell: int, slab: int, pool: np.ndarray, rows: np.ndarray, results: np.ndarray,
) -> None:  # fmt: skip
    """Compute a thread's slices of a step's jobs, each job once it is posted.

    Ends when all jobs are done or the step is abandoned. ``own``: the thread's row of ``words``.
    ``first_job``: the number of jobs posted before this step. ``jobs`` int64 [J, 2]: layer and group.
    ``groups`` int64 [G, 3]: width of the input, first projection, end of the projections. ``slices`` int64
    [S, 3]: adapter, first row, end. ``columns`` int64 [P, 2]: first column and number of columns of a
    projection's results in its group's. ``records`` int64 [N, P, 3] and ``scales`` float32 [N, P, L] are as
    in LoraSegments. ``pool``, ``rows`` and ``results`` are flat; ``rows`` has the pool's type.
    """
    clock = np.empty(2, np.int64)
    for place in range(jobs.shape[0]):
        job = first_job + place + 1
        began = _now(clock)
        while _load(words, 0, POSTED) < job and _load(words, 0, ABANDONED) < step:
            _rest(_now(clock) - began)
        if _load(words, 0, ABANDONED) >= step:
            break
        began = _now(clock)
        group = jobs[place, 1]
        features, first_p, end_p = groups[group, 0], groups[group, 1], groups[group, 2]
        compute_cold(
            jobs[place, 0], features, first_p, end_p, slices, columns, records, scales, cells, cell, slab, pool,
            rows, results,
        )  # fmt: skip
        _store(words, own, BUSY_NS, _load(words, own, BUSY_NS) + _now(clock) - began)
        _store(words, own, DONE, job)
    _store(words, own, ENDED, step)
