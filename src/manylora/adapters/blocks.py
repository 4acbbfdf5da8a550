"""What a page holds of a matrix, and how loops fill it.

Knows what loops are to be told: of matrices in a file, and of their places in pages. Does not read by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from manylora.adapters import read_loops
from manylora.adapters.peft import Side
from manylora.adapters.tensorfile import StoredTensor
from manylora.adapters.values import BITS
from manylora.kernels.shapes import AdapterCut

_CONVERSIONS = {(dtype, dtype): read_loops.AS_IT_IS for dtype in BITS} | {
    (torch.float32, torch.bfloat16): read_loops.FROM_FLOAT32,
    (torch.float16, torch.bfloat16): read_loops.FROM_FLOAT16,
}
"""What loops do of what is stored and what the pool has; calls do the others."""

_WORD = np.dtype(np.uint64)
"""What loops keep a matrix in, so that it begins where words do."""


class Block(NamedTuple):
    """What one page holds of a matrix (A, or B transposed): whole rows end to end, or a part of one row.

    ``values``: bit patterns [layers, rows, length] in place, of the matrix's rows from ``row`` on and columns
    from ``column`` on.
    """

    row: int
    column: int
    values: np.ndarray


class Buffer:
    """Memory of one thread that is taken again and again: fresh arrays of this size would be mapped anew."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, dtype=np.uint8)

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """An array of any content, valid until the next one."""
        size = math.prod(shape) * dtype.itemsize
        if len(self._bytes) < size:
            self._bytes = np.empty(size, dtype=np.uint8)
        return np.asarray(self._bytes[:size].view(dtype).reshape(shape))


class Matrices(NamedTuple):
    """One projection's A or B in some layers, all of one rank and type; ``cut``: what of them is wanted."""

    side: Side
    cut: AdapterCut
    stored_as: torch.dtype
    tensors: Sequence[StoredTensor]


def fill_by_loops(
    file: int, matrices: Matrices, blocks: Sequence[Block], dtype: torch.dtype, words: Buffer
) -> bool:
    """Fill the blocks, whose ``values`` have these layers, without the interpreter, from the first read to looking
    for what is not finite; False where that did not go well, for whatever reason, or loops do not convert what is
    stored. ``words``: the calling thread's."""
    side, cut, stored_as, tensors = matrices
    conversion = _CONVERSIONS.get((stored_as, dtype))
    if conversion is None:
        return False
    width, size, stored_size = tensors[0].shape[1], dtype.itemsize, stored_as.itemsize
    parts = np.array([
        (block.values.ctypes.data, block.row, block.column, *block.values.shape[1:], block.values.strides[1])
        for block in blocks
    ])  # fmt: skip
    begins = np.array([stored.begin for stored in tensors])
    how = BITS[dtype].infinity, size, conversion
    layer_bytes = blocks[0].values.strides[0]
    if side == "A":
        parts[:, 2] += cut.a_columns.start
        held = words.take((_words(int(parts[:, 4].max()) * stored_size) if conversion else 0,), _WORD)
        return read_loops.read_rows(file, begins, width, parts, layer_bytes, *how, held)
    rows = len(cut.b_rows)
    begins += cut.b_rows.start * width * stored_size
    converted = _words(rows * width * size) if conversion else 0
    held = words.take((_words(rows * width * stored_size) + converted,), _WORD)
    return read_loops.read_turned(file, begins, width, rows, parts, layer_bytes, *how, held)


def _words(num_bytes: int) -> int:
    return -(-num_bytes // _WORD.itemsize)
