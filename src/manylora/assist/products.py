"""The LoRA products of cold rows on one core: x A, times the scale, times B, in float32.

Owns how an adapter's rows come out of the host pool into matrices. What it is asked lies in the board's rows, and
what it finds goes into the board's results.
"""

from __future__ import annotations

import mmap

import numpy as np

from manylora.assist.board import Board
from manylora.assist.orders import LentPool, Orders, ProductPart, Slice


class CpuProducts:
    """Over one pool, which it only reads."""

    def __init__(self, place: LentPool, board: Board) -> None:
        self._place = place
        self._board = board
        self._dtype = board.shape.dtype
        # Read-only, and shared: this process holds no copy.
        memory = mmap.mmap(place.pool, place.pool_bytes, prot=mmap.PROT_READ)
        kind = np.dtype(np.float32 if board.shape.itemsize == 4 else np.uint16)
        whole = place.pool_bytes // kind.itemsize // place.piece * place.piece
        self._pieces = np.frombuffer(memory, kind, whole).reshape(-1, place.piece)
        # A new matrix of some 100 KiB would come from the system each time, page by page.
        self._gathered = np.empty(0, kind)
        self._widened = np.empty(0, np.uint32)

    def compute(self, orders: Orders, cells: list[np.ndarray], layer: int, number: int) -> None:
        """One job's rows of this worker."""
        product = orders.products[number]
        rows = self._board.rows(orders.num_tokens, product.in_features)
        results = self._board.results(orders.num_tokens, product.width)
        for own in orders.slices:
            x = as_float32(rows[own.first : own.end], self._dtype)
            for part in product.parts:
                columns = results[
                    own.first : own.end, part.first_column : part.first_column + part.num_columns
                ]
                self._project(x, part, own, cells[own.adapter], layer, columns)

    def _project(
        self, x: np.ndarray, part: ProductPart, own: Slice, cells: np.ndarray, layer: int, into: np.ndarray
    ) -> None:
        first_a, first_b, rank = part.records[own.adapter]
        if rank == 0:
            into[:] = 0
            return
        shrunk = x @ self._matrix(cells, first_a, rank, x.shape[1], layer).T
        shrunk *= np.float32(part.scales[own.adapter][layer])
        into[:] = shrunk @ self._matrix(cells, first_b, rank, part.num_columns, layer)

    def _matrix(self, cells: np.ndarray, first: int, rank: int, elements: int, layer: int) -> np.ndarray:
        """float32 ``[rank, elements]``, whose cells begin at ``first`` of the adapter's; until the next one."""
        place = self._place
        count = -(-elements // place.cell_elements) * rank
        begins = (cells[first : first + count] + layer * place.slab_elements) // place.piece
        pieces = (begins[:, None] + np.arange(place.cell_elements // place.piece)).reshape(-1)
        size = pieces.size * place.piece
        if size > self._gathered.size:
            self._gathered = np.empty(size, self._gathered.dtype)
            self._widened = np.empty(size, np.uint32)
        rows = self._gathered[:size].reshape(-1, place.piece)
        # All of them lie in the pool; any other mode fills a copy first.
        np.take(self._pieces, pieces, axis=0, out=rows, mode="clip")
        into = self._widened[: rank * elements].reshape(rank, elements)
        return as_float32(rows.reshape(rank, -1)[:, :elements], self._dtype, into)


def as_float32(values: np.ndarray, dtype: str, into: np.ndarray | None = None) -> np.ndarray:
    """16-bit numbers (uint16) as what they are of, in the memory of ``into`` (uint32), if given."""
    if dtype == "float32":
        return values
    if into is None:
        into = np.empty(values.shape, np.uint32)
    if dtype == "float16":
        into.view(np.float32)[:] = values.view(np.float16)
    else:
        np.left_shift(values, 16, out=into, dtype=np.uint32, casting="unsafe")
    return into.view(np.float32)
