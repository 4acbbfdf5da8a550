"""Commands from one process to N others, through shared memory: written once, read by all in one order.

A stream of frames, each with its number, in a ring of bytes; a frame may be longer than the ring. What waits
sleeps on an event of the system, so that nothing is done while there is nothing to do. Owns the layout of the
memory. Does not know what a frame means.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable

RING_BYTES = 2**20
_LINE = 64
_HEADER = struct.Struct("<QI")
"""Of a frame: its number, counted from 1, and its length."""

_LOOKS = 30
_FULL_S = 1e-4


def memory_bytes(count: int) -> int:
    """What a ring with so many readers needs."""
    return _LINE * (1 + count) + RING_BYTES


class _Ring:
    """The memory: how many bytes were ever written, how many each reader has read, the bytes."""

    def __init__(self, file: int, count: int) -> None:
        memory = mmap.mmap(file, memory_bytes(count))
        words = memoryview(memory)
        self.counters = words[: _LINE * (1 + count)].cast("q")
        self.data = words[_LINE * (1 + count) :]
        self.fence = threading.Lock()

    def counter(self, place: int) -> int:
        return int(self.counters[place * _LINE // 8])

    def set_counter(self, place: int, value: int) -> None:
        # Whatever the processor, the bytes are there, or read, before the number says so.
        with self.fence:
            pass
        with self.fence:
            self.counters[place * _LINE // 8] = value


class RingWriter:
    """The one writer. ``wakes``: an eventfd of each reader, closed with it."""

    def __init__(self, file: int, wakes: list[int]) -> None:
        self._ring = _Ring(file, len(wakes))
        self._wakes = wakes
        self._count = len(wakes)
        self._written = 0
        self._number = 0

    def write(self, data: bytes, check: Callable[[], None]) -> None:
        """Append a frame. Waits while readers are behind, and calls ``check`` meanwhile, which may raise. One
        thread at a time."""
        self._number += 1
        left = memoryview(_HEADER.pack(self._number, len(data)) + data)
        while left:
            count = min(self._room(), len(left))
            if not count:
                check()
                time.sleep(_FULL_S)
                continue
            at = self._written % RING_BYTES
            first = min(count, RING_BYTES - at)
            self._ring.data[at : at + first] = left[:first]
            self._ring.data[: count - first] = left[first:count]
            self._written += count
            left = left[count:]
            self._ring.set_counter(0, self._written)
            for wake in self._wakes:
                os.eventfd_write(wake, 1)

    def close(self) -> None:
        """Once there are no readers: what is written then wakes no rank."""
        wakes, self._wakes = self._wakes, []
        for wake in wakes:
            os.close(wake)

    def _room(self) -> int:
        read = min(self._ring.counter(1 + reader) for reader in range(self._count))
        return RING_BYTES - (self._written - read)


class RingReader:
    """One of the readers. ``wake``: its eventfd."""

    def __init__(self, file: int, reader: int, count: int, wake: int) -> None:
        self._ring = _Ring(file, count)
        self._place = 1 + reader
        self._wake = wake
        self._read = 0
        self._number = 0

    def has_some(self) -> bool:
        """Whether ``read`` finds a frame, or the beginning of one."""
        return self._ring.counter(0) != self._read

    def read(self) -> bytes:
        """The next frame; waits for it. Raises RuntimeError where frames are not what they were numbered."""
        number, length = _HEADER.unpack(self._take(_HEADER.size))
        self._number += 1
        if number != self._number:
            raise RuntimeError(f"command {self._number} was expected, and {number} came")
        return self._take(length)

    def _take(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            ready = min(self._wait(), count - len(data))
            at = self._read % RING_BYTES
            first = min(ready, RING_BYTES - at)
            data += self._ring.data[at : at + first]
            data += self._ring.data[: ready - first]
            self._read += ready
            self._ring.set_counter(self._place, self._read)
        return bytes(data)

    def _wait(self) -> int:
        """How many bytes there are, at least one."""
        for _ in range(_LOOKS):
            if count := self._ring.counter(0) - self._read:
                return count
        while not (count := self._ring.counter(0) - self._read):
            os.eventfd_read(self._wake)
        with self._ring.fence:
            return count
