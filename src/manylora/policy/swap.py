"""The swapper (FastLibra §5.3) and the prefetch for the waiting queue (S-LoRA §5.2).

Owns when nodes move without being asked for: at every interval, out above the high mark, in below the low one.
Which nodes, is the value model's choice; how they move, ``cache``'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from manylora.config import CacheConfig
from manylora.policy.cache import Cache
from manylora.policy.queues import Sequence, WaitingQueue
from manylora.policy.tree import ABSENT, HELD, NO_COPY, SAVING, STANDBY, Node

LANE_S = 0.005
"""What it moves at a time, in seconds of the lane: a copy that somebody waits for stands behind it."""
QUEUE_DEPTH = 8
"""How far into the waiting queue it looks."""
LEAST_ROOM, MOST_ROOM = 0.02, 0.10
"""Of the device, where the high mark follows what steps take."""
ROOM_STEPS = 2
"""So many of the largest intakes that a step had lately find room: one, and another while that is freed anew."""
ROOM_HALF_LIFE_S = 60.0
"""How fast a large intake is forgotten."""


class Swapper:
    """Moves nodes between the tiers at intervals."""

    def __init__(
        self,
        config: CacheConfig,
        cache: Cache,
        waiting: WaitingQueue,
        match: Callable[[Sequence], list[Node]],
    ) -> None:
        self._cache = cache
        self._waiting = waiting
        self._match = match
        total = cache.device.num_pages
        high_mark = config.high_mark or cache.policy.high_mark
        self._follows_intake = high_mark is None
        if high_mark is None:
            high_mark = 1 - MOST_ROOM  # until steps have shown what they take
        self._high_pages = int(high_mark * total)
        self._low_pages = math.ceil(min(config.low_mark, high_mark) * total)
        self._room_pages = MOST_ROOM * total
        self._taken_before = 0
        self._noted_at = 0.0
        # Each decision costs something whatever its size: who looks after every step makes room for several.
        self._slack_pages = total // 64 if cache.policy.swaps_every_step else 0
        self._held_back: list[Node] = []

    def tick(self, now: float) -> None:
        """An interval has passed."""
        cache = self._cache
        cache.interval += 1
        for node in self._held_back:
            if cache.tree.may_enter(node):
                cache.entering.offer(node)
        self._held_back.clear()
        cache.visits.expire(now)
        self._sample()
        self._keep_room()

    def step_ended(self) -> None:
        """Pages may have been filled, and sequences have ended."""
        if self._follows_intake:
            self._note_intake()
        if self._cache.policy.swaps_every_step:
            self._keep_room()

    def _note_intake(self) -> None:
        """Room beyond what is asked for at once is not free: what stands by there takes pages of the host too."""
        cache, total = self._cache, self._cache.device.num_pages
        asked, least = ROOM_STEPS * (cache.device.num_taken - self._taken_before), LEAST_ROOM * total
        if asked > least or self._room_pages > least:  # or it stays as small as it gets
            faded = self._room_pages * math.pow(0.5, (cache.now - self._noted_at) / ROOM_HALF_LIFE_S)
            self._room_pages = min(max(faded, asked, least), MOST_ROOM * total)
            self._high_pages = int(total - self._room_pages)
        self._taken_before, self._noted_at = cache.device.num_taken, cache.now

    def _keep_room(self) -> None:
        cache = self._cache
        if cache.policy.swaps_by_itself and cache.pages_used > self._high_pages:
            cache.shrink(self._high_pages - self._slack_pages, "busy")

    def _sample(self) -> None:
        tree, counters = self._cache.tree, self._cache.counters
        if tree.idle_history_pages:
            counters.invalid_share_sum += tree.invalid_pages / tree.idle_history_pages
            counters.invalid_share_samples += 1

    def use_idle_lane(self, now: float) -> None:
        """Bring in what waiting requests need, then what is worth most, while nothing else is copied."""
        cache = self._cache
        if cache.pages_coming or cache.reads:
            return
        if cache.policy.prefetches and len(self._waiting):
            self._prefetch()
        if cache.policy.swaps_by_itself and cache.pages_used < self._low_pages and cache.entering:
            self._bring_in(now)

    @property
    def may_bring_in(self) -> bool:
        """Whether a later interval may find something to do while nothing happens."""
        cache = self._cache
        return cache.policy.swaps_by_itself and (
            cache.pages_used > self._high_pages
            or (cache.pages_used < self._low_pages and bool(self._held_back))
        )

    def _bring_in(self, now: float) -> None:
        cache = self._cache
        most_pages = max(1, int(LANE_S / cache.rates.page_in_s))
        brought = 0
        cache.begin_entering(now)
        while brought < most_pages and cache.pages_used < self._low_pages:
            chosen = cache.entering.pop()
            if chosen is None:
                break
            node, value = chosen
            if node.evicted_in >= cache.interval - 1:
                self._held_back.append(node)  # no ping-pong: only a request brings it back so soon
                continue
            if not self._fits(node):
                continue
            cache.load([node], "idle", value)
            brought += node.num_pages
        cache.entering.end()

    def _fits(self, node: Node) -> bool:
        """Into idle pages, without passing the high mark."""
        cache = self._cache
        return (
            cache.pages_used + node.num_pages <= self._high_pages and cache.device.num_free >= node.num_pages
        )

    def _prefetch(self) -> None:
        """For the first in the queue, into idle pages only; an adapter with no room there at least is read."""
        cache = self._cache
        for sequence in self._waiting.leading(QUEUE_DEPTH):
            if sequence.is_prefetched:
                continue
            sequence.is_prefetched = True
            root = cache.tree.node(sequence.adapter)
            for node in (root, *self._match(sequence)):
                if node.residence is STANDBY and self._fits(node):
                    cache.rescue((node,))
                has_left = node.residence is SAVING or node.residence is STANDBY
                if has_left and cache.tree.keeps_dependencies:
                    break  # nothing comes below what leaves
                if node.residence is not ABSENT:
                    continue
                if self._fits(node) and (node.parent is None or node.host is HELD):
                    cache.load([node], "queue")
                    cache.counters.prefetches += 1
                    continue
                if node.is_adapter and node.host is NO_COPY and node.num_pages <= cache.host.num_free:
                    cache.read(node, "queue")
                    cache.counters.prefetches += 1
                if cache.tree.keeps_dependencies:
                    break
