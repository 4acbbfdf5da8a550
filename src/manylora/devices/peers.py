"""What N ranks exchange during a step: sums and gathers, the same on every rank to the last bit.

Owns the account of what was exchanged. Every rank asks for the same exchanges in the same order;
what they are for is the callers' business.
"""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Iterator, Sequence
from typing import Literal

import torch

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
