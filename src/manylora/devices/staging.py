"""A step's numbers on their way between host and device: a copy engine's work, or a small kernel's.

Every step sends some kilobytes and gets fewer back. The device's copy engines take their work in turn, so while
pages are copied both ways such a copy may wait for milliseconds, and its step with it. A kernel that reads pinned
host memory, or writes it, waits for no copy. Owns the pinned buffers; does not know what the numbers mean.
"""

# mypy: disallow-untyped-calls=False
# torch's streams and events have no annotations.

from __future__ import annotations

import collections
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

_log = logging.getLogger(__name__)

NUMBERS_BY_KERNEL = True
"""Whether kernels move a step's numbers where they can. Read when the first numbers move. Off only to measure what
that is worth: with the copy engines, a step beside saturated copies takes up to 2.4 times as long on an H200
(docs/performance.md)."""

_STAGES = 16
"""Pinned buffers of one ``UploadBuffers``: some more than what the steps in flight send."""

_LEAST_BYTES = 2**16
"""The bytes of a pinned buffer, unless it must hold more."""


class _View(NamedTuple):
    """A buffer as numbers of one type: as the host has it, as kernels of the device see it, as an array."""

    memory: torch.Tensor
    mapped: torch.Tensor
    array: np.ndarray


class StagingBuffer:
    """A pinned buffer, and the event that tells when what was last copied from it or to it has landed.

    Its views are made once for each type: each call into torch takes a microsecond, or ten after a pause.
    """

    def __init__(self, device: torch.device, by_kernel: bool) -> None:
        self._device = device
        self._by_kernel = by_kernel
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._num_bytes = 0
        self._views: dict[torch.dtype, _View] = {}
        self._landed = torch.cuda.Event() if device.type == "cuda" else None
        self._held = self._view(torch.uint8)
        self._length = 0

    @property
    def numbers(self) -> np.ndarray:
        """What ``hold`` asked for."""
        return self._held.array[: self._length]

    def hold(self, length: int, dtype: torch.dtype) -> StagingBuffer:
        """Be [length] of this type from now on, holding anything. Waits for the last copy."""
        self.settle()
        num_bytes = length * dtype.itemsize
        if num_bytes > self._num_bytes or not self._num_bytes:
            self._num_bytes = size = max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._landed is not None)
            self._views = {}
        self._held, self._length = self._views.get(dtype) or self._view(dtype), length
        return self

    def _view(self, dtype: torch.dtype) -> _View:
        mapped = self._memory
        if self._by_kernel and self._landed is not None and self._num_bytes:
            mapped = borrowed(mapped, self._device)
        memory = self._memory.view(dtype)
        found = self._views[dtype] = _View(memory, mapped.view(dtype), np.asarray(memory.numpy()))
        return found

    def lend(self) -> tuple[torch.Tensor, Callable[[], None]]:
        """What ``hold`` asked for, as kernels of the device see it, and what to call once those that read it are
        issued: nothing is written here before they have ended. Only where kernels move numbers."""
        landed = self._landed
        seen = self._held.mapped[: self._length]
        if landed is None:
            return seen, lambda: None
        return seen, lambda: landed.record(torch.cuda.current_stream(self._device))

    def send(self, target: torch.Tensor) -> None:
        """Copy the first numbers to ``target``, contiguous, on the device, of this type, after all work issued.

        Does not wait for it. Nothing is written here until the next ``hold``.
        """
        target = target.view(-1)
        if self._by_kernel:
            copy_by_kernel(target, self._held.mapped[: target.numel()])
        else:
            target.copy_(self._held.memory[: target.numel()], non_blocking=True)
        self._note_copy()

    def take(self, source: torch.Tensor) -> None:
        """The same the other way round: the numbers are here after ``settle``."""
        source = source.view(-1)
        if self._by_kernel:
            copy_by_kernel(self._held.mapped[: source.numel()], source)
        else:
            self._held.memory[: source.numel()].copy_(source, non_blocking=True)
        self._note_copy()

    def settle(self) -> None:
        """Wait for the last copy. Raises what went wrong on the device."""
        if self._landed is not None:
            self._landed.synchronize()

    def _note_copy(self) -> None:
        if self._landed is not None:
            self._landed.record(torch.cuda.current_stream(self._device))


