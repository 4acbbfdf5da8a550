"""The operations of a decoding step beside LoRA on one GPU: errors, times, and the choices that follow.

Products of few tokens (the library's against ours, over a list of configurations), norms, rope and the storing
of K and V, the gated activation, attention (ours against FlashInfer), and whole base layers before and after.
Every time is that of one call inside a CUDA graph, over memory that is not in the cache where serving would find
it so; floors are bytes over the read bandwidth measured in the same run. Parts that fail are reported and the
rest goes on. Writes everything to ``--out`` after each part and ends with one compact line; run from the
repository's root:

    python -m manylora_lab.benchmarks.h200_ops --out ops.json [--linears-only]
        [--table src/manylora/kernels/tuned/linear.json]
"""

# mypy: disallow-untyped-calls=False
# torch's streams and events have no annotations.

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib.util
import itertools
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from torch.nn import functional

from manylora.kernels.ops import HeadNorm, Rotary
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.triton.decode_table import DecodeConfig, DecodeTable, stored_table
from manylora.kernels.triton.operations import TritonOps
from manylora.kernels.triton.products import BUCKETS, Choice, LinearConfig, Products, Shape
from manylora.kernels.weight import Weight
from manylora_lab.bench.provenance import Provenance, add_flags
from manylora_lab.benchmarks import h200_ops_attention as attending
from manylora_lab.benchmarks.h200_ops_linears import (
    BATCHES,
    DTYPE,
    LINEARS,
    Linears,
    compile_linear,
    configs,
    errors,
    save_table,
)
from manylora_lab.benchmarks.h200_ops_timing import graph_time, relative_error

LAYERS = {
    "llama-2-7b": (32, 32, ("7b.qkv", "both.o", "7b.gate_up", "7b.down")),
    "llama-3-8b": (32, 8, ("8b.qkv", "both.o", "8b.gate_up", "8b.down")),
}
"""Heads, key heads, and the products of a layer."""

MEASURED_LAYERS, CONTEXT = 6, 512
SEEDS = "0 and 1 of the pages' places and lengths; values are drawn anew"
OTHER_PARTS = ("elementwise", "decode", "prefill", "flashinfer_builds", "flashinfer")


@dataclasses.dataclass
class OpsRun:
    """What the parts share: the report, where it goes, and what was measured so far."""

    out: Path
    began: float
    report: dict[str, Any]
    recording: Provenance
    bytes_per_s: float = 4.3e12
    linears: Linears | None = None

    def part(self, name: str, work: Callable[[OpsRun], Any]) -> None:
        begin = time.perf_counter()
        try:
            self.report[name] = work(self)
        except Exception:
            self.report[name] = {"failed": traceback.format_exc(limit=-4)[-1500:]}
            print(f"{name} FAILED\n{traceback.format_exc()}", flush=True)
            torch.cuda.synchronize()
        took, total = time.perf_counter() - begin, time.perf_counter() - self.began
        self.report.setdefault("seconds", {})[name] = round(took, 1)
        print(f"-- {name}: {took:.1f} s, {total:.0f} s in all", flush=True)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.report["provenance"] = self.recording.provenance()
        self.out.write_text(json.dumps(self.report))

    def floor_us(self, num_bytes: float) -> float:
        return num_bytes / self.bytes_per_s * 1e6


# ---------------------------------------------------------------- what is there


def probe(_: OpsRun) -> dict[str, Any]:
    found = importlib.util.find_spec("flashinfer")
    version = ""
    if found is not None:
        import flashinfer

        version = flashinfer.__version__
    nvcc = shutil.which("nvcc")
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "flashinfer": version,
        "flashinfer_cubins": importlib.util.find_spec("flashinfer_cubin") is not None,
        "flashinfer_jit_cache": importlib.util.find_spec("flashinfer_jit_cache") is not None,
        "nvcc": nvcc,
        "ninja": shutil.which("ninja"),
        "CUDA_HOME": os.environ.get("CUDA_HOME"),
        "cores": os.cpu_count(),
    }


def bandwidth(run: OpsRun) -> dict[str, float]:
    source = torch.empty(1 << 31, dtype=torch.int8, device="cuda").random_()
    target = torch.empty_like(source)
    words = source.view(torch.float32)
    copy = 2 * source.nbytes / graph_time(lambda: torch.mul(words, 2.0, out=target.view(torch.float32)))
    read = source.nbytes / graph_time(lambda: words.sum())
    run.bytes_per_s = max(copy, read)
    return {"copy_tb_s": copy / 1e12, "read_tb_s": read / 1e12}


# ---------------------------------------------------------------- products


def compile_one(setting: tuple[int | str, LinearConfig | DecodeConfig]) -> str | None:
    """In a process of its own: fills Triton's cache. The error, if any, in one line."""
    size, config = setting
    try:
        if isinstance(config, DecodeConfig):
            attending.compile_decode(str(size), config)
        else:
            compile_linear(int(size), config)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{setting}: {str(error)[:200] or type(error).__name__}"
    return None


