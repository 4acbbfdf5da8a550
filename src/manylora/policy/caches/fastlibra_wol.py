"""FastLibra's ablation without the reward of adapters, its equation 4 (-WOL)."""

from __future__ import annotations

from manylora.policy.caches.fastlibra import FastLibra
from manylora.policy.caches.policy import Signals
from manylora.policy.value import FastLibraValue, ValueModel


class FastLibraWithoutReward(FastLibra):
    """The value of adapters is that of equations 3, 5 and 6."""

    name = "fastlibra-wol"

    def device_value(self, signals: Signals) -> ValueModel:
        """See CachePolicy."""
        return FastLibraValue(
            signals.visits, signals.rates, signals.turns, signals.config.tau_s, rewards_adapters=False
        )
