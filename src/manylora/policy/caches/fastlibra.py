"""FastLibra's own policy: its cost model (§5.1, §5.2) and its swapper (§5.3) over one pool with dependencies
(§4), whose nodes are turns."""

from __future__ import annotations

from manylora.config import CacheConfig
from manylora.policy.caches.policy import CachePolicy, Signals
from manylora.policy.marks import FixedMarks
from manylora.policy.value import FastLibraValue, ValueModel

HIGH_MARK = 0.95


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
