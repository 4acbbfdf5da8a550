"""The engine's own figures as Prometheus metrics, from the last snapshot of its stats."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from manylora.engine.client import AdapterLoad, EngineStats
from manylora.types import EngineInfo

_TIERS = ("device", "host")
_DIRECTIONS = ("in", "out")

_COUNTERS = (
    ("vllm:prefix_cache_queries", "prefix_queries_tokens", "Prompt tokens looked up in the prefix cache."),
    ("vllm:prefix_cache_hits", "prefix_hits_tokens", "Prompt tokens found in the prefix cache."),
    ("vllm:prompt_tokens", "prompt_tokens", "Prompt tokens processed."),
    ("vllm:generation_tokens", "generated_tokens", "Tokens generated."),
    ("vllm:num_preemptions", "preemptions", "Requests preempted to make room."),
    ("manylora:adapter_reads", "adapter_reads", "Adapters read into the pool."),
    ("manylora:adapter_read_failures", "adapter_read_failures", "Adapter reads that failed."),
    ("manylora:adapter_read_seconds", "adapter_read_s", "Time spent reading adapters."),
    ("manylora:adapter_store_hits", "adapter_store_hits", "Adapters read from the adapter store."),
    (
        "manylora:adapter_store_misses",
        "adapter_store_misses",
        "Adapters that the adapter store did not have.",
    ),
    ("manylora:adapter_evictions", "adapter_evictions", "Adapters that left the pool."),
    ("manylora:history_page_evictions", "history_evictions", "Pages of cached KV that left the pool."),
    ("manylora:history_page_drops", "history_drops", "Pages of cached KV whose last copy was dropped."),
    ("manylora:host_evictions", "host_evictions", "Adapters and pages of KV that left the host's pool."),
    ("manylora:adapter_misses", "adapter_misses", "Admissions whose adapter was in neither tier."),
    ("manylora:prefetches", "prefetches", "Adapters and pages of KV fetched for requests in the queue."),
    ("manylora:swap_failures", "swaps_failed", "Copies between the tiers that failed."),
    (
        "manylora:adapter_limit_overtaken",
        "adapter_limit_overtaken",
        "Admissions before the first in line, for --adapter-batch-limit.",
    ),
    (
        "manylora:cold_start_stall_seconds",
        "cold_start_stall_s",
        "Time that steps stood still for copies and for the CPU, under every --cold-start but wait.",
    ),
    (
        "manylora:cold_start_hidden_seconds",
        "cold_start_hidden_s",
        "Time of copies that steps awaited during which they went on.",
    ),
    (
        "manylora:cold_start_expected_stall_seconds",
        "cold_start_expected_s",
        "Time that steps were expected to stand still for cold requests.",
    ),
    (
        "manylora:cold_start_answer_seconds",
        "cold_answer_s",
        "Time from the decision how cold requests begin to the end of their first steps.",
    ),
    (
        "manylora:cold_start_expected_answer_seconds",
        "cold_answer_expected_s",
        "What this time was expected to be.",
    ),
    (
        "manylora:cpu_lora_seconds",
        "cpu_lora_s",
        "Time that CPU workers computed for cold requests, the busiest one of each step.",
    ),
    ("manylora:spoilt_rows", "spoilt_rows", "Rows computed again since a copy failed or was late."),
    ("manylora:step_seconds", "step_s", "Time spent in steps."),
    ("manylora:merge_switch_failures", "switches_failed", "Changes of what is merged that failed."),
    ("manylora:merge_switch_seconds", "merge_switch_s", "Time that changes of what is merged took."),
    ("manylora:paused_seconds", "paused_s", "Time that sequences held pages and could not run, for merging."),
)


class EngineCollector(Collector):
    """Yields metrics of the newest snapshot; before the first one, of an engine that has done nothing."""

    def __init__(self, base: str, info: EngineInfo) -> None:
        self._base = base
        self._info = info
        self._stats = EngineStats(
            pages_total=info.num_pages, pages_free=info.num_pages, cold_start_kinds=info.cold_start_kinds
        )
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
        yield lora_requests(stats.adapters, self._info.max_num_seqs)
        yield from _residency(stats, self._base)
        yield from _pages(stats)
        yield from _invalid(stats)
        yield from _hits(stats)
        yield from _swaps(stats, self._info.page_bytes)
        yield from _adapters(stats)
        yield from _clients(stats)
        yield from _merging(stats, self._base)
        yield _cold_starts(stats)
        if self._info.ranks:
            yield from _ranks(stats, self._info)

    def _load(self, stats: EngineStats) -> Iterator[Metric]:
        gauges = (
            ("vllm:num_requests_running", "Requests in the running batch.", stats.num_running),
            ("vllm:num_requests_waiting", "Requests waiting for admission.", stats.num_waiting),
            (
                "vllm:kv_cache_usage_perc",
                "Share (0 to 1) of the pool held by running requests and their adapters. History and idle "
                "adapters give way, so they count as free.",
                busy_pages(stats) / max(stats.pages_total, 1),
            ),
            (
                "manylora:adapter_store_bytes",
                "Bytes that the adapter store's files take.",
                stats.adapter_store_bytes,
            ),
            ("manylora:engine_up", "1 while the engine answers.", float(self._is_up)),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._base], value)
            yield gauge
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Shape of the pools.",
            labels=["block_size", "num_gpu_blocks", "num_cpu_blocks", "cache_policy"],
        )  # fmt: skip
        shape = (self._info.page_tokens, self._info.num_pages, self._info.num_host_pages)
        info.add_metric([*map(str, shape), self._info.cache_policy], 1)
        yield info


def lora_requests(loads: Iterable[AdapterLoad], most: int) -> Metric:
    """The gauge in vLLM's form: names in labels, the time as the value. There are no adapter slots to report, so
    ``max_lora`` is how many adapters can run at once: ``most``."""
    gauge = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Adapters of running and waiting requests; the value is the Unix time.",
        labels=["max_lora", "waiting_lora_adapters", "running_lora_adapters"],
    )
    loads = list(loads)
    waiting = ",".join(dict.fromkeys(load.name for load in loads if load.waiting))
    running = ",".join(dict.fromkeys(load.name for load in loads if load.running))
    gauge.add_metric([str(most), waiting, running], time.time())
    return gauge


def busy_pages(stats: EngineStats) -> int:
    """Pages that running requests and their adapters hold: the others give way."""
    adapters = (load.num_pages for load in stats.adapters if load.running and load.state == "resident")
    return stats.pages_running + sum(adapters)


def _cold_starts(stats: EngineStats) -> Metric:
    starts = CounterMetricFamily(
        "manylora:cold_starts",
        "Requests whose adapter was not on the device when admitted, by how they began and where it was.",
        labels=["mode", "source"],
    )
    for kind, count in sorted((dict.fromkeys(stats.cold_start_kinds, 0) | stats.cold_starts).items()):
        starts.add_metric(kind.split("/"), count)
    return starts


def _ranks(stats: EngineStats, info: EngineInfo) -> Iterator[Metric]:
    weights = GaugeMetricFamily(
        "manylora:rank_weight_bytes", "Bytes of the base's weights on each rank.", labels=["rank"]
    )
    pools = GaugeMetricFamily(
        "manylora:rank_pool_bytes", "Bytes of each rank's parts of the pools.", labels=["rank", "tier"]
    )
    adapters = GaugeMetricFamily(
        "manylora:rank_adapter_bytes", "Bytes of adapters' pages on each rank.", labels=["rank", "tier"]
    )
    for rank, held in enumerate(info.ranks):
        weights.add_metric([str(rank)], held.weight_bytes)
        for tier, total, used in (
            ("device", info.num_pages, stats.pages_adapters),
            ("host", info.num_host_pages, stats.host_pages_adapters),
        ):
            pools.add_metric([str(rank), tier], total * held.page_bytes)
            adapters.add_metric([str(rank), tier], used * held.page_bytes)
    yield from (weights, pools, adapters)
    count = CounterMetricFamily(
        "manylora:collectives",
        "Exchanges between ranks: sums of the base's, of what adapters' A give, logits and tokens, switches.",
        labels=["rank", "kind"],
    )
    size = CounterMetricFamily(
        "manylora:collective_bytes", "Bytes that each rank put into them.", labels=["rank", "kind"]
    )
    for rank, traffic in enumerate(stats.traffic):
        said = traffic._asdict()
        for kind in ("base", "lora", "sampling", "merging"):
            count.add_metric([str(rank), kind], said[kind])
            size.add_metric([str(rank), kind], said[f"{kind}_bytes"])
    yield from (count, size)


def _residency(stats: EngineStats, base: str) -> Iterator[Metric]:
    """True residency, as the metric standard to come has it: ``gpu`` is the tier that steps read from, ``cpu``
    the host's. An adapter may be in both."""
    resident = [load for load in stats.adapters if load.state == "resident"]
    held = [load for load in stats.adapters if load.host_state == "held"]
    loaded = GaugeMetricFamily(
        "vllm:lora_adapter_loaded",
        "1 for each adapter whose weights are in the device (gpu) or host (cpu) pool, in use or idle.",
        labels=["adapter_name", "level", "pinned", "rank"],
    )
    for level, loads in (("gpu", resident), ("cpu", held)):
        for load in loads:
            loaded.add_metric([load.name, level, "false", str(load.rank)], 1)
    yield loaded
    for level, pool, loads in (("gpu", "device", resident), ("cpu", "host", held)):
        count = GaugeMetricFamily(
            f"vllm:num_{level}_loaded_lora_adapters", f"Adapters in the {pool} pool.", labels=["model_name"]
        )
        count.add_metric([base], len(loads))
        yield count


