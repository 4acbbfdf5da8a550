"""What the rest of manylora asks of a device beyond tensors: memory, ordering, transfers.

One implementation a kind of device. Owns no tensor of the engine; does not know what a page holds.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch

Tensors = tuple[torch.Tensor, ...]


class Mirror(Protocol):
    """Numbers for the device, at one address: what a captured step reads. Used by the step loop's thread."""

    tensor: torch.Tensor
    """int64, on the device. The first entries are what was sent last."""

    def stage(self) -> np.ndarray:
        """Where the next numbers are to be written before ``send``: int64, as long as ``tensor``; it holds
        anything. Does not wait for steps that are still to come to an end, unless there are many."""

    def send(self, count: int) -> None:
        """Copy the first ``count`` numbers of the last stage to the front of ``tensor``, after all work issued so
        far. Does not wait for that work. Nothing is written to the stage afterwards."""


class PageWriter(Protocol):
    """Writes page images into the pool while steps run. Made on the step loop's thread, used by one other."""

    def write(self, target: torch.Tensor, image: torch.Tensor) -> None:
        """Copy ``image`` (host, contiguous) to ``target`` (device, same shape and dtype, contiguous).

        ``image`` may be reused at once. The write waits for all work issued before the writer was made.
        """

    def close(self) -> None:
        """Return when every write has landed. Raises what went wrong on the way."""


class CopyLane(Protocol):
    """Copies between host and device memory beside the steps, in order. Used by one thread, which has no
    other work on the device; or, from ``begin`` to ``end`` within ``here``, by another meanwhile."""

    def here(self) -> AbstractContextManager[None]:
        """For the step loop's thread, whose own work on the device stays apart."""

    def launch(self, start: Callable[[], None]) -> None:
        """``start`` launches kernels that copy, after what was asked for before."""

    def begin(self, issued: object) -> None:
        """Copies from here on wait for the work that ``issued`` stands for (see ``Device.issued``), and for none
        that was issued after it."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between contiguous tensors of one size and dtype, after those asked for before: begun at the latest
        by ``end``.

        Returns early, unless much is on its way already.
        """

    def landing(self) -> Callable[[], None]:
        """Begins all that was asked for so far, and gives a function for the step loop's thread: work issued after
        it was called there waits for those copies, without keeping that thread."""

    def end(self) -> Callable[[], float]:
        """Gives a function for any thread: it waits until all that was asked for since ``begin`` has landed
        and returns the seconds which those copies took, or raises what went wrong with them."""


Elapsed = Callable[[], Callable[[], float]]
"""Ends a measurement after all work issued so far, and gives a function for any thread: it waits until that work
has ended and returns the seconds since the measurement began, or raises what went wrong on the device."""


class Device(Protocol):
    """A device that runs one engine's steps, in the order they are issued."""

    name: str
    """For people: "cpu", "cuda (NVIDIA H200)"."""

    torch_device: torch.device

    copies_from_pinned: bool
    """Whether ``pin`` makes copies with host memory faster."""

    def free_bytes(self) -> int:
        """Memory that could be allocated now."""

    def share_bytes(self, share: float) -> int:
        """What this process does not hold yet of this share of a GPU's whole memory, whatever others hold. On a
        CPU it is a share of what is free."""

    def zeros(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A large tensor of zeros. Where the system can, memory is taken only as it is first written."""

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """The array on the device, ordered before later work. The caller never changes the array again."""

    def send(self, array: np.ndarray, target: torch.Tensor) -> None:
        """Copy to ``target``, contiguous, on the device, of the array's type and length, after all work issued so
        far. Does not wait for that; the array may be changed afterwards."""

    def download(self, tensor: torch.Tensor) -> Callable[[], np.ndarray]:
        """Start to copy to the host what the tensor holds after all work issued so far; later work may change it.

        Gives a function for one later call: it waits for the copy and returns it, or raises what went wrong
        on the device until then.
        """

    def sending_together(self) -> AbstractContextManager[None]:
        """What the step loop's thread sends within, by ``send``, mirrors and plans, is on its way at the end."""

    def mirror(self, length: int) -> Mirror:
        """Memory for ``Mirror``: ``length`` numbers, zero at first."""

    captures: bool
    """Whether ``capture`` spares the host the launches."""

    def capture(self, run: Callable[[], Tensors]) -> Callable[[], Tensors]:
        """Run once, then record ``run``'s launches; gives a function that launches them again.

        It returns what ``run`` returned, with new contents, which any later replay of any capture may overwrite.
        ``run`` must launch the same work at the same addresses whatever memory holds, return contiguous tensors,
        and not wait for the device. Raises RuntimeError where the device refuses.
        """

    def captured_bytes(self) -> int:
        """Device memory that captures hold."""

    def page_writer(self) -> PageWriter:
        """A writer whose writes come after everything issued so far."""

    def issued(self) -> object:
        """Stands for everything issued so far, for ``CopyLane.begin``. Called on the step loop's thread."""

    def has_passed(self, issued: object) -> bool:
        """Whether all work that ``issued`` stands for has ended. Does not wait."""

    def measure(self) -> Elapsed:
        """Begin to measure time, on the device's own clock, when all work issued so far has ended. Does not
        wait."""

    def copy_lane(self) -> CopyLane:
        """A lane whose copies run beside steps and beside other lanes."""

    def can_mark(self) -> bool:
        """Whether ``mark`` works."""

    def mark(self, word: torch.Tensor, number: int) -> None:
        """Once all work issued so far has ended ``word``, int64 [1], on the device or pinned, holds the number,
        also for another process that looks for it meanwhile."""

    launches_wait: bool
    """Whether each launch waits for its end, so that nothing on the device may wait for what comes later."""

    def pin(self, memory: torch.Tensor) -> None:
        """Take all of this host memory and lock it, for direct copies; the caller's thread waits.

        ``memory`` begins and ends at the system's page boundaries and must be given to ``unpin`` before it
        is freed. Raises RuntimeError when the system or the driver refuses; then the calling thread uses the
        device no more, for it may be told so again.
        """

    def unpin(self, memory: torch.Tensor) -> None:
        """Undo ``pin`` of the same tensor, with no copy on its way. Raises RuntimeError like ``pin``."""

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
