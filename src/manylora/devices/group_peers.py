"""Exchanges between ranks through a process group of torch: NCCL between GPUs, gloo where there are none.

What is small is gathered and added up here, in float32 and one order; what is large is left to the group's own
sum, which is the same bits on every rank, in an order of its own. So is everything that two GPUs add up: a sum of
two has one order and is rounded once. Owns the group, one a process.
"""

from __future__ import annotations

import os

import torch
import torch.distributed
from torch._C._distributed_c10d import FileStore

from manylora.devices.peers import Peers, Purpose

GATHERED_BYTES = 2**20
"""Of a rank's tensor up to which all ranks' are gathered to be added up: beyond it N times the bytes take longer
than the launches that are spared."""


class GroupPeers(Peers):
    """Peers on tensors of ``device``. ``file``: a descriptor of an empty file without a name,
    shared by all ranks, by which they find each other; it may be closed afterwards."""

    def __init__(self, file: int, rank: int, count: int, device: torch.device) -> None:
        super().__init__(rank, count)
        self._device = device
        is_cuda = device.type == "cuda"
        self._gathered_bytes = 0 if is_cuda and count == 2 else GATHERED_BYTES
        # The path of a descriptor that is never closed: a thread of NCCL opens it once a second, and would open
        # whatever has the number by then.
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
            torch.sum(self._gathered(flat), 0, out=flat)  # one launch; of 16 bits it adds in float32
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

    # No ``close``: the group's own end waits for the others, which may be gone. The process ends it.

    def _gathered(self, flat: torch.Tensor) -> torch.Tensor:
        planes = flat.new_empty((self.count, *flat.shape))
        torch.distributed.all_gather_into_tensor(planes.view(-1), flat.view(-1))
        return planes

    def _here(self, tensor: torch.Tensor) -> torch.Tensor:
        """Contiguous, on the group's device: at the start some tensors are the host's."""
        return tensor.to(self._device).contiguous()
