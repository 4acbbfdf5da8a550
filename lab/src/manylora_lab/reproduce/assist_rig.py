"""Cold rows' products on the CPU: by the engine's threads, and by ways that no server offers (CaraServe §4.2).

Products are those of q, k and v of one adapter of random numbers, one for each layer, as in a prefill. Ways:

- shared: the engine's threads over one memory, each with a slice of the tokens;
- socket: processes with such a thread each, which have rows and give results over domain sockets;
- threads: one process, torch's own threads.

Invocations, with a thread that stands for the device, whose kernels take time and no core:

- native: the host waits for the device before it hands rows over, and launches what follows only then;
- queued: the device hands them over itself, in its order, and the host waits for nothing.
"""

from __future__ import annotations

import os
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch

from manylora.config.cold_start import num_cores
from manylora.devices.device import open_device
from manylora.executor.cpu_lora import LATE_S, CpuLora, TimedProduct, cut
from manylora.kernels.shapes import PageShape, Projection, ProjectionGroup, adapter_geometry
from manylora.memory.pool import HostPool

_HEAD_DIM, _PAGE_TOKENS = 128, 16
_DTYPE = torch.bfloat16


class AssistPool:
    """The adapter in a host pool, and its numbers by layer: ``weights[layer]`` has A ``[rank, hidden]`` and B
    ``[rank, hidden]`` of each of the three projections."""

    def __init__(self, hidden: int, layers: int, rank: int) -> None:
        page = PageShape(layers, _PAGE_TOKENS, hidden // _HEAD_DIM, _HEAD_DIM, _DTYPE.itemsize)
        group = ProjectionGroup("qkv", tuple(Projection(name, hidden, hidden) for name in ("q", "k", "v")))
        self.geometry = adapter_geometry(page, ((group,),) * layers)
        self.hidden, self.layers, self.rank = hidden, layers, rank
        self.timed = TimedProduct(self.geometry, rank)
        self.host = HostPool(self.timed.num_pages, page, _DTYPE, open_device("cpu"))
        generator = torch.Generator().manual_seed(0)
        for number in range(self.timed.num_pages):
            own = self.host.page(number)
            own.copy_(torch.randn(own.shape, generator=generator).mul_(0.02))
        self.weights = [
            [
                (self._matrix(first_a, layer), self._matrix(first_b, layer))
                for first_a, first_b, _ in self.timed.records[0].tolist()
            ]
            for layer in range(layers)
        ]

    def _matrix(self, first: int, layer: int) -> torch.Tensor:
        geometry = self.geometry
        count = geometry.cells(self.hidden) * self.rank
        begins = torch.from_numpy(self.timed.offsets[first : first + count]) + layer * geometry.slab_elements
        within = torch.arange(geometry.cell_elements)
        whole = self.host.run(0, self.host.num_pages).view(_DTYPE)
        return whole[begins[:, None] + within].reshape(self.rank, -1)[:, : self.hidden].contiguous()

    def exact(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        """float32 ``[T, 3 hidden]``."""
        wide = x.float()
        return torch.cat([wide @ a.float().T @ b.float() for a, b in self.weights[layer]], 1)

    def close(self) -> None:
        self.host.close()


# ---------------------------------------------------------------- ways


class AssistWay(Protocol):
    """How products come about: one ``post`` and one ``take`` for each layer between ``begin`` and ``end``."""

    def begin(self, num_tokens: int) -> None:
        """A prefill of so many tokens."""

    def post(self, x: torch.Tensor) -> None:
        """The next layer's rows are x ``[T, hidden]``."""

    def take(self) -> np.ndarray:
        """Their results, float32 ``[T, 3 hidden]``, until the next ``post``."""

    def busy_s(self) -> float:
        """Seconds that the busiest process has computed of this prefill."""

    def end(self) -> None:
        """No row comes any more."""

    def close(self) -> None:
        """End what was started."""


class SharedWay:
    """``count`` of the engine's threads, each of which takes as much as every other."""

    def __init__(self, pool: AssistPool, count: int) -> None:
        self._pool, self._count = pool, count
        self._cpu = CpuLora(pool.geometry, pool.host, count)

    def begin(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._cpu.slice_tokens = -(-num_tokens // self._count)
        until = time.monotonic() + LATE_S
        # On a crowded machine a thread may still be about to end the prefill before.
        while not self._cpu.begin(self._pool.timed.work(num_tokens, self._pool.layers)):
            if time.monotonic() > until:
                raise OSError("CPU LoRA's threads do not end")

    def post(self, x: torch.Tensor) -> None:
        self._cpu.rows(self._num_tokens, self._pool.hidden).copy_(x)
        self._cpu.post()

    def take(self) -> np.ndarray:
        self._cpu.wait()
        return np.asarray(self._cpu.results(self._num_tokens, 3 * self._pool.hidden).numpy())

    def busy_s(self) -> float:
        return self._cpu.busy_s()

    def end(self) -> None:
        self._cpu.end()

    def close(self) -> None:
        self._cpu.close()


_NUMBER = struct.Struct("<q")
_TOOK = struct.Struct("<d")
"""Before the results: for how many seconds they have been computed so far."""


def _send(sock: socket.socket, message: bytes) -> None:
    sock.sendall(_NUMBER.pack(len(message)) + message)


def _receive(sock: socket.socket) -> bytes | None:
    """The next message; None where the other side has ended."""
    head = sock.recv(_NUMBER.size, socket.MSG_WAITALL)
    return sock.recv(_NUMBER.unpack(head)[0], socket.MSG_WAITALL) if head else None


def _serve_socket(arguments: list[str]) -> None:
    """The life of a process behind a socket. ``arguments``: its core or -1, the descriptor of its socket, and what
    the pool is made of."""
    core, descriptor, *made_of = map(int, arguments)
    if core >= 0:
        os.sched_setaffinity(0, {core})
    pool = AssistPool(*made_of)
    way = SharedWay(pool, 1)
    with socket.socket(fileno=descriptor) as sock:
        while (told := _receive(sock)) is not None:
            (num_tokens,) = _NUMBER.unpack(told)
            way.begin(num_tokens)
            for _ in range(pool.layers):
                sent = _receive(sock)
                if sent is None:
                    break
                way.post(torch.frombuffer(bytearray(sent), dtype=_DTYPE).view(num_tokens, -1))
                found = way.take()
                _send(sock, _TOOK.pack(way.busy_s()) + found.tobytes())
            way.end()
    way.close()


class SocketWay:
    """``count`` processes behind domain sockets."""

    def __init__(self, pool: AssistPool, count: int) -> None:
        self._pool = pool
        self._socks: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        cores = num_cores()
        for number in range(count):
            ours, theirs = socket.socketpair()
            core = number % cores if cores > count else -1
            numbers = core, theirs.fileno(), pool.hidden, pool.layers, pool.rank
            command = [sys.executable, "-m", "manylora_lab.reproduce.assist_rig", *map(str, numbers)]
            self._processes.append(
                subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
            )
            theirs.close()
            self._socks.append(ours)

    def begin(self, num_tokens: int) -> None:
        shares = cut([num_tokens], -(-num_tokens // len(self._socks)), len(self._socks))
        self._results = np.empty((num_tokens, 3 * self._pool.hidden), np.float32)
        self._given: list[tuple[socket.socket, slice]] = []
        for sock, ((_, first, end),) in zip(self._socks, (own.tolist() for own in shares)):
            _send(sock, _NUMBER.pack(end - first))
            self._given.append((sock, slice(first, end)))
        self._busy_s = [0.0] * len(self._given)

    def post(self, x: torch.Tensor) -> None:
        for sock, own in self._given:
            _send(sock, x[own].view(torch.int16).numpy().tobytes())

    def take(self) -> np.ndarray:
        for number, (sock, own) in enumerate(self._given):
            told = _receive(sock)
            if told is None:
                raise OSError("a process behind a socket has ended")
            (self._busy_s[number],) = _TOOK.unpack_from(told)
            found = np.frombuffer(told, np.float32, offset=_TOOK.size)
            self._results[own] = found.reshape(own.stop - own.start, -1)
        return self._results

    def busy_s(self) -> float:
        return max(self._busy_s)

    def end(self) -> None:
        self._given = []

    def close(self) -> None:
        for sock in self._socks:
            sock.close()
        for process in self._processes:
            process.wait()


class ThreadsWay:
    """This process, by ``count`` of torch's threads, from matrices that lie in one piece."""

    def __init__(self, pool: AssistPool, count: int) -> None:
        self._pool, self._before = pool, torch.get_num_threads()
        torch.set_num_threads(count)

    def begin(self, num_tokens: int) -> None:
        self._layer, self._took_s = 0, 0.0

    def post(self, x: torch.Tensor) -> None:
        self._x = x

    def take(self) -> np.ndarray:
        began = time.perf_counter()
        parts = [(self._x @ a.T @ b).float() for a, b in self._pool.weights[self._layer]]
        found = torch.cat(parts, 1).numpy()
        self._layer += 1
        self._took_s += time.perf_counter() - began
        return np.asarray(found)

    def busy_s(self) -> float:
        return self._took_s

    def end(self) -> None:
        del self._x

    def close(self) -> None:
        torch.set_num_threads(self._before)


WAYS: dict[str, Callable[[AssistPool, int], AssistWay]] = {
    "shared": SharedWay,
    "socket": SocketWay,
    "threads": ThreadsWay,
}


class Prefill(NamedTuple):
    """Seconds in all, and those that the busiest process computed; ``error``: the largest of the last layer's
    results, relative to the largest of them."""

    seconds: float
    busy_s: float
    error: float


def prefill(pool: AssistPool, way: AssistWay, x: torch.Tensor, repeats: int) -> Prefill:
    """All layers' products of x ``[T, hidden]``, one after another: of each the least of so many runs, after one
    that warms caches."""
    seconds, busy_s = np.empty((repeats + 1, pool.layers)), np.empty((repeats + 1, pool.layers))
    for run in range(repeats + 1):
        way.begin(len(x))
        before_s = 0.0
        for layer in range(pool.layers):
            began = time.perf_counter()
            way.post(x)
            found = way.take()
            seconds[run, layer] = time.perf_counter() - began
            now_s = way.busy_s()
            busy_s[run, layer], before_s = now_s - before_s, now_s
        way.end()
    least_s, least_busy_s = (float(values[1:].min(axis=0).sum()) for values in (seconds, busy_s))
    return Prefill(least_s, least_busy_s, _error(pool, x, found))


def _error(pool: AssistPool, x: torch.Tensor, found: np.ndarray) -> float:
    truth = pool.exact(x, pool.layers - 1)
    return float((torch.from_numpy(found) - truth).abs().max() / truth.abs().max())


# ---------------------------------------------------------------- beside a device


class StandIn:
    """A thread that does what is launched, in order."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="stand-in", daemon=True)
        self._thread.start()

    def launch(self, call: Callable[[], None]) -> None:
        self._queue.put(call)

    def kernel(self, seconds: float) -> None:
        """Launch one that takes so long."""
        self._queue.put(lambda: time.sleep(seconds))

    def synchronize(self) -> None:
        """Wait until all that was launched is done."""
        done = threading.Event()
        self._queue.put(done.set)
        done.wait()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            call()


class LayerTimes(NamedTuple):
    """Of one layer on the device: before its rows are there, the base's product of them, and what the host takes
    to launch it."""

    before_s: float
    product_s: float
    launch_s: float


def beside_device(
    pool: AssistPool, way: AssistWay | None, x: torch.Tensor, times: LayerTimes, *, is_native: bool
) -> float:
    """Seconds of a prefill whose rows' products come by ``way`` (None: no row is cold)."""
    device = StandIn()
    taken: list[np.ndarray] = []
    if way is not None:
        way.begin(len(x))
    began = time.perf_counter()
    for _ in range(pool.layers):
        if way is None:
            time.sleep(times.launch_s)
            device.kernel(times.before_s + times.product_s)
        elif is_native:
            device.kernel(times.before_s)
            device.synchronize()
            way.post(x)
            time.sleep(times.launch_s)
            device.kernel(times.product_s)
            device.launch(lambda: taken.append(way.take()))
        else:
            time.sleep(times.launch_s)
            device.kernel(times.before_s)
            device.launch(lambda: way.post(x))
            device.kernel(times.product_s)
            device.launch(lambda: taken.append(way.take()))
    device.synchronize()
    seconds = time.perf_counter() - began
    device.close()
    if way is not None:
        way.end()
    return seconds


if __name__ == "__main__":
    _serve_socket(sys.argv[1:])
