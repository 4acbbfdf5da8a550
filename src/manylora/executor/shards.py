"""Splits a batch of a small model among CPU threads, each of which runs its rows from inputs to samples.

Torch splits every operation among threads instead, which pays for large matrices; a model whose weights
fit into the cache has operations of some ten microseconds, and forking and joining threads for each costs more
than it gains. Rows of one step are independent: no row reads what another writes in the same step.
Knows nothing of models or tensors.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

SMALL_MODEL_BYTES = 48 * 2**20
"""Weights up to this size are read by every thread from its cache; larger ones must be read once."""

MIN_ROWS = 4
"""Rows that a thread must get to be worth waking."""

MAX_SHARE = 0.7
"""Where one part would have more of the tokens than this, a long prompt dominates: torch's way is better."""

_Result = TypeVar("_Result")


class Shards:
    """``num_threads`` threads whose torch operations are single-threaded."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        before = torch.get_num_threads()
        self._pool = concurrent.futures.ThreadPoolExecutor(
            num_threads, thread_name_prefix="manylora-shard", initializer=torch.set_num_threads, initargs=(1,)
        )
        # All threads start now: each start also changes the default for threads to come, which is not ours.
        everyone = threading.Barrier(num_threads)
        concurrent.futures.wait([self._pool.submit(everyone.wait) for _ in range(num_threads)])
        torch.set_num_threads(before)

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
        futures = [self._pool.submit(part) for part in parts]
        concurrent.futures.wait(futures)
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
