"""The reports of a replica: snapshots for metrics and figures, and reports for a cluster's router."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable

from manylora.policy.merging.choice import MergeGauges
from manylora.policy.merging.state import MergeState
from manylora.policy.reservations import Reservations
from manylora.policy.sequences import RUNNING
from manylora.policy.tree import ABSENT, HELD, RESIDENT
from manylora.policy.value import REUSE_S
from manylora.protocol import commands
from manylora.protocol.routing import NOWHERE, ON_DEVICE, ON_HOST
from manylora.reports import AdapterUse, CreditUse, Snapshot, Which
from manylora.types import BASE, AdapterId

_Counts = collections.Counter[AdapterId]


class ClusterReport:
    """The reports of one replica for its router."""

    def __init__(self, held: Reservations) -> None:
        self._residency = held.residency
        self._tree = held.residency.tree
        self._held = held
        self._waiting = held.waiting
        self._seq = 0
        self._reported: dict[AdapterId, int] = {}  # but NOWHERE
        self._num_preemptions = 0

    def read(self, is_full: bool) -> commands.Status:
        """Return the present state; the first report is a full one."""
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
        before, self._num_preemptions = self._num_preemptions, residency.counters.preemptions
        token_s, page_in_s, page_read_s = residency.rates.learnt()
        device = residency.device
        # The value a second of the node that left last, over the time in which KV keeps its value.
        value = residency.last_value
        page_price_s = 0.0 if value is None else REUSE_S * math.exp(min(value, 0.0))
        return commands.Status(
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
            is_exhausted=self._held.is_short or self._num_preemptions > before,
            token_s=token_s,
            page_in_s=page_in_s,
            page_read_s=page_read_s,
        )

    def _all(self) -> tuple[tuple[AdapterId, int], ...]:
        found = ((adapter, self._tier(adapter)) for adapter in self._tree.adapters())
        self._reported = {adapter: tier for adapter, tier in found if tier != NOWHERE}
        return tuple(sorted(self._reported.items()))

    def _moved(self, adapters: set[AdapterId]) -> tuple[tuple[AdapterId, int], ...]:
        moved = []
        for adapter in sorted(adapters):
            tier = self._tier(adapter)
            if tier != self._reported.get(adapter, NOWHERE):
                moved.append((adapter, tier))
                if tier == NOWHERE:
                    del self._reported[adapter]
                else:
                    self._reported[adapter] = tier
        return tuple(moved)

    def _tier(self, adapter: AdapterId) -> int:
        if not self._tree.has(adapter) or self._tree.idle_size(adapter) is not None:
            return NOWHERE
        node = self._tree.node(adapter)
        return ON_DEVICE if node.residence is RESIDENT else ON_HOST if node.host is HELD else NOWHERE


class Gauges:
    """The snapshots of one replica's gauges."""

    def __init__(self, held: Reservations, merging: MergeState | None) -> None:
        self._residency = held.residency
        self._tree = held.residency.tree
        self._held = held
        self._waiting = held.waiting
        self._merging = merging
        self._busy_before: frozenset[AdapterId] = frozenset()

    def read(self, which: Which) -> Snapshot:
        """Return the present gauges. O(requests + adapters reported)."""
        running = _Counts()
        waiting = collections.Counter(self._waiting.num_by_adapter)
        for sequence in self._held.admitted:
            where = running if sequence.stage is RUNNING and sequence.paused_s is None else waiting
            where[sequence.adapter] += 1
        tree, device, host = self._tree, self._residency.device, self._residency.host
        free = device.num_free + device.num_deferred
        left_over = sum(len(move.pages) for move in self._residency.transfers.moves() if move.owns_pages)
        cached = tree.kv_pages - tree.pinned_kv_pages + left_over
        merging = MergeGauges() if self._merging is None else self._merging.policy.gauges()
        return Snapshot(
            num_running=running.total(),
            num_waiting=waiting.total(),
            pages_total=device.num_pages,
            pages_free=free,
            pages_running=device.num_pages - free - cached - tree.adapter_pages,
            pages_history=cached,
            pages_adapters=tree.adapter_pages,
            pages_loading=tree.loading_pages,
            pages_saving=tree.offloading_pages,
            invalid_pages=tree.invalid_pages,
            host_pages_total=host.num_pages,
            host_pages_free=host.num_free,
            host_pages_history=tree.host_kv_pages,
            host_pages_adapters=tree.host_adapter_pages,
            adapters=tuple(
                self._use(adapter, running, waiting)
                for adapter in sorted(self._chosen(which, running.keys() | waiting.keys()))
            ),
            clients=() if self._waiting.shares is None else self._waiting.shares.uses(),
            merged=BASE if self._merging is None else self._merging.adapter,
            merge_alpha=merging.alpha,
            merge_beta=merging.beta,
            credits=tuple(CreditUse(adapter, credit_s) for adapter, credit_s in merging.credits),
        )

    def _chosen(self, which: Which, busy: Iterable[AdapterId]) -> Iterable[AdapterId]:
        if which == "all":
            return [BASE, *self._tree.adapters()]
        before, self._busy_before = self._busy_before, frozenset(busy)
        # Requests of an adapter that is gone have gone before it.
        gone = {adapter for adapter in before if not self._tree.has(adapter)}
        return {BASE} | self._tree.take_changed() | self._busy_before | (before - gone)

    def _use(self, adapter: AdapterId, running: _Counts, waiting: _Counts) -> AdapterUse:
        num_pages = self._tree.idle_size(adapter)
        if num_pages is not None:
            return AdapterUse(adapter, ABSENT.value, num_pages, 0, 0)
        node = self._tree.node(adapter)
        state, host_state = node.residence.value, node.host.value
        num_running, num_waiting, idle_kv = running[adapter], waiting[adapter], self._tree.idle_kv_of[adapter]
        return AdapterUse(adapter, state, node.num_pages, num_running, num_waiting, host_state, idle_kv)
