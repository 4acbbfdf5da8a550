"""Loops that read parts of an adapter's file into pages, without the interpreter: threads
that read beside each other, and beside the step loop, would wait for it at every call.

They say whether all went well, and nothing else: where it did not, or where they are not compiled yet, the same is
done by calls that find out why. Owns whether they are compiled. No torch here.
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

WORDS = 6
"""Of a part of a matrix in ``parts``: where its first element lies in memory, its first row and column, its rows,
their elements, and the bytes from one row to the next in memory."""

AS_IT_IS, FROM_FLOAT32, FROM_FLOAT16 = range(3)
"""How what is stored becomes what the pages hold: bit by bit, or as bfloat16."""

_STRIP = 128
"""Rows that are turned at a time: what is written of a column then is a few lines of the cache."""

_pread: Any = types.ExternalFunction(
    "pread", types.intp(types.int32, types.voidptr, types.uintp, types.int64)
)


def prepare() -> None:
    """Compile them, or load what an earlier run has compiled, on the calling thread."""
    nothing, parts = np.zeros(0, dtype=np.int64), np.zeros((0, WORDS), dtype=np.int64)
    scratch = np.zeros(0, dtype=np.uint64)
    read_rows(0, nothing, 0, parts, 0, 0, 2, AS_IT_IS, scratch)
    read_turned(0, nothing, 0, 0, parts, 0, 0, 2, AS_IT_IS, scratch)


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _memory(_: Any, address: Any) -> Any:
    """The pointer of an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@loop
def _filled(file: int, begin: int, address: int, num_bytes: int) -> bool:
    """Whether the file had them all."""
    while num_bytes > 0:
        count = _pread(file, _memory(address), num_bytes, begin)
        if count <= 0:
            return False
        begin, address, num_bytes = begin + count, address + count, num_bytes - count
    return True


