"""Weights as bit patterns: numpy works on them beside the step loop, and torch converts them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

TORCH_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_SERIAL_ELEMENTS = 16384
"""torch copies so few elements in the calling thread."""


@dataclasses.dataclass(frozen=True)
class BitPattern:
    """Patterns from ``infinity`` on, read as signed, and from ``negative_infinity`` on, as unsigned numbers, are
    infinity and NaN."""

    unsigned: np.dtype[Any]
    signed: np.dtype[Any]
    infinity: int
    """The bits of the exponent, all set."""
    negative_infinity: int


BITS = {
    torch.float64: BitPattern(np.dtype(np.uint64), np.dtype(np.int64), 0x7FF << 52, 0xFFF << 52),
    torch.float32: BitPattern(np.dtype(np.uint32), np.dtype(np.int32), 0x7F800000, 0xFF800000),
    torch.float16: BitPattern(np.dtype(np.uint16), np.dtype(np.int16), 0x7C00, 0xFC00),
    torch.bfloat16: BitPattern(np.dtype(np.uint16), np.dtype(np.int16), 0x7F80, 0xFF80),
}


def all_finite(patterns: np.ndarray, dtype: torch.dtype) -> bool:
    """No value is infinity or NaN: these have the largest patterns of either sign."""
    bits = BITS[dtype]
    largest_positive = np.maximum.reduce(patterns.view(bits.signed), axis=None)
    largest_negative = np.maximum.reduce(patterns, axis=None)
    return int(largest_positive) < bits.infinity and int(largest_negative) < bits.negative_infinity


def convert(values: np.ndarray, source: torch.dtype, target: np.ndarray, dtype: torch.dtype) -> None:
    """Bit patterns of contiguous ``values`` in another dtype, rounded to nearest."""
    old, new = _as_tensor(values, source), _as_tensor(target, dtype)
    for begin in range(0, len(old), _SERIAL_ELEMENTS):
        new[begin : begin + _SERIAL_ELEMENTS].copy_(old[begin : begin + _SERIAL_ELEMENTS])


def _as_tensor(patterns: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(patterns.reshape(-1).view(np.uint8)).view(dtype)
