"""What CaraServe's router goes by: the coefficients of its model, which a profile has and nothing else gives, and
the objective for the time between tokens (§5)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from manylora.config.declaring import ConfigError
from manylora.protocol.routing import RankCosts
from manylora_lab.pricing.costs import StepCosts, StepWork
from manylora_lab.pricing.profile import Profile

_CONTEXT = 512
_SOURCES = {
    "decode_slope_s": "--profile", "decode_base_s": "--profile", "prefill_slope_s": "--profile",
    "prefill_base_s": "--profile", "slo_s": "--slo-tpot",
}  # fmt: skip
"""The option of ``bench simulate`` that each of these parameters comes from."""


def merged_step_s(costs: StepCosts) -> float:
    """A decode step of one row of 512 positions whose adapter is merged: without any beside the weights."""
    return costs.step_s(StepWork(1, 0, _CONTEXT))


def slo_factor(text: str) -> float:
    """The number of an objective: seconds, or with an x behind it merged steps. Raises ConfigError."""
    try:
        value = float(text.removesuffix("x"))
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ConfigError(
            f"--slo-tpot must be seconds, or a multiple of the merged step as 1.5x, got {text!r}"
        )
    return value


def slo_of(text: str | None, costs: StepCosts) -> float | None:
    """The objective for the time between tokens, in seconds."""
    if text is None:
        return None
    return slo_factor(text) * (merged_step_s(costs) if text.endswith("x") else 1.0)


def rank_costs(router: str, pairs: Sequence[tuple[str, str]], profile: Profile | None) -> RankCosts:
    """The coefficients of a device, for the kernel that the parameters ``pairs`` name. Raises ConfigError."""
    lines = None if profile is None else profile.ranks
    if lines is None:
        raise ConfigError(
            f"router {router} needs a --profile with its steps by rank: write one with manylora profile"
        )
    decode = lines.mbgmv if dict(pairs).get("kernel") == "mbgmv" else lines.bgmv
    return RankCosts(decode.slope_s, decode.base_s, lines.prefill.slope_s, lines.prefill.base_s)


def caraserve_settings(
    router: str, pairs: Sequence[tuple[str, str]], profile: Profile | None, slo_s: float | None
) -> list[tuple[str, str]]:
    """Parameters of the router beside those that are given, ``pairs``. Raises ConfigError."""
    for key, _ in pairs:
        if key in _SOURCES:
            raise ConfigError(f"{router}.{key} comes from {_SOURCES[key]}")
    costs = rank_costs(router, pairs, profile)
    if slo_s is None:
        raise ConfigError(f"router {router} needs --slo-tpot")
    return [(key, repr(value)) for key, value in (*costs._asdict().items(), ("slo_s", slo_s))]