@loop
def _all_finite(address: int, num_bytes: int, exponent: int, itemsize: int) -> bool:
    """No exponent is the largest. ``exponent``: its bits in an element of so many bytes, 2 or 4."""
    lanes, lowest, highest = np.uint64(0), np.uint64(0), np.uint64(0)
    for shift in range(0, 64, 8 * itemsize):
        lanes |= np.uint64(exponent) << np.uint64(shift)
        lowest |= np.uint64(exponent & -exponent) << np.uint64(shift)
        highest |= np.uint64(1) << np.uint64(shift + 8 * itemsize - 1)
    found = np.uint64(0)
    num_words = num_bytes // 8 if address % 8 == 0 else 0
    words = numba.carray(_memory(address), num_words, np.uint64)
    for number in range(num_words):
        # One more than the largest exponent carries into the place of the sign.
        found |= ((words[number] & lanes) + lowest) & highest
    rest, left = address + 8 * num_words, num_bytes - 8 * num_words
    if itemsize == 2:
        for element in numba.carray(_memory(rest), left // 2, np.uint16):
            found |= ((np.uint64(element) & lanes) + lowest) & highest
    else:
        for element in numba.carray(_memory(rest), left // 4, np.uint32):
            found |= ((np.uint64(element) & lanes) + lowest) & highest
    return bool(found == 0)


@loop
def _converted(source: int, target: int, count: int, conversion: int) -> bool:
    """Elements as bfloat16, rounded to nearest, ties to even: whether all were finite before."""
    narrow = numba.carray(_memory(target), count, np.uint16)
    found = np.uint64(0)
    if conversion == FROM_FLOAT32:
        wide = numba.carray(_memory(source), count, np.uint32)
        for number in range(count):
            bits = np.uint64(wide[number])
            found |= ((bits & np.uint64(0x7F800000)) + np.uint64(0x00800000)) & np.uint64(0x80000000)
            narrow[number] = _rounded(bits)
    else:
        half = numba.carray(_memory(source), count, np.uint16)
        for number in range(count):
            bits = np.uint64(half[number])
            found |= ((bits & np.uint64(0x7C00)) + np.uint64(0x0400)) & np.uint64(0x8000)
            narrow[number] = _rounded(_widened(bits))
    return bool(found == 0)


@loop
def _rounded(bits: np.uint64) -> np.uint64:
    """The bfloat16 of a float32."""
    sixteen, one = np.uint64(16), np.uint64(1)
    return np.uint64((bits + np.uint64(0x7FFF) + ((bits >> sixteen) & one)) >> sixteen)


@loop
def _widened(bits: np.uint64) -> np.uint64:
    """The float32 of a float16."""
    sign, magnitude = (bits & np.uint64(0x8000)) << np.uint64(16), bits & np.uint64(0x7FFF)
    if magnitude >= np.uint64(0x0400):
        return np.uint64(sign | ((magnitude << np.uint64(13)) + np.uint64((127 - 15) << 23)))
    if magnitude == np.uint64(0):
        return np.uint64(sign)
    # So many units of the least number, 2^-24.
    place = np.uint64(9)
    while (magnitude >> place) == np.uint64(0):
        place -= np.uint64(1)
    fraction = (magnitude << (np.uint64(23) - place)) & np.uint64(0x007FFFFF)
    return np.uint64(sign | ((place + np.uint64(127 - 24)) << np.uint64(23)) | fraction)


@loop
def _fetched(
    file: int,
    begin: int,
    held: int,
    target: int,
    count: int,
    exponent: int,
    itemsize: int,
    conversion: int,
) -> bool:
    """Read elements to ``target``, by way of ``held`` where there is a ``conversion``: whether all were there, and
    finite before and after."""
    first = target if conversion == AS_IT_IS else held
    if not _filled(file, begin, first, count * _stored_size(itemsize, conversion)):
        return False
    if conversion != AS_IT_IS and not _converted(held, target, count, conversion):
        return False
    return _all_finite(target, count * itemsize, exponent, itemsize)


@loop
def _stored_size(itemsize: int, conversion: int) -> int:
    """Bytes of an element in the file."""
    return 4 if conversion == FROM_FLOAT32 else itemsize


@loop
def read_rows(
    file: int,
    begins: Ints,
    width: int,
    parts: Ints,
    layer_bytes: int,
    exponent: int,
    itemsize: int,
    conversion: int,
    scratch: Words,
) -> bool:
    """Read parts of a matrix [rows, width] in each layer to their places: whether all was there, and finite.

    ``begins`` int64 [L]: of the matrices in the file. ``parts`` int64 [N, WORDS]; those of the next layer lie
    ``layer_bytes`` further on. ``scratch``: where there is a ``conversion``, has room for a part's row as it is
    stored.
    """
    stored, held = _stored_size(itemsize, conversion), scratch.ctypes.data
    for layer in range(len(begins)):
        for part in range(len(parts)):
            address, row, column, rows, length, stride = parts[part]
            address += layer * layer_bytes
            if length == width and stride == length * itemsize and conversion == AS_IT_IS:
                rows, length = 1, rows * length  # they lie in the file as they do in the page
            for number in range(rows):
                begin = begins[layer] + ((row + number) * width + column) * stored
                to = address + number * stride
                if not _fetched(file, begin, held, to, length, exponent, itemsize, conversion):
                    return False
    return True


@loop
def read_turned(
    file: int,
    begins: Ints,
    width: int,
    num_rows: int,
    parts: Ints,
    layer_bytes: int,
    exponent: int,
    itemsize: int,
    conversion: int,
    scratch: Words,
) -> bool:
    """The same of a matrix [num_rows, width] whose columns are the parts' rows. ``scratch``: has room for it as it
    is stored, and behind that, where there is a ``conversion``, as it is to be."""
    count = num_rows * width
    held = source = scratch.ctypes.data
    if conversion != AS_IT_IS:
        source += -(-count * _stored_size(itemsize, conversion) // 8) * 8
    for layer in range(len(begins)):
        if not _fetched(file, begins[layer], held, source, count, exponent, itemsize, conversion):
            return False
        for part in range(len(parts)):
            address, row, column, rows, length, stride = parts[part]
            address += layer * layer_bytes
            first = source + (column * width + row) * itemsize
            if itemsize == 4:
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
    return True


@loop
def _turn(source: Any, target: Any, width: int, rows: int, length: int, stride: int) -> None:
    """target[row, column] = source[column, row]."""
    for first in range(0, length, _STRIP):
        for row in range(rows):
            for column in range(first, min(first + _STRIP, length)):
                target[row * stride + column] = source[column * width + row]


@loop
def _turn_fours(source: Any, target: Any, width: int, rows: int, length: int, stride: int) -> None:
    """The same of elements of two bytes, by words of four, which ``width``, ``rows`` and ``stride`` count."""
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
