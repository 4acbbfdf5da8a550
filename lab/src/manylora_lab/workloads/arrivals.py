"""Arrival processes: when requests come. Knows nothing of what they ask for.

Every process takes the mean rate in requests a second and gives ascending moments in [0, duration_s). Random ones
draw from the generator they are handed, a ``random.Random``, so that a seed gives the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from random import Random

from manylora.config.declaring import ConfigError
from manylora_lab.workloads.terms import Form, Number, parse_term

Process = Callable[[float, float, Random], list[float]]
"""Mean rate a second, duration in seconds, generator -> moments."""


def poisson(rate: float, duration_s: float, rng: Random) -> list[float]:
    """Independent arrivals: exponential gaps."""
    return _renewal(lambda: rng.expovariate(rate), duration_s)


def gamma(rate: float, cv: float, duration_s: float, rng: Random) -> list[float]:
    """Gamma-distributed gaps with coefficient of variation ``cv``: 1 is Poisson, more is burstier (S-LoRA §7.2).

    Shape 1 / cv^2, scale cv^2 / rate.
    """
    shape = 1 / cv**2
    return _renewal(lambda: rng.gammavariate(shape, 1 / (shape * rate)), duration_s)


def even(rate: float, duration_s: float) -> list[float]:
    """One every 1 / rate seconds, the first at once."""
    moments = (index / rate for index in range(math.ceil(rate * duration_s)))
    return [moment for moment in moments if moment < duration_s]  # a product may be rounded up


def at_once(rate: float, duration_s: float) -> list[float]:
    """All rate * duration_s of them at the start: an offline batch."""
    return [0.0] * max(1, round(rate * duration_s))


def ramp(low_rate: float, high_rate: float, duration_s: float, rng: Random) -> list[float]:
    """Independent arrivals whose rate climbs to ``high_rate`` at half time and falls again (Punica §7.3).

    Linear both ways: a Poisson process of rate 1, its moments sent through the inverse of the integrated rate.
    """
    slope = (high_rate - low_rate) / (duration_s / 2)
    half = (low_rate + high_rate) / 2 * (duration_s / 2)

    def climbing(expected: float) -> float:
        """When the integral of low_rate + slope * t reaches ``expected``; this form bears a slope of 0."""
        return 2 * expected / (low_rate + math.sqrt(low_rate**2 + 2 * slope * expected))

    moments = []
    for expected in poisson(1.0, 2 * half, rng):
        rising = expected <= half
        moments.append(climbing(expected) if rising else duration_s - climbing(2 * half - expected))
    return [moment for moment in moments if moment < duration_s]


def from_gaps(gaps_s: Sequence[float], rate: float, duration_s: float, start: int) -> list[float]:
    """Recorded gaps from number ``start`` on, again and again, stretched to just ``rate`` (as S-LoRA §7.3 does).

    round(rate * duration_s) arrivals, the first at 0, at least one; the pattern stays, its pace is scaled.
    """
    count = max(1, round(rate * duration_s))
    moments = [0.0]
    for index in range(start, start + count):
        moments.append(moments[-1] + gaps_s[index % len(gaps_s)])
    span = moments.pop()
    if span <= 0:
        raise ConfigError(f"{count} recorded gaps from number {start} on are all 0")
    # A product may round up to the end itself, which is outside.
    return [min(moment / span * duration_s, math.nextafter(duration_s, 0)) for moment in moments]


def _renewal(gap: Callable[[], float], duration_s: float) -> list[float]:
    return list(_until(gap, duration_s))


def _until(gap: Callable[[], float], duration_s: float) -> Iterator[float]:
    moment = gap()
    while moment < duration_s:
        yield moment
        moment += gap()


_FORMS = {
    "poisson": Form(),
    "gamma": Form((Number("cv", 0.01, 100),)),
    "even": Form(),
    "at-once": Form(),
    "ramp": Form(),
}


def parse_process(text: str) -> Process:
    """'poisson', 'gamma(cv)', 'even', 'at-once' or 'ramp' (from 0 to twice the mean rate and back).

    Raises ConfigError. What comes back refuses a rate or a duration that is not above 0.
    """
    name, numbers = parse_term("an arrival process", text, _FORMS)

    def process(rate: float, duration_s: float, rng: Random) -> list[float]:
        check_load(rate, duration_s)
        if name == "gamma":
            return gamma(rate, numbers[0], duration_s, rng)
        if name == "ramp":
            return ramp(0.0, 2 * rate, duration_s, rng)
        if name == "poisson":
            return poisson(rate, duration_s, rng)
        return even(rate, duration_s) if name == "even" else at_once(rate, duration_s)

    return process


MOST_REQUESTS = 20_000_000
"""More are surely a slip, and would fill the memory unnoticed."""


def check_load(rate: float, duration_s: float) -> None:
    """Raises ConfigError unless rate and duration are above 0 and make a number of requests that can be held."""
    for what, value, unit in (("rate", rate, "requests a second"), ("duration", duration_s, "seconds")):
        if not 0 < value < math.inf:
            raise ConfigError(f"the {what} must be a number of {unit} above 0, got {value:g}")
    if rate * duration_s > MOST_REQUESTS:
        raise ConfigError(
            f"{rate:g} requests a second for {duration_s:g} seconds are more than {MOST_REQUESTS:,} requests"
        )
