"""How the CPU path batches a step's LoRA products: a few padded batched products instead of many small ones.

Owns: which segments share a block, and the index and scale tensors of blocks. It does not touch weights.

A block is one batched product over its segments: tokens are padded to the longest segment, ranks to the
largest one of each projection. Padding repeats something real (the segment's last token, an adapter's last
row) and gets scale zero, so that nothing stale is ever read. Segments of similar length are put together
while that costs less arithmetic than another block costs calls; a long segment stays alone.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from manylora.kernels.ops import LoraSegments
from manylora.kernels.shapes import AdapterGeometry, Projection, ProjectionGroup

Ints = npt.NDArray[np.int64]

# One more torch call costs as much as this many multiply-adds (10 us of float32; bfloat16 products are
# slower, and so are their calls).
CALL_COST = 500_000
# Bringing one element of A or B out of the pool costs as much as its products with this many tokens.
GATHER_COST = 24
# Elements that one block may bring out of the pool (a single segment may exceed it).
GATHER_LIMIT = 1 << 23


@dataclasses.dataclass(frozen=True)
class Share:
    """What one projection takes of a block: its cells of B and its columns of the shrunk batch."""

    projection: Projection
    first_output: int
    first_cell: int
    first_column: int
    rank: int


@dataclasses.dataclass(frozen=True, eq=False)
class LoraBlock:
    """U segments of at most N tokens and R rank rows (all projections of the group together).

    ``start``, ``stop``: the tokens, where U = 1; else ``tokens`` int64 [U * N] names them.
    ``pieces`` int64: the pool's pieces of layer 0: A's rows (segment, projection, row), then B's rows
    (projection, segment, row).
    ``scales`` float32 [L or 1, U, N or 1, R], zero where anything is padding. ``lent`` bool [U, 1, R]: rows of
    another segment's adapter, whose products may be infinite; None: there are none.
    """

    segments: int
    start: int
    stop: int
    tokens: torch.Tensor | None
    pieces: torch.Tensor
    scales: torch.Tensor
    lent: torch.Tensor | None
    shares: tuple[Share, ...]

    def num_a_cells(self, per_row: int) -> int:
        """How many of its cells are A's, which come first."""
        return self.segments * int(self.scales.shape[-1]) * per_row


@dataclasses.dataclass(frozen=True)
class CpuLoraPlan:
    """A plan may be used as long as the cells that it names hold the same adapters."""

    geometry: AdapterGeometry
    piece: int
    blocks: dict[str, list[LoraBlock]]

    @property
    def pieces_per_cell(self) -> int:
        return self.geometry.cell_elements // self.piece


def plan_blocks(segments: LoraSegments, geometry: AdapterGeometry) -> CpuLoraPlan:
    # Cells need not be aligned to their own size where a slab is no multiple of it.
    piece = geometry.alignment
    blocks: dict[str, list[LoraBlock]] = {}
    first = 0
    for group in geometry.groups:
        indices = slice(first, first + len(group.projections))
        first = indices.stop
        blocks[group.name] = [
            _block(segments, geometry, group, indices, chosen, piece)
            for chosen in _choose(segments, group, indices)
        ]
    return CpuLoraPlan(geometry, piece, blocks)


def _choose(segments: LoraSegments, group: ProjectionGroup, indices: slice) -> list[Ints]:
    """The segments of each block. Sorted by length and size, so that neighbours pad each other least."""
    ranks = segments.records[:, indices, 2]
    widths = np.array([p.in_features + p.out_features for p in group.projections])
    weight = ranks @ widths
    order = np.lexsort((-weight, -segments.length))
    order = order[(weight > 0)[order] & (segments.length > 0)[order]]
    saved = (4 + 2 * len(group.projections)) * CALL_COST
    chosen: list[Ints] = []
    begin = 0
    longest = cost = 0
    total_widths, all_ranks = widths.tolist(), ranks[order].tolist()
    largest_ranks: list[int] = []
    for place, (length, own) in enumerate(zip(segments.length[order].tolist(), weight[order].tolist())):
        alone = (length + GATHER_COST) * own
        together = [max(pair) for pair in zip(largest_ranks, all_ranks[place])]
        size = sum(w * r for w, r in zip(total_widths, together))
        count = place - begin + 1
        joined = count * (longest + GATHER_COST) * size
        if place > begin and joined - cost - alone <= saved and count * size <= GATHER_LIMIT:
            cost, largest_ranks = joined, together
            continue
        if place > begin:
            chosen.append(np.sort(order[begin:place]))
        begin, longest, cost, largest_ranks = place, length, alone, all_ranks[place]
    if len(order):
        chosen.append(np.sort(order[begin:]))
    return chosen


