"""Defines a device's services beyond tensors: memory, ordering, transfers.

The classes here are the CPU's: work is done when a call returns, so most methods do next to nothing. Other
kinds of device override the methods that differ. Owns no tensor of the engine; does not know the contents of
a page.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable

import numpy as np
import torch

from manylora.config.declaring import ConfigError
from manylora.devices.free_memory import free_bytes

_log = logging.getLogger(__name__)

Tensors = tuple[torch.Tensor, ...]

_ALIGNMENT_BYTES = 64


def open_device(name: str) -> Device:
    """Open the device "cpu" or "cuda"; "auto" is CUDA where there is a GPU. Raises ConfigError."""
    from manylora.devices.cuda import CudaDevice, cuda_is_available

    if name == "auto":
        name = "cuda" if cuda_is_available() else "cpu"
    if name == "cpu":
        return Device()
    if name == "cuda":
        return CudaDevice()
    raise ConfigError(f"device {name!r} is not known: use auto, cpu or cuda")


class CopyLane:
    """Ordered copies between host and device memory, beside the steps. Used by one thread at a time, which
    has no other work on the device. Within ``here`` another thread may use it, from ``begin`` to ``end``.

    On the CPU the calling thread makes the copies; large ones release the interpreter's lock.
    """

    def __init__(self) -> None:
        self._seconds = 0.0

    def here(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the step loop's thread may use the lane; its own work on the device stays
        separate."""
        return contextlib.nullcontext()

    def launch(self, start: Callable[[], None]) -> None:
        """Call ``start``, which launches kernels that copy, after the copies requested before."""
        began = time.perf_counter()
        start()
        self._seconds += time.perf_counter() - began

    def begin(self, issued: object) -> None:
        """Make later copies wait for the work that ``issued`` marks (see ``Device.issued``), and for no work
        issued after it."""
        self._seconds = 0.0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between contiguous tensors of one size and dtype, after all copies requested before. The copy
        begins no later than ``end``.

        Does not wait for the copy, unless many bytes are in flight already.
        """
        began = time.perf_counter()
        copy_bytes(target, source)
        self._seconds += time.perf_counter() - began

    def landing(self) -> Callable[[], None]:
        """Begin all copies requested so far, and return a function for the step loop's thread. Work issued
        after its call waits for these copies; the thread itself does not."""
        return lambda: None

    def end(self) -> Callable[[], float]:
        """Return a function for any thread. It waits until all copies requested since ``begin`` have landed.
        It returns the seconds that they took, or raises the error that they met."""
        seconds = self._seconds
        return lambda: seconds


Elapsed = Callable[[], Callable[[], float]]
"""Ends a measurement after all work issued so far, and returns a function for any thread. That function waits
until the work has ended and returns the seconds since the measurement began, or raises the device's error."""


