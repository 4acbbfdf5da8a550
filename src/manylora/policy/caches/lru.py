"""One pool, one LRU. It keeps dependencies: only leaves leave."""

from __future__ import annotations

from manylora.policy.caches.policy import CachePolicy


class Lru(CachePolicy):
    """The default of every question."""
