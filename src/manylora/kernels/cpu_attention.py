"""How the CPU path groups a step's rows for attention, so that a few large calls serve them all.

Owns: cutting long queries into tiles, grouping tiles of similar lengths, and their index tensors. It does not
touch keys or values. Rows are host numbers; nothing here runs once a token in Python.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
import torch

from manylora.kernels.ops import AttentionRows
from manylora.kernels.shapes import PageShape

Ints = npt.NDArray[np.int64]

# Longer queries are cut into tiles, so that the mask stays small and a tile skips the keys that follow it.
QUERY_TILE = 128
# Context lengths are rounded up to this before rows are grouped, which bounds the grouping's own work.
CONTEXT_BUCKET = 32
# What one more group costs (about 8 calls), in units of one gathered and attended context slot (50 ns).
GROUP_COST_SLOTS = 1000
# Scores of one more query cost this share of a slot.
QUERY_COST = 0.1
# Elements of K (and as many of V) that one group may gather, and elements of a mask.
GATHER_LIMIT = 1 << 23


@dataclasses.dataclass
class RowGroup:
    """Rows of similar lengths that attend in one call: B rows, Q queries each, S context slots each.

    ``queries`` int64 [B*Q]: the batch's token of each place (padding repeats the row's last token).
    ``targets`` int64 [B*Q]: where its result goes (padding goes to the extra last row of the output).
    ``slots`` int64 [B*S]: a token's K of layer 0 in the pool seen as [-1, kv_heads * head_dim].
    ``visible`` bool [B, 1, 1, Q, S].
    """

    queries: torch.Tensor
    targets: torch.Tensor
    slots: torch.Tensor
    visible: torch.Tensor
    mask: torch.Tensor | None = None

    def additive_mask(self, heads_per_kv: int, dtype: torch.dtype) -> torch.Tensor:
        """``[B, 1, heads_per_kv * Q, S]`` of 0 and -inf; built at the first layer, reused by the others."""
        if self.mask is None:
            batch, _, _, num_queries, context = self.visible.shape
            mask = torch.zeros(self.visible.shape, dtype=dtype).masked_fill_(~self.visible, -math.inf)
            mask = mask.expand(batch, 1, heads_per_kv, num_queries, context)
            self.mask = mask.reshape(batch, 1, heads_per_kv * num_queries, context)
        return self.mask


@dataclasses.dataclass
class CpuAttentionPlan:
    """The rows of a step, and their groups for each window that a layer has asked for."""

    rows: AttentionRows
    page: PageShape
    groups: dict[int | None, list[RowGroup]] = dataclasses.field(default_factory=dict)


def ragged_arange(first: Ints, count: Ints) -> Ints:
    """first[0], first[0]+1, ... (count[0] of them), then first[1], ..."""
    ends = np.cumsum(count)
    inside: Ints = np.arange(ends[-1] if len(ends) else 0) + np.repeat(first - (ends - count), count)
    return inside


def query_tiles(rows: AttentionRows, window: int | None) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Cut rows into tiles of at most QUERY_TILE queries.

    Returns per tile: its row, first token, number of queries, first visible context slot, context end.
    """
    start = rows.query_start[:-1].astype(np.int64)
    total = np.diff(rows.query_start).astype(np.int64)
    tiles = -(-total // QUERY_TILE)
    row = np.repeat(np.arange(len(total)), tiles)
    begin = ragged_arange(np.zeros(len(total), np.int64), tiles) * QUERY_TILE
    length = np.minimum(QUERY_TILE, total[row] - begin)
    end = rows.kv_len[row].astype(np.int64) - (total[row] - begin - length)
    low = np.zeros_like(end) if window is None else np.maximum(0, end - length - window + 1)
    return row, start[row] + begin, length, low, end


def group_rows(rows: AttentionRows, page: PageShape, window: int | None) -> list[RowGroup]:
    """Groups of tiles whose padding costs less than another group's calls would."""
    row, token, length, low, end = query_tiles(rows, window)
    context = end - low
    bucket = -(-context // CONTEXT_BUCKET)
    order = np.lexsort((token, -bucket, -length))
    if len(order) == 0:
        return []
    # Tiles that agree in both are one run; runs are merged while that is cheaper.
    edges = np.flatnonzero(np.diff(length[order]) | np.diff(bucket[order])) + 1
    width = page.kv_heads * page.head_dim
    chosen: list[Ints] = []
    current, size = order[:0], (0, 0)
    for run in np.split(order, edges):
        queries, slots = int(length[run[0]]), int(bucket[run[0]]) * CONTEXT_BUCKET
        # Sorted by length: the first run of a group has its most queries.
        merged = (max(size[0], queries), max(size[1], slots))
        together = _tile_cost(len(current) + len(run), merged)
        apart = _tile_cost(len(current), size) + _tile_cost(len(run), (queries, slots))
        limit = max(1, GATHER_LIMIT // max(merged[1] * width, merged[0] * merged[1]))
        if len(current) and (together > apart or len(current) + len(run) > limit):
            chosen.append(current)
            current, merged = order[:0], (queries, slots)
            limit = max(1, GATHER_LIMIT // max(slots * width, queries * slots))
        while len(run) > limit:
            chosen.append(run[:limit])
            run = run[limit:]
        current, size = np.concatenate((current, run)), merged
    chosen.append(current)
    tiles = (row, token, length, low, end)
    num_tokens = int(rows.query_start[-1])
    return [row_group(rows, page, window, num_tokens, tuple(t[np.sort(c)] for t in tiles)) for c in chosen]


def _tile_cost(tiles: int, size: tuple[int, int]) -> float:
    return GROUP_COST_SLOTS + tiles * size[1] * (1 + QUERY_COST * size[0])


def row_group(
    rows: AttentionRows, page: PageShape, window: int | None, num_tokens: int, tiles: tuple[Ints, ...]
) -> RowGroup:
    """Index tensors of one group of tiles (see ``query_tiles`` for their columns)."""
    row, token, length, low, end = tiles
    num_queries, context = int(length.max()), int((end - low).max())
    place = np.arange(num_queries)
    inside = np.minimum(place, length[:, None] - 1)  # [B, Q]: padding repeats the last query
    queries = token[:, None] + inside
    targets = np.where(place < length[:, None], queries, num_tokens)
    position = (end - length)[:, None] + inside
    # [B, S]: padding repeats the last valid slot, which is finite; the mask hides it.
    slot = low[:, None] + np.arange(context)
    valid = np.minimum(slot, end[:, None] - 1)
    pages = rows.page_table[row[:, None], valid // page.page_tokens].astype(np.int64)
    slots = pages * (2 * page.layers * page.page_tokens) + valid % page.page_tokens
    visible = slot[:, None, :] <= position[:, :, None]
    if window is not None:
        visible &= slot[:, None, :] > position[:, :, None] - window
    return RowGroup(
        queries=torch.from_numpy(queries.reshape(-1)),
        targets=torch.from_numpy(targets.reshape(-1)),
        slots=torch.from_numpy(slots.reshape(-1)),
        visible=torch.from_numpy(visible[:, None, None]),
    )
