"""The engine's own figures as Prometheus metrics, from the last snapshot of its stats: one table of families.

``EngineCollector`` yields them; a front end of several engines has one of each.
"""

from __future__ import annotations

import dataclasses
import operator
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from manylora.engine.client import EngineStats
from manylora.reports import AdapterUse
from manylora.types import EngineInfo


class _View(NamedTuple):
    """The newest snapshot, and what else samples need."""

    stats: EngineStats
    base: str
    info: EngineInfo
    is_up: bool


Samples = Iterable[tuple[tuple[str, ...], float]]
"""The values of labels, and the figure."""


class _Family(NamedTuple):
    """``samples``: a figure of EngineStats by its path, or what gives all of them.

    ``is_optional``: without samples the family is left out.
    """

    kind: type[Counter] | type[Gauge]
    name: str
    text: str
    samples: str | Callable[[_View], Samples]
    labels: tuple[str, ...] = ()
    is_optional: bool = False

    def metric(self, view: _View) -> Metric:
        """Give the family with its samples."""
        family = self.kind(self.name, self.text, labels=self.labels)
        if isinstance(self.samples, str):
            family.add_metric(
                [view.base] if self.labels else [], operator.attrgetter(self.samples)(view.stats)
            )
        else:
            for values, figure in self.samples(view):
                family.add_metric(values, figure)
        return family


_COUNTERS = (
    (
        "vllm:prefix_cache_queries",
        "counters.prefix_queries_tokens",
        "Prompt tokens looked up in the prefix cache.",
    ),
    ("vllm:prefix_cache_hits", "counters.prefix_hits_tokens", "Prompt tokens found in the prefix cache."),
    ("vllm:prompt_tokens", "meters.prompt_tokens", "Prompt tokens processed."),
    ("vllm:generation_tokens", "meters.generated_tokens", "Tokens generated."),
    ("vllm:num_preemptions", "counters.preemptions", "Requests preempted to make room."),
    ("manylora:adapter_reads", "counters.adapter_reads", "Adapters read into the pool."),
    ("manylora:adapter_read_failures", "meters.adapter_read_failures", "Adapter reads that failed."),
    ("manylora:adapter_read_seconds", "meters.adapter_read_s", "Time spent reading adapters."),
    ("manylora:adapter_store_hits", "executor.adapter_store_hits", "Adapters read from the adapter store."),
    (
        "manylora:adapter_store_misses",
        "executor.adapter_store_misses",
        "Adapters that the adapter store did not have.",
    ),
    ("manylora:adapter_evictions", "counters.adapter_evictions", "Adapters that left the pool."),
    (
        "manylora:history_page_evictions",
        "counters.history_evictions",
        "Pages of cached KV that left the pool.",
    ),
    (
        "manylora:history_page_drops",
        "counters.history_drops",
        "Pages of cached KV whose last copy was dropped.",
    ),
    (
        "manylora:host_evictions",
        "counters.host_evictions",
        "Adapters and pages of KV that left the host's pool.",
    ),
    ("manylora:adapter_misses", "counters.adapter_misses", "Admissions whose adapter was in neither tier."),
    (
        "manylora:prefetches",
        "counters.prefetches",
        "Adapters and pages of KV fetched for requests in the queue.",
    ),
    ("manylora:swap_failures", "counters.swaps_failed", "Copies between the tiers that failed."),
    (
        "manylora:adapter_limit_overtaken",
        "counters.adapter_limit_overtaken",
        "Admissions before the first in line, for --adapter-batch-limit.",
    ),
    (
        "manylora:cold_start_stall_seconds",
        "counters.cold_start_stall_s",
        "Time that steps stood still for copies and for the CPU, under every --cold-start but wait.",
    ),
    (
        "manylora:cold_start_hidden_seconds",
        "counters.cold_start_hidden_s",
        "Time of copies that steps awaited during which they went on.",
    ),
    (
        "manylora:cold_start_expected_stall_seconds",
        "counters.cold_start_expected_s",
        "Time that steps were expected to stand still for cold requests.",
    ),
    (
        "manylora:cold_start_answer_seconds",
        "counters.cold_answer_s",
        "Time from the decision how cold requests begin to the end of their first steps.",
    ),
    (
        "manylora:cold_start_expected_answer_seconds",
        "counters.cold_answer_expected_s",
        "What this time was expected to be.",
    ),
    (
        "manylora:cpu_lora_seconds",
        "counters.cpu_lora_s",
        "Time that CPU workers computed for cold requests, the busiest one of each step.",
    ),
    ("manylora:spoilt_rows", "counters.spoilt_rows", "Rows computed again since a copy failed or was late."),
    ("manylora:step_seconds", "meters.step_s", "Time spent in steps."),
    ("manylora:merge_switch_failures", "counters.switches_failed", "Changes of what is merged that failed."),
    ("manylora:merge_switch_seconds", "counters.merge_switch_s", "Time that changes of what is merged took."),
    (
        "manylora:paused_seconds",
        "counters.paused_s",
        "Time that sequences held pages and could not run, for merging.",
    ),
)


