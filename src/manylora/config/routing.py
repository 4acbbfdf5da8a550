"""Declares the settings of a router: its own numbers, and the parameters of each routing policy.

Each parameter is declared once: name, default, bounds and help. Only experiments set a parameter that is no
``setting``. A router receives its policy's parameters as texts, so that flags and journals have one form.
Times are in seconds.
"""

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Literal, TypeVar

from manylora.config.declaring import ConfigError, Count, Seconds, Section, check_rules, setting, setting_of
from manylora.config.named import named_policy
from manylora.rules import FINITE, at_least, between, broken_rule, fields_of

_HERE = "manylora.router.policies"

ROUTERS = {
    "round-robin": f"{_HERE}.simple:RoundRobin",
    "punica": f"{_HERE}.punica:Punica",
    "punica-consolidate": f"{_HERE}.punica:PunicaConsolidate",
    "caraserve": f"{_HERE}.caraserve:CaraServe",
    "dlora-proactive": f"{_HERE}.dlora:DloraProactive",
    "dlora": f"{_HERE}.dlora:Dlora",
    "cache-aware": f"{_HERE}.simple:CacheAware",
    "manylora": f"{_HERE}.manylora:CheapestReplica",
}
"""Routing policies by name, each with its ``module:Class``."""

RouterName = Annotated[str, named_policy("router", ROUTERS)]

Share = Annotated[float, between(0, 1)]
Ratio = Annotated[float, at_least(1), FINITE]
Number = Annotated[float, at_least(0), FINITE]


@dataclasses.dataclass(frozen=True, slots=True)
class RouterConfig(Section):
    """The router's own numbers. ``settings``: parameters of the policy, as (key, value) in texts.

    A replica whose last report is older than ``suspect_s`` gets no new work; with one older than ``lease_s``
    it counts as down. A request that may be to blame for ``poison_deaths`` deaths of replicas is served
    alone, and refused after one more.
    """

    policy: RouterName = setting("manylora", "", name="router")
    settings: tuple[tuple[str, str], ...] = ()
    suspect_s: Seconds = 3.0
    lease_s: Seconds = 5.0
    tick_s: Seconds = 0.5
    max_attempts: Count = 3
    poison_deaths: Count = 2
    queue_timeout_s: Seconds = 30.0
    drain_timeout_s: Seconds = 60.0
    """The time after which the requests of a draining replica are moved."""
    move_cooldown_s: Seconds = 10.0
    """The least time between two moves of a request for a gain. Each later move needs twice the gain."""
    prefix_blocks: Count = 2**17
    """The number of blocks of prompts that the router remembers, with the replicas that got them."""
    scale_up_s: Seconds = 5.0
    scale_down_s: Seconds = 30.0
    trace: bool = False

    def __post_init__(self) -> None:
        check_rules(self)
        if not self.suspect_s <= self.lease_s:
            raise ConfigError("suspect_s must not exceed lease_s")


# ---------------------------------------------------------------- parameters of policies


class RouterParameters:
    """Parameters of a routing policy, checked when they are created. Raises ConfigError."""

    __slots__ = ()

    def __post_init__(self) -> None:
        if broken := broken_rule(self):
            field, must = broken
            raise ConfigError(f"{field.name} {must}")


@dataclasses.dataclass(frozen=True, slots=True)
class NoParameters(RouterParameters):
    """The parameters of a policy that has none."""


@dataclasses.dataclass(frozen=True, slots=True)
class BatchParameters(RouterParameters):
    """The parameters of punica."""

    max_batch: Count = setting(32, "requests that a replica has at most (Punica: 32)")


@dataclasses.dataclass(frozen=True, slots=True)
class ConsolidateParameters(BatchParameters):
    """The parameters of punica-consolidate."""

    interval_s: Seconds = setting(10.0, "how often the smallest replica is looked at")
    cooldown_s: Seconds = 30.0
    """The time for which both sides of a move take part in no other."""


@dataclasses.dataclass(frozen=True, slots=True)
class CaraServeParameters(RouterParameters):
    """The parameters of caraserve.

    The coefficients belong to a device and have no defaults: ``manylora profile`` prints them. A decode step
    takes ``decode_slope_s`` for each unit of rank, plus ``decode_base_s``. A prefill takes
    ``prefill_slope_s`` for each token, plus ``prefill_base_s``. Units of rank: requests times the largest
    rank (bgmv), or the sum of ranks (mbgmv).
    """

    kernel: Literal["bgmv", "mbgmv"] = setting(
        "bgmv", "whether ranks are padded to the largest (bgmv) or not"
    )
    decode_slope_s: Number | None = setting(None, "seconds of a decode step for each unit of rank")
    decode_base_s: Number | None = setting(None, "seconds of a decode step besides")
    prefill_slope_s: Number | None = setting(None, "seconds of a prefill for each token")
    prefill_base_s: Number | None = setting(None, "seconds of a prefill besides")
    slo_s: Seconds | None = setting(None, "the objective for the time per token")
    penalty_s: Number = 1000.0
    """The cost, in seconds, of a decode step that misses the objective."""

    def __post_init__(self) -> None:
        RouterParameters.__post_init__(self)
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is None:
                raise ConfigError(f"{field.name} must be given: manylora profile prints what to give")


