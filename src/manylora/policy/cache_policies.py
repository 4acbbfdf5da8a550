"""The decisions of a cache policy, and the policies: ``manylora``, FastLibra, its paper's baselines, three
LRUs.

Above the policies stand the answers that they share: marks of device use (FastLibra §5.3) and rules of
offloading.

Owns the questions, with the defaults that the papers share. ``residency`` and ``swap`` ask them and carry out
the answers. A policy of your own is a subclass of ``CachePolicy`` anywhere on the import path, named as
``module:Class``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from manylora.config.named import imported_class, place_of
from manylora.config.policy import CACHE_POLICIES, CacheConfig, PolicyConfig
from manylora.policy import value
from manylora.policy.tree import Node
from manylora.reports import Counters

LEAST_ROOM, MOST_ROOM = 0.02, 0.10
"""The least and the most share of the device that ``IntakeMarks`` keeps free."""
ROOM_STEPS = 2
"""The free room holds this many of the largest recent intakes of a step: one, and another while that is
freed."""
ROOM_HALF_LIFE_S = 60.0
"""The time in which a large intake counts half."""
_SLACK = 64
"""Each decision has a fixed cost, so one after a step makes room for several steps: a 64th of the device."""


class Marks:
    """Levels of use, in pages of the device: here shares of it that never change.

    ``high_pages``: nodes leave while more pages are used, down to ``slack_pages`` below. ``low_pages``: nodes
    may enter ahead of demand while fewer are used. ``every_step``: the swapper looks at them after every step,
    else at intervals.
    """

    def __init__(self, high: float, low: float, num_pages: int, every_step: bool = False) -> None:
        self.high_pages = int(high * num_pages)
        self.low_pages = math.ceil(min(low, high) * num_pages)
        self.slack_pages = num_pages // _SLACK if every_step else 0
        self.every_step = every_step

    def step_ended(self, num_taken: int, now: float) -> None:
        """Adapt to a step that has ended. ``num_taken``: device pages taken since the start."""


class IntakeMarks(Marks):
    """A high mark that leaves room for the recent intakes of steps.

    More room than a step takes at once costs host pages: the nodes that left the device for it lie there.
    """

    def __init__(self, low: float, num_pages: int) -> None:
        super().__init__(1 - MOST_ROOM, low, num_pages, every_step=True)  # until steps show what they take
        self._num_pages = num_pages
        self._room_pages = MOST_ROOM * num_pages
        self._taken_before = 0
        self._noted_at = 0.0

    def step_ended(self, num_taken: int, now: float) -> None:
        """See Marks."""
        total = self._num_pages
        asked, least = ROOM_STEPS * (num_taken - self._taken_before), LEAST_ROOM * total
        if asked > least or self._room_pages > least:  # or it stays as small as it gets
            faded = self._room_pages * math.pow(0.5, (now - self._noted_at) / ROOM_HALF_LIFE_S)
            self._room_pages = min(max(faded, asked, least), MOST_ROOM * total)
            self.high_pages = int(total - self._room_pages)
        self._taken_before, self._noted_at = num_taken, now


_PRIOR_PAGES = 128
"""Pages that count as offloaded and come back before any was seen."""
_MEMORY_PAGES = 8192
"""After this many offloaded pages both counts are halved: old requests say little."""
_WRITE_SHARE = 0.05
"""The share of a write's time that it costs a step that runs on beside it (1 to 3 % slower on an H200)."""
_TRIAL_S = 1.0
_TRIALS_EVERY = 16
"""In one second of this many KV is offloaded in any case, or the policy would not notice when cached KV is
reused again."""


class OffloadRule:
    """A rule of offloading: KV is always copied to the host, and back."""

    def is_copy_cheaper(self, kv: Sequence[Node]) -> bool:
        """Return whether loading these pages from the host delays others less than computing them."""
        return True

    def pays(self, node: Node, now: float) -> bool:
        """Return whether to write a page of KV to the host."""
        return True

    def offloaded(self) -> None:
        """Count a page that was written to the host."""

    def came_back(self, num_pages: int) -> None:
        """Count pages that requests asked for and only the host had."""


class NeverOffload(OffloadRule):
    """A rule that drops KV as it leaves the device; the host never has any."""

    def pays(self, node: Node, now: float) -> bool:
        """See OffloadRule."""
        return False


class OffloadWhereItPays(OffloadRule):
    """A rule that offloads a page if its expected saving is worth the write.

    The saving of a copy back counts as often as offloaded pages have come back so far.
    """

    def __init__(self, rates: value.Rates) -> None:
        self._rates = rates
        self._offloaded = 0.0
        self._came_back = 0.0

    def is_copy_cheaper(self, kv: Sequence[Node]) -> bool:
        """See OffloadRule."""
        return not kv or self._rates.weigh_copying([node.depth.bit_length() for node in kv]) >= 0

    def pays(self, node: Node, now: float) -> bool:
        """See OffloadRule."""
        rates = self._rates
        saved_s = rates.weigh_copying((node.depth.bit_length(),))
        if saved_s < 0:
            return False
        if int(now / _TRIAL_S) % _TRIALS_EVERY == 0:
            return True
        returns = (self._came_back + _PRIOR_PAGES) / (self._offloaded + _PRIOR_PAGES)
        return returns * saved_s >= _WRITE_SHARE * rates.held_up * rates.page_out_s

    def offloaded(self) -> None:
        """See OffloadRule."""
        self._offloaded += 1
        if self._offloaded > _MEMORY_PAGES:
            self._offloaded /= 2
            self._came_back /= 2

    def came_back(self, num_pages: int) -> None:
        """See OffloadRule."""
        self._came_back += num_pages


