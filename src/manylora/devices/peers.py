"""What N ranks exchange during a step: sums and gathers, the same on every rank to the last bit.

Owns the account of what was exchanged, and the process group of torch: NCCL between GPUs, gloo where there are
none. Every rank asks for the same exchanges in the same order; what they are for is the callers' business.

What is small is gathered and added up here, in float32 and one order; what is large is left to the group's own
sum, which is the same bits on every rank, in an order of its own. So is everything that two GPUs add up: a sum of
two has one order and is rounded once.
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
"""What an exchange is for: the base's sums; what adapters add to them; logits and tokens; adapters' rows for a
switch, and agreeing about it; agreeing at the start."""

Exchange = tuple[Purpose, int]
"""And the bytes that a rank puts into it."""

PURPOSES: tuple[Purpose, ...] = ("base", "lora", "sampling", "merging", "start")


@dataclasses.dataclass
class Traffic:
    """Exchanges since the start, and the bytes that a rank put into them: one copy of its own tensor each."""

    count: int = 0
    num_bytes: int = 0


class Peers:
    """A rank's door to the others, and the account of what it exchanged. Used by one thread at a time.

    ``num_exchanges``: since the start, of any purpose: how ranks see that they have done the same. ``digest``: a
    checksum of their purposes and sizes, in order.
    """

    def __init__(self, rank: int, count: int) -> None:
        self.rank = rank
        self.count = count
        self.num_exchanges = 0
        self.digest = 0
        self.traffic: dict[Purpose, Traffic] = {purpose: Traffic() for purpose in PURPOSES}
        self._listed: list[Exchange] | None = None
        self.leaves_out = False
        """No exchange is made now."""

    def add_up(self, tensor: torch.Tensor, purpose: Purpose) -> None:
        """In place: the sum of the ranks' tensors, of one shape and dtype, the same bits on every rank; small
        tensors of 16-bit floats are added in float32. Contiguous in the last dimension."""
        raise NotImplementedError

    def gather(self, tensor: torch.Tensor, purpose: Purpose) -> list[torch.Tensor]:
        """Every rank's tensor, of one shape and dtype, in the order of the ranks."""
        raise NotImplementedError

    def broadcast(self, tensor: torch.Tensor, purpose: Purpose) -> None:
        """In place: the first rank's tensor; contiguous."""
        raise NotImplementedError

    def close(self) -> None:
        """Make no more exchanges. Idempotent."""

    def note(self, tensor: torch.Tensor, purpose: Purpose) -> None:
        """An exchange of this tensor begins."""
        exchange = purpose, tensor.numel() * tensor.itemsize
        if self._listed is None:
            self.note_all([exchange])
        else:
            self._listed.append(exchange)

    def note_all(self, exchanges: Sequence[Exchange]) -> None:
        """Count these, which a replay makes."""
        for purpose, size in exchanges:
            self.num_exchanges += 1
            self.digest = zlib.crc32(f"{purpose} {size}".encode(), self.digest)
            traffic = self.traffic[purpose]
            traffic.count += 1
            traffic.num_bytes += size

    @contextlib.contextmanager
    def listed(self, exchanges: list[Exchange]) -> Iterator[None]:
        """Exchanges meanwhile are put into the list, in place of what is there, and not counted: those of a
        captured step, whose replays run no code that would count them."""
        exchanges.clear()
        self._listed = exchanges
        try:
            yield
        finally:
            self._listed = None

    @contextlib.contextmanager
    def leaving_out(self) -> Iterator[None]:
        """Exchanges meanwhile are not made, nor counted: this rank takes its own tensors for the others', so
        results are worth nothing. For a rehearsal, which the others may have no part in."""
        self.leaves_out = True
        try:
            yield
        finally:
            self.leaves_out = False


GATHERED_BYTES = 2**20
"""Of a rank's tensor up to which all ranks' are gathered to be added up: beyond it N times the bytes take longer
than the launches that are spared."""


class GroupPeers(Peers):
    """Peers on tensors of ``device``. ``file``: a descriptor of an empty file without a name,
    shared by all ranks, by which they find each other; it may be closed afterwards."""

    def __init__(self, file: int, rank: int, count: int, device: torch.device) -> None:
        from torch._C._distributed_c10d import FileStore  # not in every build of torch

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
