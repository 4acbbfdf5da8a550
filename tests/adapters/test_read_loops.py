"""Loops that read adapters, against numpy: places, sizes, types; what is not finite or cut short."""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manylora.adapters import read_loops
from manylora.adapters.values import BITS

KINDS = {str(dtype).removeprefix("torch."): bits for dtype, bits in BITS.items() if dtype.itemsize < 8}
CONVERSIONS = {
    "float32 to bfloat16": ("float32", read_loops.FROM_FLOAT32),
    "float16 to bfloat16": ("float16", read_loops.FROM_FLOAT16),
}
WIDE = "float32 to bfloat16"
LAYERS = 3


class Case:
    """Matrices [LAYERS, rows, width] of finite values in a file, and a part of them with its place in memory."""

    def __init__(self, kind: str, turned: bool, draw: Callable[[int, int], int]) -> None:
        self.turned = turned
        stored, self.conversion = CONVERSIONS.get(kind, (kind, read_loops.AS_IT_IS))
        self.stored, self.stored_as = KINDS[stored], getattr(torch, stored)
        self.bits = KINDS["bfloat16" if self.conversion else kind]
        self.random = np.random.default_rng(draw(0, 2**31))
        # Often multiples of four, by which words are turned.
        unit = 4 if draw(0, 1) else 1
        rows, width = unit * draw(1, 80), unit * draw(1, 40)
        infinity, dtype = self.stored.infinity, self.stored.unsigned
        if kind == WIDE:
            infinity -= 0x10000  # what is larger may become infinity
        self.matrices = self.random.integers(0, infinity, (LAYERS, rows, width)).astype(dtype)
        sign = 1 << (8 * dtype.itemsize - 1)
        self.matrices |= (self.random.integers(0, 2, self.matrices.shape) * sign).astype(dtype)
        self.before = draw(0, 100)
        whole = self._turned(self.matrices)
        row, column = draw(0, whole.shape[1] - 1), draw(0, whole.shape[2] - 1)
        row, column = row // unit * unit, column // unit * unit
        count = max(1, draw(1, whole.shape[1] - row) // unit * unit)
        length = max(1, draw(1, whole.shape[2] - column) // unit * unit)
        self.place = row, column, count, length
        pad = unit * draw(0, 3)
        self.memory = np.full((LAYERS, count + 1, length + pad), 7, dtype=self.bits.unsigned)

    def _turned(self, matrices: np.ndarray) -> np.ndarray:
        return matrices.transpose(0, 2, 1) if self.turned else matrices

    def _part(self, matrices: np.ndarray) -> np.ndarray:
        row, column, count, length = self.place
        return self._turned(matrices)[:, row : row + count, column : column + length]

    @property
    def wanted(self) -> np.ndarray:
        """What is to be there, converted by torch."""
        part = np.ascontiguousarray(self._part(self.matrices))
        if not self.conversion:
            return part
        found = torch.from_numpy(part.view(np.uint8)).view(self.stored_as).to(torch.bfloat16)
        return np.asarray(found.view(torch.uint16).numpy())

    @property
    def read_part(self) -> np.ndarray:
        """What came there."""
        _, _, count, length = self.place
        return self.memory[:, :count, :length]

    def read(self, cut: int = 0) -> bool:
        """``cut``: so many bytes at its end are not in the file."""
        row, column, count, length = self.place
        address, strides = self.memory.ctypes.data, self.memory.strides
        parts = np.array([(address, row, column, count, length, strides[1])])
        size = self.matrices[0].nbytes
        begins = self.before + size * np.arange(len(self.matrices))
        data = bytes(self.before) + self.matrices.tobytes()
        with tempfile.TemporaryFile() as file:
            file.write(data[: len(data) - cut])
            file.flush()
            rows, width = self.matrices.shape[1:]
            scratch = np.zeros(-(-3 * self.matrices[0].size // 4) + -(-size // 8) + 1, dtype=np.uint64)
            last = strides[0], self.bits.infinity, self.bits.unsigned.itemsize, self.conversion, scratch
            if self.turned:
                return read_loops.read_turned(file.fileno(), begins, width, rows, parts, *last)
            return read_loops.read_rows(file.fileno(), begins, width, parts, *last)

    @property
    def is_untouched_beside(self) -> bool:
        _, _, count, length = self.place
        return bool((self.memory[:, count:] == 7).all() and (self.memory[:, :, length:] == 7).all())

    def spoil(self, value: int) -> None:
        """One element of the part becomes this pattern."""
        part = self._part(self.matrices)
        layer, row, column = (int(self.random.integers(size)) for size in part.shape)
        part[layer, row, column] = value


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "turned"])
@pytest.mark.parametrize("kind", [*KINDS, *CONVERSIONS])
@given(data=st.data())
def test_a_part_comes_to_its_place_bit_by_bit(kind: str, turned: bool, data: st.DataObject) -> None:
    case = Case(kind, turned, lambda least, most: data.draw(st.integers(least, most)))
    assert case.read()
    assert np.array_equal(case.read_part, case.wanted)
    assert case.is_untouched_beside


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "turned"])
@pytest.mark.parametrize("kind", [*KINDS, *CONVERSIONS])
@given(data=st.data())
def test_one_value_that_is_not_finite_is_seen(kind: str, turned: bool, data: st.DataObject) -> None:
    case = Case(kind, turned, lambda least, most: data.draw(st.integers(least, most)))
    first = data.draw(st.sampled_from([case.stored.infinity, case.stored.negative_infinity]))
    mantissa = (case.stored.infinity & -case.stored.infinity) - 1
    case.spoil(first | data.draw(st.integers(0, mantissa) | st.just(mantissa)))
    assert not case.read()
    assert case.is_untouched_beside


