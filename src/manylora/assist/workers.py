"""The engine's side of its CPU workers: starts them, hands steps over, and replaces those that die or are slow.

Owns the processes, their sockets and the board. A worker that fails is killed, so that it writes nothing any more
where later steps' rows lie; after some deaths no other is started. Does not know sequences or models.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import time
from collections.abc import Callable

import numpy as np

from manylora import processes
from manylora.assist.board import BoardShape, new_board
from manylora.assist.orders import LentPool, Orders, Product, cut, encoded, send

MOST_DEATHS = 3
_SPIN_S = 200e-6
_PAUSE_S = 20e-6
_LOOK_S = 0.01
_IDLE_S = 0.02
_SEND_S = 2.0

_log = logging.getLogger(__name__)


class WorkersFailed(RuntimeError):
    """A worker died, or did not answer in time: what the step asked of the CPU is not there."""


class _Worker:
    """One process. ``step``: the last step that it was given."""

    def __init__(self, number: int, core: int, board: int, shape: BoardShape, place: LentPool) -> None:
        ours, theirs = socket.socketpair()
        # Each product is one core's, whatever the machine's libraries would take.
        environment = os.environ | dict.fromkeys(
            ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
        )
        numbers = (
            number, core, theirs.fileno(), board,
            shape.num_workers, shape.num_tokens, shape.in_features, shape.out_features, shape.dtype,
        )  # fmt: skip
        self.number = number
        self.step = 0
        self._is_ready = False
        self._sock = ours
        try:
            self.process = processes.start(
                "manylora.assist.process",
                *map(str, numbers),
                pass_fds=(theirs.fileno(), board, place.pool),
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.settimeout(_SEND_S)
        send(ours, encoded(place))

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def is_ready(self) -> bool:
        """Whether it has said that it serves."""
        if not self._is_ready:
            readable, _, _ = select.select([self._sock], [], [], 0)
            self._is_ready = bool(readable) and self._sock.recv(1) == b"r"
        return self._is_ready

    def give(self, orders: Orders) -> None:
        """Raises OSError where it does not take them."""
        send(self._sock, encoded(orders))
        self.step = orders.step

    def end(self) -> None:
        """It is gone when this returns, and writes nothing any more."""
        self._sock.close()
        self.process.kill()
        self.process.wait()


class Workers:
    """``num_workers`` processes that read the pool at ``place``. Of one thread."""

    def __init__(self, shape: BoardShape, place: LentPool, cores: list[int], late_s: float) -> None:
        """``cores``: where they are bound, in turn; empty: nowhere. ``late_s``: how long a step waits for them in
        all. Raises OSError where the system gives no process or no memory."""
        self.shape = shape
        self.slice_tokens = 16
        """As many tokens as one worker takes before another one helps."""
        self._place = place
        self._cores = cores
        self._late_s = late_s
        self._descriptor, self.board = new_board(shape)
        self._num_deaths = 0
        self._num_steps = 0
        self._num_jobs = 0
        self._workers: list[_Worker] = []
        for number in range(shape.num_workers):
            self._workers.append(self._new(number))

    def _new(self, number: int) -> _Worker:
        core = self._cores[number % len(self._cores)] if self._cores else -1
        worker = _Worker(number, core, self._descriptor, self.shape, self._place)
        self.board.note_step(number, 0)
        self.board.note_done(number, 0)
        return worker

    @property
    def num_workers(self) -> int:
        """How many there are, those that are about to begin too; 0: it is off for good."""
        return len(self._workers)

    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def wait_ready(self, seconds: float) -> bool:
        """Wait until all serve; False where some do not within ``seconds``."""
        until = time.monotonic() + seconds
        while not all(worker.is_ready() for worker in self._workers):
            if time.monotonic() > until or not all(worker.is_alive for worker in self._workers):
                return False
            time.sleep(0.002)
        return True

    # ------------------------------------------------------------ a step

    def begin(
        self,
        lengths: list[int],
        jobs: list[tuple[int, int]],
        products: list[Product],
        cells: list[np.ndarray],
    ) -> HandedStep | None:
        """Hand a step over: ``lengths`` rows of each adapter, whose cells lie at ``cells`` (int64). None where no
        worker is free to take it."""
        self._replace_dead()
        free = self._free()
        if not free:
            return None
        self._num_steps += 1
        packed = [part.astype("<i8").tobytes() for part in cells]
        shares = cut(lengths, self.slice_tokens, len(free))
        given = []
        for worker, slices in zip(free, shares):
            orders = Orders(self._num_steps, sum(lengths), self._num_jobs, jobs, products, packed, slices)
            try:
                worker.give(orders)
            except OSError:
                worker.process.kill()
                self.board.abandon(self._num_steps)
                self._replace_dead()
                return None
            given.append(worker)
        step = HandedStep(self, given, self._num_steps, self._num_jobs, time.monotonic() + self._late_s)
        self._num_jobs += len(jobs)
        return step

    def _free(self) -> list[_Worker]:
        """Those that serve and have nothing to do any more, which a moment is waited for."""
        ready = [worker for worker in self._workers if worker.is_ready()]
        until = time.monotonic() + _IDLE_S
        while True:
            free = [worker for worker in ready if self.board.step(worker.number) >= worker.step]
            if len(free) == len(ready) or time.monotonic() > until:
                return free
            time.sleep(_PAUSE_S)

    def _replace_dead(self) -> None:
        """Start others in place of those that have died, unless too many have."""
        for place, worker in enumerate(self._workers):
            if worker.is_alive:
                continue
            worker.end()
            self._num_deaths += 1
            if self._num_deaths >= MOST_DEATHS:
                _log.warning(
                    "CPU workers have died %d times: cold requests wait for their adapters from now on",
                    self._num_deaths,
                )
                self._end_all()
                return
            self._workers[place] = self._new(worker.number)

    def failed(self, step: HandedStep) -> None:
        """Kill those of the step's workers that have not done what was posted."""
        for worker in step.given:
            if self.board.done(worker.number) < self.board.posted and worker.is_alive:
                worker.process.kill()
                worker.process.wait()
        self.board.abandon(step.number)
        self._replace_dead()

    def _end_all(self) -> None:
        for worker in self._workers:
            worker.end()
            self.board.release(worker.number)
        self._workers = []

    def close(self) -> None:
        """End them all. Idempotent."""
        self._end_all()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class HandedStep:
    """A step that some workers have been told of: its jobs are posted and taken one after the other."""

    def __init__(
        self, workers: Workers, given: list[_Worker], number: int, first_job: int, until: float
    ) -> None:
        self.given = given
        self.number = number
        self.waited_s = 0.0
        """How long the caller's thread has waited for results."""
        self._workers = workers
        self._board = workers.board
        self.job = first_job
        """The number of the last one that was posted."""
        self._until = until
        self._busy_ns = [self._board.busy_ns(worker.number) for worker in given]

    def rows(self, num_tokens: int, features: int) -> np.ndarray:
        """Where the next job's rows are to be written before ``post``."""
        return self._board.rows(num_tokens, features)

    def post(self) -> None:
        """The next job's rows are there."""
        self.job += 1
        self._board.post(self.job)

    def take(self, num_tokens: int, features: int) -> np.ndarray:
        """Wait for the job's results: a view, until the next ``post``. Raises WorkersFailed."""
        began = looked = time.monotonic()
        board, job = self._board, self.job
        waiting = [worker for worker in self.given if board.done(worker.number) < job]
        while waiting:
            now = time.monotonic()
            time.sleep(0 if now - began < _SPIN_S else _PAUSE_S)
            if now - looked > _LOOK_S:
                looked = now
                has_failed = now > self._until or not all(worker.is_alive for worker in waiting)
                # One may have ended after it had done its part.
                if has_failed and any(board.done(worker.number) < job for worker in waiting):
                    self._workers.failed(self)
                    raise WorkersFailed("a CPU worker died" if now <= self._until else "CPU workers are late")
            waiting = [worker for worker in waiting if board.done(worker.number) < job]
        self.waited_s += time.monotonic() - began
        return board.results(num_tokens, features)

    def wait(self, has_passed: Callable[[], bool]) -> bool:
        """Of a step whose jobs the device posts and takes: wait until it has gone through all of them. Whether no
        worker died; one that did is waited for no longer, by the device either."""
        began = looked = time.monotonic()
        dead: set[int] = set()
        while not has_passed():
            now = time.monotonic()
            time.sleep(0 if now - began < _SPIN_S else _PAUSE_S)
            if now - looked > _LOOK_S:
                looked = now
                for worker in self.given:
                    # One may have ended after it had done its part.
                    is_done = self._board.done(worker.number) >= self.job
                    if worker.number not in dead and not is_done and not worker.is_alive:
                        dead.add(worker.number)
                        self._board.release(worker.number)
        return not dead

    def end(self) -> None:
        """No job of it will be posted any more."""
        self._board.abandon(self.number)

    def busy_s(self) -> float:
        """How long the worker with most to do has computed."""
        busy = [self._board.busy_ns(worker.number) - ns for worker, ns in zip(self.given, self._busy_ns)]
        return max(busy, default=0) / 1e9
