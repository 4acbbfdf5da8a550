"""Nodes that may leave a tier, or enter one, kept in order of value as it changes.

A node's value decays with time, but nodes of one kind never overtake each other: a value model names *buckets*
within which the order stands still. Each bucket is a heap; a decision compares only their heads. So choosing is
exact, and its cost does not grow with time or the number of nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable

from manylora.policy.tree import HELD, RESIDENT, DependencyTree, Node
from manylora.policy.value import ValueModel

_Entry = tuple[float, float, int, Node]
"""Rank, tie-break by depth, stamp, node."""


class CandidateList:
    """One list of candidates. ``slot``: the index of its stamp in a node's stamps.

    ``takes_best``: the most valuable node is first (to enter) rather than the least valuable (to leave). An
    entry is stale once its node is offered again or is no candidate any more; ``pop`` passes over it.
    """

    def __init__(
        self, slot: int, values: ValueModel, is_candidate: Callable[[Node], bool], takes_best: bool = False
    ) -> None:
        self._slot = slot
        self.values = values
        self._is_candidate = is_candidate
        self._sign = -1.0 if takes_best else 1.0
        self._buckets: dict[Hashable, list[_Entry]] = {}
        self._stamps = 0
        self._num_entries = 0
        self._num_at_sweep = 0
        # While a decision is made: each bucket's best entry, and which entry that is.
        self._heads: list[tuple[float, float, int, Hashable]] | None = None
        self._noted: dict[Hashable, int] = {}
        self._changed: set[Hashable] = set()  # buckets that may have another best entry than was noted

    def __bool__(self) -> bool:
        """Return whether there may be a candidate; all entries may be stale."""
        return self._num_entries > 0

    def offer(self, node: Node) -> None:
        """Add a candidate, with its present value."""
        self._stamps += 1
        node.stamps[self._slot] = self._stamps
        bucket = self.values.bucket(node)
        heap = self._buckets.get(bucket)
        if heap is None:
            heap = self._buckets[bucket] = []
        # Among equals the deepest leaves first and enters last.
        rank = self._sign * self.values.rank(node)
        heapq.heappush(heap, (rank, -self._sign * node.depth, self._stamps, node))
        self._num_entries += 1
        if self._heads is not None:
            self._changed.add(bucket)
        # Without pressure nothing is ever popped; keep stale entries from piling up.
        if self._num_entries > 1024 + 4 * self._num_at_sweep:
            self._sweep()

    def begin(self, now: float) -> None:
        """Start a decision; until ``end`` values are compared as of ``now``."""
        self._now = now
        self._heads = []
        self._noted.clear()
        self._changed = set(self._buckets)

    def pop(self) -> tuple[Node, float] | None:
        """Return the next candidate of the decision with its value (log seconds), if any."""
        heads = self._heads
        assert heads is not None, "a decision is begun before it is made"
        for bucket in self._changed:
            self._note_head(bucket)
        self._changed.clear()
        while heads:
            value, _, stamp, bucket = heapq.heappop(heads)
            if self._noted.get(bucket) != stamp:
                continue  # another became its bucket's best since
            heap = self._buckets[bucket]
            if not heap or heap[0][2] != stamp or not self._is_valid(heap[0]):
                self._note_head(bucket)
                continue
            node = heapq.heappop(heap)[3]
            self._num_entries -= 1
            node.stamps[self._slot] = 0
            self._changed.add(bucket)
            return node, self._sign * value
        return None

    def end(self) -> None:
        """End the decision."""
        self._heads = None

    def _note_head(self, bucket: Hashable) -> None:
        """Note the bucket's best valid entry; an empty bucket is forgotten."""
        heap = self._buckets.get(bucket, [])
        while heap and not self._is_valid(heap[0]):
            heapq.heappop(heap)
            self._num_entries -= 1
        if not heap:
            self._buckets.pop(bucket, None)
            self._noted.pop(bucket, None)
            return
        assert self._heads is not None
        _, _, stamp, node = heap[0]
        if self._noted.get(bucket) == stamp:
            return
        self._noted[bucket] = stamp
        value, tie = self.values.value(node, self._now)
        heapq.heappush(self._heads, (self._sign * value, self._sign * tie, stamp, bucket))

    def _is_valid(self, entry: _Entry) -> bool:
        _, _, stamp, node = entry
        return node.stamps[self._slot] == stamp and self._is_candidate(node)

    def _sweep(self) -> None:
        for bucket in list(self._buckets):
            kept = [entry for entry in self._buckets[bucket] if self._is_valid(entry)]
            if kept:
                heapq.heapify(kept)
                self._buckets[bucket] = kept
            else:
                del self._buckets[bucket]
        self._num_entries = sum(map(len, self._buckets.values()))
        self._num_at_sweep = self._num_entries
        if self._heads is not None:
            self.begin(self._now)


class Candidates:
    """The candidates to leave each tier, and to enter the device.

    ``device``, ``host``: the values of nodes in each tier. ``has_parts``: adapters and KV leave from lists of
    their own. ``can_enter``: nodes may enter ahead of demand.
    """

    def __init__(
        self, tree: DependencyTree, device: ValueModel, host: ValueModel, has_parts: bool, can_enter: bool
    ) -> None:
        self._tree = tree
        self._can_enter = can_enter
        self.leaving = self.leaving_adapters = CandidateList(0, device, tree.may_leave)
        if has_parts:
            self.leaving_adapters = CandidateList(0, device, tree.may_leave)
        self.leaving_host = CandidateList(2, host, tree.may_leave_host)
        self.entering = CandidateList(1, device, tree.may_enter, takes_best=True)

    def offer(self, node: Node) -> None:
        """Take a node that changed: it may have become a candidate, or have another value."""
        tree = self._tree
        if node.residence is RESIDENT and node.busy == 0 and tree.may_leave(node):
            (self.leaving_adapters if node.parent is None else self.leaving).offer(node)
        if node.host is HELD:
            if self._can_enter and tree.may_enter(node):
                self.entering.offer(node)
            if tree.may_leave_host(node):
                self.leaving_host.offer(node)

    def begin(self, candidates: CandidateList, now: float) -> None:
        """Begin a decision on one of the lists, by the values of this moment."""
        candidates.values.refresh(now, self._tree.resident_adapters)
        candidates.begin(now)