def test_every_float16_becomes_what_torch_makes_of_it() -> None:
    case = Case("float16 to bfloat16", False, lambda least, most: least)
    patterns = np.arange(2**16, dtype=np.uint16).reshape(1, 64, 1024)
    case.matrices = patterns[:, (patterns[0, :, 0] & 0x7C00) != 0x7C00][:, :62]
    rows, width = case.matrices.shape[1:]
    case.before, case.place = 0, (0, 0, rows, width)
    case.memory = np.zeros((1, rows + 1, width), dtype=np.uint16)
    assert case.read()
    assert np.array_equal(case.read_part, case.wanted)


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "turned"])
def test_a_value_that_becomes_infinity_is_seen(turned: bool) -> None:
    case = Case(WIDE, turned, lambda least, most: most)
    case.spoil(0x7F7F7FFF)
    assert case.read(), "the largest that does not"
    case.spoil(0x7F7F8000)
    assert not case.read()


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "turned"])
def test_a_file_that_ends_before_its_time_is_seen(turned: bool) -> None:
    case = Case("bfloat16", turned, lambda least, most: most)
    row, column, count, length = case.place
    assert (row + count, column + length) == case.matrices.shape[1:][:: -1 if turned else 1]
    assert case.read()
    for cut in (1, case.stored.unsigned.itemsize, case.matrices[0].nbytes, case.matrices.nbytes):
        assert not case.read(cut)


def test_a_file_that_cannot_be_read_is_seen() -> None:
    memory, scratch = np.zeros(1, dtype=np.uint16), np.zeros(1, dtype=np.uint64)
    parts, nowhere, begins = np.array([(memory.ctypes.data, 0, 0, 1, 1, 2)]), 2**20, np.array([0])
    last = parts, 2, KINDS["bfloat16"].infinity, 2, read_loops.AS_IT_IS, scratch
    assert not read_loops.read_rows(nowhere, begins, 1, *last)
    assert not read_loops.read_turned(nowhere, begins, 1, 1, *last)
