"""What the rest of manylora asks of a device beyond tensors: memory, ordering, transfers.

One implementation a kind of device. Owns no tensor of the engine; does not know what a page holds.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch


class PageWriter(Protocol):
    """Writes page images into the pool while steps run. Made on the step loop's thread, used by one other."""

    def write(self, target: torch.Tensor, image: torch.Tensor) -> None:
        """Copy ``image`` (host, contiguous) to ``target`` (device, same shape and dtype).

        ``image`` may be reused at once. The write waits for all work issued before the writer was made.
        """

    def close(self) -> None:
        """Return when every write has landed. Raises what went wrong on the way."""


class Device(Protocol):
    """A device that runs one engine's steps, in the order they are issued."""

    name: str
    """For people: "cpu", "cuda (NVIDIA H200)"."""

    torch_device: torch.device

    def free_bytes(self) -> int:
        """Memory that could be allocated now."""

    def zeros(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A large tensor of zeros. Where the system can, memory is taken only as it is first written."""

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """The array on the device, ordered before later work. The caller never changes the array again."""

    def page_writer(self) -> PageWriter:
        """A writer whose writes come after everything issued so far."""

    def synchronize(self) -> None:
        """Wait for everything issued. Raises errors that the device reports late."""

    def release_memory(self) -> None:
        """Give memory that is held but unused back to the system."""


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between contiguous host tensors of one size in the calling thread.

    torch's own copy would wake a second team of compute threads beside the step loop's.
    """
    np.copyto(_as_bytes(target), _as_bytes(source))


def _as_bytes(tensor: torch.Tensor) -> np.ndarray:
    return np.asarray(tensor.view(-1).view(torch.uint8).numpy())
