"""A step's numbers on their way between host and device, by small kernels over pinned memory.

Every step sends some kilobytes and gets fewer back. The device's copy engines take their work in turn, so while
pages are copied both ways such a copy would wait for milliseconds, and its step with it. A kernel that reads or
writes pinned host memory waits for no copy. Owns the pinned buffers; does not know what the numbers mean.
"""

# mypy: disallow-untyped-calls=False
# torch's streams and events have no annotations.

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

_STAGES = 16
"""Pinned buffers of one ``UploadBuffers``: some more than what the steps in flight send."""

_LEAST_BYTES = 2**16
"""The bytes of a pinned buffer, unless it must hold more."""


_TOGETHER_BYTES = 2**18
"""The bytes that are sent together at most; what is more goes by itself."""

_UNIT = torch.int32
"""What is sent together is copied as numbers of this type."""

_ALIGNMENT = 16


class Staged(Protocol):
    """Numbers to be written, and then sent once."""

    @property
    def numbers(self) -> np.ndarray: ...

    def send(self, target: torch.Tensor) -> None: ...


class _View(NamedTuple):
    """A buffer as numbers of one type: as kernels of the device see it, and as an array."""

    mapped: torch.Tensor
    array: np.ndarray


class StagingBuffer:
    """A pinned buffer, and the event that tells when what was last copied from it or to it has landed.

    Its views are made once for each type: each call into torch takes a microsecond, or ten after a pause.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
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
        mapped = seen_by(self._device, self._memory) if self._num_bytes else self._memory
        found = _View(mapped.view(dtype), np.asarray(self._memory.view(dtype).numpy()))
        self._views[dtype] = found
        return found

    def lend(self) -> tuple[torch.Tensor, Callable[[], None]]:
        """What ``hold`` asked for, as kernels of the device see it, and what to call once those that read it are
        issued: nothing is written here before they have ended."""
        return self._held.mapped[: self._length], self.note_copy

    def send(self, target: torch.Tensor) -> None:
        """Copy the first numbers to ``target``, contiguous, on the device, of this type, after all work issued.

        Does not wait for it. Nothing is written here until the next ``hold``.
        """
        target = target.view(-1)
        copy_by_kernel(target, self._held.mapped[: target.numel()])
        self.note_copy()

    def take(self, source: torch.Tensor) -> None:
        """The same the other way round: the numbers are here after ``settle``."""
        source = source.view(-1)
        copy_by_kernel(self._held.mapped[: source.numel()], source)
        self.note_copy()

    def settle(self) -> None:
        """Wait for the last copy. Raises what went wrong on the device."""
        if self._landed is not None:
            self._landed.synchronize()

    def note_copy(self) -> None:
        """What reads it, or copies to it, has been issued: nothing is written here before that has ended."""
        if self._landed is not None:
            self._landed.record(torch.cuda.current_stream(self._device))


class _Together:
    """Parts of one buffer, which a single launch sends to as many targets."""

    def __init__(self, buffer: StagingBuffer) -> None:
        self._buffer = buffer
        self._mapped, _ = buffer.lend()
        self._num_bytes = 0
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []

    def part(self, length: int, dtype: torch.dtype) -> _Part | None:
        """None where it does not fit."""
        begin, size = self._num_bytes, length * dtype.itemsize
        if dtype not in _ARRAYS or begin + size > _TOGETHER_BYTES:
            return None
        self._num_bytes += -(-size // _ALIGNMENT) * _ALIGNMENT
        first, count = begin // _UNIT.itemsize, size // _UNIT.itemsize
        numbers = self._buffer.numbers[first : first + count].view(_ARRAYS[dtype])
        return _Part(self, numbers, self._mapped[first : first + count])

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Have it sent with the others."""
        target = target.view(-1).view(_UNIT)
        self._targets.append(target)
        self._sources.append(source[: target.numel()])

    def send(self) -> None:
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)
            self._buffer.note_copy()


class _Part:
    """See ``Staged``."""

    def __init__(self, together: _Together, numbers: np.ndarray, mapped: torch.Tensor) -> None:
        self._together = together
        self._mapped = mapped
        self.numbers = numbers

    def send(self, target: torch.Tensor) -> None:
        self._together.add(target, self._mapped)


class UploadBuffers:
    """Pinned buffers for numbers that go to a device, from one thread. Buffers are taken in turn."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stages: list[StagingBuffer] = []
        self._turn = -1
        self._together: _Together | None = None

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What ``stage`` gives within is sent by one launch, at the end. Each launch takes the host some
        microseconds, and tens of them after a pause."""
        if self._together is not None:
            yield
            return
        self._together = together = _Together(self.hold(_TOGETHER_BYTES // _UNIT.itemsize, _UNIT))
        try:
            yield
        finally:
            self._together = None
            together.send()

    def stage(self, length: int, dtype: torch.dtype = torch.int32) -> Staged:
        """Where to write the next numbers, to be sent from there at once: it serves again a little later.

        Waits for what was sent some time ago, not for steps that are in flight, unless there are many.
        """
        part = None if self._together is None else self._together.part(length, dtype)
        return self.hold(length, dtype) if part is None else part

    def hold(self, length: int, dtype: torch.dtype) -> StagingBuffer:
        """The same, of a buffer of its own."""
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
        """Does what ``Device.download`` does; the tensor is contiguous."""
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
    """The calling thread's buffers. What is sent through them arrives in order."""
    boxes: dict[torch.device, UploadBuffers] = _threads.__dict__.setdefault("boxes", {})
    if device not in boxes:
        boxes[device] = UploadBuffers(device)
    return boxes[device]


def copy_by_kernel(target: torch.Tensor, source: torch.Tensor) -> None:
    """Between tensors of the same length and type, bit by bit. torch's own copy would ask a copy engine."""
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
