"""LoRA tables of captured steps: launch sizes come from what they are made for, never from the step.

Tiles that a step does not need are there with no tokens and rank 0, and their programs return at once. Owns the
sizes; records and kernels are those of ``plans`` and ``lora``.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from manylora.kernels.ops import LoraSegments
from manylora.kernels.shapes import AdapterGeometry, ProjectionGroup
from manylora.kernels.triton.plans import (
    LORA_RECORD,
    MAX_SPLITS,
    SLOT_UNIT,
    GroupPlan,
    TritonLoraPlan,
    block_of,
    tiles_of,
    upload,
)

_PROGRAMS = 528
_TILE = 16


class FixedLoraTables:
    """A plan for batches of at most ``num_tokens`` tokens and ranks of at most ``max_rank``."""

    def __init__(
        self,
        num_tokens: int,
        max_rank: int,
        geometry: AdapterGeometry,
        cells: torch.Tensor,
        device: torch.device,
    ) -> None:
        self._geometry = geometry
        self._device = device
        self._max_rank = max_rank
        self._num_tiles = num_tokens
        layers = geometry.page.layers
        sizes = [num_tokens * len(group.projections) * LORA_RECORD for group in geometry.groups]
        self._num_scales = num_tokens * len(geometry.projections) * layers
        ends = np.cumsum([*sizes, -(-self._num_scales // 4) * 4]).tolist()
        self._memory = torch.zeros(ends[-1], dtype=torch.int32, device=device)
        tables = [self._memory[begin:end] for begin, end in zip([0, *ends], ends)]
        self.plan = TritonLoraPlan(
            geometry=geometry,
            cells=cells,
            scales=tables[-1].view(torch.float32),
            num_layers=layers,
            num_tiles=num_tokens,
            block_t=_TILE,
            vector=True,
            matrix=True,
            align=math.gcd(geometry.page.slab_elements, geometry.cell_elements, 16),
            groups={
                group.name: _group_plan(geometry, group, num_tokens, max_rank, table)
                for group, table in zip(geometry.groups, tables)
            },
        )

    def fill(self, segments: LoraSegments | None, num_tokens: int) -> None:
        """Send the segments' tables in one copy ordered before later work. ValueError: they do not fit."""
        if segments is None:
            self._memory.zero_()
            return
        geometry = self._geometry
        length = segments.length.astype(np.int64)
        owner, inside = tiles_of(length, _TILE)
        largest = int(segments.records[:, :, 2].max(initial=0))
        if len(owner) > self._num_tiles or largest > self._max_rank:
            raise ValueError(f"{len(owner)} tiles of ranks up to {largest} exceed the captured LoRA tables")
        arrays: list[np.ndarray] = []
        first = 0
        for group in geometry.groups:
            plan, count = self.plan.groups[group.name], len(group.projections)
            indices = slice(first, first + count)
            records = np.zeros((self._num_tiles, count, LORA_RECORD), dtype=np.int32)
            used = records[: len(owner)]
            used[:, :, 0] = (segments.start[owner] + inside)[:, None]
            used[:, :, 1] = np.minimum(length[owner] - inside, _TILE)[:, None]
            used[:, :, 2] = segments.records[owner, indices, 2]
            used[:, :, 3:5] = segments.records[owner, indices, :2]
            used[:, :, 5] = owner[:, None] * len(geometry.projections) + np.arange(first, first + count)
            used[:, :, 6] = np.arange(count) * plan.rank_blocks
            used[:, :, 7] = [p.out_features // plan.out_align for p in group.projections]
            used[:, :, 8] = [offset // plan.out_align for offset in group.offsets[:-1]]
            used[:, :, 9] = [geometry.cells(p.out_features) for p in group.projections]
            arrays.append(records)
            first += count
        scales = np.zeros(self._num_scales, dtype=np.float32)
        scales[: segments.scales.size] = segments.scales.reshape(-1)
        arrays.append(scales.view(np.int32))
        sent = upload([np.concatenate([array.reshape(-1) for array in arrays])], self._device)[0]
        self._memory[: len(sent)].copy_(sent)


def _group_plan(
    geometry: AdapterGeometry, group: ProjectionGroup, num_tokens: int, max_rank: int, records: torch.Tensor
) -> GroupPlan:
    """Launch sizes for any segments; each projection has slots for the largest rank."""
    outputs = [p.out_features for p in group.projections]
    exact = geometry.page.itemsize > 2
    block_k = block_of(geometry.cell_elements, 64 if exact else 256, group.in_features)
    block_n = block_of(geometry.cell_elements, 128 if exact else 256, max(outputs))
    steps = -(-group.in_features // block_k)
    rank_blocks = -(-max_rank // SLOT_UNIT)
    # As if there were an adapter for every fourth token: the more there are, the fewer splits they need.
    work = len(outputs) * max(1, num_tokens // 4)
    splits = 1
    while splits * work < _PROGRAMS and splits * 4 <= min(steps, MAX_SPLITS):
        splits *= 4
    per_split = -(-steps // splits)
    return GroupPlan(
        records=records,
        projections=len(outputs),
        num_slots=len(outputs) * rank_blocks * SLOT_UNIT,
        rank_blocks=rank_blocks,
        block_r=SLOT_UNIT,
        block_k=block_k,
        block_n=block_n,
        steps=per_split,
        splits=-(-steps // per_split),
        column_blocks=-(-max(outputs) // block_n),
        out_align=math.gcd(*outputs, 16),
    )
