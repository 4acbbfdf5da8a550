"""How long the router's decisions take, counted as a histogram."""

from __future__ import annotations

import bisect
from typing import Any

BOUNDS_S = (5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 5e-3, 2.5e-2, 0.1)


class Decisions:
    """Of one router, since its start."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        """One decision."""
        self._counts[bisect.bisect_left(BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def as_json(self) -> dict[str, Any]:
        """``buckets``: how many took no longer than each bound, and in all."""
        below, buckets = 0, []
        for bound, count in zip((*BOUNDS_S, None), self._counts, strict=True):
            below += count
            buckets.append([bound, below])
        return {"count": below, "sum_s": self._sum_s, "buckets": buckets}
