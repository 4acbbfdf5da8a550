"""Moves a step's numbers between host and device, with small kernels over pinned memory.

Every step sends some kilobytes and receives fewer. The device's copy engines do their work in turn. While
pages are copied both ways, such a small copy would wait for milliseconds, and its step with it. A kernel that
reads or writes pinned host memory waits for no copy. Owns the pinned buffers; does not know what the numbers
mean.
"""

# mypy: disallow-untyped-calls=False
# torch's streams and events have no annotations.

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

_STAGES = 16
"""The pinned buffers of one ``UploadBuffers``: somewhat more than the steps in flight use."""

_LEAST_BYTES = 2**16
"""The least size of a pinned buffer, in bytes."""


_TOGETHER_BYTES = 2**18
"""The most bytes that are sent together; numbers beyond that are sent by themselves."""

_UNIT = torch.int32
"""The type as which numbers sent together are copied."""

_ALIGNMENT = 16


class Staged(NamedTuple):
    """A place for numbers that are written there and then sent once. ``send(target)`` copies the first numbers
    to ``target``, contiguous, on the device, of their type, after all work issued."""

    numbers: np.ndarray
    send: Callable[[torch.Tensor], None]


class StagingBuffer:
    """A pinned buffer, with the event that records when the last copy from it or to it has landed.
    ``numbers``: the numbers for which ``hold`` made room.

    Its views are made once for each type: each call into torch takes a microsecond, or ten after a pause.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._num_bytes = 0
        self._views: dict[torch.dtype, tuple[torch.Tensor, np.ndarray]] = {}
        self._landed = torch.cuda.Event() if device.type == "cuda" else None

    def hold(self, length: int, dtype: torch.dtype) -> StagingBuffer:
        """Make room for ``length`` numbers of this type, of any content. Waits for the last copy."""
        self.settle()
        num_bytes = length * dtype.itemsize
        if num_bytes > self._num_bytes or not self._num_bytes:
            self._num_bytes = size = max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._landed is not None)
            self._views = {}
        if dtype not in self._views:
            mapped = seen_by(self._device, self._memory).view(dtype)
            self._views[dtype] = mapped, np.asarray(self._memory.view(dtype).numpy())
        self.mapped, array = self._views[dtype]  # ``mapped``: the buffer as kernels of the device see it
        self.numbers = array[:length]
        return self

    def lend(self) -> tuple[torch.Tensor, Callable[[], None]]:
        """Return the held numbers as the device's kernels see them, and a function. Call the function once
        the kernels that read the numbers are issued: then nothing is written here before these kernels have
        ended."""
        return self.mapped[: len(self.numbers)], self.note_copy

    def send(self, target: torch.Tensor) -> None:
        """Copy the first numbers to ``target``, contiguous, on the device, of this type, after all work
        issued.

        Does not wait for the copy. Nothing may be written here until the next ``hold``.
        """
        target = target.view(-1)
        copy_by_kernel(target, self.mapped[: target.numel()])
        self.note_copy()

    def take(self, source: torch.Tensor) -> None:
        """Copy ``source``, contiguous, on the device, of this type, to the first numbers, after all work
        issued. They are here after ``settle``."""
        source = source.view(-1)
        copy_by_kernel(self.mapped[: source.numel()], source)
        self.note_copy()

    def settle(self) -> None:
        """Wait for the last copy. Raises errors that the device reports."""
        if self._landed is not None:
            self._landed.synchronize()

    def note_copy(self) -> None:
        """Record that all kernels that read or write the buffer have been issued: ``hold`` and ``settle``
        wait for their end."""
        if self._landed is not None:
            self._landed.record(torch.cuda.current_stream(self._device))


class UploadBuffers:
    """Pinned buffers, used in turn, for numbers that one thread sends to a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stages: list[StagingBuffer] = []
        self._turn = -1
        self._shared: StagingBuffer | None = None  # the buffer of numbers that are sent together
        self._num_bytes = 0  # the bytes of ``_shared`` that are taken
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Send everything staged within by one launch, at the end. Each launch takes the host some
        microseconds, and tens of microseconds after a pause."""
        if self._shared is not None:
            yield
            return
        self._shared = shared = self.hold(_TOGETHER_BYTES // _UNIT.itemsize, _UNIT)
        self._num_bytes = 0
        try:
            yield
        finally:
            self._shared = None
            targets, sources, self._targets, self._sources = self._targets, self._sources, [], []
            if targets:
                torch._foreach_copy_(targets, sources)
                shared.note_copy()

    def stage(self, length: int, dtype: torch.dtype = torch.int32) -> Staged:
        """Return a place for the next numbers, to be written and sent at once: the place is reused a little
        later.

        Waits for numbers sent some time ago, but not for steps in flight, unless there are many.
        """
        begin, size, shared = self._num_bytes, length * dtype.itemsize, self._shared
        if shared is None or dtype not in _ARRAYS or begin + size > _TOGETHER_BYTES:
            alone = self.hold(length, dtype)
            return Staged(alone.numbers, alone.send)
        self._num_bytes += -(-size // _ALIGNMENT) * _ALIGNMENT
        part = slice(begin // _UNIT.itemsize, (begin + size) // _UNIT.itemsize)
        numbers = shared.numbers[part].view(_ARRAYS[dtype])
        return Staged(numbers, functools.partial(self._add, shared.mapped[part]))

    def _add(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Add a part of the shared buffer to what is sent together."""
        target = target.view(-1).view(_UNIT)
        self._targets.append(target)
        self._sources.append(source[: target.numel()])

    def hold(self, length: int, dtype: torch.dtype) -> StagingBuffer:
        """Return the next buffer with room for ``length`` numbers, which are sent by themselves. Waits like
        ``stage``."""
        self._turn = (self._turn + 1) % _STAGES
        if self._turn == len(self._stages):
            self._stages.append(StagingBuffer(self._device))
        return self._stages[self._turn].hold(length, dtype)


class DownloadBuffers:
    """Pinned buffers for a step's results. One thread starts the copies; another may read them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: collections.deque[StagingBuffer] = collections.deque()

    def start(self, tensor: torch.Tensor) -> Callable[[], np.ndarray]:
        """Start a download as ``Device.download`` does. The tensor is contiguous."""
        stage = self._free.popleft() if self._free else StagingBuffer(self._device)
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
    """Return the calling thread's buffers. Numbers sent through them arrive in order."""
    boxes: dict[torch.device, UploadBuffers] = _threads.__dict__.setdefault("boxes", {})
    if device not in boxes:
        boxes[device] = UploadBuffers(device)
    return boxes[device]


def copy_by_kernel(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between tensors of the same length and type, bit by bit. torch's own copy would use a copy
    engine."""
    whole = _WHOLE[source.dtype.itemsize]
    if source.dtype != whole:
        source, target = source.view(whole), target.view(whole)
    torch.bitwise_or(source, 0, out=target)


_ARRAYS: dict[torch.dtype, np.dtype[Any]] = {
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float32: np.dtype(np.float32),
}

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types, by their bytes."""


class _Address:
    """A tensor's memory in the form that torch can use without a copy."""

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
    """Return a tensor of the device at the same address, which may be pinned host memory: host and device use
    the same addresses. The result does not keep the memory alive."""
    return torch.as_tensor(_Address(tensor), device=device)


def seen_by(device: torch.device, memory: torch.Tensor) -> torch.Tensor:
    """Return contiguous host memory as the device's kernels see it. It must be pinned where the device is not
    the CPU."""
    return memory if device.type == "cpu" else borrowed(memory, device)
