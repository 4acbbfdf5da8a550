"""Punica's requests: whose they are and how long (§7). Knows no device."""

from __future__ import annotations

import dataclasses
from random import Random

from manylora_lab.bench.kernels.settings import model_counts
from manylora_lab.workloads import extracts

RANK = 16
"""§7, for all experiments but Figure 9."""
LENGTHS_NOTE = (
    "Lengths: first rounds of ShareGPT conversations in Llama-2 tokens (manylora_lab.workloads/data), of at most "
    "2,048 tokens. The paper says that its 1000 requests, of ShareGPT's distribution too, generate around 101k "
    "tokens; these generate several times as many. The published benchmark draws others again (prompts from a "
    "log-normal fit, whole lengths evenly up to 2,048), so tokens per second compare only roughly."
)


@dataclasses.dataclass(frozen=True, slots=True)
class TextRequest:
    """One request. ``model``: the number of its LoRA model; lengths in tokens."""

    model: int
    prompt_tokens: int
    output_tokens: int


def text_requests(popularity: str, num_requests: int, seed: int, divisor: int = 1) -> list[TextRequest]:
    """The requests in order of arrival. Lengths are the same for every popularity, divided by ``divisor``."""
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
