"""The tables that the Triton kernels read, built on the host and sent in one copy a plan.

Owns: how segments are cut into tiles, and how the work is split so that a large GPU is busy. All
launch sizes are decided here from host numbers; nothing reads the device back.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
import torch

from manylora.kernels.ops import LoraSegments
from manylora.kernels.shapes import AdapterGeometry, ProjectionGroup

Ints = npt.NDArray[np.int64]
Table = npt.NDArray[np.int32]

LORA_RECORD = 16
# Slots are counted in this unit, so that the kernels know their alignment.
SLOT_UNIT = 16
# Batches up to this many tokens gain more from many small tiles than from few large ones.
SMALL_BATCH = 256
MAX_SPLITS = 16


@dataclasses.dataclass(frozen=True)
class GroupPlan:
    """One projection group: its records ``[tiles, projections, LORA_RECORD]`` and launch sizes."""

    records: torch.Tensor
    projections: int
    num_slots: int
    rank_blocks: int
    block_r: int
    block_k: int
    block_n: int
    steps: int
    splits: int
    column_blocks: int
    out_align: int


@dataclasses.dataclass(frozen=True)
class TritonLoraPlan:
    geometry: AdapterGeometry
    cells: torch.Tensor
    scales: torch.Tensor
    num_layers: int
    num_tiles: int
    block_t: int
    vector: bool
    matrix: bool
    align: int
    groups: dict[str, GroupPlan]


def upload(arrays: list[Table], device: torch.device) -> list[torch.Tensor]:
    """All arrays in one asynchronous copy; each begins at a multiple of 16 bytes, as kernels expect."""
    places = []
    size = 0
    for array in arrays:
        places.append((size, array.size))
        size += -(-array.size // 4) * 4
    # Pinned memory is returned to torch's cache only after the copy, which it tracks itself.
    host = torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
    view = host.numpy()
    for array, (begin, length) in zip(arrays, places):
        view[begin : begin + length] = array.reshape(-1)
    packed = host.to(device, non_blocking=True)
    return [packed[begin : begin + length] for begin, length in places]


def tiles_of(length: Ints, most: int) -> tuple[Ints, Ints]:
    """(owner, place inside it) of every tile of runs of these lengths, cut into tiles of at most ``most``."""
    count = -(-length // most)
    owner = np.repeat(np.arange(len(length)), count)
    inside = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    return owner, inside * most


def lora_plan(
    segments: LoraSegments, geometry: AdapterGeometry, device: torch.device, programs: int
) -> TritonLoraPlan:
    length = segments.length.astype(np.int64)
    longest = int(length.max())
    small = int(length.sum()) <= SMALL_BATCH or longest <= 16
    block_t = 16 if small or geometry.page.itemsize > 2 else min(64, power_of_two(longest))
    owner, inside = tiles_of(length, block_t)
    count = np.minimum(length[owner] - inside, block_t)
    arrays = [segments.scales.astype(np.float32).view(np.int32)]
    plans: list[tuple[str, GroupPlan]] = []
    first = 0
    for group in geometry.groups:
        indices = range(first, first + len(group.projections))
        first = indices.stop
        records, plan = _group_plan(segments, geometry, group, indices, owner, block_t, programs)
        records[:, :, 0] = (segments.start[owner] + inside)[:, None]
        records[:, :, 1] = count[:, None]
        arrays.append(records)
        plans.append((group.name, plan))
    scales, *tables = upload(arrays, device)
    return TritonLoraPlan(
        geometry=geometry,
        cells=segments.cells,
        scales=scales.view(torch.float32),
        num_layers=segments.scales.shape[2],
        num_tiles=len(owner),
        block_t=block_t,
        vector=bool((count == 1).any()),
        matrix=bool((count > 1).any()),
        align=math.gcd(geometry.page.slab_elements, geometry.cell_elements, 16),
        groups={name: dataclasses.replace(plan, records=table) for (name, plan), table in zip(plans, tables)},
    )


def _group_plan(
    segments: LoraSegments,
    geometry: AdapterGeometry,
    group: ProjectionGroup,
    indices: range,
    owner: Ints,
    block_t: int,
    programs: int,
) -> tuple[Table, GroupPlan]:
    """The group's records, without the tiles' own columns, and its launch sizes."""
    chosen = segments.records[:, indices.start : indices.stop]
    ranks = chosen[owner, :, 2]
    largest = ranks.max(axis=0, initial=0)
    slots = -(-largest // SLOT_UNIT)
    outputs = np.array([p.out_features for p in group.projections])
    out_align = math.gcd(*outputs.tolist(), 16)
    records = np.zeros((len(owner), len(indices), LORA_RECORD), dtype=np.int32)
    records[:, :, 2] = ranks
    records[:, :, 3:5] = chosen[owner, :, :2]
    records[:, :, 5] = owner[:, None] * len(geometry.projections) + np.arange(indices.start, indices.stop)
    records[:, :, 6] = np.cumsum(slots) - slots
    records[:, :, 7] = outputs // out_align
    records[:, :, 8] = np.array(group.offsets[:-1]) // out_align
    records[:, :, 9] = [geometry.cells(p.out_features) for p in group.projections]

    cell = geometry.cell_elements
    most = int(largest.max(initial=0))
    # Blocks that fit the registers: float32 products run without tensor cores and need the smallest.
    exact = geometry.page.itemsize > 2
    wide = block_t > 16
    block_r = min(32, max(16, power_of_two(most))) if wide else 16
    block_k = block_of(cell, 64 if exact else 128 if wide else 256, group.in_features)
    block_n = block_of(cell, 128 if exact or wide else 256, int(outputs.max()))
    steps = -(-group.in_features // block_k)
    work = max(1, int((-(-ranks // block_r)).sum()))
    splits = 1
    # Powers of four: few variants of the kernels to compile.
    while splits * work < programs and splits * 4 <= min(steps, MAX_SPLITS):
        splits *= 4
    per_split = -(-steps // splits)
    return records, GroupPlan(
        records=torch.empty(0),
        projections=len(indices),
        num_slots=max(1, int(slots.sum())) * SLOT_UNIT,
        rank_blocks=max(1, -(-most // block_r)),
        block_r=block_r,
        block_k=block_k,
        block_n=block_n,
        steps=per_split,
        splits=-(-steps // per_split),
        column_blocks=-(-int(outputs.max()) // block_n),
        out_align=out_align,
    )


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def block_of(cell: int, most: int, elements: int) -> int:
    """Columns to load at once: within one cell where cells are long enough: then a row needs one pointer."""
    most = max(16, min(most, power_of_two(elements)))
    divisor = cell & -cell
    return min(most, divisor) if divisor >= 32 else min(64, most)
