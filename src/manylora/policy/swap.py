"""Movement ahead of demand: the swapper (FastLibra §5.3), the prefetch for the waiting queue (S-LoRA §5.2), and
copies of adapters that a router wants on the device before requests come (dLoRA §5.1).

Owns the moments of these moves: out above the high mark, at every interval or step; in below the low mark,
whenever the lane is idle. The value model chooses the nodes; ``residency`` moves them.
"""

from __future__ import annotations

from manylora.policy.cache_policies import Marks
from manylora.policy.reservations import Reservations
from manylora.policy.tree import ABSENT, HELD, NO_COPY, OFFLOADING, RESIDENT, Node
from manylora.types import AdapterId

LANE_S = 0.005
"""The most that enters at a time, in seconds of the lane: copies that requests wait for queue behind it."""
PREFETCH_MARK = 0.95
"""The share of the device up to which nodes are prefetched, if a policy has no marks."""
QUEUE_DEPTH = 8
"""How many waiting sequences the prefetch looks at."""


class Swapper:
    """The mover of nodes between the tiers ahead of demand."""

    def __init__(self, held: Reservations) -> None:
        self._residency = held.residency
        self._waiting = held.waiting
        self._held = held
        self._marks = held.residency.marks
        high_mark = held.config.cache.high_mark or PREFETCH_MARK
        self._prefetch_limit = int(high_mark * held.config.num_pages)
        self.interval = 0
        self._held_back: list[Node] = []

    def tick(self, now: float) -> None:
        """Take the end of an interval: age visits, and make room."""
        residency = self._residency
        self.interval += 1
        for node in self._held_back:
            if residency.tree.may_enter(node):
                residency.candidates.entering.offer(node)
        self._held_back.clear()
        residency.forget_visits(now)
        tree, counters = residency.tree, residency.counters
        if tree.idle_kv_pages:
            counters.invalid_share_sum += tree.invalid_pages / tree.idle_kv_pages
            counters.invalid_share_samples += 1
        if self._marks is not None:
            self._keep_room(self._marks, now)

    def step_ended(self, now: float) -> None:
        """Make room after a step, if the marks ask for it."""
        marks = self._marks
        if marks is not None and marks.every_step:
            marks.step_ended(self._residency.device.num_taken, now)
            self._keep_room(marks, now)

    def _keep_room(self, marks: Marks, now: float) -> None:
        residency = self._residency
        if residency.pages_used > marks.high_pages:
            for node in residency.shrink(now, marks.high_pages - marks.slack_pages, "busy"):
                node.evicted_in = self.interval

    def use_idle_lane(self, now: float) -> None:
        """Load nodes for waiting requests, then nodes of most value, while nothing else is copied."""
        residency, marks = self._residency, self._marks
        if residency.transfers.is_lane_busy:
            return
        if residency.policy.prefetches and len(self._waiting):
            self._prefetch(now)
        if marks is not None and residency.candidates.entering and residency.pages_used < marks.low_pages:
            self._bring_in(marks, now)

    @property
    def may_bring_in(self) -> bool:
        """Whether a later interval may find a move to make without any event before it."""
        if self._marks is None:
            return False
        used = self._residency.pages_used
        return used > self._marks.high_pages or (used < self._marks.low_pages and bool(self._held_back))

    def _bring_in(self, marks: Marks, now: float) -> None:
        residency = self._residency
        most_pages = max(1, int(LANE_S / residency.rates.page_in_s))
        brought = 0
        entering = residency.candidates.entering
        residency.candidates.begin(entering, now)
        while brought < most_pages and residency.pages_used < marks.low_pages:
            chosen = entering.pop()
            if chosen is None:
                break
            node, value = chosen
            if node.evicted_in >= self.interval - 1:
                self._held_back.append(node)  # no ping-pong: only a request loads it again so soon
                continue
            incoming = self._fitting(residency.entering_with(node), marks)
            if incoming:
                residency.load(now, incoming, "idle", value)
                brought += sum(each.num_pages for each in incoming)
        entering.end()

    def _fitting(self, nodes: list[Node], marks: Marks) -> list[Node]:
        """Return all nodes if they fit; of a turn that could never fit as a whole, the part that fits."""
        residency = self._residency
        num_pages = sum(node.num_pages for node in nodes)
        room = min(marks.high_pages - residency.pages_used, residency.device.num_free)
        if num_pages <= room:
            return nodes
        return nodes[: max(0, room)] if num_pages > marks.high_pages and len(nodes) > 1 else []

    def _fits(self, node: Node) -> bool:
        """Return whether the node fits into idle pages below the high mark."""
        residency = self._residency
        most = self._prefetch_limit if self._marks is None else self._marks.high_pages
        return residency.pages_used + node.num_pages <= most and residency.device.num_free >= node.num_pages

    def _prefetch(self, now: float) -> None:
        """Prefetch for the first in the queue, into idle pages only; at least read an adapter that has no
        room."""
        residency = self._residency
        for sequence in self._waiting.leading(QUEUE_DEPTH):
            if sequence.is_prefetched:
                continue
            sequence.is_prefetched = True
            root = residency.tree.node(sequence.adapter)
            for node in (root, *self._held.match(sequence)):
                if node.residence is OFFLOADING and residency.tree.keeps_dependencies:
                    break  # nothing is loaded below a node that leaves
                if node.residence is not ABSENT:
                    continue
                if self._fits(node) and (node.parent is None or node.host is HELD):
                    residency.load(now, [node], "queue")
                    residency.counters.prefetches += 1
                    continue
                if node.is_adapter and node.host is NO_COPY and node.num_pages <= residency.host.num_free:
                    residency.read(now, node, "queue")
                    residency.counters.prefetches += 1
                if residency.tree.keeps_dependencies:
                    break


