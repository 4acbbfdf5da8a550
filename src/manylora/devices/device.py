"""What the rest of manylora asks of a device beyond tensors: memory, ordering, transfers.

The classes here are the CPU's: work is done when a call returns, so most of them do next to nothing. Other kinds
of device override what differs. Owns no tensor of the engine; does not know what a page holds.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable

import numpy as np
import torch

from manylora.config import ConfigError
from manylora.devices.free_memory import free_bytes

Tensors = tuple[torch.Tensor, ...]

_ALIGNMENT_BYTES = 64


def open_device(name: str) -> Device:
    """The device called "cpu" or "cuda"; "auto" is CUDA where there is a GPU. Raises ConfigError."""
    from manylora.devices.cuda import CudaDevice, cuda_is_available

    if name == "auto":
        name = "cuda" if cuda_is_available() else "cpu"
    if name == "cpu":
        return Device()
    if name == "cuda":
        return CudaDevice()
    raise ConfigError(f"device {name!r} is not known: use auto, cpu or cuda")


class Mirror:
    """Numbers for the device, at one address: what a captured step reads. Used by the step loop's thread."""

    def __init__(self, length: int, device: torch.device) -> None:
        self.tensor = torch.zeros(length, dtype=torch.int64, device=device)
        """The first entries are what was sent last."""

    def stage(self) -> np.ndarray:
        """Where the next numbers are to be written before ``send``: int64, as long as ``tensor``; it holds
        anything. Does not wait for steps that are still to come to an end, unless there are many."""
        return np.asarray(self.tensor.numpy())

    def send(self, count: int) -> None:
        """Copy the first ``count`` numbers of the last stage to the front of ``tensor``, after all work issued so
        far. Does not wait for that work. Nothing is written to the stage afterwards."""
        return


class PageWriter:
    """Writes page images into the pool while steps run. Made on the step loop's thread, used by one other."""

    def write(self, target: torch.Tensor, image: torch.Tensor) -> None:
        """Copy ``image`` (host, contiguous) to ``target`` (device, same shape and dtype, contiguous).

        ``image`` may be reused at once. The write waits for all work issued before the writer was made.
        """
        copy_bytes(target, image)

    def close(self) -> None:
        """Return when every write has landed. Raises what went wrong on the way."""
        return


