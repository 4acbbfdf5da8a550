"""manylora's own policy: every node by what a miss would cost, room that follows what steps take."""

from __future__ import annotations

from manylora.config import CacheConfig
from manylora.policy.caches.policy import CachePolicy, Signals
from manylora.policy.cost import Rates
from manylora.policy.marks import FixedMarks, IntakeMarks, Marks
from manylora.policy.offload import OffloadWhereItPays
from manylora.policy.value import RealCost, RealHostCost, ValueModel


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
