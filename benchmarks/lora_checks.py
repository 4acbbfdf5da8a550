"""Checks of the LoRA kernels on a GPU against the reference in float32: for ``h200_lora``."""

from __future__ import annotations

import dataclasses

import torch

from benchmarks.lora_layer import Layers, Rig
from manylora.bench.interleaved import captured
from manylora.kernels.ops import LoraSegments
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.shapes import ProjectionGroup
from manylora.kernels.triton.lora_launch import LoraKernels, LoraPlan

TOLERANCE = 8e-3


def mixed_case(rig: Rig) -> tuple[LoraSegments, int]:
    """Mixed lengths and ranks, gaps before, between and after, projections without adapter."""
    lengths, ranks = [1, 1, 5, 17, 1, 150, 2], [16, 8, 64, 5, 33, 16, 1]
    segments = rig.segments(lengths, ranks)
    gaps = [2, 0, 1, 0, 3, 0, 1]
    start = [sum(lengths[:i]) + sum(gaps[: i + 1]) for i in range(len(lengths))]
    segments.records[1, 0, 2] = segments.records[4, 2, 2] = 0
    segments.records[2, 3:, 2] = 0
    segments.start[:] = start
    return segments, start[-1] + lengths[-1] + 3


class Checker:
    """Compares what kernels add with the reference in float32, on the mixed batch and layer 1."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.segments, self.tokens = mixed_case(rig)
        self.x = rig.inputs(self.tokens)
        reference = ReferenceOps()
        plan = reference.plan_lora(self.segments, rig.geometry, rig.device)
        assert plan is not None
        self.truth = {}
        for group in rig.geometry.groups:
            y = torch.zeros(self.tokens, group.offsets[-1], device=rig.device)
            reference.lora(y, self.x[group.name], rig.pool, 1, group, plan)
            self.truth[group.name] = y

    def worst(self, kernels: LoraKernels, thorough: bool) -> float:
        """The largest error of adding; ``thorough``: of writing and the fused activation too. Each twice: the
        results must be the same to the last bit."""
        rig, worst = self.rig, 0.0
        plan = kernels.plan(self.segments, rig.geometry, rig.device, self.tokens, cover=True)
        for group in rig.geometry.groups:
            truth = self.truth[group.name]
            for add in (True, False) if thorough else (True,):
                one, two = (self._once(kernels, plan, group, add) for _ in range(2))
                if not torch.equal(one, two):
                    raise AssertionError(f"{group.name}: two runs differ")
                worst = max(worst, error(one, truth))
            if thorough and group.name == "gate_up":
                y = torch.randn_like(truth).to(rig.dtype)
                partial = kernels.shrink(self.x[group.name], rig.pool, 1, group, plan)
                out = kernels.expand_silu(y, partial, rig.pool, 1, group, plan)
                gate, up = (y.float() + truth).chunk(2, -1)
                worst = max(worst, error(out, torch.nn.functional.silu(gate) * up))
        if not worst < TOLERANCE:
            raise AssertionError(f"error {worst:.1e}")
        return worst

    def _once(self, kernels: LoraKernels, plan: LoraPlan, group: ProjectionGroup, add: bool) -> torch.Tensor:
        partial = kernels.shrink(self.x[group.name], self.rig.pool, 1, group, plan)
        y = torch.full_like(self.truth[group.name], 0.0 if add else float("nan"), dtype=self.rig.dtype)
        kernels.expand(y, partial, self.rig.pool, 1, group, plan, add=add)
        return y


def error(out: torch.Tensor, truth: torch.Tensor) -> float:
    return float((out.float() - truth).norm() / truth.norm())


def check_replays(rig: Rig, kernels: LoraKernels) -> float:
    """A graph captured with one segment, replayed with more, with none and with fewer."""
    tokens = 24
    cells = rig.segments([1] * tokens, [32] * tokens).cells
    plan = kernels.reserve(rig.geometry, cells, tokens, 64)
    layers = Layers(rig, kernels, plan, tokens)

    def batch(lengths: list[int], ranks: list[int]) -> LoraSegments:
        described = rig.segments(lengths, ranks)
        cells[: len(described.cells)].copy_(described.cells)
        return dataclasses.replace(described, cells=cells)

    def step() -> None:
        for y in layers.y.values():
            y.zero_()
        layers.run("alone")

    kernels.refill(plan, batch([3], [16]), tokens)
    one = dataclasses.replace(rig, layers=2)
    layers.rig = one
    graph = captured(torch.cuda, step) if rig.device.type == "cuda" else None
    reference, worst = ReferenceOps(), 0.0
    for lengths, ranks in (([1] * 20, [16, 8, 64, 1] * 5), ([], []), ([2, 20], [16, 40]), ([3], [16])):
        segments = batch(lengths, ranks) if lengths else None
        kernels.refill(plan, segments, tokens)
        graph.replay() if graph is not None else step()
        for group in rig.geometry.groups:
            # Every layer of the run adds to the same y.
            truth = torch.zeros_like(layers.y[group.name], dtype=torch.float32)
            if segments is not None:
                prepared = reference.plan_lora(segments, rig.geometry, rig.device)
                for layer in range(one.layers):
                    reference.lora(truth, layers.x[group.name], rig.pool, layer, group, prepared)  # type: ignore[arg-type]
            if not truth.any():
                if layers.y[group.name].any():
                    raise AssertionError("an empty batch changed y")
                continue
            worst = max(worst, error(layers.y[group.name], truth))
    if not worst < TOLERANCE:
        raise AssertionError(f"replayed: error {worst:.1e}")
    return worst
