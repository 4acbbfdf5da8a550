"""What plans of the Triton kernels are made with: tables sent to the device in one copy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

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
