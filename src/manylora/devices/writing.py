"""Numbers that a CUDA stream writes by itself, for kernels of other streams that wait for them.

No kernel writes them, since one may find no place beside those that wait, and no copy, which does not promise that
what was copied before is there when its own bytes are. Does not know what the numbers mean.
"""

# mypy: disallow-untyped-calls=False
# torch's streams have no annotations.

from __future__ import annotations

import ctypes
import functools

import torch


def write_by_stream(word: torch.Tensor, number: int, stream: torch.cuda.Stream) -> None:
    """``word``, int64 [1] on the device or in pinned memory, holds the number when all that the stream was given
    before has ended and can be seen everywhere on the device. The calling thread has used the device before.
    Raises RuntimeError."""
    status = _driver().cuStreamWriteValue64_v2(
        ctypes.c_void_p(stream.cuda_stream),
        ctypes.c_uint64(word.data_ptr()),
        ctypes.c_uint64(number),
        ctypes.c_uint(0),  # with the barrier
    )
    if status:
        raise RuntimeError(f"the driver does not write a number in a stream: error {status}")


@functools.cache
def can_write(device: torch.device) -> bool:
    """Whether streams of this device can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    word, stream = torch.zeros(1, dtype=torch.int64, device=device), torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    try:
        write_by_stream(word, 2**40 + 1, stream)
        stream.synchronize()
    except (AttributeError, OSError, RuntimeError):  # no such driver, or one that refuses
        return False
    return int(word.item()) == 2**40 + 1


@functools.cache
def _driver() -> ctypes.CDLL:
    # The interpreter is kept during its calls, which take microseconds: to get it back may take longer.
    return ctypes.PyDLL("libcuda.so.1")
