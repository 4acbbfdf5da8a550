"""The cases of LoRA on all projections of a layer, by the adapters' popularity, batch and rank (Punica §7.1).

What is called is what a decoder layer calls, base products and what reads them included (SiLU, and a norm after
each other group), so that whatever interleaving serves is what is measured; the time of the same calls without
adapters is taken away.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from manylora.kernels.ops import AdaptedLinear, LoraLimits, LoraStep, Ops, Summands
from manylora.kernels.shapes import ProjectionGroup
from manylora_lab.bench import rounding
from manylora_lab.bench.kernels.pool import exact_lora, segments_for
from manylora_lab.bench.kernels.rig import Errors, KernelCase, KernelRig, errors
from manylora_lab.bench.kernels.settings import POPULARITIES, PROMPTS, PROMPTS_RANK, KernelSizes, model_counts
from manylora_lab.bench.kernels.timing import Step
from manylora_lab.bench.rounding import Bounded

GATED = "gate_up"
"""The group whose products go through SiLU."""
EPS = 1e-5


def lora_cases(rig: KernelRig, sizes: KernelSizes) -> Iterator[list[KernelCase]]:
    """All cases of a batch together, since they take turns with its base products."""
    for batch in sizes.lora_batches:
        layer = LoraLayer(rig, batch)
        yield [
            _decoding(layer, popularity, rank, sizes.lora_ranks[-1])
            for popularity in POPULARITIES
            for rank in sizes.lora_ranks
        ]
    layer = LoraLayer(rig, sizes.lora_prompt_tokens)
    yield [_prompts(layer, popularity) for popularity in ("distinct", "identical")]


def _decoding(layer: LoraLayer, popularity: str, rank: int, max_rank: int) -> KernelCase:
    """One token a request, with the plan that captured steps have."""
    batch = LoraProblem(layer, model_counts(popularity, layer.tokens), rank)
    plan = batch.fixed(layer.rig.ops, layer.tokens, max_rank)
    setting = {"popularity": popularity, "batch": layer.tokens, "rank": rank, "models": batch.models}
    return batch.case(setting, layer.rig.ops, plan)


def _prompts(layer: LoraLayer, popularity: str) -> KernelCase:
    """Eight prompts, of an adapter each or of one."""
    each = layer.tokens // PROMPTS
    counts = [count * each for count in model_counts(popularity, PROMPTS)]
    batch = LoraProblem(layer, counts, PROMPTS_RANK)
    setting = {"popularity": popularity, "batch": PROMPTS, "rank": PROMPTS_RANK, "prompt": each}
    setting["models"] = batch.models
    return batch.case(setting, layer.rig.ops, batch.eager(layer.rig.ops))


class LoraLayer:
    """The products of so many tokens, with LoRA and without, and what reads them."""

    def __init__(self, rig: KernelRig, tokens: int) -> None:
        self.rig = rig
        self.tokens = tokens
        self._weights = rig.weights
        self.inputs = [rig.normal(tokens, group.in_features) for group in rig.groups]
        self._residuals = [rig.normal(tokens, group.offsets[-1]) for group in rig.groups]
        self._norms = [rig.normal(group.offsets[-1]) for group in rig.groups]
        self.base: Step = lambda: self.run(rig.ops, None)

    def run(self, ops: Ops, plan: Any) -> None:
        for layer in range(self.rig.layers):
            for group, x, residual, norm in zip(self.rig.groups, self.inputs, self._residuals, self._norms):
                y = self.product(ops, layer, group, x, plan)
                if group.name != GATED:
                    ops.add_rms_norm(y, residual, norm, EPS)

    def product(self, ops: Ops, layer: int, group: ProjectionGroup, x: torch.Tensor, plan: Any) -> Summands:
        rig = self.rig
        linear = AdaptedLinear(group, layer, self._weights[layer][group.name], None)
        step = LoraStep(rig.pool, plan)
        if group.name == GATED:
            return Summands(ops.lora_gated(x, linear, step))
        return ops.lora_summands(x, linear, step)

    @functools.cached_property
    def truths(self) -> list[Bounded]:
        """The last layer's base products."""
        return [
            rounding.linear(x, self._weights[-1][group.name].data, None).rounded(self.rig.dtype)
            for group, x in zip(self.rig.groups, self.inputs)
        ]


class LoraProblem:
    """Which of a layer's tokens have which adapter: ``counts[m]`` adjacent ones adapter m, of this rank."""

    def __init__(self, layer: LoraLayer, counts: Sequence[int], rank: int) -> None:
        rig = layer.rig
        self._layer = layer
        self._rank = rank
        self.models, self._tokens = len(counts), sum(counts)
        self._segments = segments_for(
            rig.geometry, list(counts), [rank] * len(counts), len(rig.pool), rig.device
        )

    def fixed(self, ops: Ops, num_rows: int, max_rank: int) -> Any:
        """The plan that captured steps have, where the operations know such. ``num_rows``: as many as the tokens
        where each has one."""
        rig, tokens, cells = self._layer.rig, self._layer.tokens, self._segments.cells
        plan = ops.lora_plan(rig.geometry, rig.device, LoraLimits(tokens, num_rows, max_rank, cells))
        plan.fill(self._segments, tokens)
        return plan

    def eager(self, ops: Ops) -> Any:
        return ops.plan_lora(self._segments, self._layer.rig.geometry, self._layer.rig.device)

    def case(self, setting: dict[str, Any], ops: Ops, plan: Any) -> KernelCase:
        layer, rig = self._layer, self._layer.rig
        per_rank = sum(p.in_features + p.out_features for p in rig.geometry.projections)

        def check() -> Errors:
            last = rig.layers - 1
            return errors(
                (layer.product(ops, last, group, x, plan).whole, truth)
                for group, x, truth in zip(rig.groups, layer.inputs, self._truths)
            )

        return KernelCase(
            "lora", setting, self.models * self._rank * per_rank * rig.dtype.itemsize,
            2 * self._tokens * self._rank * per_rank, check, lambda: layer.run(ops, plan), rig.layers, layer.base,
        )  # fmt: skip

    @functools.cached_property
    def _truths(self) -> list[Bounded]:
        """What the last layer's products give."""
        rig, found = self._layer.rig, []
        for group, x, base in zip(rig.groups, self._layer.inputs, self._layer.truths):
            added = exact_lora(x, rig.pool, rig.layers - 1, group, self._segments, rig.geometry)
            truth = base.plus(added).rounded(rig.dtype)
            if group.name == GATED:
                truth = rounding.silu_mul(truth, rig.dtype).rounded(rig.dtype)
            found.append(truth)
        return found
