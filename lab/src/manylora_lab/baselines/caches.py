"""FastLibra's ablations (§6.5), by turns, and by pages: KV then moves a page at a time, as everywhere else."""

from __future__ import annotations

from manylora.policy.cache_policies import FastLibra, Signals
from manylora.policy.value import FastLibraValue, LeastRecentlyUsed, ValueModel


class WithoutDependencies(FastLibra):
    """-WOM: without the dependency tree. The cache may hold invalid KV on the device, and never uses it."""

    keeps_dependencies = False


class WithoutValue(FastLibra):
    """-WOS: without the cost model. A plain LRU that frees pages ahead of demand."""

    counts_visits = False

    def device_value(self, signals: Signals) -> ValueModel:
        """See CachePolicy."""
        return LeastRecentlyUsed()


class UnrewardedValue(FastLibraValue):
    """Equations 3, 5 and 6, for adapters too."""

    def refresh(self, now: float, num_adapters: int) -> None:
        return


class WithoutReward(FastLibra):
    """-WOL: without the reward of adapters, equation 4."""

    def device_value(self, signals: Signals) -> ValueModel:
        """See CachePolicy."""
        return UnrewardedValue(signals.visits, signals.rates, signals.turns, signals.config.tau_s)


class Pages(FastLibra):
    """A page of KV is worth what a page costs, so that an adapter of many pages outweighs any."""

    keeps_turns = False


class PagesWithoutDependencies(WithoutDependencies):
    """-WOM by pages."""

    keeps_turns = False


class PagesWithoutValue(WithoutValue):
    """-WOS by pages."""

    keeps_turns = False


class PagesWithoutReward(WithoutReward):
    """-WOL by pages."""

    keeps_turns = False
