"""Loops that read adapters, against numpy and torch: places, sizes, types; what is not finite or cut short."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manylora.adapters import loops


class Kind(NamedTuple):
    """A type of elements: as loops know it, as torch does, its bit patterns and its infinity."""

    number: int
    dtype: torch.dtype
    bits: np.dtype[Any]
    infinity: int


KINDS = {
    "F64": Kind(loops.F64, torch.float64, np.dtype(np.uint64), 0x7FF << 52),
    "F32": Kind(loops.F32, torch.float32, np.dtype(np.uint32), 0x7F800000),
    "F16": Kind(loops.F16, torch.float16, np.dtype(np.uint16), 0x7C00),
    "BF16": Kind(loops.BF16, torch.bfloat16, np.dtype(np.uint16), 0x7F80),
}
WAYS = list(itertools.product(KINDS, ("F32", "F16", "BF16")))
LAYERS = 3


def tensor(patterns: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    whole = np.ascontiguousarray(patterns)
    return torch.from_numpy(whole.reshape(-1).view(np.uint8)).view(dtype).view(whole.shape)


def patterns_of(values: torch.Tensor, kind: Kind) -> np.ndarray:
    return values.contiguous().view(-1).view(torch.uint8).numpy().view(kind.bits).reshape(values.shape)


class Case:
    """Matrices [LAYERS, rows, width] of finite values in a file, and a part of them with its place in memory."""

    def __init__(self, way: tuple[str, str], turned: bool, draw: Callable[[int, int], int]) -> None:
        self.turned = turned
        self.stored, self.kept = KINDS[way[0]], KINDS[way[1]]
        self.random = np.random.default_rng(draw(0, 2**31))
        # Often multiples of four, by which words are turned.
        unit = 4 if draw(0, 1) else 1
        rows, width = unit * draw(1, 80), unit * draw(1, 40)
        self.matrices = self._finite((LAYERS, rows, width))
        self.before = draw(0, 100)
        whole = self._turned(self.matrices)
        row, column = draw(0, whole.shape[1] - 1), draw(0, whole.shape[2] - 1)
        row, column = row // unit * unit, column // unit * unit
        count = max(1, draw(1, whole.shape[1] - row) // unit * unit)
        length = max(1, draw(1, whole.shape[2] - column) // unit * unit)
        self.place = row, column, count, length
        pad = unit * draw(0, 3)
        self.memory = np.full((LAYERS, count + 1, length + pad), 7, dtype=self.kept.bits)

    def _finite(self, shape: tuple[int, ...]) -> np.ndarray:
        """Any patterns; those that are not finite, or will not be, give way to others."""
        bits = self.stored.bits
        found = self.random.integers(0, np.iinfo(bits).max, shape, dtype=bits, endpoint=True)
        if self.random.random() < 0.5:  # most of all patterns are far too large or small for fewer bits
            normal = torch.from_numpy(self.random.standard_normal(shape) * 10.0 ** self.random.uniform(-8, 4))
            found = patterns_of(normal.to(self.stored.dtype), self.stored).copy()
        bad = ~tensor(found, self.stored.dtype).to(self.kept.dtype).isfinite().numpy()
        found[bad] = np.arange(bad.sum(), dtype=np.uint64).astype(bits) % 1000
        return found

    def _turned(self, matrices: np.ndarray) -> np.ndarray:
        return matrices.transpose(0, 2, 1) if self.turned else matrices

    def _part(self, matrices: np.ndarray) -> np.ndarray:
        row, column, count, length = self.place
        return self._turned(matrices)[:, row : row + count, column : column + length]

    @property
    def wanted(self) -> np.ndarray:
        """What is to be there, converted by torch."""
        return patterns_of(
            tensor(self._part(self.matrices), self.stored.dtype).to(self.kept.dtype), self.kept
        )

    @property
    def read_part(self) -> np.ndarray:
        """What came there."""
        _, _, count, length = self.place
        return self.memory[:, :count, :length]

    def read(self, cut: int = 0) -> int:
        """``cut``: so many bytes at its end are not in the file."""
        row, column, count, length = self.place
        address, strides = self.memory.ctypes.data, self.memory.strides
        parts = np.array([(address, row, column, count, length, strides[1])])
        begins = self.before + self.matrices[0].nbytes * np.arange(len(self.matrices))
        data = bytes(self.before) + self.matrices.tobytes()
        with tempfile.TemporaryFile() as file:
            file.write(data[: len(data) - cut])
            file.flush()
            rows, width = self.matrices.shape[1:]
            scratch = np.zeros(loops.SCRATCH_WORDS * (rows * width if self.turned else length) + 2, np.uint64)
            last = strides[0], self.stored.number, self.kept.number, scratch
            if self.turned:
                return loops.read_transposed(file.fileno(), begins, width, rows, parts, *last)
            return loops.read_rows(file.fileno(), begins, width, parts, *last)

    def verify(self, most: int) -> bool:
        with tempfile.TemporaryFile() as file:
            file.write(bytes(self.before) + self.matrices.tobytes())
            file.flush()
            scratch = np.zeros(loops.SCRATCH_WORDS * most + 2, np.uint64)
            kinds = self.stored.number, self.kept.number
            return loops.are_finite(file.fileno(), self.before, self.matrices.size, *kinds, scratch)

    @property
    def is_untouched_beside(self) -> bool:
        _, _, count, length = self.place
        return bool((self.memory[:, count:] == 7).all() and (self.memory[:, :, length:] == 7).all())

    def invalidate(self, value: int) -> int:
        """One element of the part becomes this pattern; its layer."""
        part = self._part(self.matrices)
        layer, row, column = (int(self.random.integers(size)) for size in part.shape)
        part[layer, row, column] = value
        return layer


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "turned"])
@pytest.mark.parametrize("way", WAYS, ids="-".join)
@given(data=st.data())
def test_a_part_comes_to_its_place_bit_by_bit(
    way: tuple[str, str], turned: bool, data: st.DataObject
) -> None:
    case = Case(way, turned, lambda least, most: data.draw(st.integers(least, most)))
    assert case.read() == -1
    assert np.array_equal(case.read_part, case.wanted)
    assert case.is_untouched_beside
    assert case.verify(data.draw(st.integers(1, 100)))


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "turned"])
@pytest.mark.parametrize("way", WAYS, ids="-".join)
@given(data=st.data())
def test_one_value_that_is_not_finite_is_seen(
    way: tuple[str, str], turned: bool, data: st.DataObject
) -> None:
    case = Case(way, turned, lambda least, most: data.draw(st.integers(least, most)))
    sign = data.draw(st.sampled_from([0, 1 << (8 * case.stored.bits.itemsize - 1)]))
    mantissa = (case.stored.infinity & -case.stored.infinity) - 1
    layer = case.invalidate(sign | case.stored.infinity | data.draw(st.integers(0, mantissa) | st.just(mantissa)))
    assert case.read() == layer
    assert case.is_untouched_beside
    assert not case.verify(data.draw(st.integers(1, 100)))


@pytest.mark.parametrize("kept", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("stored", ["F16", "BF16"])
def test_every_pattern_of_16_bits_becomes_what_torch_makes_of_it(stored: str, kept: str) -> None:
    case = Case((stored, kept), False, lambda least, most: least)
    patterns = np.arange(2**16, dtype=np.uint16)
    is_finite = tensor(patterns, case.stored.dtype).to(case.kept.dtype).isfinite().numpy()
    case.matrices = patterns[is_finite].reshape(1, 1, -1)
    case.before, case.place = 0, (0, 0, 1, case.matrices.size)
    case.memory = np.zeros((1, 2, case.matrices.size), dtype=case.kept.bits)
    assert case.read() == -1
    assert np.array_equal(case.read_part, case.wanted)


@pytest.mark.parametrize("kept", ["F16", "BF16"])
def test_float32_is_rounded_as_by_torch(kept: str) -> None:
    """Of each exponent: values between two of the other type, and beside these."""
    case = Case(("F32", kept), False, lambda least, most: least)
    ties = (np.arange(2**12, dtype=np.uint32) << 11) + (np.arange(255, dtype=np.uint32)[:, None] << 23)
    patterns = np.concatenate([ties, ties + 1, ties + 2047, ties | 1 << 31]).astype(np.uint32).reshape(-1)
    is_finite = tensor(patterns, torch.float32).to(case.kept.dtype).isfinite().numpy()
    case.matrices = patterns[is_finite].reshape(1, 1, -1)
    case.before, case.place = 0, (0, 0, 1, case.matrices.size)
    case.memory = np.zeros((1, 2, case.matrices.size), dtype=case.kept.bits)
    assert case.read() == -1
    assert np.array_equal(case.read_part, case.wanted)


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "turned"])
@pytest.mark.parametrize(
    ("way", "largest"),
    [(("F32", "BF16"), 0x7F7F7FFF), (("F32", "F16"), 0x477FEFFF), (("BF16", "F16"), 0x477F),
     (("F64", "F32"), 0x47EFFFFFEFFFFFFF)],
    ids=str,
)  # fmt: skip
def test_a_value_that_becomes_infinity_is_seen(way: tuple[str, str], largest: int, turned: bool) -> None:
    case = Case(way, turned, lambda least, most: most)
    case.invalidate(largest)
    assert case.read() == -1, "the largest that does not"
    layer = case.invalidate(largest + 1)
    assert case.read() == layer


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "turned"])
def test_a_file_that_ends_before_its_time_is_seen(turned: bool) -> None:
    case = Case(("BF16", "BF16"), turned, lambda least, most: most)
    row, column, count, length = case.place
    assert (row + count, column + length) == case.matrices.shape[1:][:: -1 if turned else 1]
    assert case.read() == -1
    size = case.matrices[0].nbytes
    assert [case.read(cut) for cut in (1, 2, size, size + 1, 3 * size)] == [2, 2, 2, 1, 0]


def test_a_file_that_cannot_be_read_is_seen() -> None:
    memory, scratch = np.zeros(1, dtype=np.uint16), np.zeros(4, dtype=np.uint64)
    parts, nowhere, begins = np.array([(memory.ctypes.data, 0, 0, 1, 1, 2)]), 2**20, np.array([0])
    last = parts, 2, loops.BF16, loops.BF16, scratch
    assert loops.read_rows(nowhere, begins, 1, *last) == 0
    assert loops.read_transposed(nowhere, begins, 1, 1, *last) == 0
    assert not loops.are_finite(nowhere, 0, 1, loops.BF16, loops.BF16, scratch)
