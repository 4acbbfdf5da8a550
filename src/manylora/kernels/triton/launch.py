"""Provides what the Triton kernels' launches share: uploads, counters, and the report of compilation.

Triton is imported only inside the function that needs it, because FlashInfer's planning imports this module
without Triton.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from manylora.devices.preparation import PREPARATION

Ints = npt.NDArray[np.int64]
Table = npt.NDArray[np.int32]


def upload(arrays: list[Table], device: torch.device) -> list[torch.Tensor]:
    """Copy all arrays to the device in one asynchronous copy, and return them as flat tensors.

    Each tensor begins at a multiple of 16 bytes, as kernels expect.
    """
    begins = [0, *itertools.accumulate(-(-array.size // 4) * 4 for array in arrays)]
    # torch tracks the copy, and reuses the pinned memory only after it.
    host = torch.empty(begins[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    view = host.numpy()
    for array, begin in zip(arrays, begins):
        view[begin : begin + array.size] = array.reshape(-1)
    packed = host.to(device, non_blocking=True)
    return [packed[begin : begin + array.size] for array, begin in zip(arrays, begins)]


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


_LEAST = 1 << 16


class LaunchCounters:
    """Counters on one device, int32 zeros, shared by launches that are ordered on it.

    The first ``take`` must not be under capture. Tensors that have become too small are kept, because
    captured graphs hold their addresses.
    """

    def __init__(self) -> None:
        self._all: list[torch.Tensor] = []

    def take(self, count: int, device: torch.device) -> torch.Tensor:
        """Return at least ``count`` counters, and allocate more where there are too few."""
        if not self._all or len(self._all[-1]) < count:
            self._all.append(torch.zeros(max(count, _LEAST), dtype=torch.int32, device=device))
        return self._all[-1]


@functools.cache
def report_compilation() -> None:
    """Report Triton's compilation to ``PREPARATION`` from now on, and still call the hooks set before."""
    from triton import knobs

    runtime = knobs.runtime
    before, after = runtime.jit_cache_hook, runtime.jit_post_compile_hook

    def begin(**what: Any) -> bool | None:
        PREPARATION.begin()
        return before(**what) if before else None

    def end(**what: Any) -> bool | None:
        PREPARATION.end()
        return after(**what) if after else None

    runtime.jit_cache_hook, runtime.jit_post_compile_hook = begin, end


def ceil_div(n: int, d: int) -> int:
    return -(-n // d)


def precision(dtype: torch.dtype) -> str:
    """Return Triton's input precision. float32 uses no TF32: tests require token-for-token equality."""
    return "ieee" if dtype == torch.float32 else "tf32"
