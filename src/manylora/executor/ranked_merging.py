"""What merging asks of the other ranks: an adapter's rows as this rank's part of the weights needs them, and
whether a switch went well on all.

Of sharded adapters each rank has some inputs of every A and some outputs of every B. Its part of a column linear's
update B^T A needs all inputs of A, of a row linear's all outputs of B: these are gathered from all ranks, a group
of projections at a time. Of replicated adapters a rank has what it needs. A switch fails on all ranks or on none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from manylora.adapters.pack import cell_offsets, layout_for
from manylora.devices.peers import Peers
from manylora.kernels.ops import MergePlan, of_adapters
from manylora.kernels.shapes import AdapterGeometry, Projection, RankPlace
from manylora.models.layers import LoraLinear, RankedLinear
from manylora.models.share import LinearShare

ELSEWHERE = "it failed on another rank"


class MergeRows(NamedTuple):
    """A plan, and the pool in which its cells lie."""

    plan: MergePlan
    pool: torch.Tensor


class RankedMerging:
    """``geometry``: of adapters that are cut as the linears are, in pages as the pool's. Of one thread at a time;
    every rank asks the same in the same order."""

    def __init__(self, peers: Peers, geometry: AdapterGeometry, linears: Sequence[LoraLinear]) -> None:
        self.geometry = geometry
        self._peers = peers
        self._dtype = linears[0].weight.data.dtype
        ranked = [linear for linear in linears if isinstance(linear, RankedLinear)]
        sharded = {linear.share.adapted: linear.share for linear in ranked if linear.is_sharded}
        self._sharded = tuple(sharded.values())

    def agree(self, failed: str) -> str:
        """What went wrong here, else that something did on another rank, else nothing."""
        flag = torch.tensor([bool(failed)])
        found = self._peers.gather(flag, "merging")
        return failed or (ELSEWHERE if any(map(bool, found)) else "")

    def rows(self, plan: MergePlan, pool: torch.Tensor) -> MergeRows:
        """The plan's adapter, whose cells lie in the pool, as this rank's part of the weights needs it."""
        if not self._sharded or not plan.records[:, 2].any():
            return MergeRows(dataclasses.replace(plan, geometry=self.geometry), pool)
        layout = layout_for(plan.records[:, 2].tolist(), plan.scales, self.geometry)
        target = pool.new_zeros((layout.num_pages, *pool.shape[1:]))
        offsets = cell_offsets(layout, self.geometry, range(layout.num_pages))
        cells = torch.from_numpy(offsets).to(plan.cells.device)
        whole = MergePlan(plan.wanted, layout.records, plan.scales, cells, self.geometry)
        for share in self._sharded:
            self._gather(share, _Rows(plan, pool, self._dtype), _Rows(whole, target, self._dtype))
        return MergeRows(whole, target)

    def _gather(self, share: LinearShare, own: _Rows, whole: _Rows) -> None:
        """Of one group of projections: the side that is cut otherwise than the linear comes from all ranks."""
        pairs = list(zip(share.adapted.projections, share.group.projections, strict=True))
        pairs = [(part, linear) for part, linear in pairs if own.rank(part)]
        if not pairs:
            return
        side = 0 if share.kind == "column" else 1
        length = share.group.in_features if side == 0 else share.group.projections[0].out_features
        widths = [len(RankPlace(rank, self._peers.count).cut(length)) for rank in range(self._peers.count)]
        mine = torch.cat([own.read(part, side) for part, _ in pairs])
        mine = functional.pad(mine, (0, max(widths) - mine.shape[2]))
        parts = self._peers.gather(mine, "merging")
        rows = torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], dim=2)
        ranks = [own.rank(part) for part, _ in pairs]
        for (part, linear), gathered in zip(pairs, torch.split(rows, ranks), strict=True):
            whole.write(linear, side, gathered)
            whole.write(linear, 1 - side, own.read(part, 1 - side))


class _Rows:
    """The rows of a plan's adapter in all layers: ``[rank, L, length]`` of side 0 (A) and 1 (B)."""

    def __init__(self, plan: MergePlan, pool: torch.Tensor, dtype: torch.dtype) -> None:
        self._plan = plan
        self._geometry = geometry = plan.geometry
        num_cells, size = geometry.cells_per_page, geometry.cell_elements
        slabs = of_adapters(pool, dtype).view(len(pool), geometry.page.layers, geometry.slab_elements)
        self._cells = torch.unflatten(slabs[:, :, : num_cells * size], 2, (num_cells, size))

    def rank(self, projection: Projection) -> int:
        return int(self._plan.records[self._place(projection), 2])

    def read(self, projection: Projection, side: int) -> torch.Tensor:
        rank, length = self.rank(projection), _length(projection, side)
        cells = torch.unflatten(self._cells[self._where(projection, side)], 0, (rank, -1))
        return cells.transpose(1, 2).flatten(2)[:, :, :length]

    def write(self, projection: Projection, side: int, rows: torch.Tensor) -> None:
        num_cells, size = self._geometry.cells(rows.shape[2]), self._geometry.cell_elements
        padded = functional.pad(rows, (0, num_cells * size - rows.shape[2]))
        cells = torch.unflatten(padded, 2, (num_cells, size)).transpose(1, 2).flatten(0, 1)
        self._cells[self._where(projection, side)] = cells

    def _place(self, projection: Projection) -> int:
        return self._geometry.projections.index(projection)

    def _where(self, projection: Projection, side: int) -> tuple[torch.Tensor, slice, torch.Tensor]:
        """Pages and cells of the rows, one after another."""
        first = int(self._plan.records[self._place(projection), side])
        count = self.rank(projection) * self._geometry.cells(_length(projection, side))
        offsets = self._plan.cells[first : first + count]
        within = offsets % self._geometry.page_elements
        return offsets // self._geometry.page_elements, slice(None), within // self._geometry.cell_elements


def _length(projection: Projection, side: int) -> int:
    return projection.in_features if side == 0 else projection.out_features
