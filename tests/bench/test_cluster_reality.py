"""Real clusters beside simulated ones: streams, the simulation, and what is said of both."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from manylora_lab.benchmarks.cluster_reality import PARTS, beside, of_sets, order, peak_per_s, simulate
from manylora_lab.benchmarks.cluster_rig import ADAPTERS, Facts
from manylora_lab.sim.shipped import find_profile

from manylora.config import CacheConfig, PolicyConfig
from manylora.config.routing import RouterConfig
from manylora.pricing.fit import fit_profile
from tests.e2e.process import REPOSITORY, environment

POLICY = PolicyConfig(
    num_pages=1000, page_tokens=16, max_model_len=1024, max_num_seqs=8, max_batch_tokens=1024, num_host_pages=400,
    page_bytes=2**14, cache=CacheConfig("manylora"),
)  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_a_parts_stream_is_simulated(name: str) -> None:
    part = PARTS[name]
    costs = fit_profile(find_profile("cpu-demo"))
    peak = peak_per_s([costs, costs], part.stream(20.0, 30.0, 1), 8)
    stream = part.stream(part.load * peak, 2.0, 1)
    assert {request.adapter for request in stream.requests} <= set(range(len(ADAPTERS)))
    assert max(request.new_tokens + request.output_tokens for request in stream.requests) < 1024
    facts = Facts(POLICY, RouterConfig(), (8,) * len(ADAPTERS), [2] * len(ADAPTERS))
    router = part.routers[-1]
    row, sets = simulate(stream, facts, router, [], part.replicas, [costs], 0.1)
    assert sum(row["shares"]) == pytest.approx(1.0)
    assert row["ttft_mean_ms"] > 0
    assert 0 <= of_sets(sets, 2.0, 8)["replica_seconds"] <= 2.0 * part.replicas
    assert simulate(stream, facts, router, [], part.replicas, [costs], 0.1)[0] == row


def test_what_is_said_of_both() -> None:
    rows = [
        {"router": name, "real": {"x": real}, "simulated": {"x": simulated}}
        for name, real, simulated in (("a", 1.0, 10.0), ("b", 2.0, 20.0), ("c", 1.5, 20.5))
    ]
    found = order(rows, "x")
    assert found["real"] == ["a", "c", "b"]
    assert found["simulated"] == ["a", "b", "c"]
    # The simulation does not tell b and c apart.
    assert (found["pairs_told_apart"], found["agreeing"]) == (2, 2)
    real = {"ttft_mean_ms": 10.0, "output_tokens_per_s": 100.0, "shares": [0.4, 0.6]}
    near = beside(real, {"ttft_mean_ms": 11.0, "output_tokens_per_s": 95.0, "shares": [0.44, 0.56]})
    assert near["is_within"]
    far = beside(real, {"ttft_mean_ms": 11.0, "output_tokens_per_s": 95.0, "shares": [0.5, 0.5]})
    assert not far["is_within"]


@pytest.mark.long
def test_real_clusters_serve_the_streams(tmp_path: Path) -> None:
    """Two replicas under two routers; what a profile of another machine says of them does not count."""
    out = tmp_path / "reality.json"
    words = [sys.executable, "-m", "manylora_lab.benchmarks.cluster_reality", "--toy", "--parts", "pair"]
    words += ["--profile", "cpu-demo"]
    subprocess.run([*words, "--out", str(out)], env=environment(), cwd=REPOSITORY, check=True, timeout=280)
    record = json.loads(out.read_text())
    assert [row["router"] for row in record["pair"]] == list(PARTS["pair"].routers)
    for row in record["pair"]:
        assert row["real"]["output_tokens_per_s"] > 0
        assert sum(row["real"]["shares"]) == pytest.approx(1.0, abs=1e-3)
    assert record["provenance"]
