"""Published traces as loads over many adapters: their parts, and a run from them to the record."""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import pytest
from manylora_lab.benchmarks import held_out
from manylora_lab.benchmarks.held_out import TRACES, HeldOutRun, measure, peak_of, stream_at
from manylora_lab.reproduce.fastlibra_seeds import JUDGING_SEEDS, SHARES


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one trace of Azure's form: a request each second, two of them beyond the context."""
    folder = tmp_path_factory.mktemp("traces")
    path = folder / TRACES["azure-conv"].path
    path.parent.mkdir()
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for second in range(600):
        length = 40_000 if second in (5, 6) else 200 + second
        lines.append(f"2023-11-16 18:{second // 60:02}:{second % 60:02}.0000000,{length},20")
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return folder


def test_each_seed_has_a_part_of_its_own_at_the_rate(data: Path) -> None:
    parts = {seed: stream_at(TRACES["azure-conv"], data, 2.0, seed, 50.0) for seed in (0, *JUDGING_SEEDS)}
    said: set[int] = set()
    for seed, stream in parts.items():
        lengths = [request.new_tokens for request in stream.requests]
        assert len(lengths) == 100
        assert max(lengths) < held_out.CONTEXT
        assert stream.requests[0].arrival_s == 0.0
        assert 100 / (stream.duration_s + 0.5) == pytest.approx(2.0, rel=0.03)
        assert not said & {*lengths}, f"seed {seed} has what another has"
        said |= {*lengths}
        assert {*stream.ranks} <= {64, 128, 256}
        assert len(stream.ranks) == held_out.SERVED_BY.num_adapters
    assert len({stream.ranks for stream in parts.values()}) == len(parts)


def test_equal_runs_are_equal_and_what_came_before_does_not_count(data: Path) -> None:
    run = HeldOutRun("azure-conv", 0.5, 2, "manylora")
    found = measure(data, run, settle_s=20.0, counted_s=20.0)
    assert found == measure(data, run, settle_s=20.0, counted_s=20.0)
    whole = measure(data, run, settle_s=0.0, counted_s=40.0)
    assert found["requests"] < whole["requests"] == 20
    assert found["adapter_reads"] <= whole["adapter_reads"]


def test_the_peak_is_where_requests_begin_to_queue(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def queued(_data: Path, run: HeldOutRun) -> dict[str, float]:
        tried.append(run)
        return {"ttft_queue_ms": 400.0 if run.rate <= 3.3 else 600.0}

    monkeypatch.setattr(held_out, "measure", queued)
    assert 3.3 / 1.1 - 0.1 <= peak_of(data, "azure-conv") <= 3.3
    assert {(run.policy, run.seed) for run in tried} == {("lru-ahead", 0)}


def test_a_record_of_one_trace(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policies = ("manylora", "lru-ahead", "cached")
    monkeypatch.setattr(held_out, "POLICIES", policies)
    monkeypatch.setattr(held_out, "peak_of", lambda _data, _trace: 0.5)
    monkeypatch.setattr(held_out.measure, "__defaults__", (0.0, 20.0))
    monkeypatch.setattr(
        held_out, "run_cases", lambda call, cases, _setup: {case: call(case) for case in cases}
    )
    args = argparse.Namespace(
        workers=1, store=str(tmp_path / "store.jsonl"), data=str(data), traces="azure-conv"
    )
    report = held_out.run(args)
    assert report["settings"]["peaks"] == {"azure-conv": 0.5}
    assert len(report["rows"]) == len(policies) * (len(SHARES) + 1)
    assert all(len(row["ttft_ms_by_seed"]) == len(JUDGING_SEEDS) for row in report["rows"])
    assert {"metric", "ours", "paper"} <= set(report["headline"][0])
