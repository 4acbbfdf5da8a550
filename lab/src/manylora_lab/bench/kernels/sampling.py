"""The cases of the sampler, against plain float64 on the host."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np
import torch

from manylora.executor.sampler import SampledRow, draw, uniform
from manylora.types import SamplingParams
from manylora_lab.bench.kernels.rig import Errors, KernelCase, KernelRig
from manylora_lab.bench.kernels.settings import KernelSizes
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
    """By how much of probability the worst draw misses its token."""
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
    """How far the draw's point lies outside its token's share, and how far it may. Sums are of integers, so exact:
    what rounds is each weight, by a few units of float32 and by its exponent's rounding."""
    params = row.params
    if params.temperature == 0:
        return float(token != logits.argmax()), 0.0
    ((sample, position),) = row.samples
    exponents = (logits - logits.max()) / params.temperature
    weights = np.exp(exponents)
    order = np.argsort(-weights, kind="stable")
    if params.top_k:
        weights[order[params.top_k :]] = 0
    weights /= weights.sum()
    off = float((weights * (8 - 2 * exponents)).sum()) * unit(torch.float32)
    bound = 4 * off  # of a running sum and of the total, each on either side
    before = np.cumsum(weights[order]) - weights[order]
    point = uniform(params.seed or 0, sample, position)
    found = []
    for top_p in (params.top_p - bound, params.top_p, params.top_p + bound):
        # A token at the very end of top-p stays or goes by rounding.
        kept = weights.copy()
        kept[order[before >= top_p]] = 0
        ends = np.cumsum(kept) / kept.sum()
        begin = ends[token - 1] if token else 0.0
        found.append(float(max(begin - point, point - ends[token], 0.0)))
    return min(found), bound
