"""The cache policies, each a small class, most in a file of its own, found by name.

``manylora``, FastLibra's with its ablations (by turns and by pages), the baselines of its paper, and three of one
LRU. A policy of your own is a subclass of ``CachePolicy`` anywhere on the import path, named as ``module:Class``.
"""

from __future__ import annotations

from manylora.config import PolicyConfig, is_import_name
from manylora.policy.caches.fastlibra import FastLibra
from manylora.policy.caches.fastlibra_pages import (
    FastLibraPages,
    FastLibraPagesWithoutDependencies,
    FastLibraPagesWithoutReward,
    FastLibraPagesWithoutValue,
)
from manylora.policy.caches.fastlibra_wol import FastLibraWithoutReward
from manylora.policy.caches.fastlibra_wom import FastLibraWithoutDependencies
from manylora.policy.caches.fastlibra_wos import FastLibraWithoutValue
from manylora.policy.caches.lru import Lru
from manylora.policy.caches.lru_ahead import LruAhead
from manylora.policy.caches.lru_drop import LruDrop
from manylora.policy.caches.manylora import Manylora
from manylora.policy.caches.policy import CachePolicy
from manylora.policy.caches.s_lora import SLora
from manylora.policy.caches.static_lru import StaticLru
from manylora.policy.imported import imported_class

CACHES: dict[str, type[CachePolicy]] = {
    policy.name: policy
    for policy in (
        Manylora, FastLibra, FastLibraWithoutDependencies, FastLibraWithoutValue, FastLibraWithoutReward,
        FastLibraPages, FastLibraPagesWithoutDependencies, FastLibraPagesWithoutValue, FastLibraPagesWithoutReward,
        StaticLru, SLora, Lru, LruAhead, LruDrop,
    )
}  # fmt: skip


def find_cache(name: str) -> CachePolicy:
    """The policy of that name; raises ConfigError for ``module:Class`` where there is none."""
    if not is_import_name(name):
        return CACHES[name]()  # settings refuse names that are not known
    return imported_class("cache policy", name, CachePolicy)()


def adapter_pages_limit(config: PolicyConfig) -> int:
    """How many device pages adapters may take."""
    limit = find_cache(config.cache.policy).adapter_pages(config)
    return config.num_pages if limit is None else limit
