"""Reads tensors of an adapter's file into pages, in compiled loops.

The loops do not hold the interpreter's lock: threads that read beside each other, and beside the step loop,
would otherwise wait for it at every call. The loops report where an error occurred, but not its kind. Imports
no torch.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba.core import cgutils, types
from numba.extending import intrinsic

from manylora.kernels.loops import loop

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

F64, F32, F16, BF16 = range(4)
"""Types of elements as stored in a file; all but F64 are also types of elements kept in pages."""

WORDS = 6
"""The words that describe one part of a matrix in ``parts``: the address of its first element in memory; its
first row and first column; its number of rows; the elements of a row; the bytes from one row to the next in
memory."""

SCRATCH_WORDS = 2
"""The words for each element in ``scratch``: room for the element as stored, as a float32, and as kept."""

_STRIP = 128
"""The source's rows that are transposed at a time: each piece of a target's row is then a few cache lines."""

_pread: Any = types.ExternalFunction(
    "pread", types.intp(types.int32, types.voidptr, types.uintp, types.int64)
)


def prepare() -> None:
    """Compile the loops, or load them as an earlier run has compiled them."""
    nothing, parts = np.zeros(0, dtype=np.int64), np.zeros((0, WORDS), dtype=np.int64)
    scratch = np.zeros(SCRATCH_WORDS, dtype=np.uint64)
    read_rows(0, nothing, 0, parts, 0, F32, F32, scratch)
    read_transposed(0, nothing, 0, 0, parts, 0, F32, F32, scratch)
    are_finite(0, 0, 0, F32, F32, scratch)


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _memory(_: Any, address: Any) -> Any:
    """Return the pointer for an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@loop
def _size(kind: int) -> int:
    """Return the bytes of an element."""
    return 8 if kind == F64 else 4 if kind == F32 else 2


@loop
def _filled(file: int, begin: int, address: int, num_bytes: int) -> bool:
    """Read ``num_bytes`` of the file from ``begin`` to ``address``. Return whether the file had them all."""
    while num_bytes > 0:
        count = _pread(file, _memory(address), num_bytes, begin)
        if count <= 0:
            return False
        begin, address, num_bytes = begin + count, address + count, num_bytes - count
    return True


@loop
def _is_finite(address: int, count: int, kind: int) -> bool:
    """Return whether all elements are finite: none has the largest exponent."""
    if kind == F32:
        wide, widest = np.uint32(0x7F800000), np.uint32(0)
        for bits in numba.carray(_memory(address), count, np.uint32):
            widest = max(widest, np.uint32(bits & wide))
        return bool(widest != wide)
    narrow, largest = np.uint16(0x7C00 if kind == F16 else 0x7F80), np.uint16(0)
    for bits in numba.carray(_memory(address), count, np.uint16):
        largest = max(largest, np.uint16(bits & narrow))
    return bool(largest != narrow)


@loop
def _widen(source: int, target: int, count: int, kind: int) -> None:
    """Convert elements to float32; a value that is not finite stays so."""
    if kind == F64:
        floats = numba.carray(_memory(target), count, np.float32)
        for place, value in enumerate(numba.carray(_memory(source), count, np.float64)):
            floats[place] = np.float32(value)
        return
    wide = numba.carray(_memory(target), count, np.uint32)
    narrow = numba.carray(_memory(source), count, np.uint16)
    if kind == BF16:
        for place in range(count):
            wide[place] = np.uint32(narrow[place]) << np.uint32(16)
        return
    for place in range(count):
        bits = np.uint32(narrow[place])
        magnitude = np.uint32(bits & np.uint32(0x7FFF))
        # A subnormal float16 is its fraction times 2^-24.
        least = np.float32(np.float32(np.int32(magnitude)) * np.float32(2.0**-24)).view(np.uint32)
        found = (magnitude << np.uint32(13)) + np.uint32((127 - 15) << 23)
        found = least if magnitude < np.uint32(0x0400) else found
        found = np.uint32(0x7F800000) if magnitude >= np.uint32(0x7C00) else found
        wide[place] = found | ((bits & np.uint32(0x8000)) << np.uint32(16))


@loop
def _narrow(source: int, target: int, count: int, kind: int) -> None:
    """Convert float32 elements to 16 bits, rounded to nearest, ties to even; a value that is not finite stays
    so."""
    wide = numba.carray(_memory(source), count, np.uint32)
    narrow = numba.carray(_memory(target), count, np.uint16)
    one = np.uint32(1)
    if kind == BF16:
        for place in range(count):
            bits = wide[place]
            magnitude = min(np.uint32(bits & np.uint32(0x7FFFFFFF)), np.uint32(0x7F800000))
            odd = (magnitude >> np.uint32(16)) & one
            rounded = (magnitude + np.uint32(0x7FFF) + odd) >> np.uint32(16)
            narrow[place] = rounded | ((bits >> np.uint32(16)) & np.uint32(0x8000))
        return
    half = np.float32(0.5)  # one unit in its last place is 2^-24, the least float16
    for place in range(count):
        bits = wide[place]
        magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
        odd = (magnitude >> np.uint32(13)) & one
        rounded = (magnitude - np.uint32((127 - 15) << 23) + np.uint32(0x0FFF) + odd) >> np.uint32(13)
        least = np.float32(magnitude.view(np.float32) + half).view(np.uint32) - np.uint32(0x3F000000)
        rounded = least if magnitude < np.uint32(0x38800000) else rounded
        rounded = np.uint32(0x7C00) if magnitude >= np.uint32(0x47800000) else rounded
        narrow[place] = rounded | ((bits >> np.uint32(16)) & np.uint32(0x8000))


