"""How each rank stands, in shared memory, to be read while the ranks work: nothing waits for it.

Owns the layout. Each number is written by its rank alone; numbers that belong together may be a moment apart.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import NamedTuple

from manylora.devices.peers import PURPOSES
from manylora.types import RankTraffic

_NUMBERS = 2 + 2 * len(PURPOSES)


def memory_bytes(count: int) -> int:
    return 8 * _NUMBERS * count


class RankStatus(NamedTuple):
    """``preparation_s``: spent on compiling; ``pages_pinned``: of the host's pool."""

    preparation_s: float
    pages_pinned: int
    traffic: RankTraffic


class StatusWriter:
    def __init__(self, file: int, rank: int, count: int) -> None:
        words = memoryview(mmap.mmap(file, memory_bytes(count))).cast("d")
        self._words = words[rank * _NUMBERS : (rank + 1) * _NUMBERS]

    def write(self, preparation_s: float, pages_pinned: int, traffic: Sequence[tuple[int, int]]) -> None:
        """``traffic``: by purpose, in the order of PURPOSES, exchanges and bytes."""
        numbers = [preparation_s, pages_pinned, *(number for pair in traffic for number in pair)]
        for place, number in enumerate(numbers):
            self._words[place] = float(number)


class StatusReader:
    def __init__(self, file: int, count: int) -> None:
        self._words = memoryview(mmap.mmap(file, memory_bytes(count))).cast("d")
        self._count = count

    def read(self) -> list[RankStatus]:
        """Of every rank, in order."""
        found = []
        for rank in range(self._count):
            preparation_s, pinned, *rest = self._words[rank * _NUMBERS : (rank + 1) * _NUMBERS].tolist()
            numbers = dict(zip(PURPOSES, zip(map(int, rest[::2]), map(int, rest[1::2]))))
            traffic = RankTraffic(*numbers["base"], *numbers["lora"], *numbers["sampling"])
            found.append(RankStatus(preparation_s, int(pinned), traffic))
        return found