def lora_requests(uses: Iterable[AdapterUse], most: int) -> Metric:
    """The gauge in vLLM's form: names in labels, the time as the value. There are no adapter slots to report, so
    ``max_lora`` is how many adapters can run at once: ``most``."""
    gauge = Gauge(
        "vllm:lora_requests_info",
        "Adapters of running and waiting requests; the value is the Unix time.",
        labels=["max_lora", "waiting_lora_adapters", "running_lora_adapters"],
    )
    uses = list(uses)
    waiting = ",".join(dict.fromkeys(use.name for use in uses if use.waiting))
    running = ",".join(dict.fromkeys(use.name for use in uses if use.running))
    gauge.add_metric([str(most), waiting, running], time.time())
    return gauge


def busy_pages(stats: EngineStats) -> int:
    """Pages that running requests and their adapters hold: the others give way."""
    gauges = stats.gauges
    adapters = (use.num_pages for use in gauges.adapters if use.running and use.state == "resident")
    return gauges.pages_running + sum(adapters)


def _each(path: str, *values: str) -> Callable[[_View], Samples]:
    """Give the figures whose paths have one of the values in the braces' place, which is their label."""
    getters = [((value,), operator.attrgetter(path.format(value))) for value in values]
    return lambda view: [(labels, get(view.stats)) for labels, get in getters]


def _per_adapter(field: str) -> Callable[[_View], Samples]:
    """Give a figure of each adapter."""
    get = operator.attrgetter(field)
    return lambda view: [((use.name,), get(use)) for use in view.stats.gauges.adapters]


def _states(field: str) -> Callable[[_View], Samples]:
    """Give 1 for the state of each adapter."""
    get = operator.attrgetter(field)
    return lambda view: [((use.name, get(use)), 1) for use in view.stats.gauges.adapters]


def _on(use: AdapterUse) -> Iterator[str]:
    """The tiers that an adapter is in, as the metric standard to come has it: ``gpu`` is the tier that steps read
    from, ``cpu`` the host's. It may be in both."""
    if use.state == "resident":
        yield "gpu"
    if use.host_state == "held":
        yield "cpu"


def _loaded(view: _View) -> Samples:
    uses = view.stats.gauges.adapters
    for level in ("gpu", "cpu"):
        yield from (((use.name, level, "false", str(use.rank)), 1) for use in uses if level in _on(use))


def _num_loaded(level: str) -> Callable[[_View], Samples]:
    return lambda view: [((view.base,), sum(level in _on(use) for use in view.stats.gauges.adapters))]


def _pages(view: _View) -> Samples:
    for tier, prefix, uses in (
        ("device", "", ("free", "running", "history", "adapters")),
        ("host", "host_", ("free", "history", "adapters")),
    ):
        yield from (((tier, use), getattr(view.stats.gauges, f"{prefix}pages_{use}")) for use in uses)


def _steps(view: _View) -> Samples:
    counters = view.stats.counters
    merged, mixed = counters.steps_merged, counters.steps_mixed
    unmerged = view.stats.meters.steps - merged - mixed
    for mode, count in (("unmerged", unmerged), ("merged", merged), ("mixed", mixed)):
        yield (view.base, mode), count


def _cold_starts(view: _View) -> Samples:
    known = dict.fromkeys(view.stats.cold_start_kinds, 0) | view.stats.counters.cold_starts
    return [(tuple(kind.split("/")), count) for kind, count in sorted(known.items())]


def _threshold(field: str) -> Callable[[_View], Samples]:
    def samples(view: _View) -> Samples:
        value = getattr(view.stats.gauges, field)
        return [] if value is None else [((), value)]

    return samples


def _shape(view: _View) -> Samples:
    info = view.info
    yield (str(info.page_tokens), str(info.num_pages), str(info.num_host_pages), info.cache_policy), 1


def _rank_weights(view: _View) -> Samples:
    return [((str(rank),), held.weight_bytes) for rank, held in enumerate(view.info.ranks)]


def _rank_pages(device: str, host: str) -> Callable[[_View], Samples]:
    """Give each rank's bytes of so many pages, which are figures of the view by their paths."""
    counts = ("device", operator.attrgetter(device)), ("host", operator.attrgetter(host))
    return lambda view: [
        ((str(rank), tier), count(view) * held.page_bytes)
        for rank, held in enumerate(view.info.ranks)
        for tier, count in counts
    ]


