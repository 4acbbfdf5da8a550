"""Punica's four popularities and its request lengths (§7). Knows no device."""

from __future__ import annotations

import dataclasses
import math
from random import Random

from manylora.workloads import extracts
from manylora.workloads.popularity import Popularity

POPULARITIES = ("distinct", "uniform", "skewed", "identical")
SKEWED = Popularity("geometric", 1.5)
"""Each model is asked for 1.5 times as often as the next (§7)."""
RANK = 16
"""§7, for all experiments but Figure 9."""
LENGTHS_NOTE = (
    "Lengths: first rounds of ShareGPT conversations in Llama-2 tokens (manylora.workloads/data), of at most "
    "2,048 tokens. The paper says that its 1000 requests, of ShareGPT's distribution too, generate around 101k "
    "tokens; these generate several times as many. The published benchmark draws others again (prompts from a "
    "log-normal fit, whole lengths evenly up to 2,048), so tokens per second compare only roughly."
)


def model_counts(popularity: str, num_requests: int) -> tuple[int, ...]:
    """How many of the requests each LoRA model gets, most popular first (§7).

    Uniform: the ceiling of sqrt(n) models. Skewed: as many models as get a whole request each, shares rounded
    by largest remainder.
    """
    match popularity:
        case "distinct":
            return (1,) * num_requests
        case "identical":
            return (num_requests,)
        case "uniform":
            models = math.ceil(math.sqrt(num_requests))
            return tuple(num_requests // models + (i < num_requests % models) for i in range(models))
    models = 1
    while num_requests * SKEWED.weights(models + 1)[-1] >= 1:
        models += 1
    shares = [num_requests * weight for weight in SKEWED.weights(models)]
    left = num_requests - sum(map(int, shares))
    rounded_up = sorted(range(models), key=lambda i: int(shares[i]) - shares[i])[:left]
    return tuple(sorted((int(share) + (i in rounded_up) for i, share in enumerate(shares)), reverse=True))


@dataclasses.dataclass(frozen=True, slots=True)
class TextRequest:
    """One request. ``model``: the number of its LoRA model; lengths in tokens."""

    model: int
    prompt_tokens: int
    output_tokens: int


def text_requests(popularity: str, num_requests: int, seed: int, divisor: int = 1) -> list[TextRequest]:
    """In order of arrival. Lengths are the same for every popularity; ``divisor``: they are divided by it."""
    rounds = [talk[0] for talk in extracts.sharegpt_conversations()]
    fitting = [one for one in rounds if one.new + one.generated <= MOST_TOKENS]
    lengths = Random(f"{seed} lengths").sample(fitting, num_requests)
    models = [
        model for model, count in enumerate(model_counts(popularity, num_requests)) for _ in range(count)
    ]
    Random(f"{seed} models").shuffle(models)
    return [
        TextRequest(model, max(1, one.new // divisor), max(1, one.generated // divisor))
        for model, one in zip(models, lengths, strict=True)
    ]


MOST_TOKENS = 2048
"""A request's prompt and reply together: ``--maxlen`` of the published benchmarks/bench_textgen_lora_all.py."""
