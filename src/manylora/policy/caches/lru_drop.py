"""One LRU without write-back, as vLLM's default: KV that leaves the device is gone."""

from __future__ import annotations

from manylora.policy.caches.policy import CachePolicy
from manylora.policy.cost import Rates
from manylora.policy.offload import NeverOffload


class LruDrop(CachePolicy):
    """The host holds adapters only, which are read there."""

    def offload(self, rates: Rates) -> NeverOffload:
        """See CachePolicy."""
        return NeverOffload()
