"""Checks all weights of an adapter: whether each is a number that the pool can hold. Keeps none of them."""

from __future__ import annotations

from io import FileIO

import numpy as np
import torch

from manylora.adapters.faults import adapters_fault
from manylora.adapters.peft import AdapterSpec
from manylora.adapters.tensorfile import StoredTensor, read_into
from manylora.adapters.values import BITS, TORCH_DTYPES, all_finite, convert
from manylora.adapters.weightsfile import open_weights
from manylora.kernels.shapes import AdapterGeometry
from manylora.protocol import AdapterError

_CHUNK_ELEMENTS = 2**20


def verify_weights(spec: AdapterSpec, geometry: AdapterGeometry, dtype: torch.dtype) -> None:
    """Raises AdapterError where a weight is not finite, in the file or as ``dtype``, or cannot be read.

    Reads each tensor once, and holds 8 MiB however large they are.
    """
    with adapters_fault(), open_weights(spec, geometry) as weights:
        for name, stored in weights.tensors():
            if why := why_not_finite(weights.file, name, stored, dtype):
                raise AdapterError(why)


def why_not_finite(file: FileIO, name: str, stored: StoredTensor, dtype: torch.dtype) -> str | None:
    """What is wrong with a tensor's values; None where nothing is."""
    source = TORCH_DTYPES[stored.dtype]
    bits = BITS[source].unsigned
    for begin in range(0, stored.size_bytes, _CHUNK_ELEMENTS * bits.itemsize):
        count = min(_CHUNK_ELEMENTS, (stored.size_bytes - begin) // bits.itemsize)
        values = np.empty(count, dtype=bits)
        read_into(file, stored.begin + begin, [values.data], name)
        if not all_finite(values, source):
            return f"tensor {name} holds NaN or infinity"
        if source == dtype:
            continue
        converted = np.empty(count, dtype=BITS[dtype].unsigned)
        convert(values, source, converted, dtype)
        # Conversion makes nothing finite, but may make infinity.
        if not all_finite(converted, dtype):
            return f"tensor {name} holds a value too large for {dtype}"
    return None
