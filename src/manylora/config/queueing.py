"""Declares the order among waiting requests: priorities, fairness, and the number of adapters that run at
once."""

import dataclasses
import fractions
import math
import re
from typing import Annotated

from manylora.config.declaring import ConfigError, Seconds, Section, check_rules, only, setting
from manylora.rules import Rule, between, one_of

LEAST_PRIORITY, MOST_PRIORITY = -(2**31), 2**31 - 1
"""The bounds of a request's ``priority``, as in vLLM. A lower priority comes first."""

_LIMIT = re.compile(r"([1-9][0-9]{0,5})(:hard)?")
_WEIGHTS = re.compile(r"[0-9]{1,6},[0-9]{1,6},[0-9]{1,6}")
_SHARE = re.compile(r"(.+)=([0-9]{1,4}(?:\.[0-9]{1,3})?)")


def _are_shares(texts: tuple[str, ...]) -> bool:
    found = [_SHARE.fullmatch(text) for text in texts]
    return all(share is not None and float(share[2]) > 0 for share in found)


@dataclasses.dataclass(frozen=True, slots=True)
class QueueConfig(Section):
    """The order of the queue (``policy.queue``), which takes precedence over that of ``admission``."""

    scheduling_policy: Annotated[str, one_of(("fcfs", "priority"))] = setting(
        "fcfs",
        "priority: requests of a lower `priority` go first, and those of the largest are preempted first; fcfs: "
        "requests have none",
    )
    priority_floor: Annotated[int, between(LEAST_PRIORITY, 0)] = setting(
        0,
        "the least `priority` that a request may ask for; a lower one is refused with 400",
        needs=("scheduling_policy", only("priority")),
    )
    priority_age_s: Seconds | None = setting(
        None,
        "every S seconds that a request waits, it goes up by one priority, at most to the floor (default: never)",
        name="priority_age",
        needs=("scheduling_policy", only("priority")),
    )
    fairness: Annotated[str, one_of(("none", "vtc"))] = setting(
        "none",
        "vtc: the client that was served least is next (virtual token counters); none: clients do not matter",
    )
    fair_by: Annotated[str, one_of(("adapter", "key"))] = setting(
        "adapter",
        "what a client is for --fairness: all requests for one adapter, or of one API key",
        needs=("fairness", only("vtc")),
    )
    fair_weights: Annotated[
        str,
        Rule("three whole numbers such as 1,2,0", lambda text: _WEIGHTS.fullmatch(text) is not None),
        Rule("more than 0 in one of the first two", lambda text: any(map(int, text.split(",")[:2]))),
    ] = setting(
        "1,2,0",
        "service of one input token, one output token, and one input token from the cache",
        "P,Q,C",
        needs=("fairness", only("vtc")),
    )
    fair_share: Annotated[
        tuple[str, ...], Rule("NAME=W with W from 0.001 to 9999, of at most three decimals", _are_shares)
    ] = setting(
        (),
        "the client gets W times the service of one with the usual share, 1; an adapter's name, the base's, or a "
        "key's place among the --api-key flags, from 0; may be repeated",
        "NAME=W",
        needs=("fairness", only("vtc")),
    )
    adapter_batch_limit: (
        Annotated[str, Rule("N or N:hard, N at least 1", lambda text: _LIMIT.fullmatch(text) is not None)]
        | None
    ) = setting(
        None,
        "while N adapters have running requests, requests for one of them, or the base, go first; with :hard no "
        "further adapter runs (default: no limit)",
        "N[:hard]",
        takes_numbers=True,
    )

    def __post_init__(self) -> None:
        check_rules(self)
        names = [name for name, _ in _pairs(self.fair_share)]
        for name in names:
            if self.fair_by == "key" and not (name.isdecimal() and name == str(int(name))):
                raise ConfigError(f"--fair-share names a key by its place, from 0, got {name!r}")
            if names.count(name) > 1:
                raise ConfigError(f"--fair-share names {name!r} twice")

    @property
    def is_fair(self) -> bool:
        return self.fairness == "vtc"

    @property
    def has_priorities(self) -> bool:
        return self.scheduling_policy == "priority"

    @property
    def weights(self) -> tuple[int, int, int]:
        """The service of a token of input, of output, and of input from the cache."""
        of_input, of_output, of_cached = map(int, self.fair_weights.split(","))
        return of_input, of_output, of_cached

    @property
    def shares(self) -> dict[str, float]:
        """The shares by client, without the usual share, 1."""
        return dict(_pairs(self.fair_share))

    @property
    def share_scale(self) -> int:
        """The number that gives a whole number when divided by any of these shares, so that counters are
        integers."""
        return math.lcm(*(as_share(share).numerator for share in self.shares.values()))

    @property
    def adapter_limit(self) -> tuple[int, bool] | None:
        """The limit on adapters, and whether it is hard; None: no limit."""
        if self.adapter_batch_limit is None:
            return None
        number, colon, _ = self.adapter_batch_limit.partition(":")
        return int(number), bool(colon)


def _pairs(texts: tuple[str, ...]) -> list[tuple[str, float]]:
    return [(name, float(share)) for name, _, share in (text.rpartition("=") for text in texts)]


def as_share(share: float) -> fractions.Fraction:
    """Return the number exactly as it was written: it has at most three decimals."""
    return fractions.Fraction(share).limit_denominator(1000)
