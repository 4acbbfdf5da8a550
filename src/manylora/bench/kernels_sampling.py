"""The cases of the sampler, against plain float64 on the host."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import torch

from manylora.bench.kernels_rig import Case, Limit, Rig
from manylora.bench.kernels_settings import Sizes
from manylora.executor.sampler import SampledRow, draw, uniform
from manylora.types import SamplingParams

SAMPLERS = {
    "greedy": SamplingParams(temperature=0),
    "top-k 50, top-p 0.9": SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=7),
    "top-p 0.9": SamplingParams(temperature=0.8, top_p=0.9, seed=7),
}
LIMIT = Limit(1e-3, 1e-3)
"""Of probability: which token is the last that top-p keeps can differ by rounding."""


def sampling_cases(rig: Rig, sizes: Sizes) -> Iterator[list[Case]]:
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
                Case("sampling", setting, logits.nbytes, 0, check, LIMIT, step, 1, is_captured=is_captured)
            )
        yield cases


def _check(logits: torch.Tensor, rows: list[SampledRow]) -> Limit:
    """By how much of probability the worst draw misses its token."""
    tokens = draw(logits, rows).first.tolist()
    off = [
        _distance(row.astype(np.float64), sampled, token)
        for row, sampled, token in zip(logits.cpu().numpy(), rows, tokens, strict=True)
    ]
    return Limit(float(np.sqrt(np.mean(np.square(off)))), max(off))


def _distance(logits: np.ndarray, row: SampledRow, token: int) -> float:
    params = row.params
    if params.temperature == 0:
        return float(token != logits.argmax())
    ((sample, position),) = row.samples
    weights = np.exp((logits - logits.max()) / params.temperature)
    order = np.argsort(-weights, kind="stable")
    if params.top_k:
        weights[order[params.top_k :]] = 0
    weights /= weights.sum()
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= params.top_p]] = 0
    ends = np.cumsum(weights) / weights.sum()
    begin = ends[token - 1] if token else 0.0
    point = uniform(params.seed or 0, sample, position)
    return float(max(begin - point, point - ends[token], 0.0))
