"""``manylora`` taken apart: its six features, each on or off, between one LRU and the whole.

Names ``lru+FEATURE`` and ``manylora-FEATURE`` stand for policies of the simulator, not of an engine.
"""

from __future__ import annotations

from typing import Any

from manylora.config.declaring import ConfigError
from manylora.policy.cache_policies import CachePolicy, Lru, Manylora

FEATURES: dict[str, dict[str, Any]] = {
    "value": {"device_value": Manylora.device_value, "prices_pages": Manylora.prices_pages},
    "host-value": {"host_value": Manylora.host_value},
    "offload": {"offload": Manylora.offload},
    "room": {"marks": Manylora.marks},
    "orphans": {"keeps_orphans": Manylora.keeps_orphans},
    "prefetch": {"prefetches": Manylora.prefetches},
}
"""What ``manylora`` answers otherwise than ``lru``: which node leaves the device; which the host; whether KV is
written, and brought back; when pages are freed, and nodes come unasked; KV on the host outlives its adapter; what
waiting requests need comes ahead of them. The first two are values of nodes, the others are about when and whether
copies are made."""
VALUES = ("value", "host-value")
ABLATIONS = (*(f"manylora-{name}" for name in FEATURES), *(f"lru+{name}" for name in FEATURES))


def composed(name: str, features: set[str]) -> CachePolicy:
    """One LRU with some of the features."""
    answers: dict[str, Any] = {"name": name, "__doc__": "Taken apart."}
    for feature in features:
        answers |= FEATURES[feature]
    kind: type[CachePolicy] = type("Composed", (Lru,), answers)
    return kind()


def ablation(name: str) -> CachePolicy:
    """The policy of one of ``ABLATIONS``. Raises ConfigError."""
    if name not in ABLATIONS:
        raise ConfigError(f"there is no ablation {name!r}: use {', '.join(ABLATIONS)}")
    base, feature = name.split("+") if "+" in name else name.split("-", 1)
    return composed(name, {feature} if base == "lru" else set(FEATURES) - {feature})
