"""Computes the products of adapters for cold rows on CPU threads, directly from the host's pool (CaraServe
§4).

Owns the memory for rows and results, and the division of rows among threads. In each step a thread runs one
compiled loop (``loops.serve_cold``) without the interpreter's lock. Does not know sequences, or why a row is
cold.
"""

from __future__ import annotations

import contextlib
import os
import queue
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from manylora.config.cold_start import MOST_CPU_TOKENS, SLICE_SHARE, num_cores
from manylora.kernels import loops
from manylora.kernels.shapes import AdapterGeometry
from manylora.memory.pool import HostPool, shared_memory

LATE_S = 10.0
"""How long a step waits for the threads in total, in seconds, before it goes on without their results."""
_IDLE_NS = 20_000_000
"""How long a step waits until the threads have left the previous step, in nanoseconds."""
_FOR_EVER = 2**62
"""A number that no step or job reaches."""
_LINE_WORDS = 8
"""The int64 words of a cache line. Each thread's words have a line of their own, so that threads do not slow
each other."""


class CpuLoraLate(RuntimeError):
    """The error that the threads did not answer in time, so the step's results are missing."""


class ColdWork(NamedTuple):
    """The cold rows of a step, adapter by adapter. ``lengths``: the number of rows of each adapter. ``jobs``
    int64 [J, 2]: the layer and the group's place, in the decoder's order. ``records`` int64 [N, P, 3] and
    ``scales`` float32 [N, P, L] are as in LoraSegments. ``cells`` int64: the element of the host's pool at
    which each cell's layer 0 begins."""

    lengths: list[int]
    jobs: np.ndarray
    records: np.ndarray
    scales: np.ndarray
    cells: np.ndarray


