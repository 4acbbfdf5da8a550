"""The CPU as a device: work is done when the call returns, so most of the protocol is empty."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable

import numpy as np
import torch

from manylora.devices.device import CopyLane, Elapsed, Mirror, PageWriter, Tensors, copy_bytes
from manylora.devices.free_memory import free_bytes

_ALIGNMENT_BYTES = 64


class CpuDevice:
    """The Device protocol on the CPU."""

    name = "cpu"
    copies_from_pinned = False
    captures = False
    launches_wait = False

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def free_bytes(self) -> int:
        """What the machine could give without swapping, within the limits of this process's cgroups."""
        return free_bytes()

    def share_bytes(self, share: float) -> int:
        return int(share * self.free_bytes())

    def zeros(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # torch.zeros would write every byte, and a large pool would take seconds and all its memory at once;
        # numpy's come untouched from the system. torch aligns its own tensors likewise.
        num_bytes = math.prod(sizes) * dtype.itemsize
        raw = np.zeros(num_bytes + _ALIGNMENT_BYTES, dtype=np.uint8)
        begin = -raw.ctypes.data % _ALIGNMENT_BYTES
        return torch.from_numpy(raw[begin : begin + num_bytes]).view(dtype).view(sizes)

    def upload(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array)

    def send(self, array: np.ndarray, target: torch.Tensor) -> None:
        target.copy_(torch.from_numpy(array))

    def download(self, tensor: torch.Tensor) -> Callable[[], np.ndarray]:
        # A copy: the next step may write to the same memory before this is read.
        found = tensor.numpy().copy()
        return lambda: found

    def sending_together(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def mirror(self, length: int) -> Mirror:
        return _CpuMirror(length)

    def capture(self, run: Callable[[], Tensors]) -> Callable[[], Tensors]:
        return run

    def captured_bytes(self) -> int:
        return 0

    def page_writer(self) -> PageWriter:
        return _CpuPageWriter()

    def issued(self) -> object:
        return None

    def has_passed(self, issued: object) -> bool:
        return True

    def measure(self) -> Elapsed:
        began = time.perf_counter()

        def end() -> Callable[[], float]:
            seconds = time.perf_counter() - began
            return lambda: seconds

        return end

    def copy_lane(self) -> CopyLane:
        return CpuCopyLane()

    def can_mark(self) -> bool:
        return True

    def mark(self, word: torch.Tensor, number: int) -> None:
        word.numpy()[:] = number

    def pin(self, memory: torch.Tensor) -> None:
        return

    def unpin(self, memory: torch.Tensor) -> None:
        return

    def synchronize(self) -> None:
        return

    def release_memory(self) -> None:
        return


class _CpuMirror:
    def __init__(self, length: int) -> None:
        self.tensor = torch.zeros(length, dtype=torch.int64)

    def stage(self) -> np.ndarray:
        return np.asarray(self.tensor.numpy())

    def send(self, count: int) -> None:
        return


class _CpuPageWriter:
    def write(self, target: torch.Tensor, image: torch.Tensor) -> None:
        copy_bytes(target, image)

    def close(self) -> None:
        return


class CpuCopyLane:
    """Copies in the calling thread; large ones leave the interpreter to others meanwhile."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def here(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def launch(self, start: Callable[[], None]) -> None:
        began = time.perf_counter()
        start()
        self._seconds += time.perf_counter() - began

    def begin(self, issued: object) -> None:
        self._seconds = 0.0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        began = time.perf_counter()
        copy_bytes(target, source)
        self._seconds += time.perf_counter() - began

    def landing(self) -> Callable[[], None]:
        return lambda: None

    def end(self) -> Callable[[], float]:
        seconds = self._seconds
        return lambda: seconds
