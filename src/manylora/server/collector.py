"""The engine's own figures as Prometheus metrics, from the last snapshot of its stats."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from manylora.engine.client import EngineStats
from manylora.types import EngineInfo

_COUNTERS = (
    ("vllm:prefix_cache_queries", "prefix_queries_tokens", "Prompt tokens looked up in the KV history."),
    ("vllm:prefix_cache_hits", "prefix_hits_tokens", "Prompt tokens found in the KV history."),
    ("vllm:prompt_tokens", "prompt_tokens", "Prompt tokens processed."),
    ("vllm:generation_tokens", "generated_tokens", "Tokens generated."),
    ("vllm:num_preemptions", "preemptions", "Requests preempted to make room."),
    ("manylora:adapter_reads", "adapter_reads", "Adapters read into the pool."),
    ("manylora:adapter_read_failures", "adapter_read_failures", "Adapter reads that failed."),
    ("manylora:adapter_read_seconds", "adapter_read_s", "Time spent reading adapters."),
    ("manylora:adapter_evictions", "adapter_evictions", "Adapters that left the pool."),
    ("manylora:history_page_evictions", "history_evictions", "Pages of KV history that left the pool."),
    ("manylora:steps", "steps", "Steps run."),
    ("manylora:step_seconds", "step_s", "Time spent in steps."),
)


class EngineCollector(Collector):
    """Yields metrics of the newest snapshot; before the first one, of an engine that has done nothing."""

    def __init__(self, base: str, info: EngineInfo) -> None:
        self._base = base
        self._info = info
        self._stats = EngineStats(pages_total=info.num_pages, pages_free=info.num_pages)
        self._is_up = True

    def update(self, stats: EngineStats | None) -> None:
        """Take a new snapshot; None where the engine does not answer."""
        self._is_up = stats is not None
        if stats is not None:
            self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        # Taken once: a scrape on another thread must not see two snapshots.
        stats = self._stats
        for name, field, text in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._base], getattr(stats, field))
            yield counter
        yield from self._load(stats)
        yield self._lora_requests(stats)
        yield from _residency(stats, self._base)
        yield from _pages(stats)
        yield from _adapters(stats)

    def _load(self, stats: EngineStats) -> Iterator[Metric]:
        busy_pages = stats.pages_running + sum(
            load.num_pages for load in stats.adapters if load.running and load.state == "resident"
        )
        gauges = (
            ("vllm:num_requests_running", "Requests in the running batch.", stats.num_running),
            ("vllm:num_requests_waiting", "Requests waiting for admission.", stats.num_waiting),
            (
                "vllm:kv_cache_usage_perc",
                "Share (0 to 1) of the pool held by running requests and their adapters. History and idle "
                "adapters give way, so they count as free.",
                busy_pages / max(stats.pages_total, 1),
            ),
            ("manylora:engine_up", "1 while the engine answers.", float(self._is_up)),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._base], value)
            yield gauge
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Shape of the pool.", labels=["block_size", "num_gpu_blocks"]
        )
        info.add_metric([str(self._info.page_tokens), str(self._info.num_pages)], 1)
        yield info

    def _lora_requests(self, stats: EngineStats) -> Metric:
        """In vLLM's form: names in labels, the time as the value. There are no adapter slots to report, so
        ``max_lora`` is how many adapters can run at once."""
        gauge = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters of running and waiting requests; the value is the Unix time.",
            labels=["max_lora", "waiting_lora_adapters", "running_lora_adapters"],
        )
        waiting = ",".join(load.name for load in stats.adapters if load.waiting)
        running = ",".join(load.name for load in stats.adapters if load.running)
        gauge.add_metric([str(self._info.max_num_seqs), waiting, running], time.time())
        return gauge


def _residency(stats: EngineStats, base: str) -> Iterator[Metric]:
    """True residency, as the metric standard to come has it: ``gpu`` is the tier that steps read from."""
    resident = [load for load in stats.adapters if load.state == "resident"]
    loaded = GaugeMetricFamily(
        "vllm:lora_adapter_loaded",
        "1 for each adapter whose weights are in the device pool, in use or idle.",
        labels=["adapter_name", "level", "pinned", "rank"],
    )
    for load in resident:
        loaded.add_metric([load.name, "gpu", "false", str(load.rank)], 1)
    yield loaded
    count = GaugeMetricFamily(
        "vllm:num_gpu_loaded_lora_adapters", "Adapters in the device pool.", labels=["model_name"]
    )
    count.add_metric([base], len(resident))
    yield count


def _pages(stats: EngineStats) -> Iterator[Metric]:
    gauge = GaugeMetricFamily("manylora:pages", "Pages of the device pool by use.", labels=["use"])
    for use in ("free", "running", "history", "adapters"):
        gauge.add_metric([use], getattr(stats, f"pages_{use}"))
    yield gauge


def _adapters(stats: EngineStats) -> Iterator[Metric]:
    state = GaugeMetricFamily(
        "manylora:adapter_state",
        "1 for the state that each served adapter is in: absent, loading or resident.",
        labels=["adapter_name", "state"],
    )
    pages = GaugeMetricFamily(
        "manylora:adapter_pages", "Pages that an adapter takes when resident.", labels=["adapter_name"]
    )
    running = GaugeMetricFamily(
        "manylora:adapter_running_requests", "Running requests by adapter.", labels=["adapter_name"]
    )
    waiting = GaugeMetricFamily(
        "manylora:adapter_waiting_requests", "Waiting requests by adapter.", labels=["adapter_name"]
    )
    for load in stats.adapters:
        state.add_metric([load.name, load.state], 1)
        pages.add_metric([load.name], load.num_pages)
        running.add_metric([load.name], load.running)
        waiting.add_metric([load.name], load.waiting)
    yield from (state, pages, running, waiting)