def compile_all(decoding: bool) -> dict[str, Any]:
    settings: list[Any] = [(block_m, config) for block_m in BUCKETS for config in configs(block_m)]
    if decoding:
        settings += itertools.product(attending.HEADS, attending.CONFIGS)
    workers = max(1, min(12, (os.cpu_count() or 2) - 3))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        errors = [error for error in pool.map(compile_one, settings, timeout=150) if error]
    return {"settings": len(settings), "errors": errors}


def linears(run: OpsRun, seconds: float) -> dict[str, Any]:
    run.linears = Linears(run.floor_us, time.perf_counter() + seconds)
    return run.linears.measure()


def linear_errors(run: OpsRun) -> dict[str, Any]:
    assert run.linears is not None
    return errors(run.linears.dependent)


# ---------------------------------------------------------------- what memory limits


def elementwise(_: OpsRun) -> dict[str, Any]:
    """Errors against the reference in float64, and times."""
    rows: dict[str, Any] = {}
    for model, batch in itertools.product(LAYERS, (*BATCHES, 2048)):
        heads, kv_heads, names = LAYERS[model]
        small = small_operations(batch, LINEARS[names[2]][1] // 2)
        placing = placing_heads(batch, heads, kv_heads)
        row = {"us": small[0] | placing[0], "error": small[1] | placing[1]}
        rows[f"{model} {batch}"] = row
        print(f"{model} {batch}: {row}", flush=True)
    return rows


Found = tuple[dict[str, float], dict[str, float]]
"""Microseconds and errors, by name."""


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(DTYPE)


def us(step: Callable[[], object]) -> float:
    """Microseconds of one of many calls in a row, their data in the cache as in serving."""
    return round(graph_time(step, 64) * 1e6, 2)


def rounded(error: float) -> float:
    return float(f"{error:.2e}")


def small_operations(batch: int, middle: int) -> Found:
    ops, reference = TritonOps(), ReferenceOps()
    x, residual, weight, gate_up = (
        normal(batch, 4096),
        normal(batch, 4096),
        normal(4096),
        normal(batch, 2 * middle),
    )
    truth, total = reference.add_rms_norm(x.double(), residual.double(), weight.double(), 1e-5)
    normed, kept = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    errors = {
        "add_rms_norm": rounded(relative_error(normed, truth)),
        "residual": rounded(relative_error(kept, total)),
        "silu_mul": rounded(relative_error(ops.silu_mul(gate_up), reference.silu_mul(gate_up.double()))),
    }
    times = {
        "add_rms_norm": us(lambda: ops.add_rms_norm(x, residual, weight, 1e-5)),
        "add, rms_norm": us(lambda: ops.rms_norm(x + residual, weight, 1e-5)),
        "silu_mul": us(lambda: ops.silu_mul(gate_up)),
        "torch silu, mul": us(lambda: functional.silu(gate_up[:, :middle]) * gate_up[:, middle:]),
    }
    return times, errors


def placing_heads(batch: int, heads: int, kv_heads: int, dim: int = 128) -> Found:
    ops, reference = TritonOps(), ReferenceOps()
    widths = [heads * dim, kv_heads * dim, kv_heads * dim]
    qkv = normal(batch, sum(widths))
    pool = torch.zeros(max(8, -(-batch // 16)), 2, 2, 16, kv_heads, dim, dtype=DTYPE, device="cuda")
    angles = torch.outer(torch.arange(4096.0), 1e4 ** -torch.arange(0, 1, 2 / dim)).cuda()
    rotary = Rotary(angles.cos(), angles.sin())
    positions = torch.randint(4096, (batch,), device="cuda")
    slots = torch.randperm(pool.shape[0] * 16, device="cuda")[:batch]
    norm = HeadNorm(normal(dim), normal(dim), 1e-6)

    def parts(of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = (part.unflatten(1, (-1, dim)) for part in torch.split(of, widths, -1))
        return q, k, v

    wide_pool, wide_norm = pool.double(), HeadNorm(norm.query.double(), norm.key.double(), norm.eps)
    truth = reference.rotate_and_store(
        *parts(qkv.double()), wide_pool, 1, rotary, positions, slots, wide_norm
    )
    turned = ops.rotate_and_store(*parts(qkv.clone()), pool, 1, rotary, positions, slots, norm)
    errors = {
        "rotate": rounded(relative_error(turned, truth)),
        "store": rounded(relative_error(pool, wide_pool)),
    }
    q, k, v = parts(qkv)

    times = {
        "rotate_and_store": us(
            lambda: ops.rotate_and_store(q, k, v, pool, 1, rotary, positions, slots, None)
        ),
        "with head norms": us(lambda: ops.rotate_and_store(q, k, v, pool, 1, rotary, positions, slots, norm)),
    }
    return times, errors


# ---------------------------------------------------------------- whole layers


def layers(run: OpsRun) -> dict[str, Any]:
    """A base decoding layer in a graph: by the library with the default attention sizes, with those stored for
    the device, by our choices, and the same with dependent launches."""
    rows: dict[str, Any] = {}
    for model in LAYERS:
        shapes = [LINEARS[name] for name in LAYERS[model][2]]
        weights = [[Weight(normal(n, k) * k**-0.5) for k, n in shapes] for _ in range(MEASURED_LAYERS)]
        for batch in (1, 16, 32, 64, 128):
            row = layer_row(run, model, batch, weights)
            rows[f"{model} {batch}"] = row
            print(f"layer {model} {batch}: {row}", flush=True)
    return rows


def layer_row(run: OpsRun, model: str, batch: int, weights: list[list[Weight]]) -> dict[str, float]:
    heads, kv_heads, names = LAYERS[model]
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    tables = {
        "before": DecodeTable(),
        "now": stored_table(torch.cuda.get_device_name(), heads // kv_heads, 128),
    }
    steps = {
        name: attending.LayerStep(batch, CONTEXT, heads, kv_heads, len(weights), DTYPE, table)
        for name, table in tables.items()
    }
    product_bytes = sum(2 * inputs * outputs for inputs, outputs in (LINEARS[name] for name in names))
    row = {
        "floor": run.floor_us(product_bytes + steps["now"].kv_bytes),
        "floor_products": run.floor_us(product_bytes),
    }
    x, wide = normal(batch, 4096), normal(batch, LINEARS[names[3]][0])

    def measure(name: str, choices: Mapping[Shape, Choice], dependent: bool) -> None:
        ops = TritonOps(products=Products(choices, multiprocessors), dependent=dependent)
        step = steps["before" if name == "before" else "now"]

        def products() -> None:
            for layer in weights:
                for weight in layer:
                    ops.linear(x if weight.data.shape[1] == 4096 else wide, weight, None)

        row[f"products_{name}"] = graph_time(products) / len(weights) * 1e6
        row[name] = graph_time(lambda: step.run(ops, x, weights)) / len(weights) * 1e6

    assert run.linears is not None
    measure("before", {}, False)
    measure("library", {}, False)
    measure("plain", run.linears.plain, False)
    measure("dependent", run.linears.dependent, True)
    measure("library_dependent", {}, True)
    return {key: round(value, 1) for key, value in row.items()}


def choose(run: OpsRun, path: Path) -> dict[str, float]:
    """Store the choices with dependent launches if whole layers take less time by them."""
    assert run.linears is not None
    rows = run.report["layers"].values()
    total = {
        kind: round(sum(row[kind] for row in rows), 1) for kind in ("before", "library", "plain", "dependent")
    }
    better = total["dependent"] < total["plain"]
    save_table(run.linears.dependent if better else run.linears.plain, path)
    print(f"all layers: {total}; stored with{'' if better else 'out'} dependent launches", flush=True)
    return total


# ---------------------------------------------------------------- all


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", type=Path, help="write the chosen configurations of products here")
    parser.add_argument("--skip", nargs="*", default=[], help="parts to leave out")
    parser.add_argument("--linears-only", action="store_true", help="products, and layers by the choices")
    parser.add_argument("--seconds", type=float, default=90, help="for the products' measuring")
    add_flags(parser)
    parser.add_argument("--jit", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.jit:
        attending.build_flashinfer(options.jit)
        return
    run = OpsRun(options.out, time.perf_counter(), {"argv": sys.argv[1:]}, Provenance.of(options, SEEDS))
    builds: dict[str, subprocess.Popen[bytes]] = {}
    skipped = {*options.skip, *(OTHER_PARTS if options.linears_only else ())}
    if importlib.util.find_spec("flashinfer") is not None and "flashinfer" not in skipped:
        for kind in attending.BUILDS:
            command = [
                sys.executable,
                "-m",
                "manylora_lab.benchmarks.h200_ops",
                "--out",
                "unused",
                "--jit",
                kind,
            ]
            log = options.out.parent / f"jit_{kind}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("wb") as file:
                builds[kind] = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    parts: dict[str, Callable[[OpsRun], Any]] = {
        "probe": probe,
        "compile": lambda run: compile_all("decode" not in skipped),
        "bandwidth": bandwidth,
        "linears": lambda run: linears(run, options.seconds),
        "linear_errors": linear_errors,
        "elementwise": elementwise,
        "decode": lambda run: attending.decode(run.floor_us),
        "prefill": lambda run: attending.prefill(),
        "layers": layers,
        "flashinfer_builds": lambda run: attending.wait_for(
            builds, options.out.parent, run.began + attending.BUILT_BY_S
        ),
        "flashinfer": lambda run: attending.flashinfer(run.floor_us),
    }
    for name, work in parts.items():
        if name not in skipped:
            run.part(name, work)
    if options.table is not None:
        run.part("choice", lambda run: choose(run, options.table))
    rows = run.report.get("linears", {}).get("rows", {})
    kinds = ("cublas", "cublaslt", "plain", "dependent")
    worst = {name: round(min(row[kind][0] for kind in kinds) / row["floor"], 2) for name, row in rows.items()}
    failed = [name for name in parts if "failed" in (run.report.get(name) or {})]
    summary = {"failed": failed, "over_floor": worst, "layers": run.report.get("layers")}
    print(json.dumps(summary, separators=(",", ":")), flush=True)


if __name__ == "__main__":
    main()
