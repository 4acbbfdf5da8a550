"""What CaraServe's router goes by: the coefficients of its model, which a profile has and nothing else gives, and
the objective for the time between tokens (§5)."""

from __future__ import annotations

from collections.abc import Sequence

from manylora.config import ConfigError
from manylora.config.routing import CaraServeParameters
from manylora.pricing.costs import StepCosts, StepWork
from manylora.pricing.profile import Profile
from manylora.protocol.routing import RankCosts

_CONTEXT = 512


def merged_step_s(costs: StepCosts) -> float:
    """A decode step of one row of 512 positions whose adapter is merged: without any beside the weights."""
    return costs.step_s(StepWork(1, 0, _CONTEXT))


def slo_of(text: str | None, costs: StepCosts) -> float | None:
    """The objective for the time between tokens (``Objective``), in seconds."""
    if text is None:
        return None
    value = float(text.removesuffix("x"))
    return value * merged_step_s(costs) if text.endswith("x") else value


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
        if key in CaraServeParameters.sources:
            raise ConfigError(f"{router}.{key} comes from {CaraServeParameters.sources[key]}")
    costs = rank_costs(router, pairs, profile)
    if slo_s is None:
        raise ConfigError(f"router {router} needs --slo-tpot")
    return [(key, repr(value)) for key, value in (*costs._asdict().items(), ("slo_s", slo_s))]
