"""What ``manylora bench kernels`` measures: names, batches, contexts, ranks, popularities. Knows no tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from manylora.config.declaring import ConfigError
from manylora_lab.workloads.popularity import Popularity
from manylora_lab.workloads.terms import suggestion

POPULARITIES = ("distinct", "uniform", "skewed", "identical")
"""Punica's, of the adapters in a batch (§7)."""
SKEWED = Popularity("geometric", 1.5)
"""Each model is asked for 1.5 times as often as the next (§7)."""

PROMPTS, PROMPTS_RANK = 8, 16
"""LoRA while prompts are read: how many, and the rank of their adapters."""

KERNELS = {
    "add_rms_norm": "residual sum and RMSNorm",
    "silu_mul": "SiLU of the gate times up",
    "rotate_and_store": "rotary positions of q and k; k and v into their pages",
    "decode": "attention of one token a row over its pages",
    "prefill": "causal attention of many tokens a row",
    "linear": "the base model's products, one by one",
    "lora": "what adapters on all projections add to a layer's products",
    "sampling": "tokens from logits",
}
"""Kernels by the names that ``--only`` takes, in the order in which they run."""

TABLES = ("linear", "attention", "lora")
"""Of launch sizes, in ``kernels/tuned``: what ``--tune`` takes."""

Device = Literal["auto", "cpu", "cuda"]
Queries = tuple[tuple[int, int], ...]
"""Queries and context of each row."""


@dataclasses.dataclass(frozen=True, slots=True)
class KernelSettings:
    """``ops``: auto, or what the CPU is to run: cpu, triton (interpreted). ``budget_s``: no new cases
    once so much has passed. ``tune``: measure launch sizes instead, for a table of this name."""

    out: Path
    device: Device = "auto"
    dtype: str = "auto"
    shape: str | None = None
    only: tuple[str, ...] = ()
    ops: str = "auto"
    is_quick: bool = False
    budget_s: float = math.inf
    tune: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class KernelSizes:
    """``tokens``: of the small operations; ``products``: batches of the base products; ``lora_prompt_tokens``: of
    eight prompts together; ``repeats``: of which a time is the median."""

    tokens: tuple[int, ...]
    products: tuple[int, ...]
    decode: tuple[tuple[str, Queries], ...]
    prefill: tuple[tuple[str, Queries], ...]
    lora_batches: tuple[int, ...]
    lora_ranks: tuple[int, ...]
    lora_prompt_tokens: int
    sampling: tuple[int, ...]
    repeats: int

    @property
    def rows(self) -> list[Queries]:
        """Of all attention."""
        return [queries for _, queries in (*self.decode, *self.prefill)]

    @property
    def ranks(self) -> int:
        """Of the adapters of the largest LoRA batch, added up."""
        return max(self.lora_ranks[-1] * self.lora_batches[-1], PROMPTS_RANK * PROMPTS)


def _decoding(batch: int, context: int) -> tuple[str, Queries]:
    return f"context {context}", ((1, context),) * batch


FULL = KernelSizes(
    tokens=(1, 8, 32, 64, 128, 2048),
    products=(1, 2, 4, 8, 16, 32, 64, 128),
    decode=(
        *(_decoding(batch, 1024) for batch in (1, 8, 32, 64, 128)),
        ("context 100-1080", tuple((1, 100 + 140 * i) for i in range(8))),
        _decoding(1, 16000),
    ),
    prefill=(
        ("2048", ((2048, 2048),)),
        ("512 after 3584", ((512, 4096),)),
        ("2000", ((2000, 2000),) * 8),
    ),
    lora_batches=(1, 2, 4, 8, 16, 32, 64, 128),
    lora_ranks=(8, 16, 32, 64),
    lora_prompt_tokens=2048,
    sampling=(1, 64),
    repeats=20,
)
QUICK = KernelSizes(
    tokens=(1, 64),
    products=(1, 32),
    decode=(
        _decoding(1, 256),
        _decoding(32, 256),
        ("context 33-96", tuple((1, 33 + 9 * i) for i in range(8))),
    ),
    prefill=(("128", ((128, 128),)), ("32 after 96", ((32, 128),) * 4)),
    lora_batches=(1, 8, 32),
    lora_ranks=(8, 64),
    lora_prompt_tokens=128,
    sampling=(1, 32),
    repeats=15,
)
INTERPRETED = KernelSizes(
    tokens=(1, 5),
    products=(1, 5),
    decode=(("context 33-60", tuple((1, 33 + 9 * i) for i in range(4))),),
    prefill=(("17", ((17, 17),)), ("5 after 28", ((5, 33),) * 2)),
    lora_batches=(5,),
    lora_ranks=(16,),
    lora_prompt_tokens=24,
    sampling=(3,),
    repeats=0,
)
"""Triton's interpreter takes milliseconds for what a GPU does in nanoseconds."""


def model_counts(popularity: str, num_requests: int) -> tuple[int, ...]:
    """How many of the requests each LoRA model gets, most popular first (Punica §7).

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


def check_name(what: str, name: str, known: Collection[str]) -> None:
    """Raise ConfigError, with the nearest names, for one that there is not."""
    if name not in known:
        hint = suggestion(name, known) or f"; use {', '.join(known)}"
        raise ConfigError(f"there is no {what} {name!r}{hint}")
