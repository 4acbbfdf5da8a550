"""What a cluster shows to routers that take it for one server."""

from __future__ import annotations

import dataclasses
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from manylora.cluster.exposition import _Replicas
from manylora.engine.client import EngineStats
from manylora.metrics.requests import Metrics
from manylora.reports import AdapterUse, Counters
from manylora.types import EngineInfo

INFO = EngineInfo("demo", 512, 1024, (0,), 100, 16, 4096, "cpu", "float32", 8, 256)
STATUS: dict[str, Any] = {
    "router": {
        "decisions": {"buckets": [(None, 0)], "sum_s": 0.0},
        "moved": {"plan": 2, "lost": 1},
        "waiting": 4,
    },
    "frontends": [],
    "replicas": [],
    "scale_hint": {"delta": 0},
}


def use(name: str, running: int, waiting: int) -> AdapterUse:
    return AdapterUse(1, "resident", 3, running, waiting, name=name, rank=8)


def stats(num_running: int, num_waiting: int, pages_running: int, *uses: AdapterUse) -> EngineStats:
    gauges = dataclasses.replace(
        EngineStats().gauges,
        num_running=num_running,
        num_waiting=num_waiting,
        pages_total=100,
        pages_running=pages_running,
        adapters=uses,
    )
    return EngineStats(gauges)


def families(replicas: dict[int, EngineStats | None], status: dict[str, Any]) -> dict[str, list[Any]]:
    """Of the page, as a scraper reads it: samples by family, in order."""
    collector = _Replicas("demo", INFO)
    collector.update(replicas, status)
    page = Metrics("demo", INFO, collector).page().decode()
    types = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))  # a second one makes Go's parser give the page up
    return {family.name: family.samples for family in text_string_to_metric_families(page)}


def test_a_cluster_is_one_server_to_llm_d() -> None:
    """Its scorer reads the series of adapters whose value is the largest, and the first one of any other name."""
    left = stats(2, 1, 20, use("a", 1, 0), use("b", 0, 1))
    right = stats(3, 0, 10, use("a", 2, 0), use("c", 1, 1))
    found = families({0: left, 1: right, 2: None}, STATUS)
    series = found["vllm:lora_requests_info"]
    latest = max(series, key=lambda sample: sample.value)
    assert latest is series[0]
    assert latest.labels == {
        "max_lora": "16", "running_lora_adapters": "a,c", "waiting_lora_adapters": "b,c",
    }  # fmt: skip
    assert [sample.labels.get("replica") for sample in series] == [None, "0", "1", "2"]
    assert [sample.value for sample in found["manylora:cluster_requests_running"]] == [5]
    assert [sample.value for sample in found["manylora:cluster_requests_waiting"]] == [5]
    assert [sample.value for sample in found["manylora:cluster_kv_usage_perc"]] == [(20 + 10 + 3 * 3) / 200]
    moved = {sample.labels["reason"]: sample.value for sample in found["manylora:requests_moved"]}
    assert moved == {"asked": 0, "drain": 0, "lost": 1, "plan": 2}
    per_replica = found["vllm:num_requests_running"]
    assert {sample.labels["replica"]: sample.value for sample in per_replica} == {"0": 2, "1": 3, "2": 0}


def test_what_cold_starts_there_may_be_is_each_replicas_own() -> None:
    """One that has no cores for CPU workers waits, and says so; the front end's own facts are not asked."""
    counters = Counters(cold_starts={"cpu/host": 3})
    serving = EngineStats(counters=counters, cold_start_kinds=("wait/host", "cpu/host"))
    waiting = EngineStats(cold_start_kinds=("wait/host",))
    found = families({0: serving, 1: waiting}, STATUS)
    counts = {
        (sample.labels["replica"], sample.labels["mode"]): sample.value
        for sample in found["manylora:cold_starts"]
    }
    assert counts == {("0", "cpu"): 3, ("0", "wait"): 0, ("1", "wait"): 0}


def test_a_cluster_without_replicas_or_router() -> None:
    found = families({}, {})
    (only,) = found["vllm:lora_requests_info"]
    assert only.labels == {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert found["manylora:cluster_kv_usage_perc"][0].value == 0