@loop
def _fetched(file: int, begin: int, held: int, target: int, count: int, stored: int, kept: int) -> bool:
    """Read elements to ``target``; where types differ, through ``held`` and float32. Return whether all
    elements were there, and finite before and after."""
    if stored == kept:
        return _filled(file, begin, target, count * _size(kept)) and _is_finite(target, count, kept)
    if not _filled(file, begin, held, count * _size(stored)):
        return False
    wide = held
    if stored != F32:
        wide = target if kept == F32 else held + _whole_words(count * _size(stored))
        _widen(held, wide, count, stored)
    if kept != F32:
        _narrow(wide, target, count, kept)
    return _is_finite(target, count, kept)


@loop
def _whole_words(num_bytes: int) -> int:
    """Round a number of bytes up to whole words."""
    return (num_bytes + 7) // 8 * 8


@loop
def are_finite(file: int, begin: int, count: int, stored: int, kept: int, scratch: Words) -> bool:
    """Return whether ``count`` elements are there, and finite both as stored and as they would be kept."""
    most = (len(scratch) - 2) // SCRATCH_WORDS
    target = scratch.ctypes.data
    while count > 0:
        size = min(count, most)
        if not _fetched(file, begin, target + _whole_words(size * _size(kept)), target, size, stored, kept):
            return False
        begin, count = begin + size * _size(stored), count - size
    return True


@loop
def read_rows(
    file: int, begins: Ints, width: int, parts: Ints, layer_bytes: int, stored: int, kept: int, scratch: Words
) -> int:
    """Read parts of a matrix [rows, width] in each layer to their places. Return the first layer that was not
    complete or not finite, or -1.

    ``begins`` int64 [L]: where each layer's matrix begins in the file. ``parts`` int64 [N, WORDS]: the
    addresses for the first layer; each next layer's are ``layer_bytes`` further. ``scratch`` has
    SCRATCH_WORDS for each element of a part's row, and two more.
    """
    held, size = scratch.ctypes.data, _size(kept)
    for layer in range(len(begins)):
        for part in range(len(parts)):
            address, row, column, rows, length, stride = parts[part]
            address += layer * layer_bytes
            if length == width and stride == length * size and stored == kept:
                rows, length = 1, rows * length  # file and page have the same form, so one read is enough
            for number in range(rows):
                begin = begins[layer] + ((row + number) * width + column) * _size(stored)
                if not _fetched(file, begin, held, address + number * stride, length, stored, kept):
                    return layer
    return -1


@loop
def read_transposed(
    file: int,
    begins: Ints,
    width: int,
    num_rows: int,
    parts: Ints,
    layer_bytes: int,
    stored: int,
    kept: int,
    scratch: Words,
) -> int:
    """Read a matrix [num_rows, width] like ``read_rows``, transposed: its columns are the parts' rows.
    ``scratch`` has SCRATCH_WORDS for each element of the whole matrix, and two more."""
    count, size = num_rows * width, _size(kept)
    source = scratch.ctypes.data
    held = source + _whole_words(count * size)
    for layer in range(len(begins)):
        if not _fetched(file, begins[layer], held, source, count, stored, kept):
            return layer
        for part in range(len(parts)):
            address, row, column, rows, length, stride = parts[part]
            address += layer * layer_bytes
            first = source + (column * width + row) * size
            if size == 4:
                _turn(
                    numba.carray(_memory(first), (length - 1) * width + rows, np.uint32),
                    numba.carray(_memory(address), (rows - 1) * stride // 4 + length, np.uint32),
                    width, rows, length, stride // 4,
                )  # fmt: skip
            elif (width | row | rows | length) % 4 == 0 and (address | stride) % 8 == 0:
                _turn_fours(
                    numba.carray(_memory(first), ((length - 1) * width + rows) // 4, np.uint64),
                    numba.carray(_memory(address), ((rows - 1) * stride + 2 * length) // 8, np.uint64),
                    width // 4, rows // 4, length, stride // 8,
                )  # fmt: skip
            else:
                _turn(
                    numba.carray(_memory(first), (length - 1) * width + rows, np.uint16),
                    numba.carray(_memory(address), (rows - 1) * stride // 2 + length, np.uint16),
                    width, rows, length, stride // 2,
                )  # fmt: skip
    return -1


@loop
def _turn(source: Any, target: Any, width: int, rows: int, length: int, stride: int) -> None:
    """Set target[row, column] = source[column, row]."""
    for first in range(0, length, _STRIP):
        for row in range(rows):
            for column in range(first, min(first + _STRIP, length)):
                target[row * stride + column] = source[column * width + row]


@loop
def _turn_fours(source: Any, target: Any, width: int, rows: int, length: int, stride: int) -> None:
    """Transpose elements of two bytes in words of four elements, which takes less than half of ``_turn``'s
    time. ``width``, ``rows`` and ``stride`` count words."""
    low, even = np.uint64(0x00000000FFFFFFFF), np.uint64(0x0000FFFF0000FFFF)
    one, two = np.uint64(16), np.uint64(32)
    for first in range(0, length, _STRIP):
        for row in range(rows):
            for column in range(first, min(first + _STRIP, length), 4):
                at = column * width + row
                a, b = source[at], source[at + width]
                c, d = source[at + 2 * width], source[at + 3 * width]
                ab, cd = (a & even) | ((b & even) << one), (c & even) | ((d & even) << one)
                ab_odd, cd_odd = ((a >> one) & even) | (b & ~even), ((c >> one) & even) | (d & ~even)
                to = 4 * row * stride + column // 4
                target[to] = (ab & low) | (cd << two)
                target[to + stride] = (ab_odd & low) | (cd_odd << two)
                target[to + 2 * stride] = (ab >> two) | (cd & ~low)
                target[to + 3 * stride] = (ab_odd >> two) | (cd_odd & ~low)