def _pages(stats: EngineStats) -> Iterator[Metric]:
    pages = GaugeMetricFamily(
        "manylora:pages", "Pages of the device and host pools by use.", labels=["tier", "use"]
    )
    for use in ("free", "running", "history", "adapters"):
        pages.add_metric(["device", use], getattr(stats, f"pages_{use}"))
    for use in ("free", "history", "adapters"):
        pages.add_metric(["host", use], getattr(stats, f"host_pages_{use}"))
    yield pages
    yield GaugeMetricFamily(
        "manylora:host_pages_pinned",
        "Pages of the host pool whose copies are as fast as they can be: all, some time after the start.",
        value=stats.host_pages_pinned,
    )
    moving = GaugeMetricFamily(
        "manylora:pages_moving",
        "Pages of the device that are being filled (in) or copied to the host before they leave (out).",
        labels=["direction"],
    )
    for direction, count in zip(_DIRECTIONS, (stats.pages_loading, stats.pages_saving)):
        moving.add_metric([direction], count)
    yield moving


def _invalid(stats: EngineStats) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "manylora:invalid_history_share",
        "Share (0 to 1) of the device's cached KV whose adapter is not on the device.",
        value=stats.invalid_pages / max(stats.pages_history, 1),
    )
    yield GaugeMetricFamily(
        "manylora:invalid_history_share_mean",
        "The same, as the mean of all samples since the start.",
        value=stats.invalid_share_sum / max(stats.invalid_share_samples, 1),
    )


