"""What a cache policy decides, with the defaults that the papers share.

Owns the questions; ``residency`` and ``swap`` ask them and carry the answers out.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from manylora.config import CacheConfig, PolicyConfig
from manylora.policy.cost import Rates
from manylora.policy.kv_turns import KvTurns
from manylora.policy.marks import Marks
from manylora.policy.offload import AlwaysOffload, OffloadRule
from manylora.policy.value import LeastRecentlyUsed, ValueModel
from manylora.policy.visits import Visits
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
