"""The page ledger of one tier: which page ids are free, and which only become free when steps have ended.

Does not know what a page holds or who owns it; owners return what they took.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from manylora.types import PageId


class PageLedger:
    """Ids of free pages. One released while steps are in flight is not given out before they have ended: issued
    work may still touch it. Steps end in the order in which they started; the host's ledger hears of none."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        # Taken from the end, so that low ids are used first and a journal reads naturally.
        self._free: list[PageId] = list(range(num_pages - 1, -1, -1))
        # What becomes free when a step ends, by the step.
        self._deferred: collections.deque[tuple[int, Sequence[PageId]]] = collections.deque()
        self.num_deferred = 0
        self._last_started = 0
        self._last_ended = 0

    @property
    def num_free(self) -> int:
        """Pages that can be taken now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that are neither free nor about to be."""
        return self.num_pages - len(self._free) - self.num_deferred

    @property
    def is_step_in_flight(self) -> bool:
        return self._last_started > self._last_ended

    def take(self, count: int) -> tuple[PageId, ...]:
        """Exactly ``count`` pages; the caller has made sure that they are there."""
        if count > len(self._free):
            raise AssertionError(f"took {count} pages where {len(self._free)} are free")
        if count == 1:  # the usual case, in the middle of decisions
            return (self._free.pop(),)
        return tuple(self._free.pop() for _ in range(count))

    def release(self, pages: Sequence[PageId]) -> None:
        """Return pages, for when no step that started so far is in flight any more."""
        if self._last_started > self._last_ended:
            self._deferred.append((self._last_started, pages))
            self.num_deferred += len(pages)
        else:
            self._free.extend(pages)

    def step_started(self, step: int) -> None:
        """A step was issued; numbers rise."""
        self._last_started = step

    def step_ended(self, step: int) -> None:
        """The step has ended: what waited for it, or for one before it, is free."""
        self._last_ended = step
        while self._deferred and self._deferred[0][0] <= step:
            _, pages = self._deferred.popleft()
            self._free.extend(pages)
            self.num_deferred -= len(pages)

    def unowned(self) -> list[PageId]:
        """Every page that nobody owns, for invariant checks."""
        return self._free + [page for _, pages in self._deferred for page in pages]
