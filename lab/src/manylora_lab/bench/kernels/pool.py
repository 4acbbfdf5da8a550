"""What measurements of kernels read: a random pool, adapters at random places in it, and what LoRA gives exactly.

Memory for a pool is filled at random as a whole, and cell tables are random permutations, so timings are those of
a scattered pool.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from manylora.kernels.ops import AttentionRows, LoraSegments, of_adapters
from manylora.kernels.shapes import AdapterGeometry, PageShape, Projection, ProjectionGroup
from manylora_lab.bench.kernels.settings import Queries
from manylora_lab.bench.rounding import Bounded, lora
from manylora_lab.pricing.shapes import ModelShape

PAGE_TOKENS = 16


def page_of(shape: ModelShape, dtype: torch.dtype) -> PageShape:
    return PageShape(shape.layers, PAGE_TOKENS, shape.kv_heads, shape.head_dim, dtype.itemsize)


def groups_of(shape: ModelShape) -> tuple[ProjectionGroup, ...]:
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def group(name: str, inputs: int, **outputs: int) -> ProjectionGroup:
        return ProjectionGroup(name, tuple(Projection(f"{p}_proj", inputs, n) for p, n in outputs.items()))

    return (
        group("qkv", shape.hidden, q=q, k=kv, v=kv),
        group("o", q, o=shape.hidden),
        group("gate_up", shape.hidden, gate=shape.intermediate, up=shape.intermediate),
        group("down", shape.intermediate, down=shape.hidden),
    )


def random_pool(page: PageShape, pages: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    shape = (pages, page.layers, 2, page.page_tokens, page.kv_heads, page.head_dim)
    pool = torch.empty(shape, dtype=dtype, device=device)
    for begin in range(0, pages, 256):
        pool[begin : begin + 256].normal_(std=0.05)
    return pool


def scattered_rows(queries: Queries, pages: np.ndarray) -> AttentionRows:
    """Rows whose KV lies in some of these pages, in no order."""
    counts = [pages_of(context) for _, context in queries]
    free = np.random.default_rng(1).permutation(pages).astype(np.int32)
    table, taken = np.zeros((len(queries), max(counts)), dtype=np.int32), 0
    for row, count in enumerate(counts):
        table[row, :count] = free[taken : taken + count]
        taken += count
    return AttentionRows(
        np.cumsum([0, *(number for number, _ in queries)]).astype(np.int32),
        np.array([context for _, context in queries], dtype=np.int32),
        table,
    )


def cells_for(geometry: AdapterGeometry, ranks: list[int]) -> int:
    """Cells that adapters of these ranks take, on every projection."""
    per_rank = sum(
        geometry.cells(p.in_features) + geometry.cells(p.out_features) for p in geometry.projections
    )
    return per_rank * sum(ranks)


@functools.lru_cache(maxsize=1)
def _places(total: int) -> np.ndarray:
    """Seconds for all cells of a large pool, the same each time."""
    return np.random.default_rng(0).permutation(total)


def segments_for(
    geometry: AdapterGeometry, lengths: list[int], ranks: list[int], num_pages: int, device: torch.device
) -> LoraSegments:
    """Adapters on every projection, with cells at random places of a pool of so many pages."""
    projections = geometry.projections
    per_row = np.array([[geometry.cells(p.in_features), geometry.cells(p.out_features)] for p in projections])
    count = np.array(ranks)[:, None, None] * per_row[None]  # [S, P, 2]
    ends = np.cumsum(count.reshape(-1)).reshape(count.shape)
    records = np.empty((len(ranks), len(projections), 3), dtype=np.int64)
    records[:, :, :2] = ends - count
    records[:, :, 2] = np.array(ranks)[:, None]
    total, needed = num_pages * geometry.cells_per_page, cells_for(geometry, ranks)
    if needed > total:
        raise ValueError(f"adapters of {needed} cells do not fit a pool of {num_pages} pages, {total} cells")
    places = _places(total)[:needed]
    offsets = places // geometry.cells_per_page * geometry.page_elements
    offsets += places % geometry.cells_per_page * geometry.cell_elements
    length = np.array(lengths, dtype=np.int32)
    return LoraSegments(
        start=(np.cumsum(length) - length).astype(np.int32),
        length=length,
        records=records,
        scales=np.full((len(ranks), len(projections), geometry.page.layers), 2.0, dtype=np.float32),
        cells=torch.from_numpy(offsets).to(device),
    )


def adapter_of(
    pool: torch.Tensor,
    layer: int,
    projection: int,
    segment: int,
    segments: LoraSegments,
    geometry: AdapterGeometry,
) -> tuple[torch.Tensor, torch.Tensor]:
    """An adapter's matrices out of its pages: A ``[rank, in]`` and B transposed ``[rank, out]``, not scaled."""
    unit = geometry.alignment
    # A view: row n is what begins at element n * unit.
    cells = of_adapters(pool, pool.dtype).view(-1).unfold(0, geometry.cell_elements, unit)
    first_a, first_b, rank = segments.records[segment, projection].tolist()

    def rows(first: int, elements: int) -> torch.Tensor:
        begin = segments.cells[first : first + rank * geometry.cells(elements)]
        begin = (begin + layer * geometry.slab_elements) // unit
        return cells[begin].view(rank, -1)[:, :elements]

    sizes = geometry.projections[projection]
    return rows(first_a, sizes.in_features), rows(first_b, sizes.out_features)


def exact_lora(
    x: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    group: ProjectionGroup,
    segments: LoraSegments,
    geometry: AdapterGeometry,
) -> Bounded:
    """What LoRA adds, in float64, one dense product after another; and by how much a kernel's, as stored, may miss
    it."""
    added = Bounded.given(torch.zeros(len(x), group.offsets[-1], dtype=x.dtype, device=x.device))
    for s, (start, length) in enumerate(zip(segments.start.tolist(), segments.length.tolist())):
        for i, projection in enumerate(group.projections):
            p = geometry.projections.index(projection)
            a, b = adapter_of(pool, layer, p, s, segments, geometry)
            delta = lora(x[start : start + length], a, b, float(segments.scales[s, p, layer]))
            added.put(slice(start, start + length), slice(group.offsets[i], group.offsets[i + 1]), delta)
    return added


def pages_of(context: int) -> int:
    return -(-context // PAGE_TOKENS)
