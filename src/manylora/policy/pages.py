"""The page ledger of one tier: the ids that are free, and the ids that become free when steps have ended.

Owners return the pages that they took.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from manylora.types import PageId


class PageLedger:
    """The ids of free pages.

    A page released while steps are in flight is not given out before they have ended: issued work may still
    touch it. Steps end in the order in which they started. The host's ledger gets no ``step_started``.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_used = 0  # neither free nor about to be; asked for all the time, so counted
        self.num_taken = 0  # ever
        # Taken from the end, so that low ids are used first and a journal reads naturally.
        self._free: list[PageId] = list(range(num_pages - 1, -1, -1))
        # What becomes free when a step ends, by the step.
        self._deferred: collections.deque[tuple[int, Sequence[PageId]]] = collections.deque()
        self.num_deferred = 0
        """Pages that can be taken when the steps in flight have ended."""
        self._last_started = 0
        self._last_ended = 0

    @property
    def num_free(self) -> int:
        """Pages that can be taken now."""
        return len(self._free)

    def take(self, count: int) -> tuple[PageId, ...]:
        """Take exactly ``count`` pages; the caller has made sure that they are free."""
        if count > len(self._free):
            raise AssertionError(f"took {count} pages where {len(self._free)} are free")
        self.num_used += count
        self.num_taken += count
        if count == 1:  # the usual case, in the middle of decisions
            return (self._free.pop(),)
        return tuple(self._free.pop() for _ in range(count))

    def release(self, pages: Sequence[PageId], last_step: int | None = None) -> None:
        """Return pages; they become free when ``last_step`` has ended, the last that reads them.

        Without it that is the last step that has started so far.
        """
        self.num_used -= len(pages)
        step = self._last_started if last_step is None else last_step
        if step > self._last_ended:
            self._deferred.append((step, pages))
            self.num_deferred += len(pages)
        else:
            self._free.extend(pages)

    # ------------------------------------------------------------ steps

    def step_started(self, step: int) -> None:
        """Note that a step was issued; numbers rise."""
        self._last_started = step

    def step_ended(self, step: int) -> None:
        """Free the pages that waited for the step, or for one before it."""
        self._last_ended = step
        while self._deferred and self._deferred[0][0] <= step:
            _, pages = self._deferred.popleft()
            self._free.extend(pages)
            self.num_deferred -= len(pages)

    def has_ended(self, step: int) -> bool:
        """Return whether the step, and every one before it, has ended."""
        return step <= self._last_ended
