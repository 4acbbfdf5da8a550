"""Random paged batches for kernel tests. All memory that an operation must not read holds NaN."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from manylora_lab.bench import rounding
from manylora_lab.bench.rounding import Bounded

from manylora.kernels.ops import AttentionRows, LoraSegments, Scores
from manylora.kernels.shapes import AdapterGeometry, PageShape, Projection, ProjectionGroup


@dataclasses.dataclass
class AttentionCase:
    page: PageShape
    pool: torch.Tensor
    rows: AttentionRows
    q: torch.Tensor
    keys: list[torch.Tensor]  # per row [kv_len, kv_heads, D] of ``layer``
    values: list[torch.Tensor]
    layer: int
    scale: float
    window: int | None
    soft_cap: float | None = None

    @property
    def scores(self) -> Scores:
        return Scores(self.scale, self.window, self.soft_cap)


@dataclasses.dataclass
class LoraCase:
    geometry: AdapterGeometry
    pool: torch.Tensor
    segments: LoraSegments
    adapters: list[
        list[tuple[torch.Tensor, torch.Tensor] | None]
    ]  # segment, projection: A [r, in], B [r, out]
    layer: int
    num_tokens: int


def attention_case(
    seed: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    kv_heads: int = 2,
    heads_per_kv: int = 4,
    dim: int = 32,
    page_tokens: int = 4,
    lengths: list[tuple[int, int]] | None = None,
    window: int | None = None,
    layers: int = 3,
) -> AttentionCase:
    """``lengths``: per row (queries, context), drawn at random where not given."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    if lengths is None:
        lengths = []
        for _ in range(int(rng.integers(1, 7))):
            queries = 1 if rng.random() < 0.6 else int(rng.integers(2, 20))
            lengths.append((queries, queries + int(rng.integers(0, 40))))
    layer = int(rng.integers(layers))
    page = PageShape(layers, page_tokens, kv_heads, dim, torch.finfo(dtype).bits // 8)
    pages = [-(-context // page_tokens) for _, context in lengths]
    num_pages = sum(pages) + 3
    free = rng.permutation(num_pages)
    pool = torch.full((num_pages, layers, 2, page_tokens, kv_heads, dim), float("nan"), dtype=dtype)
    table = np.zeros((len(lengths), max(pages) + 2), dtype=np.int32)
    keys, values, taken = [], [], 0
    for row, (_, context) in enumerate(lengths):
        table[row, : pages[row]] = free[taken : taken + pages[row]]
        taken += pages[row]
        k, v = (torch.randn(context, kv_heads, dim, generator=generator).to(dtype) for _ in range(2))
        for position in range(context):
            target = pool[int(table[row, position // page_tokens]), layer, :, position % page_tokens]
            target[0], target[1] = k[position], v[position]
        keys.append(k.to(device))
        values.append(v.to(device))
    starts = np.cumsum([0] + [queries for queries, _ in lengths]).astype(np.int32)
    rows = AttentionRows(starts, np.array([c for _, c in lengths], dtype=np.int32), table)
    q = torch.randn(int(starts[-1]), kv_heads * heads_per_kv, dim, generator=generator).to(dtype)
    return AttentionCase(
        page, pool.to(device), rows, q.to(device), keys, values, layer, dim**-0.5 * 1.3, window
    )


def llama_groups(hidden: int, q: int, kv: int, intermediate: int) -> tuple[ProjectionGroup, ...]:
    def of(name: str, *projections: tuple[str, int, int]) -> ProjectionGroup:
        return ProjectionGroup(name, tuple(Projection(*p) for p in projections))

    return (
        of(
            "qkv",
            ("self_attn.q_proj", hidden, q),
            ("self_attn.k_proj", hidden, kv),
            ("self_attn.v_proj", hidden, kv),
        ),
        of("o", ("self_attn.o_proj", q, hidden)),
        of("gate_up", ("mlp.gate_proj", hidden, intermediate), ("mlp.up_proj", hidden, intermediate)),
        of("down", ("mlp.down_proj", intermediate, hidden)),
    )


def lora_case(
    seed: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    lengths: list[tuple[int, int]],
    ranks: list[int],
    geometry: AdapterGeometry,
    missing: float = 0.2,
    same_scale: bool = False,
    pool_dtype: torch.dtype | None = None,
    across: bool = False,
) -> LoraCase:
    """``lengths``: per segment (base tokens before it, its tokens); ``ranks`` are drawn from for each
    projection, which is missing with the given probability. ``dtype``: of the adapters; ``pool_dtype``: of
    keys and values, the same where None. ``across``: each cell lies in a slab of its own, whatever the layer."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    page, projections = geometry.page, geometry.projections
    layer = 0 if across else int(rng.integers(page.layers))
    records = np.zeros((len(lengths), len(projections), 3), dtype=np.int64)
    adapters: list[list[tuple[torch.Tensor, torch.Tensor] | None]] = []
    rows: list[tuple[int, torch.Tensor]] = []  # first entry in the cell table, the row
    entry = 0
    for s in range(len(lengths)):
        adapter: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        for p, projection in enumerate(projections):
            rank = 0 if rng.random() < missing else int(rng.choice(ranks))
            if rank == 0:
                records[s, p] = (10**6, 10**6, 0)  # positions of absent projections mean nothing
                adapter.append(None)
                continue
            a, b = (
                (torch.randn(rank, n, generator=generator) * n**-0.5).to(dtype)
                for n in (projection.in_features, projection.out_features)
            )
            for column, matrix in enumerate((a, b)):
                records[s, p, column] = entry
                for row in matrix:
                    rows.append((entry, row))
                    entry += geometry.cells(len(row))
            entry += int(rng.integers(0, 3))  # unused entries of the table
            records[s, p, 2] = rank
            adapter.append((a.to(device), b.to(device)))
        adapters.append(adapter)

    num_pages = -(-(entry + 1) // geometry.cells_per_page) + 2
    flat = torch.full((num_pages * page.layers * geometry.slab_elements,), float("nan"), dtype=dtype)
    place = rng.permutation(num_pages * geometry.cells_per_page)[:entry]
    offsets = place // geometry.cells_per_page * geometry.page_elements
    offsets += place % geometry.cells_per_page * geometry.cell_elements
    if across:
        offsets += rng.integers(page.layers, size=entry) * geometry.slab_elements
    for first, row in rows:
        for cell in range(geometry.cells(len(row))):
            piece = row[cell * geometry.cell_elements : (cell + 1) * geometry.cell_elements]
            begin = int(offsets[first + cell]) + layer * geometry.slab_elements
            flat[begin : begin + len(piece)] = piece
    starts, token = [], 0
    for gap, length in lengths:
        starts.append(token + gap)
        token += gap + length
    scales = rng.uniform(0.25, 4.0, (len(lengths), len(projections), page.layers)).astype(np.float32)
    if same_scale:
        scales[:] = scales[..., :1]
    segments = LoraSegments(
        start=np.array(starts, dtype=np.int32),
        length=np.array([length for _, length in lengths], dtype=np.int32),
        records=records,
        scales=scales,
        cells=torch.from_numpy(offsets.astype(np.int64)).to(device),
    )
    shape = (num_pages, page.layers, 2, page.page_tokens, page.kv_heads, page.head_dim)
    pool = flat.view(dtype if pool_dtype is None else pool_dtype).view(shape)
    return LoraCase(geometry, pool.to(device), segments, adapters, layer, token + 2)


def error(out: torch.Tensor, truth: torch.Tensor) -> float:
    """||out - truth|| / ||truth||; NaN where anything is NaN."""
    out, truth = out.detach().double(), truth.detach().double()
    return float((out - truth).norm() / truth.norm())


def attention_truth(case: AttentionCase) -> Bounded:
    """``[T, heads * D]`` as stored."""
    return rounding.attention(
        case.q, case.pool, case.layer, case.rows, case.page, case.scores
    ).rounded(case.q.dtype)


def lora_truth(
    case: LoraCase, x: torch.Tensor, group: ProjectionGroup, parts: Sequence[slice] = (slice(None),)
) -> Bounded:
    """What the case's adapters add for the group, as stored; ``parts`` of the inputs are shrunk one by one."""
    added = Bounded.given(torch.zeros(len(x), group.offsets[-1], dtype=x.dtype, device=x.device))
    segments = case.segments
    for segment, (start, length) in enumerate(zip(segments.start.tolist(), segments.length.tolist())):
        for i, projection in enumerate(group.projections):
            index = case.geometry.projections.index(projection)
            pair = case.adapters[segment][index]
            if pair is None:
                continue
            tokens, columns = slice(start, start + length), slice(group.offsets[i], group.offsets[i + 1])
            scale = float(segments.scales[segment, index, case.layer])
            added.put(tokens, columns, rounding.lora(x[tokens], *pair, scale, parts))
    return added


def adapted_truth(
    case: LoraCase, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: ProjectionGroup
) -> Bounded:
    """A product and what adapters add to it, as stored."""
    base = rounding.linear(x, weight, bias).rounded(x.dtype)
    return base.plus(lora_truth(case, x, group)).rounded(x.dtype)
