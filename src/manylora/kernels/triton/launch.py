"""What launches of the Triton kernels share: tables sent in one copy, counters, the meter of compilation.

Imports Triton only where it is called: FlashInfer's planning, which uses the copies, is imported without it.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from manylora.devices.preparation import PREPARATION

Ints = npt.NDArray[np.int64]
Table = npt.NDArray[np.int32]


def upload(arrays: list[Table], device: torch.device) -> list[torch.Tensor]:
    """All arrays in one asynchronous copy; each begins at a multiple of 16 bytes, as kernels expect."""
    places = []
    size = 0
    for array in arrays:
        places.append((size, array.size))
        size += -(-array.size // 4) * 4
    # Pinned memory is returned to torch's cache only after the copy, which it tracks itself.
    host = torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
    view = host.numpy()
    for array, (begin, length) in zip(arrays, places):
        view[begin : begin + length] = array.reshape(-1)
    packed = host.to(device, non_blocking=True)
    return [packed[begin : begin + length] for begin, length in places]


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


_LEAST = 1 << 16


class LaunchCounters:
    """int32 zeros of one device, shared by launches that are ordered on it.

    Taken for the first time outside of capture. Those that became too few live on, since captured graphs know
    their address.
    """

    def __init__(self) -> None:
        self._all: list[torch.Tensor] = []

    def take(self, count: int, device: torch.device) -> torch.Tensor:
        """At least ``count`` counters."""
        if not self._all or len(self._all[-1]) < count:
            self._all.append(torch.zeros(max(count, _LEAST), dtype=torch.int32, device=device))
        return self._all[-1]


@functools.cache
def report_compilation() -> None:
    """Count compilation from now on, beside whatever hooks are set already."""
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
    """float32 products are exact (no TF32): tests ask for token-for-token equality."""
    return "ieee" if dtype == torch.float32 else "tf32"