def _hits(stats: EngineStats) -> Iterator[Metric]:
    for name, field, text in (
        (
            "manylora:kv_hit_tokens",
            "kv_hit_tokens",
            "Prompt tokens found in the prefix cache, by where it was.",
        ),
        ("manylora:adapter_hits", "adapter_hits", "Admissions whose adapter had been read, by where it was."),
    ):
        hits = CounterMetricFamily(name, text, labels=["tier"])
        for tier in _TIERS:
            hits.add_metric([tier], getattr(stats, f"{field}_{tier}"))
        yield hits


def _swaps(stats: EngineStats, page_bytes: int) -> Iterator[Metric]:
    num_bytes = CounterMetricFamily(
        "manylora:swap_bytes", "Copied to the device (in) and to the host (out).", labels=["direction"]
    )
    seconds = CounterMetricFamily(
        "manylora:swap_seconds", "Time that these copies took.", labels=["direction"]
    )
    for direction in _DIRECTIONS:
        num_bytes.add_metric([direction], getattr(stats, f"pages_swapped_{direction}") * page_bytes)
        seconds.add_metric([direction], getattr(stats, f"swap_{direction}_s"))
    yield from (num_bytes, seconds)


def _adapters(stats: EngineStats) -> Iterator[Metric]:
    def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"manylora:adapter_{name}", text, labels=["adapter_name", *labels])

    state = gauge(
        "state",
        "1 for the state that each served adapter is in on the device: absent, loading, resident or saving.",
        "state",
    )
    host_state = gauge(
        "host_state", "1 for the state of each served adapter on the host: none, filling or held.", "state"
    )
    pages = gauge("pages", "Pages that an adapter takes when resident.")
    history = gauge("history_pages", "Pages of idle KV on the device, by its adapter.")
    running = gauge("running_requests", "Running requests by adapter.")
    waiting = gauge("waiting_requests", "Waiting requests by adapter.")
    for load in stats.adapters:
        state.add_metric([load.name, load.state], 1)
        host_state.add_metric([load.name, load.host_state], 1)
        pages.add_metric([load.name], load.num_pages)
        history.add_metric([load.name], load.history_pages)
        running.add_metric([load.name], load.running)
        waiting.add_metric([load.name], load.waiting)
    yield from (state, host_state, pages, history, running, waiting)


