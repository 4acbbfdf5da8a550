"""``fit_planes`` of the product, which remembers what it has found: for tests that ask about other things."""

from __future__ import annotations

from manylora_lab.pricing import fit
from manylora_lab.pricing.fit import Array

_fit_planes = fit.fit_planes
_found: dict[tuple[bytes, bytes, int, bytes | None], Array] = {}


def fit_planes(features: Array, seconds: Array, count: int, weights: Array | None = None) -> Array:
    """See ``manylora_lab.pricing.fit``."""
    given = None if weights is None else weights.tobytes()
    key = (features.tobytes(), seconds.tobytes(), count, given)
    if key not in _found:
        _found[key] = _fit_planes(features, seconds, count, weights)
    return _found[key].copy()
