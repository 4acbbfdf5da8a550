"""Splits a batch of a small model among CPU threads, each of which runs its rows from inputs to samples.

Torch splits every operation among threads instead, which pays for large matrices; a model whose weights
fit into the cache has operations of some ten microseconds, and forking and joining threads for each costs more
than it gains. Rows of one step are independent: no row reads what another writes in the same step.
Knows nothing of models or tensors.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

SMALL_MODEL_BYTES = 48 * 2**20
"""Weights up to this size are read by every thread from its cache; larger ones must be read once."""

MIN_ROWS = 4
"""Rows that a thread must get to be worth waking."""

MAX_SHARE = 0.7
"""Where one part would have more of the tokens than this, a long prompt dominates: torch's way is better."""

_Result = TypeVar("_Result")


class Shards:
    """``num_threads`` threads whose torch operations are single-threaded.

    Not a pool of ``concurrent.futures``, which takes no work once the interpreter's main thread has ended, though
    other threads may still wait for steps.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        before = torch.get_num_threads()
        everyone = threading.Barrier(num_threads + 1)
        self._threads = [
            threading.Thread(
                target=self._run_parts, args=(everyone,), name=f"manylora-shard-{n}", daemon=True
            )
            for n in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()
        # All threads have started: each start also changes the default for threads to come, which is not ours.
        everyone.wait()
        torch.set_num_threads(before)

    def _run_parts(self, everyone: threading.Barrier) -> None:
        torch.set_num_threads(1)
        everyone.wait()
        while (taken := self._work.get()) is not None:
            part, future = taken
            try:
                future.set_result(part())
            except BaseException as error:
                future.set_exception(error)
            del taken, part, future  # or the last step's would live until the next

    def split(self, costs: Sequence[int]) -> list[range] | None:
        """Consecutive ranges of rows of about equal cost; None where splitting does not pay."""
        parts = min(self.num_threads, len(costs) // MIN_ROWS)
        if parts < 2:
            return None
        total, begin, spent = sum(costs), 0, 0
        ranges: list[range] = []
        for index, cost in enumerate(costs):
            spent += cost
            if spent * parts >= total * (len(ranges) + 1) and len(ranges) < parts - 1:
                ranges.append(range(begin, index + 1))
                begin = index + 1
        ranges.append(range(begin, len(costs)))
        ranges = [part for part in ranges if len(part)]
        largest = max(sum(costs[i] for i in part) for part in ranges)
        return None if len(ranges) < 2 or largest > MAX_SHARE * total else ranges

    def run(self, parts: Sequence[Callable[[], _Result]]) -> list[_Result]:
        """Run all parts side by side; results in order. Raises the first part's exception once all ended."""
        futures: list[Future[_Result]] = [Future() for _ in parts]
        for pair in zip(parts, futures, strict=True):
            self._work.put(pair)
        concurrent.futures.wait(futures)
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads. Idempotent."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
