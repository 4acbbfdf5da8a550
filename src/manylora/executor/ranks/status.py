"""How each rank stands, in shared memory, to be read while the ranks work: nothing waits for it.

Owns the layout. Each number is written by its rank alone; numbers that belong together may be a moment apart.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import NamedTuple

from manylora.devices.peers import PURPOSES
from manylora.protocol import ExecutorState
from manylora.types import RankTraffic

_STATE = 2
"""Of ExecutorState, its first fields."""

_NUMBERS = _STATE + 2 * len(PURPOSES)


def memory_bytes(count: int) -> int:
    return 8 * _NUMBERS * count


class RankStatus(NamedTuple):
    """``state``: without ``traffic``."""

    state: ExecutorState
    traffic: RankTraffic


class StatusWriter:
    def __init__(self, file: int, rank: int, count: int) -> None:
        words = memoryview(mmap.mmap(file, memory_bytes(count))).cast("d")
        self._words = words[rank * _NUMBERS : (rank + 1) * _NUMBERS]

    def write(self, state: ExecutorState, traffic: Sequence[tuple[int, int]]) -> None:
        """``traffic``: by purpose, in the order of PURPOSES, exchanges and bytes."""
        numbers = [
            state.host_pages_pinned,
            state.preparation_s,
            *(number for pair in traffic for number in pair),
        ]
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
            pinned, preparation_s, *rest = self._words[rank * _NUMBERS : (rank + 1) * _NUMBERS].tolist()
            counts = [int(number) for number in rest]
            numbers = dict(zip(PURPOSES, zip(counts[::2], counts[1::2])))
            base, lora, sampling = numbers["base"], numbers["lora"], numbers["sampling"]
            traffic = RankTraffic(*base, *lora, *sampling, *numbers["merging"])
            found.append(RankStatus(ExecutorState(int(pinned), preparation_s), traffic))
        return found
