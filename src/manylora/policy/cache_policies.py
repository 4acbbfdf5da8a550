"""What a cache policy decides, and the policies: ``manylora``, FastLibra, the baselines of its paper, three LRUs.

Above the policies stand the answers that they share: marks of device use (FastLibra §5.3) and rules of offloading.

Owns the questions, with the defaults that the papers share; ``residency`` and ``swap`` ask them and carry the
answers out. A policy of your own is a subclass of ``CachePolicy`` anywhere on the import path, named as
``module:Class``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

from manylora.config import CACHE_POLICIES, CacheConfig, PolicyConfig, place_of
from manylora.config.named import imported_class
from manylora.policy.tree import Node
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

LEAST_ROOM, MOST_ROOM = 0.02, 0.10
"""The least and the most share of the device that is kept free, where the high mark follows what steps take."""
ROOM_STEPS = 2
"""So many of the largest intakes that a step had lately find room: one, and another while that is freed anew."""
ROOM_HALF_LIFE_S = 60.0
"""How fast a large intake is forgotten."""
_SLACK = 64
"""Each decision costs something whatever its size: one after every step makes room for several, a 64th of the
device."""


class Marks(Protocol):
    """Levels in pages of the device. ``every_step``: they are looked at after every step, else at intervals."""

    high_pages: int
    """Nodes leave while more pages are used."""
    low_pages: int
    """Nodes may come without being asked for while fewer are."""
    slack_pages: int
    """How far below the high mark they leave."""
    every_step: bool

    def step_ended(self, num_taken: int, now: float) -> None:
        """A step has ended; so many pages were taken since the start."""


class FixedMarks:
    """Shares of the device that stay as they are."""

    def __init__(self, high: float, low: float, num_pages: int, every_step: bool = False) -> None:
        self.high_pages = int(high * num_pages)
        self.low_pages = math.ceil(min(low, high) * num_pages)
        self.slack_pages = num_pages // _SLACK if every_step else 0
        self.every_step = every_step

    def step_ended(self, num_taken: int, now: float) -> None:
        """See Marks."""


class IntakeMarks:
    """A high mark that leaves room for what steps took lately.

    Room beyond what is asked for at once costs host pages: what has left the device for it lies there.
    """

    every_step = True

    def __init__(self, low: float, num_pages: int) -> None:
        high = 1 - MOST_ROOM  # until steps have shown what they take
        self.high_pages = int(high * num_pages)
        self.low_pages = math.ceil(min(low, high) * num_pages)
        self.slack_pages = num_pages // _SLACK
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
"""Offloaded pages that count as having come back once, before any was seen."""
_MEMORY_PAGES = 8192
"""After so many offloaded pages both counts are halved: what was asked for long ago says little."""
_WRITE_SHARE = 0.05
"""The share of a write's time that it costs a step that runs on beside it (1 to 3 % slower on an H200)."""
_TRIAL_S = 1.0
_TRIALS_EVERY = 16
"""In one second of so many KV is offloaded whatever is believed, or the policy would not notice that cached KV is
asked for again."""


class OffloadRule(Protocol):
    """Whether KV is copied to the host, and back."""

    def is_copy_cheaper(self, kv: Sequence[Node]) -> bool:
        """Whether bringing these pages from the host holds up less than computing them."""

    def pays(self, node: Node, now: float) -> bool:
        """Whether to write a page of KV to the host."""

    def offloaded(self) -> None:
        """A page was written to the host."""

    def came_back(self, num_pages: int) -> None:
        """Requests asked for pages that only the host had."""


class AlwaysOffload:
    """Copies always pay."""

    def is_copy_cheaper(self, kv: Sequence[Node]) -> bool:
        """See OffloadRule."""
        return True

    def pays(self, node: Node, now: float) -> bool:
        """See OffloadRule."""
        return True

    def offloaded(self) -> None:
        """See OffloadRule."""

    def came_back(self, num_pages: int) -> None:
        """See OffloadRule."""


class NeverOffload(AlwaysOffload):
    """KV that leaves the device is dropped; the host never has any."""

    def pays(self, node: Node, now: float) -> bool:
        """See OffloadRule."""
        return False


class OffloadWhereItPays:
    """An offloaded page's value is that of having it back, times how often offloaded pages came back so far."""

    def __init__(self, rates: Rates) -> None:
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
