"""Check and time the kernels: ``python -m manylora.bench.kernels --device cuda --out FILE``.

Every row is a setting of one operation: its error against a float32 computation of the same thing, its time,
and its floor, the bytes that it must read at the bandwidth measured in the same run. LoRA rows are the whole
add-on of one decoder layer (four groups), with the adapters' popularity as in Punica's evaluation.

On CUDA all layers of a model run in one captured graph, so that adapters and KV come from memory and not from
the cache, and launches cost what they cost when serving. Memory for the pool is filled at random as a whole:
cell tables are random permutations, so the timing is that of a scattered pool.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manylora.bench.interleaved import captured
from manylora.kernels.ops import AttentionRows, LoraSegments, Ops
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.select import ops_for
from manylora.kernels.shapes import AdapterGeometry, PageShape, Projection, ProjectionGroup, adapter_geometry

POPULARITIES = ("distinct", "uniform", "skewed", "identical")
SKEW = 1.5
PAGE_TOKENS = 16
REPEATS = 15
CPU_REPEATS = 100


@dataclasses.dataclass(frozen=True)
class Decoder:
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
    Decoder("llama-2-7b", 32, 4096, 32, 32, 128, 11008),
    Decoder("llama-3-8b", 32, 4096, 32, 8, 128, 14336),
)
CPU_DECODER = Decoder("demo", 4, 256, 8, 2, 32, 688)


@dataclasses.dataclass
class Bench:
    """One implementation on one device, with what all its measurements share."""

    ops: Ops
    device: torch.device
    dtype: torch.dtype
    bytes_per_s: float
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def add(self, error: float, seconds: float, num_bytes: float, **setting: object) -> None:
        floor = num_bytes / self.bytes_per_s
        row = {
            **setting,
            "error": error,
            "us": seconds * 1e6,
            "floor_us": floor * 1e6,
            "ratio": seconds / floor,
        }
        self.rows.append(row)
        name = "  ".join(f"{value}" for value in setting.values())
        print(
            f"{name:<46} error {error:8.1e}  {row['us']:9.1f} us  floor {row['floor_us']:8.2f}"
            f"  x{row['ratio']:.1f}",
            flush=True,
        )


def seconds_of(device: torch.device, step: Callable[[], None]) -> float:
    """The time of one call: on CUDA the median, without what the host needs to launch it; on the CPU the
    least, because threads that wait for a core which others use cost milliseconds."""
    if device.type == "cpu":
        samples = []
        for _ in range(CPU_REPEATS):
            begin = time.perf_counter()
            step()
            samples.append(time.perf_counter() - begin)
        return min(samples)
    module = torch.get_device_module(device)
    graph = captured(module, step)
    graph.replay()
    events = [torch.Event(device, enable_timing=True) for _ in range(REPEATS + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    events[-1].synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events)) / 1e3


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second of copying, bytes read and bytes written counted."""
    source = torch.randn((1 << 30) if device.type == "cuda" else (1 << 24), device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        # By a kernel: what a graph captures of copy_() runs at two thirds of the speed on an H200.
        torch.mul(source, 2.0, out=target)

    return 2 * source.nbytes / seconds_of(device, copy)


def void(_: object) -> None:
    """For lambdas whose result nobody wants."""


def random_pool(page: PageShape, pages: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    shape = (pages, page.layers, 2, page.page_tokens, page.kv_heads, page.head_dim)
    pool = torch.empty(shape, dtype=dtype, device=device)
    for begin in range(0, pages, 256):
        pool[begin : begin + 256].normal_(std=0.05)
    return pool


def relative_error(out: torch.Tensor, truth: torch.Tensor) -> float:
    return float((out.float() - truth.float()).norm() / truth.float().norm())


# ---- LoRA ----------------------------------------------------------------------------------------------


def segment_lengths(popularity: str, batch: int) -> list[int]:
    """Tokens of each adapter in a decoding batch."""
    if popularity == "distinct":
        return [1] * batch
    if popularity == "identical":
        return [batch]
    if popularity == "uniform":
        adapters = round(batch**0.5)
        return [batch // adapters + (i < batch % adapters) for i in range(adapters)]
    # Each adapter has 1.5 times the requests of the next; about one request for the last.
    adapters = min(batch, 1 + math.ceil(math.log(max(batch / 3, 1), SKEW)))
    weights = [SKEW**-i for i in range(adapters)]
    lengths = [max(1, int(batch * weight / sum(weights))) for weight in weights]
    lengths[0] += batch - sum(lengths)
    return lengths


def cells_for(geometry: AdapterGeometry, ranks: list[int]) -> int:
    """Cells that adapters of these ranks take, on every projection."""
    per_rank = sum(
        geometry.cells(p.in_features) + geometry.cells(p.out_features) for p in geometry.projections
    )
    return per_rank * sum(ranks)


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
    places = np.random.default_rng(0).permutation(total)[:needed]
    offsets = places // geometry.cells_per_page * geometry.page.page_elements
    offsets += places % geometry.cells_per_page * geometry.cell_elements
    length = np.array(lengths, dtype=np.int32)
    return LoraSegments(
        start=(np.cumsum(length) - length).astype(np.int32),
        length=length,
        records=records,
        scales=np.full((len(ranks), len(projections), geometry.page.layers), 2.0, dtype=np.float32),
        cells=torch.from_numpy(offsets).to(device),
    )


def exact_lora(
    x: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    group: ProjectionGroup,
    segments: LoraSegments,
    geometry: AdapterGeometry,
) -> torch.Tensor:
    """What LoRA adds, in float32, one dense product after another."""
    flat, cell = pool.view(-1), geometry.cell_elements
    added = torch.zeros(len(x), group.offsets[-1], dtype=torch.float32, device=x.device)

    def rows(first: int, rank: int, elements: int) -> torch.Tensor:
        begin = segments.cells[first : first + rank * geometry.cells(elements)]
        begin = begin + layer * geometry.page.slab_elements
        index = begin[:, None] + torch.arange(cell, device=x.device)
        return flat[index].view(rank, -1)[:, :elements].float()

    for s, (start, length) in enumerate(zip(segments.start.tolist(), segments.length.tolist())):
        for i, projection in enumerate(group.projections):
            p = geometry.projections.index(projection)
            first_a, first_b, rank = segments.records[s, p].tolist()
            v = x[start : start + length].float() @ rows(first_a, rank, projection.in_features).T
            delta = v @ rows(first_b, rank, projection.out_features) * float(segments.scales[s, p, layer])
            added[start : start + length, group.offsets[i] : group.offsets[i + 1]] = delta
    return added


def bench_lora(
    bench: Bench,
    decoder: Decoder,
    pool: torch.Tensor,
    lengths: list[int],
    segment_ranks: list[int],
    **setting: object,
) -> None:
    geometry = adapter_geometry(decoder.page(bench.dtype), decoder.groups())
    segments = segments_for(geometry, lengths, segment_ranks, len(pool), bench.device)
    plan = bench.ops.plan_lora(segments, geometry, bench.device)
    batch = sum(lengths)
    dtype, device = bench.dtype, bench.device
    inputs = [torch.randn(batch, group.in_features, dtype=dtype, device=device) for group in geometry.groups]
    outputs = [torch.zeros(batch, group.offsets[-1], dtype=dtype, device=device) for group in geometry.groups]

    def step() -> None:
        for layer in range(decoder.layers):
            for group, x, y in zip(geometry.groups, inputs, outputs):
                bench.ops.lora(y, x, pool, layer, group, plan)

    worst = 0.0
    for group, x, y in zip(geometry.groups, inputs, outputs):
        truth = exact_lora(x, pool, decoder.layers - 1, group, segments, geometry)
        bench.ops.lora(y, x, pool, decoder.layers - 1, group, plan)
        worst = max(worst, relative_error(y, truth))
    seconds = seconds_of(bench.device, step) / decoder.layers
    elements = sum(p.in_features + p.out_features for p in geometry.projections) * sum(segment_ranks)
    bench.add(worst, seconds, elements * bench.dtype.itemsize, op="lora", model=decoder.name, **setting)


@dataclasses.dataclass(frozen=True)
class LoraCase:
    """Tokens and rank of each adapter in a batch."""

    popularity: str
    kind: str
    lengths: list[int]
    ranks: list[int]


def lora_cases(batches: tuple[int, ...]) -> list[LoraCase]:
    cases = [LoraCase("prefill", "r16", [2048], [16])]
    for kind, batch, popularity in itertools.product(("r16", "r8-64"), batches, POPULARITIES):
        lengths = segment_lengths(popularity, batch)
        ranks = [16 if kind == "r16" else (8, 16, 32, 64)[i % 4] for i in range(len(lengths))]
        cases.append(LoraCase(popularity, kind, lengths, ranks))
    return cases


# ---- attention -----------------------------------------------------------------------------------------


def pages_of(context: int) -> int:
    return -(-context // PAGE_TOKENS)


def bench_attention(
    bench: Bench, decoder: Decoder, pool: torch.Tensor, lengths: list[tuple[int, int]], **setting: object
) -> None:
    """``lengths``: queries and context of every row."""
    page = decoder.page(bench.dtype)
    pages = [pages_of(context) for _, context in lengths]
    table = np.zeros((len(lengths), max(pages)), dtype=np.int32)
    free = np.random.default_rng(1).permutation(len(pool)).astype(np.int32)
    for row, count in enumerate(pages):
        table[row, :count], free = free[:count], free[count:]
    rows = AttentionRows(
        np.cumsum([0] + [queries for queries, _ in lengths]).astype(np.int32),
        np.array([context for _, context in lengths], dtype=np.int32),
        table,
    )
    plan = bench.ops.plan_attention(rows, page, bench.device)
    q = torch.randn(
        int(rows.query_start[-1]), decoder.heads, decoder.head_dim, dtype=bench.dtype, device=bench.device
    )
    scale = decoder.head_dim**-0.5

    def step() -> None:
        for layer in range(decoder.layers):
            bench.ops.attention(q, pool, layer, plan, scale, None)

    out = bench.ops.attention(q, pool, 0, plan, scale, None)
    reference = ReferenceOps()
    truth = reference.attention(q, pool, 0, reference.plan_attention(rows, page, bench.device), scale, None)
    seconds = seconds_of(bench.device, step) / decoder.layers
    context = sum(pages) * page.page_bytes / decoder.layers
    error = relative_error(out, truth)
    bench.add(error, seconds, context + 2 * q.nbytes, op="attention", model=decoder.name, **setting)


# ---- small operations ----------------------------------------------------------------------------------


def bench_small(bench: Bench, decoder: Decoder, pool: torch.Tensor, batch: int) -> None:
    ops, reference = bench.ops, ReferenceOps()

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=bench.dtype, device=bench.device)

    x, residual, weight = normal(batch, decoder.hidden), normal(batch, decoder.hidden), normal(decoder.hidden)
    gate_up = normal(batch, 2 * decoder.intermediate)
    q, k = (normal(batch, heads, decoder.head_dim) for heads in (decoder.heads, decoder.kv_heads))
    angles = torch.outer(torch.arange(4096.0), 0.5 ** torch.arange(decoder.head_dim / 2)).to(bench.device)
    cos, sin = angles.cos(), angles.sin()
    positions = torch.arange(batch, device=bench.device)
    slots = torch.randperm(len(pool) * PAGE_TOKENS, device=bench.device)[:batch]

    def add(op: str, out: torch.Tensor, truth: torch.Tensor, step: Callable[[], object], nbytes: int) -> None:
        seconds = seconds_of(bench.device, lambda: void([step() for _ in range(8)])) / 8
        bench.add(relative_error(out, truth), seconds, nbytes, op=op, model=decoder.name, batch=batch)

    truth, total = reference.add_rms_norm(x, residual, weight, 1e-5)
    normed = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)[0]
    add("add_rms_norm", normed, truth, lambda: ops.add_rms_norm(x, residual, weight, 1e-5), 4 * x.nbytes)
    del total
    expected = reference.silu_mul(gate_up)
    add("silu_mul", ops.silu_mul(gate_up), expected, lambda: ops.silu_mul(gate_up), gate_up.nbytes * 3 // 2)
    turned, _ = reference.rope(q, k, cos, sin, positions)
    out, _ = ops.rope(q.clone(), k.clone(), cos, sin, positions)
    add("rope", out, turned, lambda: ops.rope(q, k, cos, sin, positions), 2 * (q.nbytes + k.nbytes))
    ops.write_kv(pool, 0, k, k, slots)
    stored = pool[slots // PAGE_TOKENS, 0, 1, slots % PAGE_TOKENS]
    add("write_kv", stored, k, lambda: ops.write_kv(pool, 0, k, k, slots), 4 * k.nbytes)


# ---- all of it -----------------------------------------------------------------------------------------


ATTENTION_CASES: tuple[tuple[str, list[tuple[int, int]]], ...] = (
    ("decode 1024", [(1, 1024)]),
    ("decode 1024", [(1, 1024)] * 8),
    ("decode 1024", [(1, 1024)] * 64),
    ("decode 100-1080", [(1, 100 + 140 * i) for i in range(8)]),
    ("decode 16000", [(1, 16000)]),
    ("prefill 2048", [(2048, 2048)]),
    ("prefill 512 of 4096", [(512, 4096)]),
)


def pages_for(geometry: AdapterGeometry, cases: list[LoraCase]) -> int:
    """The pages of a pool in which each case fits, and a few more."""
    context = max(sum(pages_of(length) for _, length in lengths) for _, lengths in ATTENTION_CASES)
    cells = max(cells_for(geometry, case.ranks) for case in cases)
    return max(context, -(-cells // geometry.cells_per_page)) + 64


def run_cuda(bench: Bench) -> None:
    cases = lora_cases((1, 8, 32, 64))
    for decoder in CUDA_DECODERS:
        page = decoder.page(bench.dtype)
        pages = pages_for(adapter_geometry(page, decoder.groups()), cases)
        pool = random_pool(page, pages, bench.dtype, bench.device)
        for rows, lengths in ATTENTION_CASES:
            bench_attention(bench, decoder, pool, lengths, batch=len(lengths), rows=rows)
        for batch in (1, 64):
            bench_small(bench, decoder, pool, batch)
        for case in cases:
            bench_lora(
                bench, decoder, pool, case.lengths, case.ranks,
                ranks=case.kind, batch=sum(case.lengths), popularity=case.popularity,
            )  # fmt: skip
        del pool


def run_cpu(bench: Bench) -> None:
    decoder = CPU_DECODER
    pool = random_pool(decoder.page(bench.dtype), 2048, bench.dtype, bench.device)
    bench_attention(bench, decoder, pool, [(1, 96)] * 64, batch=64, rows="decode 96")
    spread = [(1, 33 + i * 2) for i in range(64)]
    bench_attention(bench, decoder, pool, spread, batch=64, rows="decode 33-159")
    bench_attention(bench, decoder, pool, [(32, 32)] * 16, batch=16, rows="prefill 32")
    bench_attention(bench, decoder, pool, [(512, 512)], batch=1, rows="prefill 512")
    bench_small(bench, decoder, pool, 64)
    for lengths, kind in (([7] * 8, "r4-32"), ([1] * 64, "r8"), ([512], "r16")):
        ranks = [(4, 8, 16, 32)[i % 4] if kind == "r4-32" else int(kind[1:]) for i in range(len(lengths))]
        bench_lora(bench, decoder, pool, lengths, ranks, ranks=kind, batch=sum(lengths))
    geometry = adapter_geometry(decoder.page(bench.dtype), decoder.groups())
    segments = segments_for(geometry, [7] * 8, [4, 8, 16, 32] * 2, len(pool), bench.device)
    rows = AttentionRows(
        np.arange(65, dtype=np.int32), np.arange(33, 97, dtype=np.int32), np.zeros((64, 6), np.int32)
    )
    page, device, ops = decoder.page(bench.dtype), bench.device, bench.ops
    query = torch.zeros(64, decoder.heads, decoder.head_dim, dtype=bench.dtype)

    def plan_and_attend() -> None:
        ops.attention(query, pool, 0, ops.plan_attention(rows, page, device), 1.0, None)

    def plan_lora() -> None:
        ops.plan_lora(segments, geometry, device)

    print(f"plan_attention and one layer of decode 33-96: {seconds_of(device, plan_and_attend) * 1e6:.0f} us")
    print(f"plan_lora r4-32: {seconds_of(device, plan_lora) * 1e6:.0f} us")


def device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else str(torch.get_device_module(device).get_device_name(device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default=None, help="float32, bfloat16 or float16 (default: by device)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--commit", default="unknown", help="noted in the JSON file")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    name = arguments.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    torch.manual_seed(0)
    bandwidth = read_bandwidth(device)
    bench = Bench(ops_for(device), device, getattr(torch, name), bandwidth)
    print(f"{device} {name}, bandwidth {bandwidth / 1e9:.0f} GB/s")
    begin = time.perf_counter()
    (run_cpu if device.type == "cpu" else run_cuda)(bench)
    print(f"{time.perf_counter() - begin:.0f} s")
    if arguments.out:
        document = {
            "command": "python -m " + " ".join(["manylora.bench.kernels", *sys.argv[1:]]),
            "commit": arguments.commit,
            "device": device_name(device),
            "torch": torch.__version__,
            "dtype": name,
            "bytes_per_s": bandwidth,
            "rows": bench.rows,
        }
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
