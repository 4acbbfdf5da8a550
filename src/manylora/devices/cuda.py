"""Implements the device on CUDA. Only the ``devices`` package uses ``torch.cuda``.

Steps run on the thread's current stream (torch's default stream); pages are copied on other streams.
"""

# mypy: disallow-untyped-calls=False
# torch's streams and events have no annotations.

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import os
from collections.abc import Callable

import numpy as np
import torch

from manylora.config.declaring import ConfigError
from manylora.devices.device import CopyLane, Device, Elapsed, Tensors
from manylora.devices.preparation import PREPARATION
from manylora.devices.staging import DownloadBuffers, borrowed, upload_buffers


@functools.cache
def _driver() -> ctypes.CDLL:
    # PyDLL keeps the interpreter's lock during calls: they take microseconds, and regaining it may take longer.
    return ctypes.PyDLL("libcuda.so.1")


_CHUNK_BYTES, _CHUNKS_AHEAD = 128 * 2**20, 1
"""The bytes of a lane's chunk, and how many chunks may be under way before the lane waits. A chunk takes some
milliseconds, as long as the thread may wait for the interpreter. Copies that have not begun can be cancelled."""

_MADV_POPULATE_WRITE = 23
"""The advice that takes memory without changing its contents, from Linux 5.14 on. Elsewhere the call fails
without effect."""


def cuda_is_available() -> bool:
    return torch.cuda.is_available()


def launches_wait() -> bool:
    """Return whether each launch waits for its end, so that nothing on the device may wait for later work."""
    return os.environ.get("CUDA_LAUNCH_BLOCKING") == "1"


def visible_gpus() -> list[str]:
    """List the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them. Takes no memory on
    them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    names = [str(place) for place in range(count)] if named is None else named.split(",")
    return names[:count]


class CudaDevice(Device):
    """The current CUDA device. Raises ConfigError when there is none."""

    copies_from_pinned = True
    captures = True

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            built = "finds no GPU" if torch.version.cuda else "is built without CUDA"
            raise ConfigError(f"device cuda was asked for, but this torch ({torch.__version__}) {built}")
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.launches_wait = launches_wait()
        self.name = f"cuda ({torch.cuda.get_device_name(self.torch_device)})"
        self._captures: _Captures | None = None
        self._inbox = DownloadBuffers(self.torch_device)

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        held = torch.cuda.memory_reserved(self.torch_device)
        return free + held - torch.cuda.memory_allocated(self.torch_device)

    def share_bytes(self, share: float) -> int:
        _, total = torch.cuda.mem_get_info(self.torch_device)
        return int(share * total) - torch.cuda.memory_allocated(self.torch_device)

    def zeros(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(sizes, dtype=dtype, device=self.torch_device)

    def upload(self, array: np.ndarray) -> torch.Tensor:
        target = torch.empty_like(torch.from_numpy(array), device=self.torch_device)
        self.send(array, target)
        return target

    def send(self, array: np.ndarray, target: torch.Tensor) -> None:
        staged = upload_buffers(self.torch_device).stage(array.size, target.dtype)
        staged.numbers[:] = array.reshape(-1)
        staged.send(target)

    def sending_together(self) -> contextlib.AbstractContextManager[None]:
        return upload_buffers(self.torch_device).together()

    def download(self, tensor: torch.Tensor) -> Callable[[], np.ndarray]:
        return self._inbox.start(tensor)

    def capture(self, run: Callable[[], Tensors]) -> Callable[[], Tensors]:
        if self._captures is None:
            self._captures = _Captures(self.torch_device)
        return self._captures.capture(run)

    def captured_bytes(self) -> int:
        return 0 if self._captures is None else self._captures.num_bytes

    def issued(self) -> object:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def has_passed(self, issued: object) -> bool:
        assert isinstance(issued, torch.cuda.Event)
        return bool(issued.query())

    def measure(self) -> Elapsed:
        begun, ended = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        begun.record(torch.cuda.current_stream(self.torch_device))

        def end() -> Callable[[], float]:
            ended.record(torch.cuda.current_stream(self.torch_device))

            def wait() -> float:
                ended.synchronize()
                return float(begun.elapsed_time(ended)) / 1e3

            return wait

        return end

    def copy_lane(self) -> CopyLane:
        return _CudaCopyLane(self.torch_device)

    def mark(self, word: torch.Tensor, number: int) -> None:
        # With the barrier, all earlier work of the stream is visible everywhere on the device.
        status = _driver().cuStreamWriteValue64_v2(
            ctypes.c_void_p(torch.cuda.current_stream(self.torch_device).cuda_stream),
            ctypes.c_uint64(word.data_ptr()),
            ctypes.c_uint64(number),
            ctypes.c_uint(0),  # with the barrier
        )
        if status:
            raise RuntimeError(f"the driver does not write a number in a stream: error {status}")

    def pin(self, memory: torch.Tensor) -> None:
        # Memory is taken before registration: the driver would take it while it holds locks that steps need.
        address, size = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes)
        ctypes.CDLL(None).madvise(address, size, _MADV_POPULATE_WRITE)
        with torch.cuda.device(self.torch_device):
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))

    def unpin(self, memory: torch.Tensor) -> None:
        with torch.cuda.device(self.torch_device):
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def release_memory(self) -> None:
        torch.cuda.empty_cache()


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for all captures of a process: cuBLAS keeps 32 MiB for every stream that it has
    seen."""
    return torch.cuda.Stream(device)


