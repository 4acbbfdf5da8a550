"""S-LoRA-bmm (S-LoRA §7.1) as operations of an engine: contiguous padded copies of adapters, and ``torch.bmm``.

Before each group of projections the adapters of a step are copied out of the pool into contiguous memory, every
one padded to the largest rank there, and every run of tokens to the longest; two batched products follow. All
other operations are the engine's own, so what lies between the two engines is how adapters are multiplied.
Captured steps take kernels with fixed plans, so an engine for these runs without graphs; ranks of tensor
parallelism halve a product, which these do not. S-LoRA's other baseline, two pools (S-LoRA-no-unify-mem), needs no
operations of its own: an engine with ``--cache-policy static-lru`` has a part of its pages for adapters and the
rest for KV.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from manylora.executor.worker import Worker
from manylora.kernels.ops import ComposedLora, LoraSegments, Ops, of_adapters
from manylora.kernels.shapes import AdapterGeometry, ProjectionGroup


@dataclasses.dataclass(frozen=True, eq=False)
class PaddedPlan:
    """One step's. ``tokens`` int64 [S, N]: of each run, the last one again where it is shorter. ``is_token`` bool
    [S, N]: which are not such repetitions."""

    segments: LoraSegments
    geometry: AdapterGeometry
    tokens: torch.Tensor
    is_token: torch.Tensor
    # Of what all layers share, what some layer asked for.
    places: dict[tuple[int, bool], tuple[torch.Tensor, torch.Tensor]] = dataclasses.field(
        default_factory=dict
    )
    scales: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(segments: LoraSegments, geometry: AdapterGeometry, device: torch.device) -> PaddedPlan | None:
        """None where no run has a token."""
        kept = np.flatnonzero(segments.length)
        if not len(kept):
            return None
        mine = dataclasses.replace(
            segments, start=segments.start[kept], length=segments.length[kept], records=segments.records[kept],
            scales=segments.scales[kept],
        )  # fmt: skip
        places = np.arange(mine.length.max())[None]
        tokens = mine.start[:, None] + np.minimum(places, mine.length[:, None] - 1)
        is_token = places < mine.length[:, None]
        return PaddedPlan(
            mine, geometry, torch.from_numpy(tokens.astype(np.int64)).to(device),
            torch.from_numpy(is_token).to(device),
        )  # fmt: skip

    def _where(self, projection: int, is_b: bool, elements: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where layer 0 of every element lies, int64 [S, R, cells, elements of a cell], and which rows are none's
        but padding, bool [S, R, 1]."""
        geometry, device = self.geometry, self.tokens.device
        records = self.segments.records[:, projection]
        ranks, firsts = records[:, 2], records[:, int(is_b)]
        rows, per_row = np.arange(ranks.max()), geometry.cells(elements)
        is_row = rows[None] < ranks[:, None]
        some = int(firsts[ranks.argmax()])  # padding takes cells that some run has
        entries = np.where(is_row, firsts[:, None] + rows[None] * per_row, some)
        cells = torch.from_numpy(entries[..., None] + np.arange(per_row)).to(device)
        places = self.segments.cells[cells][..., None] + torch.arange(geometry.cell_elements, device=device)
        return places, torch.from_numpy(~is_row[..., None]).to(device)

    def copies(
        self, pool: torch.Tensor, layer: int, projection: int, is_b: bool, elements: int
    ) -> torch.Tensor:
        """``[S, R, elements]``: every run's matrix A, or B as it lies, in memory of its own; rows beyond a rank
        are 0."""
        if (projection, is_b) not in self.places:
            self.places[projection, is_b] = self._where(projection, is_b, elements)
        places, is_padding = self.places[projection, is_b]
        flat = pool.view(-1)
        copied = flat[places + layer * self.geometry.slab_elements].flatten(2)[..., :elements]
        return copied.masked_fill(is_padding, 0)

    def row_scales(self, projection: int, layer: int) -> torch.Tensor:
        """float32 [S, R] of the layer."""
        if projection not in self.scales:
            segments = self.segments
            layers, most = segments.scales.shape[-1], int(segments.records[:, projection, 2].max())
            scales = np.zeros((layers, len(segments.start), most), dtype=np.float32)
            for number, segment in np.ndindex(scales.shape[:2]):
                mine = segments.row_scales(segment, projection, number)
                scales[number, segment, : len(mine)] = mine
            self.scales[projection] = torch.from_numpy(scales).to(self.tokens.device)
        return self.scales[projection][layer]


class PaddedLora(ComposedLora):
    """Before another implementation of Ops among the bases of a class: its LoRA."""

    # The next class may have others, in which its own LoRA is part of the product.
    lora_summands = ComposedLora.lora_summands
    lora_gated = ComposedLora.lora_gated

    def plan_lora(
        self, segments: LoraSegments, geometry: AdapterGeometry, device: torch.device
    ) -> PaddedPlan | None:
        """See Ops."""
        return PaddedPlan.of(segments, geometry, device)

    def lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        group: ProjectionGroup,
        plan: PaddedPlan,
    ) -> None:
        """See Ops."""
        adapters = of_adapters(pool, x.dtype)
        inputs = x[plan.tokens]
        tokens = plan.tokens[plan.is_token]
        for place, projection in enumerate(group.projections):
            index = plan.geometry.projections.index(projection)
            if not plan.segments.records[:, index, 2].any():
                continue
            a = plan.copies(adapters, layer, index, False, projection.in_features)
            b = plan.copies(adapters, layer, index, True, projection.out_features)
            shrunk = torch.bmm(inputs, a.transpose(1, 2))
            shrunk = (shrunk * plan.row_scales(index, layer)[:, None]).to(x.dtype)
            columns = y[:, group.offsets[place] : group.offsets[place + 1]]
            columns[tokens] += torch.bmm(shrunk, b)[plan.is_token]


def padded_ops(ops: Ops) -> Ops:
    """The same operations, but for LoRA."""
    kind: Any = type("PaddedOps", (PaddedLora, type(ops)), {"name": f"{ops.name}, padded copies"})
    padded = object.__new__(kind)
    padded.__dict__.update(vars(ops))
    found: Ops = padded
    return found


def pad_adapters(worker: Worker) -> None:
    """The worker multiplies adapters so from its next step on. Raises ValueError where steps are captured."""
    inside: Any = worker
    if inside._graphs is not None:
        raise ValueError("captured steps have kernels of their own: build the engine without CUDA graphs")
    decoder = inside._forward.decoder
    object.__setattr__(decoder, "ops", padded_ops(decoder.ops))  # which is frozen