class CpuLora:
    """A team of ``num_threads`` threads over one host pool, which serves one step at a time. ``memory`` holds
    the ``words`` (int64), the rows (of the pool's type) and the results (float32); a device may read and
    write it too. ``loops`` describes the words."""

    def __init__(
        self, geometry: AdapterGeometry, host: HostPool, num_threads: int, cores_before: int = 0
    ) -> None:
        """Take the memory, compile the loops and start the threads. ``cores_before``: the number of the
        machine's last cores that other engines' threads use. Raises ConfigError where there is no memory."""
        groups = geometry.groups
        self.num_threads = num_threads
        self.slice_tokens = 16
        """The number of tokens that one thread takes before another thread helps; ``tune`` sets it."""
        self.waited_s = 0.0
        """The seconds that the host has waited for results in this step."""
        self.job = 0
        """The number of the last job posted, counted over all steps."""
        sizes = (
            8 * _LINE_WORDS * (1 + num_threads),
            MOST_CPU_TOKENS * max(group.in_features for group in groups) * host.dtype.itemsize,
            MOST_CPU_TOKENS * max(group.offsets[-1] for group in groups) * 4,
        )
        ends = np.cumsum([-(-size // 64) * 64 for size in sizes]).tolist()
        self.memory = shared_memory(ends[2], "CPU LoRA")
        self.words = self.memory[: sizes[0]].view(torch.int64).view(-1, _LINE_WORDS)
        self._rows = self.memory[ends[0] : ends[0] + sizes[1]].view(host.dtype)
        self._results = self.memory[ends[1] : ends[1] + sizes[2]].view(torch.float32)
        self._words = self.words.numpy()
        self._clock = np.zeros(2, np.int64)
        ends = np.cumsum([0] + [len(group.projections) for group in groups])
        self._groups = np.array(
            [(group.in_features, ends[n], ends[n + 1]) for n, group in enumerate(groups)], np.int64
        )
        columns = [
            (begin, projection.out_features)
            for group in groups
            for begin, projection in zip(group.offsets, group.projections)
        ]
        self._columns = np.array(columns, np.int64)
        pool = _numbers(host.run(0, host.num_pages).view(host.dtype))
        memories = _numbers(self._rows), self._results.numpy()
        self._last: tuple[Any, ...] = geometry.cell_elements, geometry.slab_elements, pool, *memories
        self._num_steps = self._num_given = 0
        self._busy_ns = np.zeros(0, np.int64)
        self._compile()
        cores = _cores(num_threads, cores_before)
        self._orders = [queue.SimpleQueue[tuple[Any, ...] | None]() for _ in range(num_threads)]
        self._threads = [
            threading.Thread(
                target=_serve, args=(orders, cores[n : n + 1]), name="manylora-cpu-lora", daemon=True
            )
            for n, orders in enumerate(self._orders)
        ]
        for thread in self._threads:
            thread.start()

    def _compile(self) -> None:
        """Run each loop on empty input, which compiles it or loads the code that an earlier process
        compiled."""
        none = np.zeros((0, 3), np.int64)
        scales, cells = np.zeros((0, 0, 0), np.float32), np.zeros(0, np.int64)
        work = none[:, :2].copy(), self._groups, none, self._columns, none.reshape(0, 1, 3), scales, cells
        loops.serve_cold(self._words, 1, 0, 0, *work, *self._last)
        loops.set_word(self._words, 0, loops.ABANDONED, 0)
        loops.await_words(self._words, 0, loops.DONE, 0, 0, self._clock)

    # ------------------------------------------------------------ a step

    def begin(self, work: ColdWork) -> int:
        """Hand a step over, and return how many threads have rows of it. Return 0 where the step has more
        than MOST_CPU_TOKENS rows, a thread has not left the previous step, or the threads have ended."""
        if sum(work.lengths) > MOST_CPU_TOKENS or not self._orders:
            return 0
        before = self._num_given, loops.ENDED, self._num_steps
        if loops.await_words(self._words, *before, _IDLE_NS, self._clock) < 0:
            return 0
        self._num_steps += 1
        shares = cut(work.lengths, self.slice_tokens, self.num_threads)
        self._num_given, self.waited_s = len(shares), 0.0
        self._busy_ns = self._words[1 : 1 + len(shares), loops.BUSY_NS].copy()
        described = self._columns, work.records, work.scales, work.cells
        for own, (orders, slices) in enumerate(zip(self._orders, shares), 1):
            given = self._words, own, self._num_steps, self.job, work.jobs, self._groups, slices
            orders.put((*given, *described, *self._last))
        return len(shares)

    def rows(self, num_tokens: int, features: int) -> torch.Tensor:
        """Return the memory for the next job's rows, ``[num_tokens, features]``, to be written before
        ``post``."""
        return self._rows[: num_tokens * features].view(num_tokens, features)

    def results(self, num_tokens: int, features: int) -> torch.Tensor:
        """Return the memory of the last job's results, float32 ``[num_tokens, features]``. They are complete
        once all threads have done the job."""
        return self._results[: num_tokens * features].view(num_tokens, features)

    def post(self) -> None:
        """Post the next job, whose rows have been written."""
        self.job += 1
        loops.set_word(self._words, 0, loops.POSTED, self.job)

    def wait(self) -> None:
        """Wait for the last job's results. Raises CpuLoraLate where the step's waits exceed LATE_S in
        total."""
        left_ns = int((LATE_S - self.waited_s) * 1e9)
        waited_ns = loops.await_words(
            self._words, self._num_given, loops.DONE, self.job, left_ns, self._clock
        )
        if waited_ns < 0:
            self.waited_s = LATE_S
            raise CpuLoraLate("CPU LoRA is late")
        self.waited_s += waited_ns / 1e9

    def end(self) -> None:
        """End the step: no more of its jobs will be posted, and unfinished jobs are abandoned."""
        loops.set_word(self._words, 0, loops.ABANDONED, self._num_steps)

    def busy_s(self) -> float:
        """Return the seconds that the busiest thread has computed in this step."""
        busy = self._words[1 : 1 + self._num_given, loops.BUSY_NS] - self._busy_ns
        return float(busy.max(initial=0)) / 1e9

    def close(self) -> None:
        """End the threads, release the pool, and end the waits of a device that awaits the threads.
        Idempotent."""
        loops.set_word(self._words, 0, loops.ABANDONED, _FOR_EVER)
        for orders in self._orders:
            orders.put(None)
        for thread in self._threads:
            thread.join()
        self._orders, self._last = [], ()
        for own in range(1, 1 + self.num_threads):
            loops.set_word(self._words, own, loops.DONE, _FOR_EVER)


def _serve(orders: queue.SimpleQueue[tuple[Any, ...] | None], cores: list[int]) -> None:
    """Serve steps on a thread, bound to the given cores, until ``orders`` gives None."""
    if cores:
        with contextlib.suppress(AttributeError, OSError):  # where the system refuses, any core will do
            os.sched_setaffinity(0, cores)  # 0: this thread alone
    while (given := orders.get()) is not None:
        loops.serve_cold(*given)


def _cores(count: int, before: int) -> list[int]:
    """Return the last ``count`` cores of this process before its ``before`` last ones. Return none where that
    leaves no core for other threads."""
    end = num_cores() - before
    return sorted(os.sched_getaffinity(0))[end - count : end] if end > count else []


def _numbers(values: torch.Tensor) -> np.ndarray:
    """Return the values as the loops read them: float32, float16's bits as uint16, or bfloat16's as int16."""
    if values.dtype is torch.float32:
        return np.asarray(values.numpy())
    numbers = np.asarray(values.view(torch.int16).numpy())
    return numbers.view(np.uint16) if values.dtype is torch.float16 else numbers


def cut(lengths: list[int], slice_tokens: int, num_threads: int) -> list[np.ndarray]:
    """Divide rows evenly among threads (CaraServe §4.2). ``lengths``: each adapter's number of rows, one
    adapter after another. Use as few threads as suffice with ``slice_tokens`` rows each, at most
    ``num_threads``. Returns for each thread int64 [S, 3]: an adapter's place, its first row, and the end of
    its rows."""
    total = sum(lengths)
    count = max(1, min(num_threads, -(-total // slice_tokens), total))
    ends = np.cumsum(lengths).tolist()
    found = []
    for thread in range(count):
        first, end = thread * total // count, (thread + 1) * total // count
        own = [
            (adapter, max(first, last - length), min(end, last))
            for adapter, (length, last) in enumerate(zip(lengths, ends))
            if max(first, last - length) < min(end, last)
        ]
        found.append(np.array(own, np.int64).reshape(-1, 3))
    return found


# ---------------------------------------------------------------- before serving

_TRIED_RANK, _TRIED_TOKENS, _REPEATS = 16, (4, 32, 128), 3
_CPU = torch.device("cpu")


def tune(cpu: CpuLora, geometry: AdapterGeometry, host: HostPool, device: torch.device) -> None:
    """Set ``slice_tokens`` from times measured on the geometry's first group. Leave it unchanged where the
    threads are late or the host's pool has too little room."""
    timed = TimedProduct(geometry, _TRIED_RANK, device)
    if timed.num_pages > host.num_pages:
        return
    before = cpu.slice_tokens
    try:
        # The least of the tries, since much else runs during a start, and one handover stands for those of
        # all products.
        seconds = {tokens: timed.seconds(cpu, tokens, of=min) for tokens in _TRIED_TOKENS}
    except CpuLoraLate:
        cpu.slice_tokens = before
        return
    fewest, most = _TRIED_TOKENS[0], _TRIED_TOKENS[-1]
    token_s = max(seconds[most][0] - seconds[fewest][0], 1e-9) / (most - fewest)
    read_s = max(seconds[fewest][0] - fewest * token_s, 0.0)
    handover_s = min(max(whole_s - busy_s, 0.0) for busy_s, whole_s in seconds.values())
    cpu.slice_tokens = int(min(max(SLICE_SHARE * (read_s + handover_s) / token_s, 1), MOST_CPU_TOKENS))


class TimedProduct:
    """The product of the first group with an adapter of ``rank``, for timing. The adapter's rows are
    consecutive in the first pages of the host's pool; the input is on ``device``. ``num_bytes``: the size of
    the adapter's rows in one layer."""

    def __init__(self, geometry: AdapterGeometry, rank: int, device: torch.device = _CPU) -> None:
        group, first = geometry.groups[0], 0
        self.records = np.zeros((1, len(geometry.projections), 3), np.int64)
        for place, projection in enumerate(group.projections):
            of_a = rank * geometry.cells(group.in_features)
            self.records[0, place] = first, first + of_a, rank
            first += of_a + rank * geometry.cells(projection.out_features)
        self.num_pages = -(-first // geometry.cells_per_page)
        self.num_bytes = first * geometry.cell_elements * geometry.itemsize
        self.in_features, self.width = group.in_features, group.offsets[-1]
        self._device = device
        self._layers = geometry.page.layers
        page, cell = np.divmod(np.arange(first, dtype=np.int64), geometry.cells_per_page)
        self.offsets = np.asarray(page * geometry.page_elements + cell * geometry.cell_elements)

    def work(self, num_tokens: int, num_layers: int = 1) -> ColdWork:
        """Describe this product for ``num_tokens`` rows in the first ``num_layers`` layers."""
        jobs = np.array([(layer, 0) for layer in range(num_layers)], np.int64)
        scales = np.ones((*self.records.shape[:2], self._layers), np.float32)
        return ColdWork([num_tokens], jobs, self.records, scales, self.offsets)

    def seconds(
        self,
        cpu: CpuLora,
        tokens: int,
        num_busy: int = 1,
        of: Callable[[list[float]], float] = statistics.median,
    ) -> tuple[float, float]:
        """Measure one job that ``num_busy`` threads share. Return the busiest thread's seconds, and the
        seconds until the results are on the device, each reduced by ``of`` over several tries. Sets
        ``cpu.slice_tokens``. Raises CpuLoraLate."""
        busy, whole = [], []
        cpu.slice_tokens = -(-tokens // num_busy)
        target = cpu.rows(tokens, self.in_features)
        x = torch.zeros(target.shape, dtype=target.dtype, device=self._device)
        y = torch.zeros(tokens, self.width, dtype=target.dtype, device=self._device)
        rows = torch.arange(tokens, device=self._device)
        for _ in range(_REPEATS + 1):
            if not cpu.begin(self.work(tokens)):
                raise CpuLoraLate("CPU LoRA is busy")
            began = time.perf_counter()
            # The same operations as in ColdRows.
            target.copy_(x.index_select(0, rows))
            cpu.post()
            cpu.wait()
            y.index_add_(0, rows, cpu.results(tokens, self.width).to(y.device, y.dtype))
            whole.append(time.perf_counter() - began)
            busy.append(cpu.busy_s())
            cpu.end()
        # The first try only warms the caches.
        return of(busy[1:]), of(whole[1:])