def _block(
    segments: LoraSegments,
    geometry: AdapterGeometry,
    group: ProjectionGroup,
    indices: slice,
    chosen: Ints,
    piece: int,
) -> LoraBlock:
    records = segments.records[chosen][:, indices]  # [U, P, 3]
    most = records[:, :, 2].max(axis=0).tolist()
    a_cells = geometry.cells(group.in_features)
    a_parts, b_parts, scale_parts, lent_parts, shares = [], [], [], [], []
    cell, column = sum(most) * len(chosen) * a_cells, 0
    for i, (projection, rank) in enumerate(zip(group.projections, most)):
        if rank == 0:
            continue
        own = records[:, i, 2]
        # An adapter without this projection borrows the rows of the one with most; its scale is zero.
        lender = np.where(own > 0, np.arange(len(chosen)), own.argmax())
        row = np.minimum(np.arange(rank), own[lender][:, None] - 1)  # [U, rank]
        b_cells = geometry.cells(projection.out_features)
        a_parts.append(_cell_entries(records[lender, i, 0], row, a_cells))
        b_parts.append(_cell_entries(records[lender, i, 1], row, b_cells))
        scale = segments.scales[chosen, indices.start + i].T[:, :, None]  # [L, U, 1]
        scale_parts.append(np.where(np.arange(rank) < own[:, None], scale, np.float32(0)))
        lent_parts.append(np.repeat(own[:, None] == 0, rank, axis=1))
        shares.append(Share(projection, group.offsets[i], cell, column, rank))
        cell += len(chosen) * rank * b_cells
        column += rank

    a_entries = np.concatenate(a_parts, axis=1).reshape(-1)
    entries = np.concatenate((a_entries, *(part.reshape(-1) for part in b_parts)))
    pieces = segments.cells[torch.from_numpy(entries)].div_(piece, rounding_mode="floor")
    if piece != geometry.cell_elements:
        pieces = (pieces[:, None] + torch.arange(geometry.cell_elements // piece)).view(-1)

    scales = np.concatenate(scale_parts, axis=2)[:, :, None]  # [L, U, 1, R]
    if (scales == scales[:1]).all():
        scales = scales[:1]
    lent = np.concatenate(lent_parts, axis=1)[:, None]  # [U, 1, R]
    start, length = segments.start[chosen].astype(np.int64), segments.length[chosen].astype(np.int64)
    tokens = None
    if len(chosen) > 1:
        place = np.arange(length.max())
        tokens = torch.from_numpy((start[:, None] + np.minimum(place, length[:, None] - 1)).reshape(-1))
        if (length != length[0]).any():
            scales = scales * (place < length[:, None])[None, :, :, None]
    return LoraBlock(
        segments=len(chosen),
        start=int(start[0]),
        stop=int(start[0] + length[0]),
        tokens=tokens,
        pieces=pieces,
        scales=torch.from_numpy(np.ascontiguousarray(scales, dtype=np.float32)),
        lent=torch.from_numpy(lent) if lent.any() else None,
        shares=tuple(shares),
    )


def _cell_entries(first: Ints, row: Ints, per_row: int) -> Ints:
    """``[U, rank * per_row]``: entries in the cell table of rows of the matrices that begin at ``first``."""
    entries: Ints = first[:, None, None] + row[:, :, None] * per_row + np.arange(per_row)
    return entries.reshape(len(first), -1)
