"""Attention's part of ``h200_ops``: our Triton kernel beside FlashInfer's, over one scattered pool.

Pages of 16 tokens are drawn at random; every call reads pages of its own, so nothing comes from the cache.
"""

# mypy: disallow-untyped-calls=False
# torch's streams and events have no annotations.

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manylora.kernels.ops import AttentionRows, Rotary
from manylora.kernels.shapes import PageShape
from manylora.kernels.triton.attending import PagedAttention
from manylora.kernels.triton.decode_table import DecodeConfig, DecodeTable
from manylora.kernels.triton.operations import TritonOps
from manylora.kernels.weight import Weight
from manylora_lab.benchmarks.h200_ops_timing import cold_time, relative_error

DTYPE = torch.bfloat16
PAGE_TOKENS, LAYERS, NUM_PAGES = 16, 2, 16896
HEADS = {"mha": (32, 32, 128), "gqa": (32, 8, 128)}
"""Llama-2-7B's and Llama-3-8B's heads, key heads and dimensions."""

BATCHES, CONTEXTS = (1, 8, 16, 32, 64, 128), (512, 2048)
MOST_SETS = 8
CHECKED_ROWS = 6
BUILDS, BUILT_BY_S = ("decode", "fa2", "fa3"), 290
CONFIGS = (
    DecodeConfig(64, 4, 3),
    DecodeConfig(64, 4, 5),
    DecodeConfig(64, 8, 5),
    DecodeConfig(32, 4, 4),
    DecodeConfig(32, 4, 5),
    DecodeConfig(32, 2, 4),
)
PROGRAMS = (264, 528, 1056)
PREFILLS = {
    "1 x 2048": [(2048, 2048)],
    "8 x 512": [(512, 512)] * 8,
    "8 x 2000": [(2000, 2000)] * 8,
    "16 x 256": [(256, 256)] * 16,
    "16 x 128": [(128, 128)] * 16,
    "4 x 256 after 1792": [(256, 2048)] * 4,
    "16 x 64": [(64, 64)] * 16,
}


