"""The FastLibra paper's S-LoRA (§6.1): one pool, adapters dropped when they are not used, no prefix cache."""

from __future__ import annotations

from manylora.policy.caches.policy import CachePolicy


class SLora(CachePolicy):
    """What no running request uses goes at once; what waiting ones need is prefetched."""

    keeps_prefixes = False
    prefetches = True
