"""Attention of captured steps that hold prompts, on one GPU: launch sizes, and how the work is cut and ordered.

Every time is that of one layer's call inside a CUDA graph; decoding rows read pages of their own. Compiles in
processes of its own first. Run from the repository's root:

    python -m manylora_lab.benchmarks.h200_ops_mixed --out mixed.json
"""

# mypy: disallow-untyped-calls=False
# torch's streams and events have no annotations.

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from manylora.kernels.triton import attention_plans
from manylora.kernels.triton.attending import PagedAttention
from manylora.kernels.triton.decode_table import AttentionTileConfig, DecodeTable, stored_table
from manylora_lab.bench.provenance import Provenance, add_flags
from manylora_lab.benchmarks.h200_ops_attention import HEADS, Pool, calls
from manylora_lab.benchmarks.h200_ops_timing import cold_time

PROGRAMS, MOST_ROWS, LONGEST = 528, 128, 4096
ROWS = [(1, 300)] * 32
CASES: dict[str, tuple[int, list[tuple[int, int]]]] = {
    "64": (64, [(64, 64)]),
    "220": (256, [(220, 220)]),
    "64 + 32": (96, [(64, 64), *ROWS]),
    "220 + 32": (256, [(220, 220), *ROWS]),
    "600": (640, [(600, 600)]),
    "600 + 32": (640, [(600, 600), *ROWS]),
    "64 after 1984": (64, [(64, 2048)]),
    "32 rows": (32, ROWS),
}
"""Tokens of the bucket, and rows of (queries, context); the last is a decoding step."""

CONFIGS = (
    AttentionTileConfig(64, 64, 4, 3, None),
    AttentionTileConfig(64, 64, 4, 3, 168),
    AttentionTileConfig(64, 64, 4, 2, 168),
    AttentionTileConfig(64, 32, 4, 3, 168),
    AttentionTileConfig(64, 32, 4, 5, 168),
    AttentionTileConfig(64, 64, 4, 3, 128),
    AttentionTileConfig(64, 64, 8, 3, 128),
    AttentionTileConfig(64, 64, 8, 3, None),
    AttentionTileConfig(128, 64, 8, 3, None),
    AttentionTileConfig(128, 64, 8, 3, 128),
    AttentionTileConfig(32, 64, 4, 3, 168),
    AttentionTileConfig(16, 64, 4, 3, None),
)
CHOICES: dict[str, tuple[tuple[float, ...], tuple[str, ...]]] = {
    "LEAST_TILE_BLOCKS": ((4, 8, 12, 24), ("220", "600", "64 after 1984")),
    "SPREAD": ((0.0, 0.5, 0.9), ("64 + 32", "220 + 32", "600 + 32")),
}
"""Where contexts of tiles are cut at the earliest, and how tiles lie between rows of one query."""


def table_of(heads: str, tiles: AttentionTileConfig) -> DecodeTable:
    """The device's choices for rows of one query, beside these tiles."""
    num, kv_heads, dim = HEADS[heads]
    stored = stored_table(torch.cuda.get_device_name(), num // kv_heads, dim)
    return dataclasses.replace(stored, tiles=tiles)


def compile_one(setting: tuple[str, AttentionTileConfig]) -> str | None:
    heads, tiles = setting
    try:
        row(Pool(*HEADS[heads], num_pages=128), tiles, heads, (64, [(1, 300), (33, 900)]), 1)
    except Exception as error:
        return f"{setting}: {str(error)[:150] or type(error).__name__}"
    return None


def row(
    pool: Pool,
    tiles: AttentionTileConfig,
    heads: str,
    case: tuple[int, list[tuple[int, int]]],
    rounds: int,
    dependent: bool = False,
) -> dict[str, Any]:
    """Its time, its error against float32, and whether it gives the same bits again and zeros as padding."""
    tokens, lengths = case
    attention = PagedAttention(PROGRAMS, table_of(heads, tiles), dependent=dependent)
    sets, device = pool.sets(lengths), pool.memory.device
    of_any_length = None if all(queries == 1 for queries, _ in lengths) else tokens
    num_rows = tokens if of_any_length is None else min(tokens - 1, MOST_ROWS)
    fixed = [attention.fixed(num_rows, LONGEST, pool.page, device, of_any_length) for _ in sets]
    for plan, rows in zip(fixed, sets):
        plan.fill(rows)
    q = torch.randn(tokens, pool.heads, pool.dim, device=device).to(torch.bfloat16)

    def one(call: tuple[Any, int]) -> torch.Tensor:
        return attention(q, pool.memory, call[1], call[0].plan, pool.scale, None)

    outs = [one((fixed[0], 1)) for _ in range(3)]
    padding = outs[0][sum(queries for queries, _ in lengths) :]
    return {
        "us": round(cold_time(one, calls(fixed), rounds) * 1e6, 2),
        "error": pool.error(outs[0], q, sets[0], 1),
        "same": all(torch.equal(outs[0], out) for out in outs[1:]) and not padding.any().item(),
    }


def sweep(
    pool: Pool, heads: str, configs: Sequence[AttentionTileConfig], cases: Sequence[str]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for tiles in configs:
        name = f"{heads} {' '.join(str(part) for part in dataclasses.astuple(tiles))}"
        try:
            found[name] = {case: row(pool, tiles, heads, CASES[case], 5) for case in cases}
        except Exception as error:
            found[name] = {"failed": str(error)[:200]}
            print(name, found[name], flush=True)
            continue
        errors = max(each["error"] for each in found[name].values())
        same = all(each["same"] for each in found[name].values())
        print(name, {case: each["us"] for case, each in found[name].items()}, errors, same, flush=True)
    return found


def choices(
    pool: Pool, heads: str, name: str, values: Sequence[float], cases: Sequence[str]
) -> dict[str, Any]:
    """Times of the cases with each value of a number of ``attention_plans``."""
    found: dict[str, Any] = {}
    shipped = getattr(attention_plans, name)
    for value in values:
        setattr(attention_plans, name, value)
        found[str(value)] = {
            case: row(pool, AttentionTileConfig(), heads, CASES[case], 5)["us"] for case in cases
        }
        print(heads, name, value, found[str(value)], flush=True)
    setattr(attention_plans, name, shipped)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    add_flags(parser)
    args = parser.parse_args()
    recording = Provenance.of(args, "0 of the pages' places; values are drawn anew")
    began = time.perf_counter()
    settings = [(heads, tiles) for heads in HEADS for tiles in CONFIGS]
    workers = max(1, min(13, (os.cpu_count() or 2) - 2))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as processes:
        failed = [error for error in processes.map(compile_one, settings, timeout=120) if error]
    print(f"compiled in {time.perf_counter() - began:.0f} s; failed: {failed}", flush=True)
    report: dict[str, Any] = {
        "command": recording.command, "commit": recording.commit, "torch": torch.__version__,
        "device": torch.cuda.get_device_name(), "failed": failed,
    }  # fmt: skip
    for heads, shape in HEADS.items():
        pool = Pool(*shape)
        report[heads] = sweep(pool, heads, CONFIGS, list(CASES))
        args.out.write_text(json.dumps(report))
        for name, (values, cases) in CHOICES.items():
            report[f"{heads} {name}"] = choices(pool, heads, name, values, cases)
        report["provenance"] = recording.provenance()
        report[f"{heads} dependent"] = found = row(
            pool, AttentionTileConfig(), heads, CASES["220 + 32"], 3, True
        )
        print(heads, "dependent", found, flush=True)
        args.out.write_text(json.dumps(report))
        del pool
        torch.cuda.empty_cache()
    print(f"{time.perf_counter() - began:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