@dataclasses.dataclass
class Pool:
    """A pool of one shape of heads, and sets of rows that share no page."""

    heads: int
    kv_heads: int
    dim: int
    num_pages: int = NUM_PAGES

    def __post_init__(self) -> None:
        shape = (self.num_pages, LAYERS, 2, PAGE_TOKENS, self.kv_heads, self.dim)
        self.memory = torch.empty(shape, dtype=DTYPE, device="cuda").normal_()
        self.page = PageShape(LAYERS, PAGE_TOKENS, self.kv_heads, self.dim, 2)
        self.scale = self.dim**-0.5

    def sets(self, lengths: Sequence[tuple[int, int]]) -> list[AttentionRows]:
        """Rows of (queries, context) over pages of their own, as often as the pool holds them."""
        counts = [-(-context // PAGE_TOKENS) for _, context in lengths]
        free = np.random.default_rng(0).permutation(self.num_pages).astype(np.int32)
        starts = np.cumsum([0, *(queries for queries, _ in lengths)]).astype(np.int32)
        contexts = np.array([context for _, context in lengths], dtype=np.int32)
        found: list[AttentionRows] = []
        taken = 0
        while len(found) < MOST_SETS and taken + sum(counts) <= self.num_pages:
            table = np.zeros((len(lengths), max(counts)), dtype=np.int32)
            for row, count in enumerate(counts):
                table[row, :count] = free[taken : taken + count]
                taken += count
            found.append(AttentionRows(starts, contexts, table))
        return found

    def queries(self, rows: AttentionRows) -> torch.Tensor:
        shape = (int(rows.query_start[-1]), self.heads, self.dim)
        return torch.randn(shape, device="cuda").to(DTYPE)

    def kv_bytes(self, lengths: Sequence[tuple[int, int]]) -> int:
        return sum(context for _, context in lengths) * 2 * self.kv_heads * self.dim * 2

    def error(self, out: torch.Tensor, q: torch.Tensor, rows: AttentionRows, layer: int) -> float:
        """Against float32, on some of the rows."""
        outs, truths = [], []
        for row in range(min(CHECKED_ROWS, len(rows.kv_len))):
            first, last, context = (int(n) for n in (*rows.query_start[row : row + 2], rows.kv_len[row]))
            pages = torch.from_numpy(rows.page_table[row, : -(-context // PAGE_TOKENS)]).cuda().long()
            kv = self.memory[pages, layer].float().movedim(1, 0).flatten(1, 2)[:, :context]
            k, v = kv.repeat_interleave(self.heads // self.kv_heads, dim=2)
            scores = torch.einsum("qhd,khd->hqk", q[first:last].float(), k) * self.scale
            position = torch.arange(context - (last - first), context, device="cuda")[:, None]
            hidden = torch.arange(context, device="cuda")[None, :] > position
            weights = scores.masked_fill_(hidden, -math.inf).softmax(-1)
            truths.append(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
            outs.append(out[first:last].flatten(1))
        return float(f"{relative_error(torch.cat(outs), torch.cat(truths)):.2e}")


def calls(plans: Sequence[Any]) -> list[tuple[Any, int]]:
    return [(plan, layer) for layer in range(LAYERS) for plan in plans]


def decode_cases() -> dict[str, list[tuple[int, int]]]:
    cases = {f"{batch} x {n}": [(1, n)] * batch for batch in BATCHES for n in CONTEXTS}
    uneven = np.random.default_rng(1).integers(32, 2048, 64).tolist()
    return cases | {"64 uneven": [(1, n) for n in uneven], "1 long of 32": [(1, 16384)] + [(1, 512)] * 31}


def decode(floor_us: Callable[[float], float]) -> dict[str, Any]:
    """Our decoding kernel: each configuration, and the plan of a captured step."""
    rows: dict[str, Any] = {}
    for name, shape in HEADS.items():
        pool = Pool(*shape)
        for case, lengths in decode_cases().items():
            rows[f"{name} {case}"] = row = {
                "floor": round(floor_us(pool.kv_bytes(lengths)), 2),
                **decode_row(pool, lengths),
            }
            print(f"decode {name} {case}: {row}", flush=True)
        del pool
        torch.cuda.empty_cache()
    return rows


def always(config: DecodeConfig) -> DecodeTable:
    return DecodeTable(((1, config),))


def compile_decode(name: str, config: DecodeConfig) -> None:
    """Run the decoding kernel once on little data."""
    heads, kv_heads, dim = HEADS[name]
    pool = Pool(heads, kv_heads, dim, num_pages=64)
    rows = pool.sets([(1, 600)])[0]
    attention = PagedAttention(64, always(config))
    plan = attention.plan(rows, pool.page, pool.memory.device)
    attention(pool.queries(rows), pool.memory, 0, plan, pool.scale, None)


def decode_row(pool: Pool, lengths: Sequence[tuple[int, int]]) -> dict[str, Any]:
    sets = pool.sets(lengths)
    q, found = pool.queries(sets[0]), []

    def microseconds(attention: PagedAttention, plans: Sequence[Any], rounds: int) -> float:
        def one(call: tuple[Any, int]) -> None:
            attention(q, pool.memory, call[1], call[0], pool.scale, None)

        return round(cold_time(one, calls(plans), rounds) * 1e6, 2)

    for programs, config in itertools.product(PROGRAMS, CONFIGS):
        attention = PagedAttention(programs, always(config))
        plans = [attention.plan(rows, pool.page, q.device) for rows in sets]
        found.append((microseconds(attention, plans, 3), programs, *dataclasses.astuple(config)[:3]))
    attention = PagedAttention(PROGRAMS[1])
    fixed = [attention.fixed(len(lengths), 16384, pool.page, q.device) for _ in sets]
    for plan, rows in zip(fixed, sets):
        plan.fill(rows)
    out = attention(q, pool.memory, 1, fixed[0].plan, pool.scale, None)
    return {
        "fixed": microseconds(attention, [plan.plan for plan in fixed], 5),
        "default": next(f[0] for f in found if f[1:] == (PROGRAMS[1], 64, 4, 3)),
        "best": sorted(found)[:4],
        "error": pool.error(out, q, sets[0], 1),
    }


def tera_flops(pool: Pool, lengths: Sequence[tuple[int, int]]) -> float:
    pairs = sum(queries * (context - (queries - 1) / 2) for queries, context in lengths)
    return 4 * pairs * pool.heads * pool.dim / 1e12


def prefill() -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name, shape in HEADS.items():
        pool = Pool(*shape)
        for case, lengths in PREFILLS.items():
            rows[f"{name} {case}"] = prefill_row(pool, lengths)
            print(f"prefill {name} {case}: {rows[f'{name} {case}']}", flush=True)
        del pool
        torch.cuda.empty_cache()
    return rows


def prefill_row(pool: Pool, lengths: Sequence[tuple[int, int]]) -> dict[str, Any]:
    attention = PagedAttention(528, DecodeTable(group=pool.heads // pool.kv_heads))
    sets = pool.sets(lengths)[:2]
    q = pool.queries(sets[0])
    plans = [attention.plan(rows, pool.page, q.device) for rows in sets]

    def one(call: tuple[Any, int]) -> torch.Tensor:
        return attention(q, pool.memory, call[1], call[0], pool.scale, None)

    seconds = cold_time(one, calls(plans))
    return {
        "us": round(seconds * 1e6, 1),
        "tflops": round(tera_flops(pool, lengths) / seconds, 1),
        "error": pool.error(one((plans[0], 0)), q, sets[0], 0),
    }


# ---------------------------------------------------------------- FlashInfer


class FlashInfer:
    """Wrappers of FlashInfer for one pool, sharing a workspace."""

    def __init__(self, pool: Pool) -> None:
        import flashinfer

        self._module = flashinfer
        self._pool = pool
        self._workspace = torch.zeros(256 * 2**20, dtype=torch.uint8, device="cuda")

    def _tables(self, rows: AttentionRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """indptr and last page's length on the host, indices on the device."""
        counts = -(-rows.kv_len // PAGE_TOKENS)
        indptr = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        used = np.arange(rows.page_table.shape[1]) < counts[:, None]
        last = (rows.kv_len - 1) % PAGE_TOKENS + 1
        indices = torch.from_numpy(rows.page_table[used]).cuda()
        return torch.from_numpy(indptr), indices, torch.from_numpy(last.astype(np.int32))

    def decode(self, rows: AttentionRows, tensor_cores: bool) -> tuple[Any, float]:
        """A planned wrapper as a captured step would have it, and the seconds that planning took."""
        indptr, indices, last = self._tables(rows)
        wrapper = self._module.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=tensor_cores,
            paged_kv_indptr_buffer=indptr.cuda(),
            paged_kv_indices_buffer=indices.clone(),
            paged_kv_last_page_len_buffer=last.cuda(),
            backend="fa2" if tensor_cores else "auto",
        )
        pool, times = self._pool, []
        for _ in range(4):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            wrapper.plan(
                indptr,
                indices,
                last,
                pool.heads,
                pool.kv_heads,
                pool.dim,
                PAGE_TOKENS,
                q_data_type=DTYPE,
                kv_data_type=DTYPE,
                sm_scale=pool.scale,
            )
            times.append(time.perf_counter() - begin)
        return wrapper, statistics.median(times[1:])

    def prefill(self, rows: AttentionRows, backend: str) -> Any:
        indptr, indices, last = self._tables(rows)
        wrapper = self._module.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=backend)
        pool = self._pool
        wrapper.plan(
            torch.from_numpy(rows.query_start),
            indptr,
            indices,
            last,
            pool.heads,
            pool.kv_heads,
            pool.dim,
            PAGE_TOKENS,
            causal=True,
            sm_scale=pool.scale,
            q_data_type=DTYPE,
            kv_data_type=DTYPE,
        )
        return wrapper


def build_flashinfer(kind: str) -> None:
    """Run once what FlashInfer compiles on its first use, in a process of its own."""
    for dim in (128, 64):
        pool = Pool(8, 2, dim, num_pages=64)
        rows = pool.sets([(1, 40), (1, 20)] if kind == "decode" else [(20, 40), (5, 20)])[0]
        infer, begin = FlashInfer(pool), time.perf_counter()
        wrapper = infer.decode(rows, False)[0] if kind == "decode" else infer.prefill(rows, kind)
        wrapper.run(pool.queries(rows), pool.memory[:, 0])
        torch.cuda.synchronize()
        print(f"built {kind} of {dim} in {time.perf_counter() - begin:.0f} s", flush=True)


def wait_for(builds: Mapping[str, subprocess.Popen[bytes]], logs: Path, deadline: float) -> dict[str, Any]:
    """Wait for the builds begun at the start; one that takes too long is ended."""
    found: dict[str, Any] = {}
    for name, process in builds.items():
        try:
            code: int | str = process.wait(max(1.0, deadline - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.kill()
            code = "too slow"
        found[name] = code
        found[f"{name} log"] = (logs / f"jit_{name}.log").read_text(errors="replace")[-1200:]
        (logs / f"jit_{name}.log").unlink(missing_ok=True)
    print(f"flashinfer's builds: {found}", flush=True)
    return found


def flashinfer(floor_us: Callable[[float], float]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name, shape in HEADS.items():
        rows |= _of_heads(name, Pool(*shape), floor_us)
        torch.cuda.empty_cache()
    for dim in (64, 128):
        _attempt(rows, f"errors {dim}", functools.partial(_errors, dim))
    return rows


def _attempt(rows: dict[str, Any], name: str, measure: Callable[[], dict[str, Any]]) -> None:
    try:
        rows[name] = measure()
    except Exception as error:
        rows[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
    print(f"flashinfer {name}: {rows[name]}", flush=True)


def _of_heads(name: str, pool: Pool, floor_us: Callable[[float], float]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    infer = FlashInfer(pool)
    for (case, lengths), cores in itertools.product(decode_cases().items(), (False, True)):
        measure = functools.partial(_decode, pool, infer, lengths, cores, floor_us)
        _attempt(rows, f"decode {name} {case} {'tensor' if cores else 'cuda'}", measure)
    for (case, lengths), backend in itertools.product(PREFILLS.items(), ("fa2", "fa3")):
        measure = functools.partial(_prefill, pool, infer, lengths, backend)
        _attempt(rows, f"prefill {name} {case} {backend}", measure)
    return rows


def _decode(
    pool: Pool,
    infer: FlashInfer,
    lengths: Sequence[tuple[int, int]],
    cores: bool,
    floor_us: Callable[[float], float],
) -> dict[str, Any]:
    sets = pool.sets(lengths)[:4]
    q = pool.queries(sets[0])
    planned = [infer.decode(rows, cores) for rows in sets]
    wrappers = [wrapper for wrapper, _ in planned]
    seconds = cold_time(lambda call: call[0].run(q, pool.memory[:, call[1]]), calls(wrappers))
    return {
        "us": round(seconds * 1e6, 2),
        "floor": round(floor_us(pool.kv_bytes(lengths)), 2),
        "plan_us": round(planned[0][1] * 1e6),
        "error": pool.error(wrappers[0].run(q, pool.memory[:, 1]), q, sets[0], 1),
    }


def _prefill(
    pool: Pool, infer: FlashInfer, lengths: Sequence[tuple[int, int]], backend: str
) -> dict[str, Any]:
    sets = pool.sets(lengths)[:2]
    q = pool.queries(sets[0])
    wrappers = [infer.prefill(rows, backend) for rows in sets]
    seconds = cold_time(lambda call: call[0].run(q, pool.memory[:, call[1]]), calls(wrappers))
    return {
        "us": round(seconds * 1e6, 1),
        "tflops": round(tera_flops(pool, lengths) / seconds, 1),
        "error": pool.error(wrappers[0].run(q, pool.memory[:, 0]), q, sets[0], 0),
    }


def _errors(dim: int) -> dict[str, Any]:
    """Of FlashInfer and of ours, against float32, for heads of this size."""
    pool, attention = Pool(16, 4, dim, num_pages=1024), PagedAttention(528)
    infer = FlashInfer(pool)
    found = {}
    decoding = pool.sets([(1, n) for n in (1, 17, 333, 900, 2000)])[0]
    prompts = pool.sets([(5, 5), (100, 400), (700, 700)])[0]
    for name, rows in (("decode", decoding), ("prefill", prompts)):
        q = pool.queries(rows)
        ours = attention(q, pool.memory, 1, attention.plan(rows, pool.page, q.device), pool.scale, None)
        found[f"{name} ours"] = pool.error(ours, q, rows, 1)
        if name == "decode":
            wrappers = {"cuda": infer.decode(rows, False)[0], "tensor": infer.decode(rows, True)[0]}
        else:
            wrappers = {backend: infer.prefill(rows, backend) for backend in ("fa2", "fa3")}
        for kind, wrapper in wrappers.items():
            found[f"{name} {kind}"] = pool.error(wrapper.run(q, pool.memory[:, 1]), q, rows, 1)
    return found


# ---------------------------------------------------------------- a whole layer


class LayerStep:
    """A decoding step of base layers, on equal contexts."""

    def __init__(
        self,
        batch: int,
        context: int,
        heads: int,
        kv_heads: int,
        layers: int,
        dtype: torch.dtype,
        decoding: DecodeTable,
    ) -> None:
        self._heads, self._kv_heads, self._dim = heads, kv_heads, 128
        pages = -(-context // PAGE_TOKENS)
        shape = (batch * pages, layers, 2, PAGE_TOKENS, kv_heads, self._dim)
        self._pool = torch.empty(shape, dtype=dtype, device="cuda").normal_()
        order = np.random.default_rng(0).permutation(batch * pages).astype(np.int32)
        table = order.reshape(batch, pages)
        starts, contexts = np.arange(batch + 1, dtype=np.int32), np.full(batch, context, np.int32)
        page = PageShape(layers, PAGE_TOKENS, kv_heads, self._dim, 2)
        ops = TritonOps(decoding=decoding)
        self._fixed = ops.fixed_attention(batch, context, page, torch.device("cuda"))
        self._fixed.fill(AttentionRows(starts, contexts, table))
        last = torch.from_numpy(table[:, -1]).cuda().long()
        self._slots = last * PAGE_TOKENS + (context - 1) % PAGE_TOKENS
        self._positions = torch.full((batch,), context - 1, device="cuda")
        angles = torch.outer(torch.arange(float(context)), 1e4 ** -torch.arange(0, 1, 2 / self._dim)).cuda()
        self._rotary = Rotary(angles.cos(), angles.sin())
        self._norm = torch.ones(4096, dtype=dtype, device="cuda")
        self.kv_bytes = batch * context * 2 * kv_heads * self._dim * 2

    def run(self, ops: TritonOps, x: torch.Tensor, weights: Sequence[Sequence[Weight]]) -> torch.Tensor:
        """Through all layers; the weights are those of qkv, o, gate_up and down. x is left as it is."""
        residual, widths = torch.zeros_like(x), (self._heads, self._kv_heads, self._kv_heads)
        x = x.clone()
        for layer, (qkv, o, gate_up, down) in enumerate(weights):
            x, residual = ops.add_rms_norm(x, residual, self._norm, 1e-5)
            parts = ops.linear(x, qkv, None).split([width * self._dim for width in widths], -1)
            q, k, v = (part.unflatten(1, (-1, self._dim)) for part in parts)
            q = ops.rotate_and_store(
                q, k, v, self._pool, layer, self._rotary, self._positions, self._slots, None
            )
            mixed = ops.attention(q, self._pool, layer, self._fixed.plan, self._dim**-0.5, None)
            x, residual = ops.add_rms_norm(ops.linear(mixed, o, None), residual, self._norm, 1e-5)
            x = ops.linear(ops.silu_mul(ops.linear(x, gate_up, None)), down, None)
        return x