class UploadBuffers:
    """Pinned buffers for numbers that go to a device, from one thread. Buffers are taken in turn."""

    def __init__(self, device: torch.device, by_kernel: bool) -> None:
        self._device = device
        self._by_kernel = by_kernel
        self._stages: list[StagingBuffer] = []
        self._turn = -1

    def stage(self, length: int, dtype: torch.dtype = torch.int32) -> StagingBuffer:
        """The buffer to write the next numbers to and send them from, at once: it serves again a little later.

        Waits for what was sent some time ago, not for steps that are in flight, unless there are many.
        """
        self._turn = (self._turn + 1) % _STAGES
        if self._turn == len(self._stages):
            self._stages.append(StagingBuffer(self._device, self._by_kernel))
        return self._stages[self._turn].hold(length, dtype)


class DownloadBuffers:
    """Pinned buffers for a step's results. One thread starts the copies; another may read them."""

    def __init__(self, device: torch.device, by_kernel: bool) -> None:
        self._device = device
        self._by_kernel = by_kernel
        self._free: collections.deque[StagingBuffer] = collections.deque()

    def start(self, tensor: torch.Tensor) -> Callable[[], np.ndarray]:
        """Does what ``Device.download`` does; the tensor is contiguous."""
        stage = self._free.popleft() if self._free else StagingBuffer(self._device, self._by_kernel)
        stage.hold(tensor.numel(), tensor.dtype).take(tensor)
        shape = tuple(tensor.shape)

        def wait() -> np.ndarray:
            stage.settle()
            found = stage.numbers.reshape(shape).copy()
            self._free.append(stage)
            return found

        return wait


_threads = threading.local()


def upload_buffers(device: torch.device) -> UploadBuffers:
    """The calling thread's buffers. What is sent through them arrives in order."""
    boxes: dict[torch.device, UploadBuffers] = _threads.__dict__.setdefault("boxes", {})
    if device not in boxes:
        boxes[device] = UploadBuffers(device, moves_by_kernel(device))
    return boxes[device]


def forget_outboxes() -> None:
    """NUMBERS_BY_KERNEL has changed. On the thread of the steps, with none in flight."""
    _threads.__dict__.clear()
    moves_by_kernel.cache_clear()


@functools.cache
def moves_by_kernel(device: torch.device) -> bool:
    """Whether numbers of this device are moved by kernels."""
    if not NUMBERS_BY_KERNEL or device.type != "cuda":
        return False
    if can_map(device):
        return True
    _log.warning("kernels do not reach pinned memory: a step's numbers wait for the copy engines")
    return False


def copy_by_kernel(target: torch.Tensor, source: torch.Tensor) -> None:
    """Between tensors of the same length and type, bit by bit. torch's own copy would ask a copy engine."""
    whole = _WHOLE[source.dtype.itemsize]
    if source.dtype != whole:
        source, target = source.view(whole), target.view(whole)
    torch.bitwise_or(source, 0, out=target)


_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by the bytes of one."""


class _Address:
    """Memory of a tensor, as torch takes it up without a copy."""

    def __init__(self, tensor: torch.Tensor) -> None:
        if not tensor.is_contiguous():
            raise ValueError("only contiguous tensors can be borrowed")
        kinds = {torch.float32: "<f4", torch.int64: "<i8", torch.uint8: "|u1"}
        self.__cuda_array_interface__: dict[str, Any] = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "typestr": kinds[tensor.dtype],
            "version": 2,
        }


def borrowed(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the device at the same place, which may be pinned host memory: both know it by one address. It
    does not hold the memory."""
    return torch.as_tensor(_Address(tensor), device=device)


def seen_by(device: torch.device, memory: torch.Tensor) -> torch.Tensor:
    """Host memory, contiguous and pinned where a device has memory of its own, as the device's kernels see it."""
    return memory if device.type == "cpu" else borrowed(memory, device)


def can_map(device: torch.device) -> bool:
    """Whether kernels of this device read pinned memory, and the host finds there what they write."""
    numbers = [1, -2, 3, -4, 5]
    try:
        target = torch.zeros(len(numbers), dtype=torch.int32, device=device)
        stage = UploadBuffers(device, by_kernel=True).stage(len(numbers))
        stage.numbers[:] = numbers
        stage.send(target)
        return bool(DownloadBuffers(device, by_kernel=True).start(target)().tolist() == numbers)
    except (RuntimeError, TypeError, ValueError):  # whichever torch says of such memory
        return False
