"""An LRU as today's engines offload by: what is computed is written to the host at once, and pages are freed
ahead of demand."""

from __future__ import annotations

from manylora.config import CacheConfig
from manylora.policy.caches.policy import CachePolicy
from manylora.policy.marks import FixedMarks

HIGH_MARK = 0.95


class LruAhead(CachePolicy):
    """Writes through and keeps room ahead: a node that leaves is on the host already, so its pages are free at
    once. Nothing comes back before it is asked for."""

    writes_through = True

    def marks(self, config: CacheConfig, num_pages: int) -> FixedMarks:
        """See CachePolicy."""
        return FixedMarks(config.high_mark or HIGH_MARK, 0.0, num_pages, every_step=True)
