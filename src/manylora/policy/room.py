"""How much room there is on the device, for adapters and for KV. Owns the parts that they may take; changes
nothing."""

from __future__ import annotations

from manylora.policy.pages import PageLedger
from manylora.policy.tree import DependencyTree


class Room:
    """Counts pages. ``adapter_pages``: the part that is the adapters', with the rest for KV; None: one pool for
    both."""

    def __init__(self, tree: DependencyTree, device: PageLedger, adapter_pages: int | None) -> None:
        self._tree = tree
        self._device = device
        self.has_parts = adapter_pages is not None
        self.adapter_limit = device.num_pages if adapter_pages is None else adapter_pages

    @property
    def pages_used(self) -> int:
        """Device pages that are neither free nor about to be."""
        return self._device.num_used - self._tree.offloading_pages

    def num_free(self, for_adapters: bool) -> int:
        """Pages that an adapter, or KV, could take at once."""
        device = self._device
        free = device.num_free
        if not self.has_parts:
            return free
        if for_adapters:
            return min(free, self.adapter_limit - self._tree.adapter_pages)
        used = device.num_pages - free - self._tree.adapter_pages
        return min(free, device.num_pages - self.adapter_limit - used)

    def num_coming(self, for_adapters: bool) -> int:
        """Pages that are free, or become so by themselves: offloads in flight, and the step's end."""
        device, leaving = self._device, self._tree.offloading_pages
        if self.has_parts:
            return self.num_free(for_adapters) + leaving + device.num_deferred
        return device.num_pages - device.num_used + leaving

    def may_provide(self, kv_pages: int, adapter_pages: int) -> bool:
        """Whether so many pages can become free while no sequence lets go of any."""
        tree, for_kv = self._tree, self.num_coming(for_adapters=False)
        if not self.has_parts:
            return for_kv + tree.evictable_pages >= kv_pages + adapter_pages
        for_adapters = self.num_coming(for_adapters=True) + tree.evictable_adapter_pages
        return for_adapters >= adapter_pages and for_kv + tree.idle_kv_pages >= kv_pages

    def will_provide(self, kv_pages: int) -> bool:
        """Whether so many pages will be free when those that are on their way have come."""
        return self.num_coming(for_adapters=False) >= kv_pages
