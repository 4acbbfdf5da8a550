"""Layers of a model with LoRA in CUDA graphs, as its captured and eager steps run them: for ``h200_lora``.

A layer here is its four products with adapters, as models call them, and what reads them: the activation of
gate and up, and a norm after each other one, which adds what adapters gave where that is still to do. Attention
is left out. Every layer has weights of its own, and adapters lie in their pages as loading leaves them: LoRA's
price is the difference to the same graph without it.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from manylora.kernels.ops import LoraSegments
from manylora.kernels.shapes import AdapterGeometry, ProjectionGroup, adapter_geometry
from manylora.kernels.triton.lora import TritonFixedLora
from manylora.kernels.triton.lora_launch import LoraConfig, LoraKernels, LoraPlan
from manylora.kernels.triton.operations import TritonOps
from manylora.kernels.weight import Weight
from manylora_lab.bench.interleaved import captured
from manylora_lab.bench.kernels import DecoderSizes, exact_lora, random_pool, relative_error, segments_for
from manylora_lab.bench.rounding import Bounded

RANK = 16


@dataclasses.dataclass
class LoraLayerRig:
    """Weights of ``layers`` of a model's layers, and a pool with all layers' pages."""

    decoder: DecoderSizes
    device: torch.device
    dtype: torch.dtype
    layers: int
    geometry: AdapterGeometry
    pool: torch.Tensor
    weights: list[dict[str, Weight]]
    norms: dict[str, torch.Tensor]
    multiprocessors: int

    @classmethod
    def of(
        cls, decoder: DecoderSizes, device: torch.device, dtype: torch.dtype, layers: int, adapters: int
    ) -> LoraLayerRig:
        """A rig with room for so many adapters of rank RANK."""
        page = decoder.page(dtype)
        geometry = adapter_geometry(page, (decoder.groups(),) * page.layers)
        rows = sum(
            geometry.cells(p.in_features) + geometry.cells(p.out_features) for p in geometry.projections
        )
        pages = -(-rows * RANK * adapters // geometry.cells_per_page) + 16

        def drawn(group: ProjectionGroup) -> Weight:
            weight = torch.randn(group.offsets[-1], group.in_features, dtype=dtype, device=device)
            return Weight(weight.mul_(group.in_features**-0.5))

        weights = [{group.name: drawn(group) for group in geometry.groups} for _ in range(layers)]
        norms = {g.name: torch.ones(g.offsets[-1], dtype=dtype, device=device) for g in geometry.groups}
        pool = random_pool(geometry.page, pages, dtype, device)
        sms = 4
        if device.type == "cuda":
            sms = torch.cuda.get_device_properties(device).multi_processor_count
        return cls(decoder, device, dtype, layers, geometry, pool, weights, norms, sms)

    def segments(self, lengths: list[int]) -> LoraSegments:
        """An adapter a segment; a page's cells one after another, pages anywhere."""
        described = segments_for(self.geometry, lengths, [RANK] * len(lengths), len(self.pool), self.device)
        per_page, page = self.geometry.cells_per_page, self.geometry.page_elements
        count = torch.arange(len(described.cells), device=self.device)
        pages = torch.randperm(len(self.pool), device=self.device)
        places = pages[count // per_page] * page + count % per_page * self.geometry.cell_elements
        return dataclasses.replace(described, cells=places)


class StepCase:
    """One kind of step. ``tokens``, ``rows``: of the bucket that captures it; no rows: an eager one of prompts."""

    def __init__(
        self, rig: LoraLayerRig, ops: TritonOps, lengths: list[int], tokens: int, rows: int | None
    ) -> None:
        self.rig, self.ops, self.tokens, self.rows = rig, ops, tokens, rows
        self.segments = rig.segments(lengths)
        self.inputs = {
            g.name: torch.randn(tokens, g.in_features, dtype=rig.dtype, device=rig.device)
            for g in rig.geometry.groups
        }
        self.residuals = {
            g.name: torch.zeros(tokens, g.offsets[-1], dtype=rig.dtype, device=rig.device)
            for g in rig.geometry.groups
        }
        self.layers = min(rig.layers, 2) if rows is None else rig.layers
        self.floor_bytes = len(lengths) * RANK * rig.dtype.itemsize * sum(
            p.in_features + p.out_features for p in rig.geometry.projections
        )  # fmt: skip
        self._truths: dict[str, Bounded] = {}

    def use(self, config: LoraConfig) -> LoraKernels:
        """Make these sizes those of ``ops``."""
        kernels = LoraKernels(config, self.rig.multiprocessors)
        self.ops._adapted(self.rig.device).kernels = kernels
        return kernels

    def plan_for(self, kernels: LoraKernels) -> LoraPlan:
        """The plan as the engine makes it."""
        rig = self.rig
        if self.rows is None:
            return kernels.plan(self.segments, rig.geometry, rig.device, self.tokens)
        rows = None if self.rows == self.tokens else self.rows
        fixed = TritonFixedLora(kernels, self.tokens, RANK, rig.geometry, self.segments.cells, rows)
        fixed.fill(self.segments, self.tokens)
        return fixed.plan

    def run(self, plan: LoraPlan | None) -> None:
        rig, ops = self.rig, self.ops
        for layer in range(self.layers):
            for group in rig.geometry.groups:
                x, weight = self.inputs[group.name], rig.weights[layer][group.name]
                given = (x, weight, None, rig.pool, layer, group, plan)
                if group.name == "gate_up":
                    ops.lora_gated(*given)
                else:
                    y, adapted = ops.lora_summands(*given)
                    ops.add_rms_norm(y, self.residuals[group.name], rig.norms[group.name], 1e-6, adapted)

    def error(self, config: LoraConfig) -> float:
        """The largest of the last layer's groups, relative. Two runs must agree to the last bit, and each element
        with the exact one but for rounding."""
        rig, layer, worst = self.rig, self.layers - 1, 0.0
        kernels = LoraKernels(config, rig.multiprocessors)
        plan = self.plan_for(kernels)
        for group in rig.geometry.groups:
            x = self.inputs[group.name]
            if group.name not in self._truths:
                truth = exact_lora(x, rig.pool, layer, group, self.segments, rig.geometry)
                self._truths[group.name] = truth
            truth, found = self._truths[group.name], []
            for _ in range(2):
                y = torch.zeros_like(truth.exact, dtype=rig.dtype)
                partial = kernels.shrink(x, rig.pool, layer, group, plan)
                kernels.expand(y, partial, rig.pool, layer, group, plan, add=not plan.is_first)
                found.append(y)
            if not torch.equal(*found):
                raise AssertionError(f"{group.name}: two runs differ")
            if not (excess := truth.excess(y)) <= 1:
                raise AssertionError(
                    f"{group.name}: an element is off by {excess:.2g} times what rounding allows"
                )
            worst = max(worst, relative_error(y, truth.exact))
        return worst

    def added_us(self, configs: dict[str, LoraConfig], rounds: int) -> tuple[float, dict[str, float]]:
        """Microseconds of a layer without LoRA, and what each configuration adds, medians of rounds in turn."""
        if self.rig.device.type != "cuda":
            return self._rehearsed(configs)
        graphs: list[Any] = [captured(torch.cuda, lambda: self.run(None))]
        plans = []
        for config in configs.values():
            plans.append(self.plan_for(self.use(config)))
            graphs.append(captured(torch.cuda, functools.partial(self.run, plans[-1])))
        found = self._medians(graphs, rounds)
        del graphs, plans
        gc.collect()
        torch.cuda.empty_cache()
        return found[0], {name: us - found[0] for name, us in zip(configs, found[1:])}

    def _rehearsed(self, configs: dict[str, LoraConfig]) -> tuple[float, dict[str, float]]:
        for config in configs.values():
            self.run(self.plan_for(self.use(config)))
        return 0.0, {name: float(number) for number, name in enumerate(configs)}

    def _medians(self, graphs: Sequence[Any], rounds: int) -> list[float]:
        pairs: list[list[Any]] = [[] for _ in graphs]
        for number in range(rounds + 1):
            for graph, taken in zip(graphs, pairs):
                pair = [torch.Event(self.rig.device, enable_timing=True) for _ in range(2)]
                pair[0].record()
                graph.replay()
                pair[1].record()
                if number:
                    taken.append(pair)
        torch.cuda.synchronize()
        return [statistics.median(a.elapsed_time(b) for a, b in taken) * 1e3 / self.layers for taken in pairs]
