"""Exchanges between ranks on CPUs of one host, through shared memory.

Each rank writes its tensor into an area of its own, says so by a number, waits for the others' numbers and
reads all areas in the order of the ranks, so that sums are the same bits everywhere. Areas are used in turn:
what a rank writes next but one overwrites what all have read, since they could not have gone on to the one
between otherwise.

Owns the layout of the memory. Waiting is by looking: a step has several exchanges a layer, of some ten
microseconds each. A rank whose peers are gone waits until it is ended.
"""

from __future__ import annotations

import mmap
import os
import threading
import time

import torch

from manylora.devices.peers import Peers, Purpose

AREA_BYTES = 2**22
"""Larger tensors are exchanged piece by piece."""

_LINE = 64
"""A processor's cache line: what one rank writes often has one to itself."""

_LOOKS, _YIELD_S, _SLEEP_S = 100, 2e-3, 1e-4


def memory_bytes(count: int) -> int:
    """What ``SharedPeers`` of so many ranks need of shared memory; taken as it is written."""
    return count * (_LINE + 2 * AREA_BYTES)


class SharedPeers(Peers):
    """Peers on a CPU. ``file``: a descriptor of ``memory_bytes`` zeros, shared by all
    ranks; it may be closed afterwards."""

    def __init__(self, file: int, rank: int, count: int) -> None:
        super().__init__(rank, count)
        memory = mmap.mmap(file, memory_bytes(count))
        self._numbers = memoryview(memory)[: count * _LINE].cast("q")
        areas = torch.frombuffer(memory, dtype=torch.uint8)[count * _LINE :]
        self._areas = areas.view(2, count, AREA_BYTES)
        self._posted = 0
        self._fence = threading.Lock()

    def add_up(self, tensor: torch.Tensor, purpose: Purpose) -> None:
        if self.leaves_out:
            return
        flat = tensor.contiguous().view(-1)
        self.note(flat, purpose)
        most = AREA_BYTES // flat.itemsize
        for first in range(0, len(flat), most):
            piece = flat[first : first + most]
            one, *others = self._exchanged(piece)
            if piece.itemsize < 4:
                total = one.float()
                for other in others:
                    total += other
                piece.copy_(total)
                continue
            torch.add(one, others[0], out=piece)
            for other in others[1:]:
                piece += other
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))

    def gather(self, tensor: torch.Tensor, purpose: Purpose) -> list[torch.Tensor]:
        if self.leaves_out:
            return [tensor] * self.count
        flat = tensor.contiguous().view(-1)
        self.note(flat, purpose)
        found = [torch.empty_like(flat) for _ in range(self.count)]
        most = AREA_BYTES // flat.itemsize
        for first in range(0, len(flat), most):
            for target, piece in zip(found, self._exchanged(flat[first : first + most]), strict=True):
                target[first : first + most] = piece
        return [target.view(tensor.shape) for target in found]

    def broadcast(self, tensor: torch.Tensor, purpose: Purpose) -> None:
        if self.leaves_out:
            return
        flat = tensor.view(-1)
        self.note(flat, purpose)
        most = AREA_BYTES // flat.itemsize
        for first in range(0, len(flat), most):
            piece = flat[first : first + most]
            # The others' areas are not read, but all have to be as far.
            piece.copy_(self._exchanged(piece)[0])

    def close(self) -> None:
        return

    def _exchanged(self, piece: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's piece, in their order, valid until the next exchange."""
        self._posted = number = self._posted + 1
        size = piece.numel() * piece.itemsize
        areas = self._areas[number % 2, :, :size]
        areas[self.rank].view(piece.dtype).copy_(piece)
        # Whatever the processor, the bytes are there before the number is.
        with self._fence:
            pass
        with self._fence:
            self._numbers[self.rank * _LINE // 8] = number
        for rank in range(self.count):
            self._wait(rank, number)
        with self._fence:
            pass
        return [areas[rank].view(piece.dtype) for rank in range(self.count)]

    def _wait(self, rank: int, number: int) -> None:
        numbers, place = self._numbers, rank * _LINE // 8
        for _ in range(_LOOKS):
            if numbers[place] >= number:
                return
        yields_until_s = time.monotonic() + _YIELD_S
        while numbers[place] < number:
            if time.monotonic() < yields_until_s:
                os.sched_yield()
            else:
                time.sleep(_SLEEP_S)