def _exchanges(suffix: str) -> Callable[[_View], Samples]:
    return lambda view: [
        ((str(rank), kind), getattr(traffic, kind + suffix))
        for rank, traffic in enumerate(view.stats.executor.traffic if view.info.ranks else ())
        for kind in ("base", "lora", "sampling", "merging")
    ]


_MODEL, _ADAPTER = ("model_name",), ("adapter_name",)
_FAMILIES = (
    *(_Family(Counter, name, text, path, _MODEL) for name, path, text in _COUNTERS),
    _Family(Gauge, "vllm:num_requests_running", "Requests in the running batch.", "gauges.num_running", _MODEL),
    _Family(Gauge, "vllm:num_requests_waiting", "Requests waiting for admission.", "gauges.num_waiting", _MODEL),
    _Family(
        Gauge, "vllm:kv_cache_usage_perc",
        "Share (0 to 1) of the pool held by running requests and their adapters. History and idle adapters give "
        "way, so they count as free.",
        lambda view: [((view.base,), busy_pages(view.stats) / max(view.stats.gauges.pages_total, 1))], _MODEL,
    ),
    _Family(
        Gauge, "manylora:adapter_store_bytes", "Bytes that the adapter store's files take.",
        "executor.adapter_store_bytes", _MODEL,
    ),
    _Family(
        Gauge, "manylora:engine_up", "1 while the engine answers.",
        lambda view: [((view.base,), view.is_up)], _MODEL,
    ),
    _Family(
        Gauge, "vllm:cache_config_info", "Shape of the pools.", _shape,
        ("block_size", "num_gpu_blocks", "num_cpu_blocks", "cache_policy"),
    ),
    _Family(
        Gauge, "vllm:lora_adapter_loaded",
        "1 for each adapter whose weights are in the device (gpu) or host (cpu) pool, in use or idle.", _loaded,
        ("adapter_name", "level", "pinned", "rank"),
    ),
    _Family(
        Gauge, "vllm:num_gpu_loaded_lora_adapters", "Adapters in the device pool.", _num_loaded("gpu"), _MODEL
    ),
    _Family(
        Gauge, "vllm:num_cpu_loaded_lora_adapters", "Adapters in the host pool.", _num_loaded("cpu"), _MODEL
    ),
    _Family(Gauge, "manylora:pages", "Pages of the device and host pools by use.", _pages, ("tier", "use")),
    _Family(
        Gauge, "manylora:host_pages_pinned",
        "Pages of the host pool whose copies are as fast as they can be: all, some time after the start.",
        "executor.host_pages_pinned",
    ),
    _Family(
        Gauge, "manylora:pages_moving",
        "Pages of the device that are being filled (in) or copied to the host before they leave (out).",
        lambda view: [(("in",), view.stats.gauges.pages_loading), (("out",), view.stats.gauges.pages_saving)],
        ("direction",),
    ),
    _Family(
        Gauge, "manylora:invalid_history_share",
        "Share (0 to 1) of the device's cached KV whose adapter is not on the device.",
        lambda view: [((), view.stats.gauges.invalid_pages / max(view.stats.gauges.pages_history, 1))],
    ),
    _Family(
        Gauge, "manylora:invalid_history_share_mean", "The same, as the mean of all samples since the start.",
        lambda view: [
            ((), view.stats.counters.invalid_share_sum / max(view.stats.counters.invalid_share_samples, 1))
        ],
    ),
    _Family(
        Counter, "manylora:kv_hit_tokens", "Prompt tokens found in the prefix cache, by where it was.",
        _each("counters.kv_hit_tokens_{}", "device", "host"), ("tier",),
    ),
    _Family(
        Counter, "manylora:adapter_hits", "Admissions whose adapter had been read, by where it was.",
        _each("counters.adapter_hits_{}", "device", "host"), ("tier",),
    ),
    _Family(
        Counter, "manylora:swap_bytes", "Copied to the device (in) and to the host (out).",
        lambda view: [
            (labels, num_pages * view.info.page_bytes)
            for labels, num_pages in _each("counters.pages_swapped_{}", "in", "out")(view)
        ],
        ("direction",),
    ),
    _Family(
        Counter, "manylora:swap_seconds", "Time that these copies took.",
        _each("counters.swap_{}_s", "in", "out"), ("direction",),
    ),
    _Family(
        Gauge, "manylora:adapter_state",
        "1 for the state that each served adapter is in on the device: absent, loading, resident or saving.",
        _states("state"), ("adapter_name", "state"),
    ),
    _Family(
        Gauge, "manylora:adapter_host_state",
        "1 for the state of each served adapter on the host: none, filling or held.", _states("host_state"),
        ("adapter_name", "state"),
    ),
    _Family(
        Gauge, "manylora:adapter_pages", "Pages that an adapter takes when resident.", _per_adapter("num_pages"),
        _ADAPTER,
    ),
    _Family(
        Gauge, "manylora:adapter_history_pages", "Pages of idle KV on the device, by its adapter.",
        _per_adapter("history_pages"), _ADAPTER,
    ),
    _Family(
        Gauge, "manylora:adapter_running_requests", "Running requests by adapter.", _per_adapter("running"),
        _ADAPTER,
    ),
    _Family(
        Gauge, "manylora:adapter_waiting_requests", "Waiting requests by adapter.", _per_adapter("waiting"),
        _ADAPTER,
    ),
    _Family(
        Counter, "manylora:fair_service_tokens", "Weighted tokens that a client was served.",
        lambda view: [((client.name,), client.service) for client in view.stats.gauges.clients], ("client",),
    ),
    _Family(
        Gauge, "manylora:fair_counter",
        "A client's virtual token counter: what it was served over its share, and what it was lifted by.",
        lambda view: [((client.name,), client.counter) for client in view.stats.gauges.clients], ("client",),
    ),
    _Family(
        Counter, "manylora:steps",
        "Steps run: without a merged adapter (unmerged), of the merged one alone (merged), with others (mixed).",
        _steps, ("model_name", "mode"),
    ),
    _Family(
        Counter, "manylora:merge_switches", "Changes of what is merged, by what it is then.",
        _each("counters.switches_{}", "merged", "base"), ("to",),
    ),
    _Family(
        Gauge, "manylora:merged_adapter", "1 for the adapter whose weights are merged into the base's.",
        lambda view: [] if view.stats.merged_adapter is None else [((view.stats.merged_adapter,), 1)], _ADAPTER,
    ),
    _Family(
        Gauge, "manylora:pristine_bytes", "What the copy of the base's own weights takes.", "pristine_bytes"
    ),
    _Family(
        Gauge, "manylora:longest_pause_seconds",
        "The longest time that a sequence held pages and could not run, for merging.", "counters.longest_pause_s",
    ),
    _Family(
        Gauge, "manylora:merge_alpha",
        "dLoRA's threshold: An adapter with more than this share of a batch's requests is merged.",
        _threshold("merge_alpha"), is_optional=True,
    ),
    _Family(
        Gauge, "manylora:merge_beta", "dLoRA's threshold: One with less is unmerged.", _threshold("merge_beta"),
        is_optional=True,
    ),
    _Family(
        Gauge, "manylora:credit", "dLoRA's credits: seconds of one request held back that an adapter can pay.",
        lambda view: [((credit.name,), credit.credit_s) for credit in view.stats.gauges.credits], _ADAPTER,
    ),
    _Family(
        Counter, "manylora:cold_starts",
        "Requests whose adapter was not on the device when admitted, by how they began and where it was.",
        _cold_starts, ("mode", "source"),
    ),
    _Family(
        Gauge, "manylora:rank_weight_bytes", "Bytes of the base's weights on each rank.", _rank_weights,
        ("rank",), is_optional=True,
    ),
    _Family(
        Gauge, "manylora:rank_pool_bytes", "Bytes of each rank's parts of the pools.",
        _rank_pages("info.num_pages", "info.num_host_pages"), ("rank", "tier"), is_optional=True,
    ),
    _Family(
        Gauge, "manylora:rank_adapter_bytes", "Bytes of adapters' pages on each rank.",
        _rank_pages("stats.gauges.pages_adapters", "stats.gauges.host_pages_adapters"), ("rank", "tier"),
        is_optional=True,
    ),
    _Family(
        Counter, "manylora:collectives",
        "Exchanges between ranks: sums of the base's, of what adapters' A give, logits and tokens, switches.",
        _exchanges(""), ("rank", "kind"), is_optional=True,
    ),
    _Family(
        Counter, "manylora:collective_bytes", "Bytes that each rank put into them.", _exchanges("_bytes"),
        ("rank", "kind"), is_optional=True,
    ),
)  # fmt: skip


class EngineCollector(Collector):
    """Yields metrics of the newest snapshot; before the first one, of an engine that has done nothing."""

    def __init__(self, base: str, info: EngineInfo) -> None:
        gauges = dataclasses.replace(
            EngineStats().gauges, pages_total=info.num_pages, pages_free=info.num_pages
        )
        stats = EngineStats(gauges, cold_start_kinds=info.cold_start_kinds)
        self._view = _View(stats, base, info, True)

    def update(self, stats: EngineStats | None) -> None:
        """Take a new snapshot; None where the engine does not answer."""
        known = self._view.stats if stats is None else stats
        self._view = self._view._replace(stats=known, is_up=stats is not None)

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        view = self._view  # taken once: a scrape on another thread must not see two snapshots
        for family in _FAMILIES:
            metric = family.metric(view)
            if metric.samples or not family.is_optional:
                yield metric
        yield lora_requests(view.stats.gauges.adapters, view.info.max_num_seqs)
