"""The cases of LoRA on all projections of a layer, by the adapters' popularity, batch and rank (Punica §7.1).

What is called is what a decoder layer calls, base products and what reads them included (SiLU, and a norm after
each other group), so that whatever interleaving serves is what is measured; the time of the same calls without
adapters is taken away.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from manylora.executor.fixed import fixed_lora
from manylora.kernels.ops import LoraSegments, Summands
from manylora.kernels.shapes import ProjectionGroup
from manylora_lab.bench import rounding
from manylora_lab.bench.interleaved import Step
from manylora_lab.bench.kernels import exact_lora, segments_for
from manylora_lab.bench.kernels_rig import Errors, KernelCase, KernelRig, errors
from manylora_lab.bench.kernels_settings import POPULARITIES, PROMPTS, PROMPTS_RANK, KernelSizes, model_counts
from manylora_lab.bench.rounding import Bounded

GATED = "gate_up"
"""The group whose products go through SiLU."""
EPS = 1e-5


def lora_cases(rig: KernelRig, sizes: KernelSizes) -> Iterator[list[KernelCase]]:
    """All cases of a batch together, since they take turns with its base products."""
    for batch in sizes.lora_batches:
        layer = _LoraLayer(rig, batch)
        yield [
            layer.decoding(popularity, rank, sizes.lora_ranks[-1])
            for popularity in POPULARITIES
            for rank in sizes.lora_ranks
        ]
    layer = _LoraLayer(rig, sizes.lora_prompt_tokens)
    yield [layer.prompts(popularity) for popularity in ("distinct", "identical")]


class _LoraLayer:
    """The products of so many tokens, with LoRA and without."""

    def __init__(self, rig: KernelRig, tokens: int) -> None:
        self._rig = rig
        self._tokens = tokens
        self._inputs = [rig.normal(tokens, group.in_features) for group in rig.groups]
        self._residuals = [rig.normal(tokens, group.offsets[-1]) for group in rig.groups]
        self._norms = [rig.normal(group.offsets[-1]) for group in rig.groups]
        self._base: Step = lambda: self._run(None)

    def decoding(self, popularity: str, rank: int, max_rank: int) -> KernelCase:
        """One token a request, with the plan that captured steps have, where the operations know such."""
        rig, counts = self._rig, model_counts(popularity, self._tokens)
        segments = self._segments(counts, rank)
        fixed = fixed_lora(
            rig.ops, self._tokens, self._tokens, max_rank, rig.geometry, segments.cells, rig.device
        )
        fixed.fill(segments, self._tokens)
        setting = {"popularity": popularity, "batch": self._tokens, "rank": rank}
        return self._case(setting, segments, fixed.plan, rank, fixed)

    def prompts(self, popularity: str) -> KernelCase:
        """Eight prompts, of an adapter each or of one."""
        rig, each = self._rig, self._tokens // PROMPTS
        counts = [count * each for count in model_counts(popularity, PROMPTS)]
        segments = self._segments(counts, PROMPTS_RANK)
        plan = rig.ops.plan_lora(segments, rig.geometry, rig.device)
        setting = {"popularity": popularity, "batch": PROMPTS, "rank": PROMPTS_RANK, "prompt": each}
        return self._case(setting, segments, plan, PROMPTS_RANK, plan)

    def _segments(self, counts: Sequence[int], rank: int) -> LoraSegments:
        rig = self._rig
        return segments_for(rig.geometry, list(counts), [rank] * len(counts), len(rig.pool), rig.device)

    def _case(
        self, setting: dict[str, Any], segments: LoraSegments, plan: Any, rank: int, owner: object
    ) -> KernelCase:
        """``owner`` holds the plan's memory."""
        rig, models = self._rig, len(segments.start)
        per_rank = sum(p.in_features + p.out_features for p in rig.geometry.projections)

        def step() -> None:
            assert owner is not None
            self._run(plan)

        return KernelCase(
            "lora", {**setting, "models": models}, models * rank * per_rank * rig.dtype.itemsize,
            2 * self._tokens * rank * per_rank, self._check(segments, plan), step, rig.layers, self._base,
        )  # fmt: skip

    def _run(self, plan: Any) -> None:
        for layer in range(self._rig.layers):
            for group, x, residual, norm in zip(self._rig.groups, self._inputs, self._residuals, self._norms):
                y, adapted = self._product(layer, group, x, plan)
                if group.name != GATED:
                    self._rig.ops.add_rms_norm(y, residual, norm, EPS, adapted)

    def _product(self, layer: int, group: ProjectionGroup, x: torch.Tensor, plan: Any) -> Summands:
        rig = self._rig
        given = (x, rig.weights[layer][group.name], None, rig.pool, layer, group, plan)
        return Summands(rig.ops.lora_gated(*given)) if group.name == GATED else rig.ops.lora_summands(*given)

    def _check(self, segments: LoraSegments, plan: Any) -> Callable[[], Errors]:
        rig, last = self._rig, self._rig.layers - 1

        def check() -> Errors:
            pairs = []
            for group, x, base in zip(rig.groups, self._inputs, self._truths):
                added = exact_lora(x, rig.pool, last, group, segments, rig.geometry)
                truth = base.plus(added).rounded(rig.dtype)
                if group.name == GATED:
                    truth = rounding.silu_mul(truth, rig.dtype).rounded(rig.dtype)
                pairs.append((self._product(last, group, x, plan).whole, truth))
            return errors(pairs)

        return check

    @functools.cached_property
    def _truths(self) -> list[Bounded]:
        """The last layer's base products."""
        weights = self._rig.weights[-1]
        return [
            rounding.linear(x, weights[group.name].data, None).rounded(self._rig.dtype)
            for group, x in zip(self._rig.groups, self._inputs)
        ]