class Device:
    """A device that runs one engine's steps in the order in which they are issued. This class is the CPU;
    subclasses are other devices."""

    name: str = "cpu"
    """The name in messages: "cpu", "cuda (NVIDIA H200)"."""

    copies_from_pinned = False
    """Whether ``pin`` makes copies with host memory faster."""

    captures = False
    """Whether ``capture`` saves the host the launches."""

    launches_wait = False
    """Whether each launch waits for its end, so that nothing on the device may wait for later work."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def free_bytes(self) -> int:
        """Return the bytes that could be allocated now: on a machine without swapping, within the limits of
        this process's cgroups."""
        return free_bytes()

    def share_bytes(self, share: float) -> int:
        """Return the bytes of this share of a GPU's whole memory, less the bytes that this process holds
        already. Other processes' memory does not count. On a CPU it is a share of the free memory."""
        return int(share * self.free_bytes())

    def zeros(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a large tensor of zeros. Where the system can, memory is taken only as it is first
        written."""
        # torch.zeros would write every byte, so a large pool would take seconds and all its memory at once.
        # numpy's zeros come untouched from the system. The alignment is that of torch's own tensors.
        num_bytes = math.prod(sizes) * dtype.itemsize
        raw = np.zeros(num_bytes + _ALIGNMENT_BYTES, dtype=np.uint8)
        begin = -raw.ctypes.data % _ALIGNMENT_BYTES
        return torch.from_numpy(raw[begin : begin + num_bytes]).view(dtype).view(sizes)

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """Return the array on the device, ordered before later work. The caller must never change the array
        again."""
        return torch.from_numpy(array)

    def send(self, array: np.ndarray, target: torch.Tensor) -> None:
        """Copy the array to ``target``, contiguous, on the device, of the array's type and length, after all
        work issued so far. Does not wait for that work; the array may be changed afterwards."""
        target.copy_(torch.from_numpy(array))

    def download(self, tensor: torch.Tensor) -> Callable[[], np.ndarray]:
        """Start to copy the tensor's contents, after all work issued so far, to the host; later work may
        change the tensor.

        Returns a function to be called once, later. It waits for the copy and returns it, or raises an error
        that the device met until then.
        """
        # A copy: the next step may write to the same memory before this is read.
        found = tensor.numpy().copy()
        return lambda: found

    def sending_together(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the step loop's thread sends by ``send`` and plans. At its end
        all these numbers are on their way."""
        return contextlib.nullcontext()

    def capture(self, run: Callable[[], Tensors]) -> Callable[[], Tensors]:
        """Run once, then record ``run``'s launches; return a function that launches them again.

        The function returns the tensors that ``run`` returned, with new contents; any later replay of any
        capture may overwrite them. ``run`` must launch the same work at the same addresses whatever memory
        holds, return contiguous tensors, and not wait for the device. Raises RuntimeError where the device
        refuses.
        """
        return run

    def captured_bytes(self) -> int:
        """Return the bytes of device memory that captures hold."""
        return 0

    def issued(self) -> object:
        """Return a mark for everything issued so far, for ``CopyLane.begin``. Called on the step loop's
        thread."""
        return None

    def has_passed(self, issued: object) -> bool:
        """Return whether all work that ``issued`` marks has ended. Does not wait."""
        return True

    def measure(self) -> Elapsed:
        """Begin to measure time, on the device's own clock, from when all work issued so far has ended. Does
        not wait."""
        began = time.perf_counter()

        def end() -> Callable[[], float]:
            seconds = time.perf_counter() - began
            return lambda: seconds

        return end

    def copy_lane(self) -> CopyLane:
        """Return a lane whose copies run beside steps and beside other lanes."""
        return CopyLane()

    def mark(self, word: torch.Tensor, number: int) -> None:
        """Write the number into ``word``, int64 [1], on the device or pinned, once all work issued so far has
        ended. Another process that watches the word sees the number too. Raises RuntimeError, or OSError or
        AttributeError, where the driver cannot do so."""
        word.numpy()[:] = number

    def pin(self, memory: torch.Tensor) -> None:
        """Take all of this host memory and lock it, for direct copies; the calling thread waits.

        ``memory`` begins and ends at the system's page boundaries and must be passed to ``unpin`` before it
        is freed. Raises RuntimeError when the system or the driver refuses. The calling thread must then not
        use the device any more, since the device may report the same error to it again.
        """
        return

    def unpin(self, memory: torch.Tensor) -> None:
        """Undo ``pin`` of the same tensor, with no copy under way. Raises RuntimeError like ``pin``."""
        return

    def release(self, memory: torch.Tensor, what: str) -> None:
        """Undo ``pin``, or log that it fails. ``what``: the memory's name in the log."""
        try:
            self.unpin(memory)
        except RuntimeError as error:
            _log.warning("%s could not be unpinned: %s", what, error)

    def synchronize(self) -> None:
        """Wait for everything issued. Raises errors that the device reports late."""
        return

    def release_memory(self) -> None:
        """Return memory that is held but unused to the system."""
        return


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between contiguous host tensors of one size, in the calling thread.

    torch's own copy would wake a second team of compute threads beside the step loop's.
    """
    np.copyto(_as_bytes(target), _as_bytes(source))


def _as_bytes(tensor: torch.Tensor) -> np.ndarray:
    return np.asarray(tensor.view(-1).view(torch.uint8).numpy())
