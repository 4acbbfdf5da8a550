"""Exchanges tensors between N ranks during a step: sums and gathers, the same on every rank to the last bit.

Owns the account of all exchanges, and torch's process group: NCCL between GPUs, gloo where there are none.
Every rank makes the same exchanges in the same order; the callers know their purpose.

Small tensors are gathered and added up here, in float32 and in one order. Large tensors are summed by the
group, in an order of its own, with the same bits on every rank. The group also sums every tensor between two
GPUs: a sum of two numbers has only one order and is rounded once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
import torch.distributed

Purpose = Literal["base", "lora", "sampling", "merging", "start"]
"""The purpose of an exchange: ``base``: the base's sums; ``lora``: the sums that adapters add; ``sampling``:
logits and tokens; ``merging``: adapters' rows for a switch, and agreement about it; ``start``: agreement at
the start."""

Exchange = tuple[Purpose, int]
"""A purpose, and the bytes that a rank contributes."""

PURPOSES: tuple[Purpose, ...] = ("base", "lora", "sampling", "merging", "start")


@dataclasses.dataclass
class Traffic:
    """The number of exchanges since the start, and the bytes that a rank contributed: one copy of its own
    tensor each."""

    count: int = 0
    num_bytes: int = 0


class Peers:
    """A rank's connection to the other ranks, with the account of its exchanges. Used by one thread at a
    time.

    ``num_exchanges``: exchanges since the start, of any purpose, by which ranks check that they have done the
    same. ``digest``: a checksum of their purposes and sizes, in order.
    """

    def __init__(self, rank: int, count: int) -> None:
        self.rank = rank
        self.count = count
        self.num_exchanges = 0
        self.digest = 0
        self.traffic: dict[Purpose, Traffic] = {purpose: Traffic() for purpose in PURPOSES}
        self._listed: list[Exchange] | None = None
        self.leaves_out = False
        """Whether exchanges are left out at present."""

    def add_up(self, tensor: torch.Tensor, purpose: Purpose) -> None:
        """Replace the tensor by the sum of the ranks' tensors, with the same bits on every rank. The tensors
        have one shape and dtype and are contiguous in the last dimension. Small tensors of 16-bit floats are
        added in float32."""
        raise NotImplementedError

    def gather(self, tensor: torch.Tensor, purpose: Purpose) -> list[torch.Tensor]:
        """Return every rank's tensor, of one shape and dtype, in the order of the ranks."""
        raise NotImplementedError

    def broadcast(self, tensor: torch.Tensor, purpose: Purpose) -> None:
        """Replace the tensor, which is contiguous, by the first rank's."""
        raise NotImplementedError

    def note(self, tensor: torch.Tensor, purpose: Purpose) -> None:
        """Count an exchange of this tensor, or list it inside ``listed``."""
        exchange = purpose, tensor.numel() * tensor.itemsize
        if self._listed is None:
            self.note_all([exchange])
        else:
            self._listed.append(exchange)

    def note_all(self, exchanges: Sequence[Exchange]) -> None:
        """Count exchanges that a replay makes."""
        for purpose, size in exchanges:
            self.num_exchanges += 1
            self.digest = zlib.crc32(f"{purpose} {size}".encode(), self.digest)
            traffic = self.traffic[purpose]
            traffic.count += 1
            traffic.num_bytes += size

    @contextlib.contextmanager
    def listed(self, exchanges: list[Exchange]) -> Iterator[None]:
        """Put exchanges made in the block into the list, in place of its contents, and do not count them.
        Used for a captured step, whose replays run no code that would count its exchanges."""
        exchanges.clear()
        self._listed = exchanges
        try:
            yield
        finally:
            self._listed = None

    @contextlib.contextmanager
    def leaving_out(self) -> Iterator[None]:
        """Neither make nor count exchanges in the block. This rank uses its own tensors in place of the
        others', so results are meaningless. Used for rehearsals, in which the other ranks may take no
        part."""
        self.leaves_out = True
        try:
            yield
        finally:
            self.leaves_out = False


GATHERED_BYTES = 2**20
"""The largest tensor of a rank that is gathered to be added up. For larger ones, N times the bytes take
longer than the launches that are saved."""


class GroupPeers(Peers):
    """Peers in torch's process group, with tensors of ``device``. ``file``: a descriptor of an empty file
    without a name, shared by all ranks, through which they find each other; it may be closed afterwards."""

    def __init__(self, file: int, rank: int, count: int, device: torch.device) -> None:
        from torch._C._distributed_c10d import FileStore  # not in every build of torch

        super().__init__(rank, count)
        self._device = device
        is_cuda = device.type == "cuda"
        self._gathered_bytes = 0 if is_cuda and count == 2 else GATHERED_BYTES
        # The path of a descriptor that is never closed: a thread of NCCL opens it once a second, and would open
        # another file if the number were reused.
        store = FileStore(f"/proc/self/fd/{os.dup(file)}", count)
        torch.distributed.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=count,
            device_id=device if is_cuda else None,
        )

    def add_up(self, tensor: torch.Tensor, purpose: Purpose) -> None:
        if self.leaves_out:
            return
        self.note(tensor, purpose)
        flat = self._here(tensor)
        if flat.numel() * flat.itemsize > self._gathered_bytes:
            torch.distributed.all_reduce(flat)
        else:
            torch.sum(self._gathered(flat), 0, out=flat)  # one launch, which adds 16-bit floats in float32
        tensor.copy_(flat)

    def gather(self, tensor: torch.Tensor, purpose: Purpose) -> list[torch.Tensor]:
        if self.leaves_out:
            return [tensor] * self.count
        self.note(tensor, purpose)
        return list(self._gathered(self._here(tensor)).to(tensor.device).unbind())

    def broadcast(self, tensor: torch.Tensor, purpose: Purpose) -> None:
        if self.leaves_out:
            return
        self.note(tensor, purpose)
        moved = self._here(tensor)
        torch.distributed.broadcast(moved, 0)
        if moved is not tensor:
            tensor.copy_(moved)

    # Nothing ends the group but the process's end: to end it would wait for the other ranks, which may be gone.

    def _gathered(self, flat: torch.Tensor) -> torch.Tensor:
        planes = flat.new_empty((self.count, *flat.shape))
        torch.distributed.all_gather_into_tensor(planes.view(-1), flat.view(-1))
        return planes

    def _here(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor contiguous, on the group's device: at the start some tensors are on the host."""
        return tensor.to(self._device).contiguous()