class PinnedAdapters:
    """Adapters that a router keeps on the device, in at most ``kept_share`` of its pages.

    A copy comes when the lane is idle, and is pinned while it is on the device.

    If nothing can run for want of pages, the pins are released. The copies may then be evicted like others, and
    are not loaded again while any request waits.
    """

    def __init__(self, held: Reservations) -> None:
        self._residency = held.residency
        self._held = held
        self._most_pages = int(held.config.kept_share * held.config.num_pages)
        self._num_pages = 0
        self._wanted: dict[AdapterId, Node] = {}
        self.pinned: set[AdapterId] = set()
        """The adapters of them that are pinned on the device now."""
        self._gives_way = False

    def __len__(self) -> int:
        return len(self._wanted)

    def keep(self, adapter: AdapterId) -> None:
        """Want a copy of the adapter, if its pages fit."""
        tree = self._residency.tree
        if adapter in self._wanted or not tree.knows(adapter):
            return
        node = tree.node(adapter)
        if 0 < node.num_pages <= self._most_pages - self._num_pages:
            self._wanted[adapter] = node
            self._num_pages += node.num_pages

    def forget(self, adapter: AdapterId) -> None:
        """Treat the adapter like any other from now on."""
        node = self._wanted.pop(adapter, None)
        if node is not None:
            self._num_pages -= node.num_pages
            self._unpin(adapter, node)

    def pin(self) -> None:
        """Pin the copies that have landed, before room is made for anything else: a copy that is evicted as it
        lands would be brought again at once, and so on."""
        if self._gives_way and (len(self._held.waiting) or self._held.admitted):
            return
        self._gives_way = False
        if len(self.pinned) < len(self._wanted):
            for adapter, node in self._wanted.items():
                if adapter not in self.pinned and node.residence is RESIDENT:
                    self._residency.tree.pin(node)
                    self.pinned.add(adapter)

    def bring(self, now: float) -> None:
        """Start the copy of the first adapter that is absent, one after the other."""
        residency = self._residency
        if self._gives_way or len(self.pinned) == len(self._wanted) or residency.transfers.is_lane_busy:
            return
        unpinned = [node for adapter, node in self._wanted.items() if adapter not in self.pinned]
        if any(node.residence not in (ABSENT, RESIDENT) for node in unpinned):
            return
        absent = next((node for node in unpinned if node.residence is ABSENT), None)
        if absent is not None and residency.provide(now, 0, absent.num_pages):
            residency.load(now, [absent], "kept")

    def give_way(self) -> bool:
        """Release the pins so that something may run; return whether there were any."""
        if not self.pinned or not self._held.is_stuck():
            return False
        self._gives_way = True
        for adapter in sorted(self.pinned):
            self._unpin(adapter, self._wanted[adapter])
        return True

    def _unpin(self, adapter: AdapterId, node: Node) -> None:
        if adapter in self.pinned:
            self.pinned.remove(adapter)
            self._residency.unpin(node)