class Signals(NamedTuple):
    """The inputs of value models."""

    config: CacheConfig
    visits: value.Visits
    rates: value.Rates
    counters: Counters
    turns: value.KvTurns


class CachePolicy:
    """A cache policy of one pool and one LRU, which keeps dependencies; nothing moves ahead of demand.

    Subclasses override the answers in which they differ.
    """

    keeps_dependencies: ClassVar[bool] = True
    """No KV lies on the device without its adapter and its prefix (FastLibra §4)."""
    keeps_prefixes: ClassVar[bool] = True
    """A finished request's KV, and an unused adapter, stay until their pages are needed."""
    keeps_turns: ClassVar[bool] = False
    """The KV of one turn is one node, which moves as a whole (FastLibra §4), not a page at a time."""
    keeps_orphans: ClassVar[bool] = False
    """The host keeps KV whose adapter is in neither tier, since the adapter can be read again."""
    prefetches: ClassVar[bool] = False
    """Nodes that waiting requests need are loaded into idle pages ahead of demand (S-LoRA §5.2)."""

    writes_through: ClassVar[bool] = False
    """KV is copied to the host as soon as it is computed, if the host can make room, and not only when it
    leaves."""

    prices_pages: ClassVar[bool] = False
    """Values on the device are log seconds that a page saves, each second."""

    counts_visits: ClassVar[bool] = False
    """A value model reads how many requests in the window used a node."""

    def device_value(self, signals: Signals) -> value.ValueModel:
        """Return the value model of the device: the least valuable node leaves first."""
        return value.LeastRecentlyUsed()

    def host_value(self, signals: Signals) -> value.ValueModel:
        """Return the value model of copies on the host."""
        return value.LeastRecentlyUsed()

    def offload(self, rates: value.Rates) -> OffloadRule:
        """Return the rule for copies of KV to the host and back."""
        return OffloadRule()

    def marks(self, config: CacheConfig, num_pages: int) -> Marks | None:
        """Return the levels between which the device is kept (FastLibra §5.3); None: free pages on demand
        only."""
        return None

    def adapter_pages(self, config: PolicyConfig) -> int | None:
        """Return how many device pages are for adapters, the rest for KV; None: one pool for both."""
        return None

    def loses_kv_with(self, is_adapter: bool) -> bool:
        """Return whether the nodes below a node are dropped when the node is in neither tier any more."""
        return self.keeps_dependencies and not (is_adapter and self.keeps_orphans)


class Lru(CachePolicy):
    """The policy ``lru``: every default."""


class LruDrop(CachePolicy):
    """A policy whose host holds adapters only."""

    def offload(self, rates: value.Rates) -> NeverOffload:
        """See CachePolicy."""
        return NeverOffload()


HIGH_MARK = 0.95


class LruAhead(CachePolicy):
    """A policy that writes through and keeps room ahead.

    A node that leaves is on the host already, so its pages are free at once. No node comes back ahead of
    demand.
    """

    writes_through = True

    def marks(self, config: CacheConfig, num_pages: int) -> Marks:
        """See CachePolicy."""
        return Marks(config.high_mark or HIGH_MARK, 0.0, num_pages, every_step=True)


class StaticLru(CachePolicy):
    """A policy with one part for adapters and one for KV, each with its own LRU; it ignores dependencies."""

    keeps_dependencies = False

    def adapter_pages(self, config: PolicyConfig) -> int:
        """See CachePolicy."""
        return max(1, int(config.num_pages * config.cache.adapter_share))


class SLora(CachePolicy):
    """A policy that drops every node that no running request uses, and prefetches for waiting requests."""

    keeps_prefixes = False
    prefetches = True


class FastLibra(CachePolicy):
    """The policy of the paper: values by equations 3 to 6; out above 95 % of the device, in below 70 %, each
    100 ms."""

    counts_visits = True
    keeps_turns = True

    def device_value(self, signals: Signals) -> value.ValueModel:
        """See CachePolicy."""
        return value.FastLibraValue(signals.visits, signals.rates, signals.turns, signals.config.tau_s)

    def marks(self, config: CacheConfig, num_pages: int) -> Marks:
        """See CachePolicy."""
        return Marks(config.high_mark or HIGH_MARK, config.low_mark, num_pages)


class Manylora(CachePolicy):
    """A policy that offloads KV only if that beats computing it again, and looks at the device after every
    step."""

    keeps_orphans = True
    prefetches = True
    prices_pages = True

    def device_value(self, signals: Signals) -> value.ValueModel:
        """See CachePolicy."""
        return value.RealCost(signals.rates, signals.counters, signals.config.window_s)

    def host_value(self, signals: Signals) -> value.ValueModel:
        """See CachePolicy."""
        return value.RealHostCost(signals.rates, signals.counters, signals.config.window_s)

    def offload(self, rates: value.Rates) -> OffloadWhereItPays:
        """See CachePolicy."""
        return OffloadWhereItPays(rates)

    def marks(self, config: CacheConfig, num_pages: int) -> Marks:
        """See CachePolicy."""
        if config.high_mark is None:
            return IntakeMarks(config.low_mark, num_pages)
        return Marks(config.high_mark, config.low_mark, num_pages, every_step=True)


def find_cache(name: str) -> CachePolicy:
    """Return the policy of a name that settings have checked; raise ConfigError if its class is not there."""
    return imported_class("cache policy", place_of("cache", CACHE_POLICIES, name), CachePolicy)()


def adapter_pages_limit(config: PolicyConfig) -> int:
    """Return how many device pages adapters may take."""
    limit = find_cache(config.cache.policy).adapter_pages(config)
    return config.num_pages if limit is None else limit
