"""What FastLibra's text states of its own results; what only its pictures show is not here."""

from __future__ import annotations

from typing import NamedTuple


class Stated(NamedTuple):
    """FastLibra against a baseline: changes of TTFT and TPOT, multiples of peak, memory use and hit rate."""

    ttft: float
    tpot: float
    peak: float
    used: float
    hit: float


AGAINST = {
    "static-lru": Stated(-0.603, -0.339, 1.7, 1.2, 1.3),
    "s-lora": Stated(-0.501, -0.286, 1.6, 2.6, 3.2),
}
"""§6.3, §6.4."""
IN_SCENARIOS = {"static-lru": ("translation", -0.689, -0.525), "s-lora": ("agent", -0.811, -0.346)}
"""§6.3: FastLibra's change of TTFT against each in the scenario where it gains most, and in the others."""
OF_VARIANTS = {
    "fastlibra-wom": (1.27, 1.18, -0.198),
    "fastlibra-wos": (1.24, 1.15, -0.172),
    "fastlibra-wol": (1.13, 1.11, -0.131),
}
"""§6.6 to §6.8: TTFT and TPOT as multiples of FastLibra's, and the change of the peak."""
INVALID = {"fastlibra-wom": 0.486, "static-lru": 0.481}
"""§6.6 and, of its evaluation, §2.3.1 (§1 says "up to 46.5%"): invalid share of the history on the device."""
AMONG_MANY = {"TTFT": -0.554, "TPOT": -0.162}
"""§6.9: against both baselines together."""


def stated(ours: str, figure: float | None) -> float | None:
    """A figure of the paper beside the policy that it is of, by turns or pages; beside another there is none."""
    return figure if ours in ("fastlibra", "fastlibra-pages") else None
