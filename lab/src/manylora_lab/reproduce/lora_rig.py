"""The LoRA operator of one projection on a device: paged adapters, inputs, and what to time. Brings torch.

Kernels are the ones that serve: Triton on CUDA, torch over pages on a CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from manylora.kernels.ops import LoraSegments, LoraSite, LoraStep, of_adapters
from manylora.kernels.select import ops_for
from manylora.kernels.shapes import PageShape, Projection, ProjectionGroup, adapter_geometry
from manylora_lab.bench.kernels.pool import (
    PAGE_TOKENS,
    adapter_of,
    cells_for,
    exact_lora,
    random_pool,
    segments_for,
)
from manylora_lab.bench.kernels.rig import errors
from manylora_lab.bench.kernels.timing import Step, device_name, medians

_CUDA_LAYERS = 8
"""One timed call goes through so many layers, each with adapters of its own."""


@dataclasses.dataclass(frozen=True)
class LoraBatch:
    """A batch: ``counts[m]`` adjacent inputs of model m."""

    counts: tuple[int, ...]
    segments: LoraSegments
    x: torch.Tensor
    y: torch.Tensor


class LoraRig:
    """A pool that holds up to ``most_models`` adapters of ``most_rank`` for a projection from h1 to h2."""

    def __init__(self, device: str, h1: int, h2: int, most_models: int, most_rank: int) -> None:
        torch.manual_seed(0)
        self.device = torch.device(device)
        is_cpu = self.device.type == "cpu"
        self.dtype = torch.float32 if is_cpu else torch.float16
        self.layers = 1 if is_cpu else _CUDA_LAYERS
        self.h1, self.h2 = h1, h2
        page = PageShape(self.layers, PAGE_TOKENS, 8, 64, self.dtype.itemsize)
        self.group = ProjectionGroup("one", (Projection("one", h1, h2),))
        self.geometry = adapter_geometry(page, ((self.group,),) * page.layers)
        cells = cells_for(self.geometry, [most_rank] * most_models)
        self.pool = random_pool(page, -(-cells // self.geometry.cells_per_page), self.dtype, self.device)
        self.ops = ops_for(self.device)

    @property
    def description(self) -> dict[str, object]:
        """The rig's part of a report's settings."""
        return {
            "kernels": self.ops.name, "dtype": str(self.dtype).removeprefix("torch."),
            "machine": device_name(self.device), "torch": torch.__version__, "layers_a_call": self.layers,
        }  # fmt: skip

    def case(self, counts: Sequence[int], rank: int) -> LoraBatch:
        """Inputs of so many models, their adapters at random places of the pool."""
        return self.ranked(counts, [rank] * len(counts))

    def ranked(self, counts: Sequence[int], ranks: Sequence[int]) -> LoraBatch:
        """The same of models of these ranks."""
        segments = segments_for(self.geometry, list(counts), list(ranks), len(self.pool), self.device)
        batch = sum(counts)
        x = torch.randn(batch, self.h1, dtype=self.dtype, device=self.device)
        y = torch.zeros(batch, self.h2, dtype=self.dtype, device=self.device)
        return LoraBatch(tuple(counts), segments, x, y)

    def clear_b(self, case: LoraBatch, layer: int, model: int, rank: int) -> None:
        """Zeros in B of one model's rows from ``rank`` on: its product is then that of an adapter of this rank."""
        geometry, records = self.geometry, case.segments.records
        _, first_b, rows = records[model, 0].tolist()
        cells_a_row = geometry.cells(self.h2)
        cells = case.segments.cells[first_b + rank * cells_a_row : first_b + rows * cells_a_row]
        begins = cells + layer * geometry.slab_elements
        within = torch.arange(geometry.cell_elements, device=self.device)
        of_adapters(self.pool, self.pool.dtype).view(-1)[begins[:, None] + within] = 0

    def sgmv(self, case: LoraBatch) -> Step:
        """The engine's operator, planned once, on every layer."""
        plan = self.ops.plan_lora(case.segments, self.geometry, self.device)

        def step() -> None:
            for layer in range(self.layers):
                self.ops.lora(case.y, case.x, LoraSite(self.group, layer), LoraStep(self.pool, plan))

        return step

    def errors(self, case: LoraBatch) -> dict[str, float]:
        """Of the engine's operator, for a report's row: ``error`` relative, and ``error_of_bound``, the largest of
        an element over what rounding may make of it. Leaves y alone."""
        y = torch.zeros_like(case.y)
        plan = self.ops.plan_lora(case.segments, self.geometry, self.device)
        self.ops.lora(y, case.x, LoraSite(self.group, 0), LoraStep(self.pool, plan))
        truth = exact_lora(case.x, self.pool, 0, self.group, case.segments, self.geometry)
        found = errors([(y, truth)])
        return {"error": found.relative, "error_of_bound": found.of_bound}

    def dense(self, case: LoraBatch, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The adapters out of their pages: a ``[n, h1, rank]``, and b ``[n, rank, h2]`` with the scale in it."""
        a, b = [], []
        for model in range(len(case.counts)):
            rows_a, rows_b = adapter_of(self.pool, layer, 0, model, case.segments, self.geometry)
            a.append(rows_a.T)
            b.append(rows_b * float(case.segments.scales[model, 0, layer]))
        return torch.stack(a), torch.stack(b)

    def seconds(self, steps: Sequence[Step], repeats: int) -> list[float]:
        """The seconds of one layer of each step: medians of repeats that take turns."""
        return [total / self.layers for total in medians(self.device, steps, repeats)]
