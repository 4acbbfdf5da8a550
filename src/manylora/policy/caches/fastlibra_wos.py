"""FastLibra's ablation without its cost model (-WOS): the swapper goes by last use."""

from __future__ import annotations

from manylora.policy.caches.fastlibra import FastLibra
from manylora.policy.caches.policy import Signals
from manylora.policy.value import LeastRecentlyUsed, ValueModel


class FastLibraWithoutValue(FastLibra):
    """A plain LRU that frees pages ahead of demand."""

    name = "fastlibra-wos"
    counts_visits = False

    def device_value(self, signals: Signals) -> ValueModel:
        """See CachePolicy."""
        return LeastRecentlyUsed()
