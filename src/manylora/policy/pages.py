"""The page ledger of one tier: which page ids are free, and which only become free when steps have ended.

A page that stands by is free, but taken last and in the order in which it came; until then its node may have it
back, with what it holds. Owners return what they took.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from manylora.policy.tree import Node
from manylora.types import PageId


class PageLedger:
    """Ids of free pages. One released while steps are in flight is not given out before they have ended: issued
    work may still touch it. Steps end in the order in which they started; the host's ledger hears of none."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_used = 0  # neither free nor about to be; asked for all the time, so counted
        self.num_taken = 0  # ever
        # Taken from the end, so that low ids are used first and a journal reads naturally.
        self._free: list[PageId] = list(range(num_pages - 1, -1, -1))
        # What becomes free when a step ends, by the step.
        self._deferred: collections.deque[tuple[int, Sequence[PageId]]] = collections.deque()
        self._num_deferred = 0
        self._last_started = 0
        self._last_ended = 0
        # Pages that stand by, oldest first, with their nodes, by a number that rises; up to a certain one the
        # steps have ended that were in flight when they came.
        self._standing: dict[PageId, tuple[int, Node]] = {}
        self._unripe: collections.deque[tuple[int, int, PageId]] = collections.deque()
        self._num_stood_by = 0
        self._last_ripe = 0
        self._num_ripe = 0

    @property
    def num_free(self) -> int:
        """Pages that can be taken now, those that stand by included."""
        return len(self._free) + self._num_ripe

    @property
    def num_deferred(self) -> int:
        """Pages that can be taken when the steps in flight have ended."""
        return self._num_deferred + len(self._standing) - self._num_ripe

    @property
    def is_step_in_flight(self) -> bool:
        return self._last_started > self._last_ended

    def num_short(self, count: int) -> int:
        """How many of ``count`` pages no page that is simply free can be; below 1 where all can."""
        return count - len(self._free)

    def take(self, count: int) -> tuple[PageId, ...]:
        """Exactly ``count`` pages; the caller has made sure that they are free, and that none of them stands
        by."""
        if count > len(self._free):
            raise AssertionError(f"took {count} pages where {len(self._free)} are free")
        self.num_used += count
        self.num_taken += count
        if count == 1:  # the usual case, in the middle of decisions
            return (self._free.pop(),)
        return tuple(self._free.pop() for _ in range(count))

    def release(self, pages: Sequence[PageId]) -> None:
        """Return pages, for when every step that has started so far has ended."""
        self.num_used -= len(pages)
        if self._last_started > self._last_ended:
            self._deferred.append((self._last_started, pages))
            self._num_deferred += len(pages)
        else:
            self._free.extend(pages)

    def release_after(self, step: int, pages: Sequence[PageId]) -> None:
        """Return pages that a step in flight still reads, of a ledger that hears of the ends of such steps."""
        self.num_used -= len(pages)
        self._deferred.append((step, pages))
        self._num_deferred += len(pages)

    # ------------------------------------------------------------ standing by

    def stand_by(self, page: PageId, node: Node) -> None:
        """Return a page, likewise, which the node may have back until it is taken."""
        self.num_used -= 1
        self._num_stood_by += 1
        self._standing[page] = self._num_stood_by, node
        if self._last_started > self._last_ended:
            self._unripe.append((self._last_started, self._num_stood_by, page))
        else:
            self._ripen(self._num_stood_by, page)

    def call_back(self, page: PageId) -> None:
        """The node has its page again."""
        self.num_used += 1
        self._leave_standing(page)

    def stand_down(self, page: PageId) -> None:
        """A page that stands by is free like any other."""
        if self._leave_standing(page):
            self._free.append(page)
        else:
            self.num_used += 1  # as if its node had it back, for release to count it down
            self.release((page,))

    def longest_standing(self) -> Node:
        """The node whose page is taken first of those that stand by."""
        return next(iter(self._standing.values()))[1]

    def _leave_standing(self, page: PageId) -> bool:
        """Take a page from those that stand by; whether it could have been taken."""
        is_ripe = self._standing.pop(page)[0] <= self._last_ripe
        self._num_ripe -= is_ripe
        return is_ripe

    def _ripen(self, number: int, page: PageId) -> None:
        self._last_ripe = number
        # The page may have been called back since, and stand by anew.
        standing = self._standing.get(page)
        self._num_ripe += standing is not None and standing[0] == number

    # ------------------------------------------------------------ steps

    def step_started(self, step: int) -> None:
        """A step was issued; numbers rise."""
        self._last_started = step

    def step_ended(self, step: int) -> None:
        """The step has ended: what waited for it, or for one before it, is free."""
        self._last_ended = step
        while self._deferred and self._deferred[0][0] <= step:
            _, pages = self._deferred.popleft()
            self._free.extend(pages)
            self._num_deferred -= len(pages)
        while self._unripe and self._unripe[0][0] <= step:
            self._ripen(*self._unripe.popleft()[1:])

    def has_ended(self, step: int) -> bool:
        """Whether the step, and every one before it, has ended."""
        return step <= self._last_ended

    # ------------------------------------------------------------ for invariant checks

    def standing(self) -> list[PageId]:
        """Every page that stands by."""
        return list(self._standing)

    def unowned(self) -> list[PageId]:
        """Every page that no node, sequence or copy owns, those that stand by left out."""
        return self._free + [page for _, pages in self._deferred for page in pages]
