"""What a replica tells a router, as changes since it last did: O(what changed + running sequences).

Owns what was told, and what has changed since; residency says of each change. Nothing is kept before the first
report. Does not know which replica this is, nor which assignments it has had.
"""

from __future__ import annotations

import math

from manylora.policy.queue import WaitingQueue
from manylora.policy.reservations import Reservations
from manylora.policy.residency import Residency
from manylora.policy.sequences import RUNNING
from manylora.policy.tree import HELD, RESIDENT
from manylora.policy.value import REUSE_S
from manylora.protocol import Status
from manylora.protocol.routing import NOWHERE, ON_DEVICE, ON_HOST
from manylora.types import AdapterId


class ClusterReport:
    """Reads reports of one replica's parts."""

    def __init__(self, residency: Residency, held: Reservations, waiting: WaitingQueue) -> None:
        self._residency = residency
        self._tree = residency.tree
        self._held = held
        self._waiting = waiting
        self._seq = 0
        self._told: dict[AdapterId, int] = {}  # but NOWHERE
        self._num_preemptions = 0

    def read(self, is_full: bool) -> Status:
        """The state of this moment; the first report is a full one."""
        residency, changes = self._residency, self._residency.changes
        is_full = is_full or not changes.is_on
        self._seq += 1
        adapters, evicted = changes.take()
        moved = self._all() if is_full else self._moved(adapters)
        running = waiting = waiting_tokens = kv_tokens = 0
        for sequence in self._held.admitted:
            runs = sequence.stage is RUNNING and sequence.paused_s is None
            running += runs
            waiting += not runs
            kv_tokens += sequence.num_computed
            remaining = sequence.num_remaining
            waiting_tokens += remaining if remaining > 1 else 0
        before, self._num_preemptions = self._num_preemptions, self._held.num_preemptions
        token_s, page_in_s, page_read_s = residency.rates.learnt()
        device = residency.device
        # What left last was worth that much a second, for as long as such things keep their worth.
        value = residency.last_value
        page_price_s = 0.0 if value is None else REUSE_S * math.exp(min(value, 0.0))
        return Status(
            self._seq,
            running,
            waiting + len(self._waiting),
            free_pages=device.num_free + device.num_deferred,
            reclaimable_pages=residency.tree.evictable_pages,
            waiting_tokens=waiting_tokens + self._waiting.num_tokens,
            kv_tokens=kv_tokens,
            is_full=is_full,
            residency=moved,
            evicted=evicted,
            page_price_s=page_price_s,
            is_exhausted=self._held.is_short or self._held.num_preemptions > before,
            token_s=token_s,
            page_in_s=page_in_s,
            page_read_s=page_read_s,
        )

    def _all(self) -> tuple[tuple[AdapterId, int], ...]:
        found = ((adapter, self._tier(adapter)) for adapter in self._tree.adapters())
        self._told = {adapter: tier for adapter, tier in found if tier != NOWHERE}
        return tuple(sorted(self._told.items()))

    def _moved(self, adapters: set[AdapterId]) -> tuple[tuple[AdapterId, int], ...]:
        moved = []
        for adapter in sorted(adapters):
            tier = self._tier(adapter)
            if tier != self._told.get(adapter, NOWHERE):
                moved.append((adapter, tier))
                if tier == NOWHERE:
                    del self._told[adapter]
                else:
                    self._told[adapter] = tier
        return tuple(moved)

    def _tier(self, adapter: AdapterId) -> int:
        if not self._tree.has(adapter) or self._tree.idle_size(adapter) is not None:
            return NOWHERE
        node = self._tree.node(adapter)
        return ON_DEVICE if node.residence is RESIDENT else ON_HOST if node.host is HELD else NOWHERE
