"""Which adapter a request names: popularity distributions, dLoRA's mapping of functions, and adapters' ranks.

Adapters are numbers from 0; where a distribution has an order, adapter 0 is the most popular.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from random import Random

from manylora.config.declaring import ConfigError
from manylora_lab.workloads.terms import Form, Number, parse_term

_FORMS = {
    "zipf": Form((Number("s", 0, 1000),)),
    "geometric": Form((Number("ratio", 1, 1e6),)),
    "power": Form((Number("a", 1e-6, 1000),)),
    "gaussian": Form((Number("sigma", 1e-6, 1e6),)),
    "uniform": Form(),
    "round-robin": Form(),
    "identical": Form(),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Popularity:
    """How requests fall to n adapters, i from 1 to n.

    - ``zipf(s)``: i has weight i^-s.
    - ``geometric(r)``: i is asked for r times as often as i + 1; Punica's *Skewed* (§7) is ``geometric(1.5)``.
    - ``power(a)``: number floor(n * x), counted from 0, for x of density a * x^(a - 1): ``power(1)`` is uniform,
      smaller is more skewed (S-LoRA's alpha; so its published benchmarks/trace.py draws it).
    - ``gaussian(sigma)``: a normal distribution around the middle adapter with a standard deviation of sigma * n,
      cut at both ends. FastLibra's *Skewed-x* (§6.9) is "Gaussian with standard deviations x"; that x counts in
      shares of n is our assumption, since the paper does not say.
    - ``uniform``: each alike, drawn anew for each request. ``round-robin``: one after the other (*Distinct* of
      Punica §7 and FastLibra §6.9: polling). ``identical``: all ask for the first (Punica §7).
    """

    name: str
    number: float = 0.0

    @staticmethod
    def parse(text: str) -> Popularity:
        """Parses 'zipf(1.0)', 'round-robin' and so on; raises ConfigError."""
        name, numbers = parse_term("a popularity", text, _FORMS)
        return Popularity(name, *numbers)

    def __str__(self) -> str:
        return f"{self.name}({self.number:g})" if _FORMS[self.name].numbers else self.name

    def weights(self, num_adapters: int) -> tuple[float, ...]:
        """Each adapter's expected share of the requests, adding up to 1. Raises ConfigError below 1 adapter."""
        check_adapters(num_adapters)
        parts = [self._weight(index, num_adapters) for index in range(num_adapters)]
        total = math.fsum(parts)
        return tuple(part / total for part in parts)

    def draws(self, num_adapters: int, rng: Random) -> Iterator[int]:
        """Adapters of one request after the other, without end."""
        if self.name == "round-robin":
            check_adapters(num_adapters)
            return itertools.cycle(range(num_adapters))
        bounds = tuple(itertools.accumulate(self.weights(num_adapters)))
        numbers = range(num_adapters)
        return (rng.choices(numbers, cum_weights=bounds)[0] for _ in itertools.repeat(None))

    def _weight(self, index: int, count: int) -> float:
        match self.name:
            case "zipf":
                return float((index + 1) ** -self.number)
            case "geometric":
                return float(self.number**-index)
            case "power":
                return float(((index + 1) / count) ** self.number - (index / count) ** self.number)
            case "gaussian":
                # The middle one has weight 1, or the two there the same, so the sum is never 0.
                nearest = 0.0 if count % 2 else 0.5
                middle = abs(index - (count - 1) / 2)
                return math.exp((nearest**2 - middle**2) / 2 / (self.number * count) ** 2)
            case "identical":
                return float(index == 0)
            case _:
                return 1.0


MOST_ADAPTERS = 1_000_000
"""More are surely a slip."""


def check_adapters(count: int) -> None:
    """Raises ConfigError unless there is a number of adapters that can be served."""
    if not 1 <= count <= MOST_ADAPTERS:
        raise ConfigError(f"the number of adapters must be from 1 to {MOST_ADAPTERS:,}, got {count}")


def mapped_functions(invocations: Sequence[int], num_adapters: int, skewness: int) -> tuple[int, ...]:
    """The adapter of each function of a trace, after dLoRA §7.1: the larger ``skewness``, the more skewed.

    Functions are sorted by invocations, most first (equal ones keep their order); the first ``skewness`` of them
    go to adapter 0, the next to adapter 1, and so on, round and round. Raises ConfigError.
    """
    check_adapters(num_adapters)
    if skewness < 1:
        raise ConfigError(f"the skewness must be at least 1 function an adapter, got {skewness}")
    adapters = [0] * len(invocations)
    order = sorted(range(len(invocations)), key=lambda function: -invocations[function])
    for place, function in enumerate(order):
        adapters[function] = place // skewness % num_adapters
    return tuple(adapters)


MOST_RANK = 65536
"""Likewise."""

_RANK = Number("rank", 1, MOST_RANK)
_RANK_FORMS = {"random": Form((_RANK,), repeats=True), "cycle": Form((_RANK,), repeats=True)}


def parse_ranks(text: str, num_adapters: int, rng: Random) -> tuple[int, ...]:
    """A rank for each adapter: 'random(32,64)' as in FastLibra §6.1, 'cycle(64,32,16,8)' as in S-LoRA §7.2, or
    '16' for all of them. Raises ConfigError."""
    check_adapters(num_adapters)
    written = f"cycle({text})" if text.strip().isdecimal() else text
    name, values = parse_term("a choice of ranks", written, _RANK_FORMS)
    choices = tuple(int(value) for value in values)
    if choices != values:
        raise ConfigError(f"{text}: ranks are whole numbers")
    if name == "cycle":
        return tuple(itertools.islice(itertools.cycle(choices), num_adapters))
    return tuple(rng.choice(choices) for _ in range(num_adapters))
