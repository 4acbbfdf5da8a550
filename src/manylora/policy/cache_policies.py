"""What a cache policy decides, and the policies: ``manylora``, FastLibra, the baselines of its paper, three LRUs.

Owns the questions, with the defaults that the papers share; ``residency`` and ``swap`` ask them and carry the
answers out. A policy of your own is a subclass of ``CachePolicy`` anywhere on the import path, named as
``module:Class``.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from manylora.config import CACHE_POLICIES, CacheConfig, PolicyConfig, place_of
from manylora.config.named import imported_class
from manylora.policy.marks import (
    AlwaysOffload,
    FixedMarks,
    IntakeMarks,
    Marks,
    NeverOffload,
    OffloadRule,
    OffloadWhereItPays,
)
from manylora.policy.value import (
    FastLibraValue,
    KvTurns,
    LeastRecentlyUsed,
    Rates,
    RealCost,
    RealHostCost,
    ValueModel,
    Visits,
)
from manylora.reports import Counters


class Signals(NamedTuple):
    """What a value model reads."""

    config: CacheConfig
    visits: Visits
    rates: Rates
    counters: Counters
    turns: KvTurns


class CachePolicy:
    """One pool and one LRU, which keeps dependencies; nothing moves before it is asked for. Subclasses say what
    they do otherwise."""

    keeps_dependencies: ClassVar[bool] = True
    """No KV lies on the device without its adapter and its prefix (FastLibra §4)."""
    keeps_prefixes: ClassVar[bool] = True
    """A finished request's KV, and an unused adapter, stay until their room is needed."""
    keeps_turns: ClassVar[bool] = False
    """The KV of one turn is one node, which moves as a whole (FastLibra §4), not a page at a time."""
    keeps_orphans: ClassVar[bool] = False
    """The host keeps KV whose adapter is in neither tier, since that can be read again."""
    prefetches: ClassVar[bool] = False
    """What waiting requests need comes into idle pages ahead of them (S-LoRA §5.2)."""

    writes_through: ClassVar[bool] = False
    """KV is copied to the host as soon as it is computed, as far as the host can make room, and not only when it
    leaves."""

    prices_pages: ClassVar[bool] = False
    """Values on the device are log seconds that a page saves, each second."""

    counts_visits: ClassVar[bool] = False
    """A value model reads how many requests in the window used a node."""

    def device_value(self, signals: Signals) -> ValueModel:
        """The value of keeping a node on the device: the least valuable leaves first."""
        return LeastRecentlyUsed()

    def host_value(self, signals: Signals) -> ValueModel:
        """The value of a copy on the host, when the host is full."""
        return LeastRecentlyUsed()

    def offload(self, rates: Rates) -> OffloadRule:
        """Whether KV that leaves the device is copied to the host, and whether it comes back from there."""
        return AlwaysOffload()

    def marks(self, config: CacheConfig, num_pages: int) -> Marks | None:
        """Between which levels of use the device is kept (FastLibra §5.3); None: pages are freed on demand
        only."""
        return None

    def adapter_pages(self, config: PolicyConfig) -> int | None:
        """The device pages that are the adapters', with the rest for KV; None: one pool for both."""
        return None

    def loses_kv_with(self, is_adapter: bool) -> bool:
        """Whether what lies below a node, in either tier, goes when the node is in neither any more."""
        return self.keeps_dependencies and not (is_adapter and self.keeps_orphans)


class Lru(CachePolicy):
    """The default of every question."""


class LruDrop(CachePolicy):
    """The host holds adapters only, which are read there."""

    def offload(self, rates: Rates) -> NeverOffload:
        """See CachePolicy."""
        return NeverOffload()


HIGH_MARK = 0.95


class LruAhead(CachePolicy):
    """Writes through and keeps room ahead: a node that leaves is on the host already, so its pages are free at
    once. Nothing comes back before it is asked for."""

    writes_through = True

    def marks(self, config: CacheConfig, num_pages: int) -> FixedMarks:
        """See CachePolicy."""
        return FixedMarks(config.high_mark or HIGH_MARK, 0.0, num_pages, every_step=True)


class StaticLru(CachePolicy):
    """Each part has its own LRU, which does not know what depends on what."""

    keeps_dependencies = False

    def adapter_pages(self, config: PolicyConfig) -> int:
        """See CachePolicy."""
        return max(1, int(config.num_pages * config.cache.adapter_share))


class SLora(CachePolicy):
    """What no running request uses goes at once; what waiting ones need is prefetched."""

    keeps_prefixes = False
    prefetches = True


class FastLibra(CachePolicy):
    """Nodes by equations 3 to 6; out above 95 % of the device, in below 70 %, every 100 ms."""

    counts_visits = True
    keeps_turns = True

    def device_value(self, signals: Signals) -> ValueModel:
        """See CachePolicy."""
        return FastLibraValue(signals.visits, signals.rates, signals.turns, signals.config.tau_s)

    def marks(self, config: CacheConfig, num_pages: int) -> FixedMarks:
        """See CachePolicy."""
        return FixedMarks(config.high_mark or HIGH_MARK, config.low_mark, num_pages)


class Manylora(CachePolicy):
    """Offloads KV only where that beats computing it again, and looks at the device after every step."""

    keeps_orphans = True
    prefetches = True
    prices_pages = True

    def device_value(self, signals: Signals) -> ValueModel:
        """See CachePolicy."""
        return RealCost(signals.rates, signals.counters, signals.config.window_s)

    def host_value(self, signals: Signals) -> ValueModel:
        """See CachePolicy."""
        return RealHostCost(signals.rates, signals.counters, signals.config.window_s)

    def offload(self, rates: Rates) -> OffloadWhereItPays:
        """See CachePolicy."""
        return OffloadWhereItPays(rates)

    def marks(self, config: CacheConfig, num_pages: int) -> Marks:
        """See CachePolicy."""
        if config.high_mark is None:
            return IntakeMarks(config.low_mark, num_pages)
        return FixedMarks(config.high_mark, config.low_mark, num_pages, every_step=True)


def find_cache(name: str) -> CachePolicy:
    """The policy of that name, which settings have checked; raises ConfigError where its class is not there."""
    return imported_class("cache policy", place_of("cache", CACHE_POLICIES, name), CachePolicy)()


def adapter_pages_limit(config: PolicyConfig) -> int:
    """How many device pages adapters may take."""
    limit = find_cache(config.cache.policy).adapter_pages(config)
    return config.num_pages if limit is None else limit