@dataclasses.dataclass(frozen=True, slots=True)
class DloraParameters(RouterParameters):
    """The parameters of dlora-proactive."""

    replan_s: Seconds = setting(60.0, "how often the placement is planned anew")
    half_life_s: Seconds = 300.0
    """The half-life of adapters' request rates."""
    reserve: Share = 0.1
    """The share of a replica's pages that placed copies may take."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReactiveParameters(DloraParameters):
    """The parameters of dlora."""

    check_s: Seconds = 1.0
    """The time between two checks for overload."""
    solve_interval_s: Seconds = 10.0
    """The least time between two solutions."""
    solve_wait_s: Seconds = 2.0
    """The time after which a plan is made without the solver."""
    most_kv_use: Share = 0.9
    """The share of used pages above which a replica is overloaded."""
    most_delay_ratio: Ratio = 2.0
    """The queueing delay, in medians, above which a replica is overloaded, if it also exceeds
    ``least_delay_s``."""
    least_delay_s: Number = 1.0
    """The least queueing delay of an overloaded replica."""
    most_replicas: Count = 2
    """The most overloaded replicas in one programme, and the most underloaded ones."""
    eta_steps: Number = 0.05
    """The cost of an adapter on a replica, in decode steps."""


@dataclasses.dataclass(frozen=True, slots=True)
class CacheAwareParameters(RouterParameters):
    """The parameters of cache-aware, with SGLang's defaults."""

    least_share: Share = setting(0.3, "the share of the prompt that a replica must have for it to be chosen")
    most_difference: Count = setting(64, "requests between the fullest and the emptiest replica, and")
    most_ratio: Ratio = setting(1.5, "times as many, beyond which load decides alone")


@dataclasses.dataclass(frozen=True, slots=True)
class ManyloraParameters(RouterParameters):
    """The parameters of manylora."""

    idle_candidates: Count = 8
    """The number of the least loaded replicas among the candidates."""
    holder_candidates: Count = 8
    """The number of candidates that have the adapter."""
    prefix_candidates: Count = 4
    """The number of candidates that have most of the prompt."""
    home_queue_s: Number = setting(0.5, "an adapter gets another home where all have a longer queue")
    home_half_life_s: Seconds = 60.0
    """The half-life of the number of an adapter's homes beyond its first."""
    balance_s: Seconds = 1.0
    """The time between two searches for moves."""
    move_gain: Ratio = setting(3.0, "a move must save so many times what it costs")
    most_moves: Count = 4
    """The most moves at one time."""


def parameter_lines(router: str, kind: type[RouterParameters]) -> list[str]:
    """Describe the parameters of a routing policy that users set, a line each."""
    record: type = kind
    lines = []
    for field in fields_of(record):
        if about := setting_of(field):
            default = "must be given" if field.default is None else f"default: {field.default}"
            lines.append(f"{router}.{field.name:<20} {about.help} ({default})")
    return lines or ["no parameters"]


_Parameters = TypeVar("_Parameters", bound=RouterParameters)


def read_parameters(router: str, kind: type[_Parameters], pairs: Iterable[tuple[str, str]]) -> _Parameters:
    """Read the parameters of a routing policy from texts; later ones win. Raises ConfigError, which names the
    key."""
    record: type = kind
    fields = {field.name: field for field in fields_of(record)}
    values = {}
    for key, text in pairs:
        if key not in fields:
            known = ", ".join(name for name, field in fields.items() if setting_of(field)) or "none"
            raise ConfigError(f"router {router} has no setting {key!r}: it has {known}")
        convert = fields[key].kind
        try:
            values[key] = convert(text)
        except ValueError:
            what = "a whole number" if convert is int else "a number"
            raise ConfigError(f"{router}.{key} must be {what}, got {text!r}") from None
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"router {router}: {error}") from None


def split_setting(text: str) -> tuple[str, str, str]:
    """Split ``ROUTER.KEY=VALUE`` into its parts. Raises ConfigError."""
    name, equals, value = text.partition("=")
    router, dot, key = name.rpartition(".")
    if not (equals and dot and router and key):
        raise ConfigError(f"expected ROUTER.KEY=VALUE, got {text!r}")
    return router, key, value
