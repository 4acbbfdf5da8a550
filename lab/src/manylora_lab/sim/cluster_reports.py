"""What a simulated replica tells the router: changes since its last report, from its own gauges.

Owns the numbering and what was told so far. Does not know when reports are made, nor how long they take.
"""

from __future__ import annotations

from collections.abc import Iterable

from manylora.protocol import Report
from manylora.protocol.routing import NOWHERE, ON_DEVICE, ON_HOST, ReplicaId, ReplicaReport
from manylora.reports import AdapterUse
from manylora.types import BASE, AdapterId
from manylora_lab.sim.front_end import OpenRequest


class ClusterReports:
    """The reports of one replica, each O(its requests + the adapters that changed)."""

    def __init__(self, replica: ReplicaId) -> None:
        self._replica = replica
        self._num_made = 0
        self._tiers: dict[AdapterId, int] = {}
        self._idle_pages: dict[AdapterId, int] = {}  # of adapters on the device that no request uses
        self._sum_idle_pages = 0
        self._preemptions = 0

    def make(self, report: Report, seen_upto: int, held: Iterable[OpenRequest]) -> ReplicaReport:
        """The next one. ``report``: of the adapters that changed; ``held``: the requests that the replica has."""
        self._num_made += 1
        gauges, preemptions = report.gauges, report.counters.preemptions
        waiting_tokens = kv_tokens = 0
        for request in held:
            num_tokens = request.prompt_tokens + request.num_tokens
            if request.num_tokens > request.num_before:
                kv_tokens += num_tokens
            else:
                waiting_tokens += num_tokens - request.num_cached
        is_exhausted = preemptions > self._preemptions
        self._preemptions = preemptions
        residency = tuple(change for use in gauges.adapters if (change := self._change(use)) is not None)
        return ReplicaReport(
            self._replica,
            1,
            self._num_made,
            seen_upto,
            gauges.num_running,
            gauges.num_waiting,
            gauges.pages_free,
            gauges.pages_history + self._sum_idle_pages,
            waiting_tokens,
            kv_tokens,
            self._num_made == 1,
            residency,
            is_exhausted=is_exhausted,
        )

    def _change(self, use: AdapterUse) -> tuple[AdapterId, int] | None:
        """Where the adapter is now, if that is news."""
        if use.adapter == BASE:
            return None
        is_there = use.state != "absent"
        idle = use.num_pages if is_there and not (use.running or use.waiting) else 0
        self._sum_idle_pages += idle - self._idle_pages.pop(use.adapter, 0)
        if idle:
            self._idle_pages[use.adapter] = idle
        tier = ON_DEVICE if is_there else NOWHERE if use.host_state == "none" else ON_HOST
        if tier == self._tiers.get(use.adapter, NOWHERE):
            return None
        if tier == NOWHERE:
            del self._tiers[use.adapter]
        else:
            self._tiers[use.adapter] = tier
        return use.adapter, tier
