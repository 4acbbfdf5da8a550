"""The FastLibra paper's vLLM (§2.2, §6.1): a part for adapters and one for KV, and cached KV offloaded to the
host."""

from __future__ import annotations

from manylora.config import PolicyConfig
from manylora.policy.caches.policy import CachePolicy


class StaticLru(CachePolicy):
    """Each part has its own LRU, which does not know what depends on what."""

    keeps_dependencies = False

    def adapter_pages(self, config: PolicyConfig) -> int:
        """See CachePolicy."""
        return max(1, int(config.num_pages * config.cache.adapter_share))