class _Captures:
    """CUDA graphs that share one pool of memory, since they are replayed one after another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _capture_stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self.num_bytes = 0

    @PREPARATION.running()
    def capture(self, run: Callable[[], Tensors]) -> Callable[[], Tensors]:
        run()  # compiles kernels and loads modules, which is not allowed during a capture
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        free_before, _ = torch.cuda.mem_get_info(self._device)
        # Not torch.cuda.graph, which collects garbage each time. This takes tenths of a second for tens of graphs.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # "thread_local", because other threads allocate and copy during the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = run()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(self._stream)
        free_after, _ = torch.cuda.mem_get_info(self._device)
        self.num_bytes += max(0, free_before - free_after)
        # The tensors are released, so that later captures may use their memory.
        kept = tuple(borrowed(output, output.device) for output in outputs)
        del outputs

        def replay() -> Tensors:
            graph.replay()
            return kept

        return replay


class _CudaCopyLane(CopyLane):
    """A lane with one stream. Transfers are collected and issued by few calls, since each call may have to
    wait for the interpreter, which the step loop uses too. Waiting threads sleep."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._begun: torch.cuda.Event | None = None
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self._collected_bytes = 0
        self._marks: collections.deque[torch.cuda.Event] = collections.deque()

    def here(self) -> contextlib.AbstractContextManager[None]:
        return torch.cuda.stream(self.stream)

    def launch(self, start: Callable[[], None]) -> None:
        self._issue()
        self._begin_timing()
        start()

    def begin(self, issued: object) -> None:
        assert isinstance(issued, torch.cuda.Event)
        # The current stream is set for this thread alone, which has no other work on the device.
        torch.cuda.set_stream(self.stream)
        self.stream.wait_event(issued)
        self._begun = None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._targets.append(target)
        self._sources.append(source)
        self._collected_bytes += source.nbytes
        if self._collected_bytes < _CHUNK_BYTES:
            return
        self._issue()
        mark = torch.cuda.Event(blocking=True)
        mark.record(self.stream)
        self._marks.append(mark)
        if len(self._marks) > _CHUNKS_AHEAD:
            self._marks.popleft().synchronize()

    def _begin_timing(self) -> None:
        if self._begun is None:
            self._begun = self._timer()
            self._begun.record(self.stream)

    def landing(self) -> Callable[[], None]:
        self._issue()
        landed = torch.cuda.Event()
        landed.record(self.stream)
        device = self.stream.device
        return lambda: torch.cuda.current_stream(device).wait_event(landed)

    def end(self) -> Callable[[], float]:
        failure = None
        try:
            self._issue()
        except Exception as error:  # transfers that have begun must still be awaited
            failure = error
        begun, ended = self._begun, self._timer()
        ended.record(self.stream)

        def wait() -> float:
            ended.synchronize()
            if failure is not None:
                raise failure
            return float(begun.elapsed_time(ended)) / 1e3 if begun is not None else 0.0

        return wait

    def _issue(self) -> None:
        targets, sources = self._targets, self._sources
        self._targets, self._sources, self._collected_bytes = [], [], 0
        if not targets:
            return
        self._begin_timing()
        torch._foreach_copy_(targets, sources, non_blocking=True)

    def _timer(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True, blocking=True)
