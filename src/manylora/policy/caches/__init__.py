"""The cache policies, each a small class in a file of its own, found by name.

``manylora``, FastLibra's, the baselines of its paper, and three of one LRU. A policy of your own is a subclass of
``CachePolicy`` anywhere on the import path, named as ``module:Class``.
"""

from __future__ import annotations

from manylora.config import CACHE_POLICIES, PolicyConfig, place_of
from manylora.config.named import imported_class
from manylora.policy.caches.policy import CachePolicy


def find_cache(name: str) -> CachePolicy:
    """The policy of that name, which settings have checked; raises ConfigError where its class is not there."""
    return imported_class("cache policy", place_of("cache", CACHE_POLICIES, name), CachePolicy)()


def adapter_pages_limit(config: PolicyConfig) -> int:
    """How many device pages adapters may take."""
    limit = find_cache(config.cache.policy).adapter_pages(config)
    return config.num_pages if limit is None else limit
