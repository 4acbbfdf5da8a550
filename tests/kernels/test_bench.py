"""The benchmark's own checks, on a decoder small enough for any machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from manylora.bench import kernels as bench_kernels
from manylora.bench.kernels import Bench, Decoder, bench_attention, bench_lora, bench_small, segment_lengths
from manylora.kernels.cpu import CpuOps

TINY = Decoder("tiny", 2, 64, 4, 2, 16, 96)


def test_every_operation_is_checked_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_kernels, "CPU_REPEATS", 1)
    bench = Bench(CpuOps(), torch.device("cpu"), torch.float32, 1e9)
    pool = bench_kernels.random_pool(TINY.page(bench.dtype), 64, bench.dtype, bench.device)
    bench_attention(bench, TINY, pool, [(1, 20), (5, 30)], batch=2)
    bench_lora(bench, TINY, pool, [1, 3, 2], [4, 8, 1], batch=6)
    bench_small(bench, TINY, pool, 3)
    assert {row["op"] for row in bench.rows} == {
        "attention", "lora", "add_rms_norm", "silu_mul", "rope", "write_kv",
    }  # fmt: skip
    assert all(row["error"] < 1e-5 and row["us"] > 0 and row["floor_us"] > 0 for row in bench.rows)
    json.dumps(bench.rows)


def test_popularities() -> None:
    assert segment_lengths("distinct", 5) == [1] * 5
    assert segment_lengths("identical", 5) == [5]
    assert segment_lengths("uniform", 64) == [8] * 8
    skewed = segment_lengths("skewed", 64)
    assert sum(skewed) == 64
    assert skewed == sorted(skewed, reverse=True)
    assert len(skewed) == 9
    assert all(
        min(segment_lengths("skewed", n)) > 0 and sum(segment_lengths("skewed", n)) == n for n in range(1, 70)
    )


def test_the_command_writes_what_it_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_kernels, "CPU_REPEATS", 1)
    monkeypatch.setattr(bench_kernels, "CPU_DECODER", TINY)
    out = tmp_path / "kernels.json"
    monkeypatch.setattr("sys.argv", ["kernels", "--device", "cpu", "--out", str(out)])
    bench_kernels.main()
    document = json.loads(out.read_text())
    assert document["dtype"] == "float32"
    assert max(row["error"] for row in document["rows"]) < 1e-5
