"""The page ledger of one device: which page ids are free, and which only become free when a step has ended.

Does not know what a page holds or who owns it; owners return what they took.
"""

from __future__ import annotations

from collections.abc import Iterable

from manylora.types import PageId


class PageLedger:
    """Ids of free pages. A page released while a step is in flight is not given out before that step ends."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        # Taken from the end, so that low ids are used first and a journal reads naturally.
        self._free: list[PageId] = list(range(num_pages - 1, -1, -1))
        self._deferred: list[PageId] = []

    @property
    def num_free(self) -> int:
        """Pages that can be taken now."""
        return len(self._free)

    @property
    def num_deferred(self) -> int:
        """Pages that become free when the step in flight ends."""
        return len(self._deferred)

    @property
    def num_used(self) -> int:
        """Pages that are neither free nor about to be."""
        return self.num_pages - len(self._free) - len(self._deferred)

    def take(self, count: int) -> tuple[PageId, ...]:
        """Exactly ``count`` pages; the caller has made sure that they are there."""
        if count > len(self._free):
            raise AssertionError(f"took {count} pages where {len(self._free)} are free")
        if count == 1:  # the usual case, in the middle of decisions
            return (self._free.pop(),)
        return tuple(self._free.pop() for _ in range(count))

    def release(self, pages: Iterable[PageId], *, step_in_flight: bool) -> None:
        """Return pages; issued work may still touch them while a step is in flight."""
        (self._deferred if step_in_flight else self._free).extend(pages)

    def settle(self) -> None:
        """No step is in flight any more: deferred pages are free."""
        self._free.extend(self._deferred)
        self._deferred.clear()

    def unowned(self) -> list[PageId]:
        """Every page that nobody owns, for invariant checks."""
        return self._free + self._deferred
