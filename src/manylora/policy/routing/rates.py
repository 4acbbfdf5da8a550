"""How often each adapter is asked for, late requests counting most."""

from __future__ import annotations

import math

from manylora.types import BASE, AdapterId

_FORGOTTEN = 2.0**-8
"""An adapter whose requests together count less than this share of one has no rate."""


class AdapterRates:
    """Requests a second of each adapter, as a mean whose weights halve every ``half_life_s``."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._counts: dict[AdapterId, tuple[float, float]] = {}  # decayed, and at which moment

    def saw(self, adapter: AdapterId, now: float) -> None:
        """A request has come."""
        if adapter != BASE:
            self._counts[adapter] = self._count(adapter, now) + 1.0, now

    def rates(self, now: float) -> dict[AdapterId, float]:
        """Of the adapters that have one; others are forgotten."""
        counts = {adapter: (self._count(adapter, now), now) for adapter in self._counts}
        self._counts = {adapter: count for adapter, count in counts.items() if count[0] >= _FORGOTTEN}
        return {
            adapter: count * math.log(2) / self._half_life_s for adapter, (count, _) in self._counts.items()
        }

    def _count(self, adapter: AdapterId, now: float) -> float:
        count, at_s = self._counts.get(adapter, (0.0, now))
        return float(count * 2.0 ** ((at_s - now) / self._half_life_s))
