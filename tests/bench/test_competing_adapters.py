"""Cache policies where large adapters and KV compete, really served, as a toy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from manylora_lab.bench.replay import RequestResult
from manylora_lab.bench.serve import MeasuredReplay
from manylora_lab.benchmarks import competing_adapters


def record(folder: Path, *args: str) -> dict[str, Any]:
    out = folder / "record.json"
    competing_adapters.main(["--toy", "--out", str(out), "--commit", "abc", *args])
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.long
def test_every_policy_serves_the_same(tmp_path: Path) -> None:
    args = ["--policies", "static-lru", "fastlibra", "--seeds", "1", "2", "--seconds", "2", "--settle", "0.5"]
    found = record(tmp_path, *args)
    assert found["left_out"] == []
    runs = {(row["policy"], row["seed"]): row for row in found["runs"]}
    assert list(runs) == [(policy, seed) for policy in ("static-lru", "fastlibra") for seed in (1, 2)]
    for (_, seed), row in runs.items():
        assert row["failed"] == 0
        assert row["requests"] == runs["fastlibra", seed]["requests"] > 0
        assert 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"]
        counters = row["counters"]
        assert (
            counters["adapter_hits_device"] + counters["adapter_hits_host"] + counters["adapter_misses"] > 0
        )


def test_what_has_no_time_is_named(tmp_path: Path) -> None:
    found = record(tmp_path, "--time-budget", "0", "--policies", "lru", "s-lora")
    assert found["left_out"] == ["lru", "s-lora"]


def test_requests_of_the_first_seconds_do_not_count() -> None:
    results = [
        RequestResult(number, 0, None, 0, at_s, at_s, 0.0, 0.0, 5, error, 2, ttft_s, 0.01)
        for number, (at_s, ttft_s, error) in enumerate(
            [(0.5, 9.0, None), (1.0, 0.1, None), (2.0, 0.3, None), (3.0, 0.0, "lost")]
        )
    ]
    row = competing_adapters.counted(MeasuredReplay({}, {"adapter_misses": 3}, results), 1.0)
    assert (row["requests"], row["failed"]) == (3, 1)
    assert row["ttft_mean_ms"] == pytest.approx(200)
    assert row["counters"]["adapter_misses"] == 3
    assert row["counters"]["preemptions"] == 0
