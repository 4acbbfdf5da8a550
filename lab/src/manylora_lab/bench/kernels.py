"""What measurements of kernels share: a random pool, adapters at random places in it, ceilings, exact results.

Memory for a pool is filled at random as a whole, and cell tables are random permutations, so timings are those of
a scattered pool.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch

from manylora.kernels.ops import LoraSegments, of_adapters
from manylora.kernels.shapes import AdapterGeometry, PageShape, Projection, ProjectionGroup
from manylora_lab.bench.interleaved import medians
from manylora_lab.bench.kernels_settings import model_counts
from manylora_lab.bench.rounding import Bounded, lora

PAGE_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class DecoderSizes:
    """The sizes of one decoder layer, and how many layers."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int

    def page(self, dtype: torch.dtype) -> PageShape:
        return PageShape(self.layers, PAGE_TOKENS, self.kv_heads, self.head_dim, dtype.itemsize)

    def groups(self) -> tuple[ProjectionGroup, ...]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim

        def group(name: str, inputs: int, **outputs: int) -> ProjectionGroup:
            return ProjectionGroup(
                name, tuple(Projection(f"{p}_proj", inputs, n) for p, n in outputs.items())
            )

        return (
            group("qkv", self.hidden, q=q, k=kv, v=kv),
            group("o", q, o=self.hidden),
            group("gate_up", self.hidden, gate=self.intermediate, up=self.intermediate),
            group("down", self.intermediate, down=self.hidden),
        )


CUDA_DECODERS = (
    DecoderSizes("llama-2-7b", 32, 4096, 32, 32, 128, 11008),
    DecoderSizes("llama-3-8b", 32, 4096, 32, 8, 128, 14336),
)


def ceilings(
    device: torch.device, dtype: torch.dtype, repeats: int, is_small: bool = False
) -> tuple[float, float]:
    """(bytes per second of a copy, read and written counted; FLOP per second of a matrix product), of large ones
    unless ``is_small``."""
    is_cpu = device.type == "cpu"
    elements = 2**18 if is_small else 2**24 if is_cpu else 2**29
    side = 256 if is_small else 1024 if is_cpu else 8192
    source = torch.randn(elements, dtype=dtype, device=device)
    target = torch.empty_like(source)
    left = torch.randn(side, side, dtype=dtype, device=device)
    product = torch.empty_like(left)
    copy_s, product_s = medians(
        device,
        # By a kernel: what a graph captures of copy_() runs at two thirds of the speed on an H200.
        [lambda: torch.mul(source, 2.0, out=target), lambda: torch.mm(left, left, out=product)],
        repeats,
    )
    return 2 * source.nbytes / copy_s, 2 * side**3 / product_s


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second of copying, bytes read and bytes written counted."""
    return ceilings(device, torch.float32, 15)[0]


def random_pool(page: PageShape, pages: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    shape = (pages, page.layers, 2, page.page_tokens, page.kv_heads, page.head_dim)
    pool = torch.empty(shape, dtype=dtype, device=device)
    for begin in range(0, pages, 256):
        pool[begin : begin + 256].normal_(std=0.05)
    return pool


def relative_error(out: torch.Tensor, truth: torch.Tensor) -> float:
    return float((out.float() - truth.float()).norm() / truth.float().norm())


def segment_lengths(popularity: str, batch: int) -> list[int]:
    """Tokens of each adapter in a decoding batch."""
    return list(model_counts(popularity, batch))


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
    records = np.empty((len(ranks), len(projections), 4), dtype=np.int64)
    records[:, :, :2] = ends - count
    records[:, :, 2:] = np.array(ranks)[:, None, None]
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
        scales=np.full((len(ranks), len(projections), 2, geometry.page.layers), 2.0, dtype=np.float32),
        cells=torch.from_numpy(offsets).to(device),
    )


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
    cell = geometry.cell_elements
    unit = geometry.alignment
    # A view: row n is what begins at element n * unit.
    cells = of_adapters(pool, x.dtype).view(-1).unfold(0, cell, unit)
    added = Bounded.given(torch.zeros(len(x), group.offsets[-1], dtype=x.dtype, device=x.device))

    def rows(first: int, rank: int, elements: int) -> torch.Tensor:
        begin = segments.cells[first : first + rank * geometry.cells(elements)]
        begin = (begin + layer * geometry.slab_elements) // unit
        return cells[begin].view(rank, -1)[:, :elements]

    for s, (start, length) in enumerate(zip(segments.start.tolist(), segments.length.tolist())):
        for i, projection in enumerate(group.projections):
            p = geometry.projections.index(projection)
            first_a, first_b, rank, _ = segments.records[s, p].tolist()
            a, b = rows(first_a, rank, projection.in_features), rows(first_b, rank, projection.out_features)
            delta = lora(x[start : start + length], a, b, segments.row_scales(s, p, layer))
            added.put(slice(start, start + length), slice(group.offsets[i], group.offsets[i + 1]), delta)
    return added


def pages_of(context: int) -> int:
    return -(-context // PAGE_TOKENS)


def device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else str(torch.get_device_module(device).get_device_name(device))
