"""Declares the settings of merging: whether and when an adapter's weights are merged into the base's."""

import dataclasses
from typing import Annotated, Any, NamedTuple

from manylora.config.declaring import ConfigError, Count, Seconds, Section, check_rules, only, setting
from manylora.config.named import find_policies
from manylora.rules import FINITE, Rule, at_least, less_than, more_than, one_of

_HERE = "manylora.policy.merging"

MERGE_POLICIES = {"dlora": f"{_HERE}.dlora:DloraMerging", "manylora": f"{_HERE}.regret:RegretMerging"}
"""The merge policies by mode, each with its ``module:Class``."""
MERGE_MODES = ("unmerged", *MERGE_POLICIES)

_MERGING = "mode", Rule(" or ".join(MERGE_POLICIES), lambda mode: mode != "unmerged")
"""The condition that a mode merges. Modes of other distributions merge, too."""

_MODE = Rule(
    f"one of {', '.join(MERGE_MODES)}, or a baseline of manylora-lab (pip install manylora-lab)",
    lambda mode: mode in MERGE_MODES or mode in find_policies("merge"),
)
Ratio = Annotated[float, more_than(0), FINITE]
_OF_DLORA: dict[str, Any] = {"is_internal": True, "needs": ("mode", only("dlora"))}
"""The options of dLoRA's numbers, which only experiments set."""


class StepTimes(NamedTuple):
    """Seconds of a step of ``num_rows`` rows and ``num_tokens`` tokens, measured before serving.

    ``unmerged_s``: all rows use one adapter, none merged; ``merged_s``: all rows use the merged adapter,
    which takes as long as the base alone. ``mixed_s`` is unused: journals of earlier releases have it.
    """

    num_rows: int
    num_tokens: int
    unmerged_s: float
    merged_s: float
    mixed_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class MergeTimes:
    """The times of the device, measured before serving; users cannot set them.

    ``steps_wait``: no step may be commanded between SetMerged and its SwitchDone, since the copy of the
    pristine weights is in host memory. ``merge_s``: seconds of a switch from the base to an adapter;
    ``restore_s``: of the way back.
    """

    steps_wait: bool = False
    merge_s: Annotated[float, at_least(0), FINITE] = 0.0
    restore_s: Annotated[float, at_least(0), FINITE] = 0.0
    steps: tuple[StepTimes, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class MergeConfig(Section):
    """The rules for merging an adapter (dLoRA §4). The numbers of ``dlora`` are its authors', where they give
    any."""

    mode: Annotated[str, _MODE] = setting(
        "unmerged",
        "merge an adapter into the base's weights while most requests are its: unmerged (never), dlora (dLoRA's "
        "thresholds and credits), manylora (when measured times say that it pays)",
        "MODE",
        name="merge",
    )
    copy: Annotated[str, one_of(("auto", "device", "host"))] = setting(
        "auto",
        "where the base's own weights are kept: on the device (a switch takes some ms), in pinned host memory, or "
        "(auto) on the device where they take at most 15%% of what the pool would get",
        name="merge_copy",
        needs=_MERGING,
    )
    minority: Annotated[str, one_of(("wait", "unmerge"))] = setting(
        "unmerge",
        "--merge manylora: while an adapter is merged, requests of others wait, or end it",
        name="merge_minority",
        needs=("mode", only("manylora")),
    )
    starve_s: Seconds = setting(
        2.0,
        "how long requests wait at most since they are of another adapter: dlora sets its credits by it, manylora "
        "ends such a wait",
        name="merge_starve",
        needs=_MERGING,
    )
    alpha: Ratio = setting(
        1.0, "dlora: merge above this share of a batch, at first", "SHARE", name="merge_alpha", **_OF_DLORA
    )
    beta: Ratio = setting(
        0.556, "dlora: unmerge below this share, at first", "SHARE", name="merge_beta", **_OF_DLORA
    )
    dec: Annotated[float, more_than(0), less_than(1)] = setting(
        0.05, "dlora: step by which a threshold comes nearer", "STEP", name="merge_dec", **_OF_DLORA
    )
    mul: Annotated[float, more_than(1), FINITE] = setting(
        1.1, "dlora: factor by which a threshold goes away", "FACTOR", name="merge_mul", **_OF_DLORA
    )
    window: Count = setting(
        64, "dlora: steps after which the thresholds are tuned", name="merge_window", **_OF_DLORA
    )
    times: MergeTimes = MergeTimes()

    def __post_init__(self) -> None:
        check_rules(self)
        if self.alpha <= self.beta:
            raise ConfigError(f"--merge-alpha ({self.alpha:g}) must be above --merge-beta ({self.beta:g})")

    @property
    def is_on(self) -> bool:
        return self.mode != "unmerged"