class CopyLane:
    """Copies between host and device memory beside the steps, in order. Used by one thread, which has no
    other work on the device; or, from ``begin`` to ``end`` within ``here``, by another meanwhile.

    On the CPU they are made in the calling thread; large ones leave the interpreter to others meanwhile.
    """

    def __init__(self) -> None:
        self._seconds = 0.0

    def here(self) -> contextlib.AbstractContextManager[None]:
        """For the step loop's thread, whose own work on the device stays apart."""
        return contextlib.nullcontext()

    def launch(self, start: Callable[[], None]) -> None:
        """``start`` launches kernels that copy, after what was asked for before."""
        began = time.perf_counter()
        start()
        self._seconds += time.perf_counter() - began

    def begin(self, issued: object) -> None:
        """Copies from here on wait for the work that ``issued`` stands for (see ``Device.issued``), and for none
        that was issued after it."""
        self._seconds = 0.0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between contiguous tensors of one size and dtype, after those asked for before: begun at the latest
        by ``end``.

        Returns early, unless much is on its way already.
        """
        began = time.perf_counter()
        copy_bytes(target, source)
        self._seconds += time.perf_counter() - began

    def landing(self) -> Callable[[], None]:
        """Begins all that was asked for so far, and gives a function for the step loop's thread: work issued after
        it was called there waits for those copies, without keeping that thread."""
        return lambda: None

    def end(self) -> Callable[[], float]:
        """Gives a function for any thread: it waits until all that was asked for since ``begin`` has landed
        and returns the seconds which those copies took, or raises what went wrong with them."""
        seconds = self._seconds
        return lambda: seconds


Elapsed = Callable[[], Callable[[], float]]
"""Ends a measurement after all work issued so far, and gives a function for any thread: it waits until that work
has ended and returns the seconds since the measurement began, or raises what went wrong on the device."""


class Device:
    """A device that runs one engine's steps, in the order they are issued: the CPU, unless a subclass says
    otherwise."""

    name: str = "cpu"
    """For people: "cpu", "cuda (NVIDIA H200)"."""

    copies_from_pinned = False
    """Whether ``pin`` makes copies with host memory faster."""

    captures = False
    """Whether ``capture`` spares the host the launches."""

    launches_wait = False
    """Whether each launch waits for its end, so that nothing on the device may wait for what comes later."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def free_bytes(self) -> int:
        """Memory that could be allocated now: of a machine without swapping, within the limits of this process's
        cgroups."""
        return free_bytes()

    def share_bytes(self, share: float) -> int:
        """What this process does not hold yet of this share of a GPU's whole memory, whatever others hold. On a
        CPU it is a share of what is free."""
        return int(share * self.free_bytes())

    def zeros(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A large tensor of zeros. Where the system can, memory is taken only as it is first written."""
        # torch.zeros would write every byte, and a large pool would take seconds and all its memory at once;
        # numpy's come untouched from the system. torch aligns its own tensors likewise.
        num_bytes = math.prod(sizes) * dtype.itemsize
        raw = np.zeros(num_bytes + _ALIGNMENT_BYTES, dtype=np.uint8)
        begin = -raw.ctypes.data % _ALIGNMENT_BYTES
        return torch.from_numpy(raw[begin : begin + num_bytes]).view(dtype).view(sizes)

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """The array on the device, ordered before later work. The caller never changes the array again."""
        return torch.from_numpy(array)

    def send(self, array: np.ndarray, target: torch.Tensor) -> None:
        """Copy to ``target``, contiguous, on the device, of the array's type and length, after all work issued so
        far. Does not wait for that; the array may be changed afterwards."""
        target.copy_(torch.from_numpy(array))

    def download(self, tensor: torch.Tensor) -> Callable[[], np.ndarray]:
        """Start to copy to the host what the tensor holds after all work issued so far; later work may change it.

        Gives a function for one later call: it waits for the copy and returns it, or raises what went wrong
        on the device until then.
        """
        # A copy: the next step may write to the same memory before this is read.
        found = tensor.numpy().copy()
        return lambda: found

    def sending_together(self) -> contextlib.AbstractContextManager[None]:
        """What the step loop's thread sends within, by ``send``, mirrors and plans, is on its way at the end."""
        return contextlib.nullcontext()

    def mirror(self, length: int) -> Mirror:
        """Memory for ``Mirror``: ``length`` numbers, zero at first."""
        return Mirror(length, self.torch_device)

    def capture(self, run: Callable[[], Tensors]) -> Callable[[], Tensors]:
        """Run once, then record ``run``'s launches; gives a function that launches them again.

        It returns what ``run`` returned, with new contents, which any later replay of any capture may overwrite.
        ``run`` must launch the same work at the same addresses whatever memory holds, return contiguous tensors,
        and not wait for the device. Raises RuntimeError where the device refuses.
        """
        return run

    def captured_bytes(self) -> int:
        """Device memory that captures hold."""
        return 0

    def page_writer(self) -> PageWriter:
        """A writer whose writes come after everything issued so far."""
        return PageWriter()

    def issued(self) -> object:
        """Stands for everything issued so far, for ``CopyLane.begin``. Called on the step loop's thread."""
        return None

    def has_passed(self, issued: object) -> bool:
        """Whether all work that ``issued`` stands for has ended. Does not wait."""
        return True

    def measure(self) -> Elapsed:
        """Begin to measure time, on the device's own clock, when all work issued so far has ended. Does not
        wait."""
        began = time.perf_counter()

        def end() -> Callable[[], float]:
            seconds = time.perf_counter() - began
            return lambda: seconds

        return end

    def copy_lane(self) -> CopyLane:
        """A lane whose copies run beside steps and beside other lanes."""
        return CopyLane()

    def can_mark(self) -> bool:
        """Whether ``mark`` works."""
        return True

    def mark(self, word: torch.Tensor, number: int) -> None:
        """Once all work issued so far has ended ``word``, int64 [1], on the device or pinned, holds the number,
        also for another process that looks for it meanwhile."""
        word.numpy()[:] = number

    def pin(self, memory: torch.Tensor) -> None:
        """Take all of this host memory and lock it, for direct copies; the caller's thread waits.

        ``memory`` begins and ends at the system's page boundaries and must be given to ``unpin`` before it
        is freed. Raises RuntimeError when the system or the driver refuses; then the calling thread uses the
        device no more, for it may be told so again.
        """
        return

    def unpin(self, memory: torch.Tensor) -> None:
        """Undo ``pin`` of the same tensor, with no copy on its way. Raises RuntimeError like ``pin``."""
        return

    def synchronize(self) -> None:
        """Wait for everything issued. Raises errors that the device reports late."""
        return

    def release_memory(self) -> None:
        """Give memory that is held but unused back to the system."""
        return


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between contiguous host tensors of one size in the calling thread.

    torch's own copy would wake a second team of compute threads beside the step loop's.
    """
    np.copyto(_as_bytes(target), _as_bytes(source))


def _as_bytes(tensor: torch.Tensor) -> np.ndarray:
    return np.asarray(tensor.view(-1).view(torch.uint8).numpy())
