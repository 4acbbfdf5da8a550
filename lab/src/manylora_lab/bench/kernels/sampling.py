"""The cases of the sampler, against plain float64 on the host."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np
import torch

from manylora.executor.sampling import BLOCK_TOKENS, SampledRow, draw
from manylora.types import SamplingParams
from manylora_lab.bench.kernels.rig import Errors, KernelCase, KernelRig
from manylora_lab.bench.kernels.settings import KernelSizes
from manylora_lab.bench.race import behind
from manylora_lab.bench.rounding import unit

SAMPLERS = {
    "greedy": SamplingParams(temperature=0),
    "top-k 50, top-p 0.9": SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=7),
    "top-p 0.9": SamplingParams(temperature=0.8, top_p=0.9, seed=7),
}


def sampling_cases(rig: KernelRig, sizes: KernelSizes) -> Iterator[list[KernelCase]]:
    """Only greedy sampling is part of captured steps; the time of the others has the host's share in it."""
    for batch in sizes.sampling:
        logits = torch.randn(batch, rig.shape.vocab, device=rig.device) * 3
        cases = []
        for name, params in SAMPLERS.items():
            none = np.empty(0, dtype=np.int64)
            rows = [SampledRow(params, none, none, (), ((0, row),)) for row in range(batch)]
            setting = {"sampler": name, "batch": batch}
            step = functools.partial(draw, logits, rows)
            check = functools.partial(_check, logits, rows)
            is_captured = params.temperature == 0
            cases.append(
                KernelCase("sampling", setting, logits.nbytes, 0, check, step, 1, is_captured=is_captured)
            )
        yield cases


def _check(logits: torch.Tensor, rows: list[SampledRow]) -> Errors:
    """How far behind the winner the worst drawn token is."""
    tokens = draw(logits, rows).first.tolist()
    off = [
        _distance(row.astype(np.float64), sampled, token)
        for row, sampled, token in zip(logits.cpu().numpy(), rows, tokens, strict=True)
    ]
    distances = np.array([distance for distance, _ in off])
    return Errors(float(np.sqrt(np.square(distances).mean())), max(_over(*pair) for pair in off))


def _over(distance: float, bound: float) -> float:
    return distance / bound if bound else math.inf if distance else 0.0


def _distance(logits: np.ndarray, row: SampledRow, token: int) -> tuple[float, float]:
    """How far behind the winner the drawn token is, and how far it may be.

    Sums are of integers, so exact. What rounds is each weight: by a few units of float32, by its exponent's
    rounding and by the integer.
    """
    params = row.params
    if params.temperature == 0:
        return float(token != logits.argmax()), 0.0
    ((sample, position),) = row.samples
    exponents = (logits - logits.max()) / params.temperature
    weights = np.exp(exponents)
    off = (8 - 2 * exponents) * unit(torch.float32) + 2.0 ** (len(logits).bit_length() - 62) / weights
    order = np.argsort(-weights, kind="stable")
    if params.top_k:
        weights[order[params.top_k :]] = 0
    weights /= weights.sum()
    before = np.cumsum(weights[order]) - weights[order]
    # Of a running sum and of the total, each on either side.
    at_end = 4 * float((weights * off)[weights > 0].sum())
    found = []
    for top_p in (params.top_p - at_end, params.top_p, params.top_p + at_end):
        # A token at the very end of top-p stays or goes by rounding.
        kept = weights.copy()
        kept[order[before >= top_p]] = 0
        lost = behind(kept, params.seed or 0, sample, position)
        bound = sum(_off(kept, off, place) for place in (token, int(lost.argmin())))
        found.append((float(lost[token]), bound))
    return min(found)


def _off(weights: np.ndarray, off: np.ndarray, token: int) -> float:
    """By how much a token's own weight and its block's may be off, relatively; ``off`` [V]: each weight's part."""
    begin = token - token % BLOCK_TOKENS
    block = slice(begin, begin + BLOCK_TOKENS)
    total = weights[block].sum()
    return float(off[token] + (weights[block] * off[block]).sum() / total) if total else 0.0
