"""Many copies of one size by one call of the driver, during which, if they are many, others have the interpreter.

A copy in layer groups has a piece for each page and group: a call for each would take longer than the bytes. Does
not know what is copied.
"""

# mypy: disallow-untyped-calls=False
# torch's streams have no annotations.

from __future__ import annotations

import ctypes
import functools
import logging

import numpy as np
import torch

_log = logging.getLogger(__name__)

_IN_STREAM_ORDER = 1

_FEW = 64
"""So many pieces take the driver microseconds, and to get the interpreter back may take longer."""


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: when the sources may be read, and hints for memory of other kinds than ours."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


_ATTRIBUTES = _Attributes(_IN_STREAM_ORDER)


def copy_batch(targets: np.ndarray, sources: np.ndarray, num_bytes: int, stream: torch.cuda.Stream) -> None:
    """Copy ``num_bytes`` from each address to its target, in any order, behind what the stream was given before.

    Addresses are int64 [N], none of pageable memory. The calling thread has used the device before. Raises
    RuntimeError.
    """
    if not len(targets):
        return
    targets, sources = np.ascontiguousarray(targets), np.ascontiguousarray(sources)
    sizes = np.full(len(targets), num_bytes, dtype=np.uint64)
    first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
    status = _driver(len(targets) <= _FEW).cuMemcpyBatchAsync(
        ctypes.c_void_p(targets.ctypes.data),
        ctypes.c_void_p(sources.ctypes.data),
        ctypes.c_void_p(sizes.ctypes.data),
        ctypes.c_size_t(len(targets)),
        ctypes.byref(_ATTRIBUTES),
        ctypes.byref(first),
        ctypes.c_size_t(1),
        ctypes.byref(failed),
        ctypes.c_void_p(stream.cuda_stream),
    )
    if status:
        raise RuntimeError(f"the driver does not copy {len(targets)} pieces: error {status}")


@functools.cache
def can_batch(device: torch.device) -> bool:
    """Whether the driver copies pieces of pinned memory to this device by one call (from CUDA 12.8 on)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    source = torch.arange(64, dtype=torch.uint8).pin_memory()
    target, stream = torch.zeros(64, dtype=torch.uint8, device=device), torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    at = np.array([32, 0], dtype=np.int64)
    try:
        copy_batch(target.data_ptr() + at, source.data_ptr() + at[::-1], 16, stream)
        stream.synchronize()
    except (AttributeError, OSError, RuntimeError) as error:  # no such call, or one that refuses
        _log.info("pieces of pages are copied one by one: %s", error)
        return False
    expected = [*range(32, 48), *[0] * 16, *range(16), *[0] * 16]
    return bool(target.tolist() == expected)


@functools.cache
def _driver(keeps_interpreter: bool) -> ctypes.CDLL:
    return (ctypes.PyDLL if keeps_interpreter else ctypes.CDLL)("libcuda.so.1")
