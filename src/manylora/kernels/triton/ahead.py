"""Compiles kernels before their first launch, in several processes at once.

A start finds the kernels that it needs by rehearsing its steps: the launch of a kernel that is not loaded yet
is skipped, and the kernel is ordered from a process. When the steps really run, they find the compiled
kernels in Triton's cache. A note in the cache marks each compiled kernel, so a later start rehearses only a
few steps. The module does not know what the steps compute.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton import knobs

from manylora import processes
from manylora.devices.preparation import PREPARATION
from manylora.types import first_line

LEAST_PROCESSES, MOST_PROCESSES = 2, 12
"""Bounds on the number of compiler processes. A process takes seconds to start, so one alone saves no time
over compiling in line; more than twelve wait for each other."""

_KEPT = "manylora-compiled"
"""Name of the folder in Triton's cache that holds the notes of compiled kernels."""

_WAIT_S = 180.0
"""Seconds to wait for all processes together. Kernels not compiled by then are compiled at their launch."""

_log = logging.getLogger(__name__)


class Missing(NamedTuple):
    """A kernel variant to compile: its ``order`` for ``compiler_process``, and its note's file name."""

    order: str
    note: str


def missing(function: Any, module: str, name: str, data: str) -> Missing:
    """Return the order and the note for a kernel call that Triton has reported to its hooks.

    ``module`` and ``name`` are the function's; ``data`` describes the call in the form that
    ``JITFunction.preload`` reads.
    """
    target = triton.runtime.driver.active.get_current_target()
    kind = (target.backend, target.arch, target.warp_size)
    key = json.dumps([triton.__version__, function.cache_key, *kind, data])
    order = {"module": module, "name": name, "data": data, "target": kind}
    return Missing(json.dumps(order), hashlib.sha256(key.encode()).hexdigest())


def notes_folder() -> Path:
    return Path(knobs.cache.dir) / _KEPT


class CompileAhead:
    """The compiler processes of one start. Used by one thread, which ends the processes with ``close``."""

    def __init__(self, most_processes: int = MOST_PROCESSES) -> None:
        self._most = min(most_processes, len(os.sched_getaffinity(0)) - 1)
        self._orders: queue.SimpleQueue[Missing | None] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[str]] = []
        self._threads: list[threading.Thread] = []
        self._asked: set[str] = set()
        self._lock = threading.Condition()
        self._num_left = self._num_compiled = 0
        self._error = ""

    def rehearse(self, steps: Sequence[Callable[[], object]], num_decisive: int) -> bool:
        """Compile the kernels that these steps lack, wait for them, and return whether any was compiled.

        Steps run without the launches of kernels that are not loaded, so their results are meaningless. If no
        call has ordered a kernel by the time the first ``num_decisive`` steps have run, the other steps are
        skipped. Returns False at once where processes or Triton's cache are missing, and False after any
        error: kernels are then compiled when they are launched. The wait ends after ``_WAIT_S`` seconds.
        """
        if self._most < LEAST_PROCESSES or not knobs.cache.dir:
            return False
        began_s = time.monotonic()
        before = self._num_compiled
        try:
            with self._leaving_out():
                for number, step in enumerate(steps):
                    if number == num_decisive and not self._asked:
                        return False
                    step()
            with PREPARATION.running(), self._lock:
                if not self._lock.wait_for(lambda: not self._num_left, _WAIT_S):
                    self._error = "they took too long"
        except Exception as error:  # for example, an unknown version of Triton
            _log.warning("kernels are compiled one by one: %s", first_line(error))
            return False
        if (count := self._num_compiled - before) or self._error:
            _log.info(
                "compiled %d kernels by %d processes in %.1f s%s",
                count,
                len(self._processes),
                time.monotonic() - began_s,
                f"; others later: {self._error}" if self._error else "",
            )
        return count > 0

    def close(self) -> None:
        """Kill the processes and join the threads. May be called again."""
        processes, self._processes = self._processes, []
        for process in processes:
            process.kill()
            process.wait()
        for _ in self._threads:
            self._orders.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    @contextlib.contextmanager
    def _leaving_out(self) -> Iterator[None]:
        runtime = knobs.runtime
        before = runtime.jit_cache_hook

        def leave_out(**what: Any) -> bool:
            function, data = what["fn"], what["compile"]["specialization_data"]
            self._ask(missing(function.jit_function, function.module, function.name, data))
            return True  # Triton then neither compiles nor launches

        runtime.jit_cache_hook = leave_out
        try:
            yield
        finally:
            runtime.jit_cache_hook = before

    def _ask(self, wanted: Missing) -> None:
        if wanted.note in self._asked or (notes_folder() / wanted.note).exists():
            return
        self._asked.add(wanted.note)
        with self._lock:
            self._num_left += 1
        self._orders.put(wanted)
        if len(self._threads) < min(self._most, len(self._asked)):
            process = processes.start(
                "manylora.kernels.triton.compiler_process",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            )
            self._processes.append(process)
            thread = threading.Thread(
                target=self._serve, args=(process,), name="manylora-compile", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _serve(self, process: subprocess.Popen[str]) -> None:
        """Send orders to one process, one at a time, until ``close`` ends the queue."""
        assert process.stdin is not None
        assert process.stdout is not None
        while (wanted := self._orders.get()) is not None:
            try:
                process.stdin.write(wanted.order + "\n")
                process.stdin.flush()
                error = json.loads(process.stdout.readline() or '"a compiler has ended"')
            except (OSError, ValueError) as failure:
                error = str(failure)
            if not error:
                notes_folder().mkdir(parents=True, exist_ok=True)
                (notes_folder() / wanted.note).touch()
            with self._lock:
                self._num_left -= 1
                self._num_compiled += not error
                self._error = error or self._error
                self._lock.notify_all()
