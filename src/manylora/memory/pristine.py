"""The base's weights as they were loaded, beside those that adapters are merged into.

Owns the copy and the way back from the host's. Does not know adapters, nor when weights change.
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from manylora.config import ConfigError
from manylora.devices.device import Device
from manylora.kernels.ops import Weight, WeightKind
from manylora.memory.budget import in_mib
from manylora.memory.copier import TRANSFER_BYTES, Copier
from manylora.memory.host import shared_memory
from manylora.types import first_line

_log = logging.getLogger(__name__)

_ALIGNMENT_BYTES = 64
_CHUNKS_AHEAD = 4
"""So many are asked for beside the one that is waited for: copies of pages that come later wait for no more."""


class WeightRows(NamedTuple):
    """Rows ``[begin, end)`` of the weight of this number."""

    weight: int
    begin: int
    end: int


def pristine_bytes(weights: Iterable[Weight]) -> int:
    """What a copy of these takes. Raises ConfigError where one is stored so that nothing can be merged into it."""
    weights = list(weights)
    for kind in {weight.kind for weight in weights} - {WeightKind.PLAIN}:
        raise ConfigError(f"adapters cannot be merged into weights stored as {kind.value}: serve it unmerged")
    return sum(weight.data.nbytes for weight in weights)


class DevicePristine:
    """A copy in the device's memory, beside the pool."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        """Raises ConfigError where the device has no room for it."""
        try:
            self._copies = [weight.data.clone() for weight in weights]
        except (RuntimeError, MemoryError) as error:
            size = in_mib(pristine_bytes(weights))
            raise ConfigError(
                f"no memory for a copy of the base's weights of {size} on the device"
            ) from error

    def __getitem__(self, weight: int) -> torch.Tensor:
        """As loaded, ``[out, in]``."""
        return self._copies[weight]

    def close(self) -> None:
        """Free it."""
        self._copies = []


class HostPristine:
    """A copy in host memory, pinned where copies gain by it, and a thread that brings it back."""

    def __init__(self, weights: Sequence[Weight], device: Device, chunk_bytes: int = TRANSFER_BYTES) -> None:
        """Takes the memory, pins it and fills it. Raises ConfigError when the system refuses either."""
        self._weights = list(weights)
        self._device = device
        self._chunk_bytes = chunk_bytes
        sizes = [-(-weight.data.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for weight in weights]
        memory = shared_memory(sum(sizes), "a copy of the base's weights")
        try:
            device.pin(memory)
        except RuntimeError as error:
            why = first_line(error)
            raise ConfigError(
                f"the system refuses to pin {in_mib(len(memory))} for a copy of the base's weights: {why}"
            ) from error
        self._memory: torch.Tensor | None = memory
        self._copies = []
        begin = 0
        for weight, size in zip(weights, sizes):
            copy = memory[begin : begin + weight.data.nbytes]
            copy.copy_(_as_bytes(weight.data))
            self._copies.append(copy)
            begin += size
        self._closing = threading.Event()
        self._waiting = device.copy_lane()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="manylora-restore")

    def restore(self, rows: Sequence[WeightRows], issued: object, copier: Copier) -> None:
        """Copy these rows over the weights' own, after the work that ``issued`` stands for, in their order and in
        turn with copies of pages; returns when all have landed. Raises what went wrong, RuntimeError after
        ``close`` or the copier's."""
        self._thread.submit(self._restore, rows, issued, copier).result()

    def _restore(self, rows: Sequence[WeightRows], issued: object, copier: Copier) -> None:
        moving: collections.deque[Future[Callable[[], float]]] = collections.deque()
        # Here, not on the lane that pages have too: their copies wait for no step.
        self._waiting.begin(issued)
        self._waiting.end()()
        try:
            for number, begin, end in rows:
                weight, copy = self._weights[number], self._copies[number]
                with weight.rewriting() as data:
                    target, width = _as_bytes(data), data.nbytes // len(data)
                    for at in range(begin * width, end * width, self._chunk_bytes):
                        part = slice(at, min(at + self._chunk_bytes, end * width))
                        if self._closing.is_set():
                            raise RuntimeError("the engine is closing")
                        moving.append(copier.move(target[part], copy[part], issued))
                        if len(moving) > _CHUNKS_AHEAD:
                            moving.popleft().result()()
        finally:
            # Also after a failure: what follows may not meet a late chunk.
            while moving:
                moving.popleft().result()()

    def close(self) -> None:
        """Break a restore off, end the thread, free the memory. Idempotent."""
        self._closing.set()
        self._thread.shutdown(wait=True)
        memory, self._memory = self._memory, None
        self._copies = []
        if memory is not None:
            try:
                self._device.unpin(memory)
            except RuntimeError as error:
                _log.warning("the copy of the base's weights could not be unpinned: %s", error)


Pristine = DevicePristine | HostPristine


def _as_bytes(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.view(-1).view(torch.uint8)
