"""Declares the settings of the policy, and their rules."""

import dataclasses
from collections.abc import Iterable
from typing import Annotated

from manylora.config.cold_start import ColdStartConfig
from manylora.config.declaring import ConfigError, Seconds, Section, check_rules, setting
from manylora.config.merging import MergeConfig
from manylora.config.named import named_policy
from manylora.config.queueing import QueueConfig
from manylora.rules import FINITE, Rule, at_least, at_most, less_than, more_than, one_of

_HERE = "manylora.policy.cache_policies"

CACHE_POLICIES = {
    "manylora": f"{_HERE}:Manylora",
    "fastlibra": f"{_HERE}:FastLibra",
    "static-lru": f"{_HERE}:StaticLru",
    "s-lora": f"{_HERE}:SLora",
    "lru": f"{_HERE}:Lru",
    "lru-ahead": f"{_HERE}:LruAhead",
    "lru-drop": f"{_HERE}:LruDrop",
}
"""The cache policies by name, each with its ``module:Class``."""

CACHE_NUMBERS = ("high_mark", "low_mark", "interval_s", "tau_s", "window_s", "adapter_share")
CACHE_SETTINGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(CACHE_POLICIES, ()),
    "manylora": ("high_mark", "low_mark", "interval_s", "window_s"),
    "fastlibra": CACHE_NUMBERS[:-1],
    "static-lru": ("adapter_share",),
    "lru-ahead": ("high_mark",),
}
"""The numbers of ``CacheConfig`` that each policy reads, by the policy's name. A policy from elsewhere may
read all."""


@dataclasses.dataclass(frozen=True, slots=True)
class CacheConfig(Section):
    """The cache policy and its numbers. ``tau_s`` and ``window_s`` are our assumptions where the FastLibra
    paper is silent (its equation 5): the scale of its time decay, and the time that a visit counts."""

    policy: Annotated[str, named_policy("cache", CACHE_POLICIES)] = setting(
        "manylora",
        f"what decides which adapters and KV stay on the device: {', '.join(CACHE_POLICIES)}, or module:Class for "
        "one of your own",
        "NAME",
        name="cache_policy",
    )
    adapter_share: Annotated[float, more_than(0), less_than(1)] = 0.2
    tau_s: Seconds = 10.0
    window_s: Seconds = 60.0
    interval_s: Seconds = 0.1
    high_mark: Annotated[float, more_than(0)] | None = None
    """None: the policy's own mark. That is 0.95 in the paper; ``manylora`` uses 0.90 to 0.98, depending on
    the pages that steps take."""
    low_mark: float = 0.70
    trace: bool = False

    def __post_init__(self) -> None:
        check_rules(self)
        if not 0 < self.low_mark <= (self.high_mark or 1) <= 1:
            raise ConfigError("the marks must satisfy 0 < low_mark <= high_mark <= 1")


def cache_numbers(policy: str) -> tuple[str, ...]:
    """Return the names of the numbers that users may set for this cache policy."""
    return CACHE_SETTINGS.get(policy, CACHE_NUMBERS)


def cache_config(policy: str, texts: Iterable[str], trace: bool) -> CacheConfig:
    """Build the settings of a cache policy from texts of the form KEY=VALUE; later ones win. Raises
    ConfigError."""
    config, known = CacheConfig(policy, trace=trace), cache_numbers(policy)
    values = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise ConfigError(f"--cache-set must be KEY=VALUE, got {text!r}")
        if key not in known:
            has = ", ".join(known) or "none"
            raise ConfigError(f"--cache-set {text}: {policy} has no setting {key!r}: it has {has}")
        try:
            values[key] = float(value)
        except ValueError:
            raise ConfigError(f"--cache-set {key} must be a number, got {value!r}") from None
    try:
        return dataclasses.replace(config, **values)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"--cache-set {error}") from None


KEPT_SHARE = 0.1
ADMISSIONS = ("fcfs", "lcfs", "early-abort")
FIRST_STEP_S = 0.5
"""The time that early abort allows for the step of the first token, in seconds."""

Admission = Annotated[str, one_of(ADMISSIONS)]
Objective = Annotated[float, more_than(FIRST_STEP_S, " seconds"), FINITE]
"""The time from a request's arrival to its first token that should be met, in seconds; early-abort only."""
PipelineDepth = Annotated[int, Rule("1 or 2", lambda depth: depth in (1, 2))]
"""The most steps in flight. With 2, a step is decided while the one before it still runs."""
Positive = Annotated[int, at_least(1)]


def check_objective(admission: str, slo_ttft_s: float | None) -> None:
    """Check that early abort has an objective. Raises ConfigError."""
    if admission == "early-abort" and slo_ttft_s is None:
        raise ConfigError("admission early-abort needs slo_ttft, the objective for the first token")


def check_cold_start(cold_start: ColdStartConfig, merge: MergeConfig) -> None:
    """Refuse layer groups together with merging, since a step on merged weights awaits no copy. Raises
    ConfigError."""
    if cold_start.num_groups and merge.is_on:
        raise ConfigError(f"--cold-start {cold_start.mode} does not go with --merge {merge.mode}")


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyConfig(Section):
    """The settings of the policy. Lengths are in tokens. Without host pages there is one tier."""

    num_pages: Positive
    page_tokens: Positive
    max_model_len: Positive
    max_num_seqs: Positive
    max_batch_tokens: Positive
    num_host_pages: Annotated[int, at_least(0)] = 0
    page_bytes: Positive = 2 * 2**20
    cache: CacheConfig = CacheConfig()
    admission: Admission = "fcfs"
    slo_ttft_s: Objective | None = None
    pipeline_depth: PipelineDepth = 1
    max_waiting: Positive | None = None
    """The most requests that wait for their first admission; further ones are refused. None: any number."""
    queue: QueueConfig = QueueConfig()
    merge: MergeConfig = MergeConfig()
    max_prefills_per_step: Positive | None = None
    """The most prompts of which one step computes a part. None: as many as its tokens allow."""
    cold_start: ColdStartConfig = ColdStartConfig()
    long_from: Positive | None = None
    """The length in tokens above which a sequence has other rotary keys (longrope). Its KV is then computed
    anew, and shared only with other such sequences."""
    kept_share: Annotated[float, at_least(0), at_most(1)] = KEPT_SHARE
    """The share of the device's pages that copies may take which a router wants kept."""

    def __post_init__(self) -> None:
        check_rules(self)
        check_objective(self.admission, self.slo_ttft_s)
        check_cold_start(self.cold_start, self.merge)
        if self.max_batch_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): each running sequence decodes one token a step"
            )
