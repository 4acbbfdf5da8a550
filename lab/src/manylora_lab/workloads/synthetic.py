"""Streams made up from an arrival process, a popularity and lengths; they need no data of users."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Sequence
from random import Random

from manylora.config.declaring import ConfigError
from manylora_lab.workloads.arrivals import parse_process
from manylora_lab.workloads.popularity import Popularity, parse_ranks
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest
from manylora_lab.workloads.terms import Form, Number, parse_term

Lengths = Callable[[Random], tuple[int, int]]
"""Draws one request's prompt and output, in tokens."""

_MOST_TOKENS = 10_000_000
_TOKENS = Number("tokens", 1, _MOST_TOKENS)
_FORMS = {
    "constant": Form((_TOKENS,)),
    "uniform": Form((Number("least", 1, _MOST_TOKENS), Number("most", 1, _MOST_TOKENS))),
    "lognormal": Form((Number("mean", 1, _MOST_TOKENS), Number("cv", 0.01, 100))),
}


def parse_length(text: str) -> Callable[[Random], int]:
    """A length in tokens: 'uniform(8,512)' (both ends included), 'constant(128)' or '128', 'lognormal(mean,cv)'.

    A lognormal has the given mean and coefficient of variation before it is rounded, to at least 1.
    Raises ConfigError.
    """
    written = f"constant({text})" if text.strip().isdecimal() else text
    name, numbers = parse_term("a length", written, _FORMS)
    if name == "lognormal":
        mean, cv = numbers
        variance = math.log1p(cv**2)
        place, spread = math.log(mean) - variance / 2, math.sqrt(variance)
        return lambda rng: max(1, round(rng.lognormvariate(place, spread)))
    least, most = (int(numbers[0]), int(numbers[-1]))
    if (least, most) != (numbers[0], numbers[-1]) or least > most:
        raise ConfigError(f"{text}: write whole numbers of tokens, the least first")
    return lambda rng: rng.randint(least, most)


def independent(prompt: str, output: str) -> Lengths:
    """Prompt and output drawn apart from each other; as ``parse_length`` reads them."""
    draw_prompt, draw_output = parse_length(prompt), parse_length(output)
    return lambda rng: (draw_prompt(rng), draw_output(rng))


def empirical(pairs: Sequence[tuple[int, int]]) -> Lengths:
    """Prompt and output of one of the recorded requests, each as likely."""
    if not pairs:
        raise ConfigError("there are no recorded lengths to draw from")
    return lambda rng: rng.choice(pairs)


@dataclasses.dataclass(frozen=True, slots=True)
class Synthetic:
    """What a stream is made of, as text that the named functions parse; the defaults are S-LoRA's setting S1.

    S-LoRA §7.2: Gamma arrivals, power-law popularity, uniform lengths. The paper gives every adapter an arrival
    process of its own (``each`` of ``synthetic``); its published benchmarks/trace.py draws one for all and then
    each request's adapter, which is the default here. For cv 1 the two are the same.
    """

    arrivals: str = "gamma(1)"
    popularity: str = "power(1)"
    prompt: str = "uniform(8,512)"
    output: str = "uniform(8,512)"
    ranks: str = "8"


def synthetic(
    parts: Synthetic,
    *,
    rate: float,
    num_adapters: int,
    duration_s: float,
    seed: int,
    lengths: Lengths | None = None,
    each: bool = False,
    name: str = "synthetic",
    notes: Sequence[str] = (),
) -> Stream:
    """Requests that stand alone, ``rate`` a second in the mean, for ``duration_s``.

    ``lengths``: instead of those of ``parts``. ``each``: every adapter has its own arrival process. Raises
    ConfigError, also where chance brought no request.
    """
    lengths = lengths or independent(parts.prompt, parts.output)
    popularity = Popularity.parse(parts.popularity)
    # A generator for each part: lengths stay the same where another arrival process is tried.
    times_rng, adapters_rng, lengths_rng, ranks_rng = (Random(f"{seed} {part}") for part in _PARTS)
    process = parse_process(parts.arrivals)
    if each:
        shares = popularity.weights(num_adapters)
        streams = [
            [(moment, number) for moment in process(rate * share, duration_s, times_rng)]
            for number, share in enumerate(shares)
            if rate * share > 0
        ]
        arrivals = list(heapq.merge(*streams))
    else:
        moments = process(rate, duration_s, times_rng)
        arrivals = list(zip(moments, popularity.draws(num_adapters, adapters_rng)))
    requests = []
    for number, (moment, adapter) in enumerate(arrivals):
        prompt, output = lengths(lengths_rng)
        requests.append(StreamRequest(moment, adapter, number, 0, (Piece((name, number), prompt),), output))
    ranks = parse_ranks(parts.ranks, num_adapters, ranks_rng)
    made = f"made up: arrivals {parts.arrivals}, popularity {popularity}, seed {seed}"
    return Stream(name, tuple(requests), ranks, (made, *notes))


_PARTS = ("arrivals", "adapters", "lengths", "ranks")
