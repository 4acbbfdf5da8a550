"""Copies of adapters that a router wants on the device ahead of requests (dLoRA §5.1).

Owns which they are, and their pins. They take at most ``kept_share`` of the pages; what they do not take is for
requests and the cache policy. Does not know why a router wants them.
"""

from __future__ import annotations

from manylora.config import PolicyConfig
from manylora.policy.reservations import Reservations
from manylora.policy.residency import Residency
from manylora.policy.tree import ABSENT, RESIDENT, Node
from manylora.types import AdapterId


class KeptAdapters:
    """A copy comes when the lane is idle, and is pinned while it is on the device.

    Where nothing can run for want of pages the pins are let go; the copies may then be evicted like others, and
    are not brought back before nothing waits.
    """

    def __init__(self, config: PolicyConfig, residency: Residency, held: Reservations) -> None:
        self._residency = residency
        self._held = held
        self._most_pages = int(config.kept_share * config.num_pages)
        self._num_pages = 0
        self._kept: dict[AdapterId, Node] = {}
        self._pinned: set[AdapterId] = set()
        self._gives_way = False

    def __len__(self) -> int:
        return len(self._kept)

    def pinned(self) -> list[AdapterId]:
        """Those that are kept on the device now."""
        return sorted(self._pinned)

    def keep(self, adapter: AdapterId) -> None:
        """Have a copy of it, where there is room for one."""
        tree = self._residency.tree
        if adapter in self._kept or not tree.knows(adapter):
            return
        node = tree.node(adapter)
        if 0 < node.num_pages <= self._most_pages - self._num_pages:
            self._kept[adapter] = node
            self._num_pages += node.num_pages

    def forget(self, adapter: AdapterId) -> None:
        """It is like any other from now on."""
        node = self._kept.pop(adapter, None)
        if node is not None:
            self._num_pages -= node.num_pages
            self._unpin(adapter, node)

    def pin(self, num_waiting: int) -> None:
        """Pin the copies that have landed, before room is made for anything else: a copy that is evicted as it
        lands would be brought again at once, and so on."""
        if self._gives_way and (num_waiting or self._held.admitted):
            return
        self._gives_way = False
        if len(self._pinned) < len(self._kept):
            for adapter, node in self._kept.items():
                if adapter not in self._pinned and node.residence is RESIDENT:
                    self._residency.tree.pin(node)
                    self._pinned.add(adapter)

    def bring(self, now: float) -> None:
        """Start the copy of the first adapter that is absent, one after the other."""
        residency = self._residency
        if self._gives_way or len(self._pinned) == len(self._kept) or residency.transfers.is_lane_busy:
            return
        unpinned = [node for adapter, node in self._kept.items() if adapter not in self._pinned]
        if any(node.residence not in (ABSENT, RESIDENT) for node in unpinned):
            return
        absent = next((node for node in unpinned if node.residence is ABSENT), None)
        if absent is not None and residency.provide(now, 0, absent.num_pages):
            residency.load(now, [absent], "kept")

    def give_way(self, num_waiting: int) -> bool:
        """Nothing runs: whether pins were let go, so that something may."""
        tree = self._residency.tree
        if not self._pinned or not (num_waiting or self._held.admitted):
            return False
        if self._held.num_loading or tree.loading_pages or tree.offloading_pages:
            return False
        self._gives_way = True
        for adapter in self.pinned():
            self._unpin(adapter, self._kept[adapter])
        return True

    def _unpin(self, adapter: AdapterId, node: Node) -> None:
        if adapter in self._pinned:
            self._pinned.remove(adapter)
            self._residency.unpin(node, node.last_use)