def _clients(stats: EngineStats) -> Iterator[Metric]:
    service = CounterMetricFamily(
        "manylora:fair_service_tokens", "Weighted tokens that a client was served.", labels=["client"]
    )
    counters = GaugeMetricFamily(
        "manylora:fair_counter",
        "A client's virtual token counter: what it was served over its share, and what it was lifted by.",
        labels=["client"],
    )
    for client in stats.clients:
        service.add_metric([client.name], client.service)
        counters.add_metric([client.name], client.counter)
    yield from (service, counters)


def _merging(stats: EngineStats, base: str) -> Iterator[Metric]:
    steps = CounterMetricFamily(
        "manylora:steps",
        "Steps run: without a merged adapter (unmerged), or on its weights (merged).",
        labels=["model_name", "mode"],
    )
    for mode, count in (("unmerged", stats.steps - stats.steps_merged), ("merged", stats.steps_merged)):
        steps.add_metric([base, mode], count)
    switches = CounterMetricFamily(
        "manylora:merge_switches", "Changes of what is merged, by what it is then.", labels=["to"]
    )
    switches.add_metric(["merged"], stats.switches_merged)
    switches.add_metric(["base"], stats.switches_base)
    merged = GaugeMetricFamily(
        "manylora:merged_adapter",
        "1 for the adapter whose weights are merged into the base's.",
        labels=["adapter_name"],
    )
    if stats.merged_adapter is not None:
        merged.add_metric([stats.merged_adapter], 1)
    yield from (steps, switches, merged)
    yield GaugeMetricFamily(
        "manylora:pristine_bytes",
        "What the copy of the base's own weights takes.",
        value=stats.pristine_bytes,
    )
    yield GaugeMetricFamily(
        "manylora:longest_pause_seconds",
        "The longest time that a sequence held pages and could not run, for merging.",
        value=stats.longest_pause_s,
    )
    for name, value, text in (
        ("alpha", stats.merge_alpha, "An adapter with more than this share of a batch's requests is merged."),
        ("beta", stats.merge_beta, "One with less is unmerged."),
    ):
        if value is not None:
            yield GaugeMetricFamily(f"manylora:merge_{name}", f"dLoRA's threshold: {text}", value=value)
    credits = GaugeMetricFamily(
        "manylora:credit",
        "dLoRA's credits: seconds of one request held back that an adapter can pay.",
        labels=["adapter_name"],
    )
    for credit in stats.credits:
        credits.add_metric([credit.name], credit.credit_s)
    yield credits
