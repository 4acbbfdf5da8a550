"""Reports the engine's own figures as Prometheus metrics, from the last snapshot of its stats and a table of
families.

A front end of several engines has an ``EngineCollector`` for each.
"""

from __future__ import annotations

import dataclasses
import operator
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from manylora.engine.client import EngineStats
from manylora.reports import AdapterUse
from manylora.types import EngineInfo


class _View(NamedTuple):
    """The newest snapshot, and the other facts that samples need."""

    stats: EngineStats
    base: str
    info: EngineInfo
    is_up: bool


Samples = Iterable[tuple[tuple[str, ...], float]]
"""Pairs of label values and a figure."""

_Row = tuple[str, str | Callable[[_View], Samples], str]
"""A family's name with its labels in braces; a path to one figure of EngineStats, or a function that returns
all samples; and the help text."""


def lora_requests(uses: Iterable[AdapterUse], most: int) -> Metric:
    """Return the gauge in vLLM's form: names in labels, the time as the value. There are no adapter slots to
    report, so ``max_lora`` is ``most``, the number of adapters that can run at once."""
    gauge = GaugeMetricFamily(
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
    """Count the pages that running requests and their adapters hold. All other pages can be evicted."""
    gauges = stats.gauges
    adapters = (use.num_pages for use in gauges.adapters if use.running and use.state == "resident")
    return gauges.pages_running + sum(adapters)


def _each(path: str, *values: str) -> Callable[[_View], Samples]:
    """Return a function that gives one figure for each value. The value replaces the braces in the path, and
    is the label."""
    getters = [((value,), operator.attrgetter(path.format(value))) for value in values]
    return lambda view: [(labels, get(view.stats)) for labels, get in getters]


def _per_adapter(field: str) -> Callable[[_View], Samples]:
    """Return a function that gives this figure of each adapter."""
    get = operator.attrgetter(field)
    return lambda view: [((use.name,), get(use)) for use in view.stats.gauges.adapters]


def _states(field: str) -> Callable[[_View], Samples]:
    """Return a function that gives 1 for the state of each adapter."""
    get = operator.attrgetter(field)
    return lambda view: [((use.name, get(use)), 1) for use in view.stats.gauges.adapters]


_HOLDS: dict[str, Callable[[AdapterUse], bool]] = {
    "gpu": lambda use: use.state == "resident",
    "cpu": lambda use: use.host_state == "held",
}
"""Whether a tier holds an adapter, by the tier's name in the coming metric standard: ``gpu`` is the tier that
steps read from, ``cpu`` is the host's. An adapter may be in both."""


def _loaded(view: _View) -> Samples:
    for level, holds in _HOLDS.items():
        held = filter(holds, view.stats.gauges.adapters)
        yield from (((use.name, level, "false", str(use.rank)), 1) for use in held)


def _num_loaded(level: str) -> Callable[[_View], Samples]:
    return lambda view: [((view.base,), sum(map(_HOLDS[level], view.stats.gauges.adapters)))]


def _pages(view: _View) -> Samples:
    gauges = view.stats.gauges
    for use in ("free", "running", "history", "adapters"):
        yield ("device", use), getattr(gauges, f"pages_{use}")
    for use in ("free", "history", "adapters"):
        yield ("host", use), getattr(gauges, f"host_pages_{use}")


def _steps(view: _View) -> Samples:
    merged = view.stats.counters.steps_merged
    yield (view.base, "unmerged"), view.stats.meters.steps - merged
    yield (view.base, "merged"), merged


def _cold_starts(view: _View) -> Samples:
    known = dict.fromkeys(view.stats.cold_start_kinds, 0) | view.stats.counters.cold_starts
    return [(tuple(kind.split("/")), count) for kind, count in sorted(known.items())]


def _threshold(field: str) -> Callable[[_View], Samples]:
    get = operator.attrgetter(field)
    return lambda view: [] if get(view.stats.gauges) is None else [((), get(view.stats.gauges))]


def _shape(view: _View) -> Samples:
    info = view.info
    yield (str(info.page_tokens), str(info.num_pages), str(info.num_host_pages), info.cache_policy), 1


def _rank_pages(device: str, host: str) -> Callable[[_View], Samples]:
    """Return a function that gives the bytes of pages on each rank. ``device``, ``host``: paths in the view
    to the numbers of pages."""
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


_swapped_pages = _each("counters.pages_swapped_{}", "in", "out")


_COUNTERS: tuple[_Row, ...] = (
    ("vllm:prefix_cache_queries{model_name}", "counters.prefix_queries_tokens",
     "Prompt tokens looked up in the prefix cache."),
    ("vllm:prefix_cache_hits{model_name}", "counters.prefix_hits_tokens",
     "Prompt tokens found in the prefix cache."),
    ("vllm:prompt_tokens{model_name}", "meters.prompt_tokens", "Prompt tokens processed."),
    ("vllm:generation_tokens{model_name}", "meters.generated_tokens", "Tokens generated."),
    ("vllm:num_preemptions{model_name}", "counters.preemptions", "Requests preempted to make room."),
    ("manylora:adapter_reads{model_name}", "counters.adapter_reads", "Adapters read into the pool."),
    ("manylora:adapter_read_failures{model_name}", "meters.adapter_read_failures",
     "Adapter reads that failed."),
    ("manylora:adapter_read_seconds{model_name}", "meters.adapter_read_s", "Time spent reading adapters."),
    ("manylora:adapter_evictions{model_name}", "counters.adapter_evictions", "Adapters that left the pool."),
    ("manylora:history_page_evictions{model_name}", "counters.history_evictions",
     "Pages of cached KV that left the pool."),
    ("manylora:history_page_drops{model_name}", "counters.history_drops",
     "Pages of cached KV whose last copy was dropped."),
    ("manylora:host_evictions{model_name}", "counters.host_evictions",
     "Adapters and pages of KV that left the host's pool."),
    ("manylora:adapter_misses{model_name}", "counters.adapter_misses",
     "Admissions whose adapter was in neither tier."),
    ("manylora:prefetches{model_name}", "counters.prefetches",
     "Adapters and pages of KV fetched for requests in the queue."),
    ("manylora:swap_failures{model_name}", "counters.swaps_failed", "Copies between the tiers that failed."),
    ("manylora:adapter_limit_overtaken{model_name}", "counters.adapter_limit_overtaken",
     "Admissions before the first in line, for --adapter-batch-limit."),
    ("manylora:cold_start_stall_seconds{model_name}", "counters.cold_start_stall_s",
     "Time that steps stood still for copies and for the CPU, under every --cold-start but wait."),
    ("manylora:cold_start_hidden_seconds{model_name}", "counters.cold_start_hidden_s",
     "Time of copies that steps awaited during which they went on."),
    ("manylora:cold_start_expected_stall_seconds{model_name}", "counters.cold_start_expected_s",
     "Time that steps were expected to stand still for cold requests."),
    ("manylora:cold_start_answer_seconds{model_name}", "counters.cold_answer_s",
     "Time from the decision how cold requests begin to the end of their first steps."),
    ("manylora:cold_start_expected_answer_seconds{model_name}", "counters.cold_answer_expected_s",
     "What this time was expected to be."),
    ("manylora:cpu_lora_seconds{model_name}", "counters.cpu_lora_s",
     "Time that CPU threads computed for cold requests, the busiest one of each step."),
    ("manylora:spoilt_rows{model_name}", "counters.spoilt_rows",
     "Rows computed again since a copy failed or was late."),
    ("manylora:step_seconds{model_name}", "meters.step_s", "Time spent in steps."),
    ("manylora:merge_switch_failures{model_name}", "counters.switches_failed",
     "Changes of what is merged that failed."),
    ("manylora:merge_switch_seconds{model_name}", "counters.merge_switch_s",
     "Time that changes of what is merged took."),
    ("manylora:paused_seconds{model_name}", "counters.paused_s",
     "Time that sequences held pages and could not run, for merging."),
    ("manylora:kv_hit_tokens{tier}", _each("counters.kv_hit_tokens_{}", "device", "host"),
     "Prompt tokens found in the prefix cache, by where it was."),
    ("manylora:adapter_hits{tier}", _each("counters.adapter_hits_{}", "device", "host"),
     "Admissions whose adapter had been read, by where it was."),
    ("manylora:swap_bytes{direction}",
     lambda view: [(to, pages * view.info.page_bytes) for to, pages in _swapped_pages(view)],
     "Copied to the device (in) and to the host (out)."),
    ("manylora:swap_seconds{direction}", _each("counters.swap_{}_s", "in", "out"),
     "Time that these copies took."),
    ("manylora:fair_service_tokens{client}",
     lambda view: [((client.name,), client.service) for client in view.stats.gauges.clients],
     "Weighted tokens that a client was served."),
    ("manylora:steps{model_name,mode}", _steps,
     "Steps run: without a merged adapter (unmerged), or on its weights (merged)."),
    ("manylora:merge_switches{to}", _each("counters.switches_{}", "merged", "base"),
     "Changes of what is merged, by what it is then."),
    ("manylora:cold_starts{mode,source}", _cold_starts,
     "Requests whose adapter was not on the device when admitted, by how they began and where it was."),
    ("manylora:collectives{rank,kind}", _exchanges(""),
     "Exchanges between ranks: sums of the base's, of what adapters' A give, logits and tokens, switches."),
    ("manylora:collective_bytes{rank,kind}", _exchanges("_bytes"), "Bytes that each rank put into them."),
)  # fmt: skip
_GAUGES: tuple[_Row, ...] = (
    ("vllm:num_requests_running{model_name}", "gauges.num_running", "Requests in the running batch."),
    ("vllm:num_requests_waiting{model_name}", "gauges.num_waiting", "Requests waiting for admission."),
    ("vllm:kv_cache_usage_perc{model_name}",
     lambda view: [((view.base,), busy_pages(view.stats) / max(view.stats.gauges.pages_total, 1))],
     "Share (0 to 1) of the pool held by running requests and their adapters. History and idle adapters "
     "give way, so they count as free."),
    ("manylora:engine_up{model_name}", lambda view: [((view.base,), view.is_up)],
     "1 while the engine answers."),
    ("vllm:cache_config_info{block_size,num_gpu_blocks,num_cpu_blocks,cache_policy}", _shape,
     "Shape of the pools."),
    ("vllm:lora_adapter_loaded{adapter_name,level,pinned,rank}", _loaded,
     "1 for each adapter whose weights are in the device (gpu) or host (cpu) pool, in use or idle."),
    ("vllm:num_gpu_loaded_lora_adapters{model_name}", _num_loaded("gpu"), "Adapters in the device pool."),
    ("vllm:num_cpu_loaded_lora_adapters{model_name}", _num_loaded("cpu"), "Adapters in the host pool."),
    ("manylora:pages{tier,use}", _pages, "Pages of the device and host pools by use."),
    ("manylora:host_pages_pinned", "executor.host_pages_pinned",
     "Pages of the host pool whose copies are as fast as they can be: all, some time after the start."),
    ("manylora:pages_moving{direction}",
     lambda view: [(("in",), view.stats.gauges.pages_loading), (("out",), view.stats.gauges.pages_saving)],
     "Pages of the device that are being filled (in) or copied to the host before they leave (out)."),
    ("manylora:invalid_history_share",
     lambda view: [((), view.stats.gauges.invalid_pages / max(view.stats.gauges.pages_history, 1))],
     "Share (0 to 1) of the device's cached KV whose adapter is not on the device."),
    ("manylora:invalid_history_share_mean",
     lambda view: [((), view.stats.invalid_share_sum / max(view.stats.invalid_share_samples, 1))],
     "The same, as the mean of all samples since the start."),
    ("manylora:adapter_state{adapter_name,state}", _states("state"),
     "1 for the state that each served adapter is in on the device: absent, loading, resident or saving."),
    ("manylora:adapter_host_state{adapter_name,state}", _states("host_state"),
     "1 for the state of each served adapter on the host: none, filling or held."),
    ("manylora:adapter_pages{adapter_name}", _per_adapter("num_pages"),
     "Pages that an adapter takes when resident."),
    ("manylora:adapter_history_pages{adapter_name}", _per_adapter("history_pages"),
     "Pages of idle KV on the device, by its adapter."),
    ("manylora:adapter_running_requests{adapter_name}", _per_adapter("running"),
     "Running requests by adapter."),
    ("manylora:adapter_waiting_requests{adapter_name}", _per_adapter("waiting"),
     "Waiting requests by adapter."),
    ("manylora:fair_counter{client}",
     lambda view: [((client.name,), client.counter) for client in view.stats.gauges.clients],
     "A client's virtual token counter: what it was served over its share, and what it was lifted by."),
    ("manylora:merged_adapter{adapter_name}",
     lambda view: [] if view.stats.merged_adapter is None else [((view.stats.merged_adapter,), 1)],
     "1 for the adapter whose weights are merged into the base's."),
    ("manylora:pristine_bytes", "pristine_bytes", "What the copy of the base's own weights takes."),
    ("manylora:longest_pause_seconds", "counters.longest_pause_s",
     "The longest time that a sequence held pages and could not run, for merging."),
    ("manylora:merge_alpha", _threshold("merge_alpha"),
     "dLoRA's threshold: An adapter with more than this share of a batch's requests is merged."),
    ("manylora:merge_beta", _threshold("merge_beta"), "dLoRA's threshold: One with less is unmerged."),
    ("manylora:credit{adapter_name}",
     lambda view: [((credit.name,), credit.credit_s) for credit in view.stats.gauges.credits],
     "dLoRA's credits: seconds of one request held back that an adapter can pay."),
    ("manylora:rank_weight_bytes{rank}",
     lambda view: [((str(rank),), held.weight_bytes) for rank, held in enumerate(view.info.ranks)],
     "Bytes of the base's weights on each rank."),
    ("manylora:rank_pool_bytes{rank,tier}", _rank_pages("info.num_pages", "info.num_host_pages"),
     "Bytes of each rank's parts of the pools."),
    ("manylora:rank_adapter_bytes{rank,tier}",
     _rank_pages("stats.gauges.pages_adapters", "stats.gauges.host_pages_adapters"),
     "Bytes of adapters' pages on each rank."),
)  # fmt: skip
_Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]
_OPTIONAL = {
    "manylora:merge_alpha", "manylora:merge_beta", "manylora:rank_weight_bytes", "manylora:rank_pool_bytes",
    "manylora:rank_adapter_bytes", "manylora:collectives", "manylora:collective_bytes",
}  # fmt: skip
"""Families that are left out where they have no samples."""


class EngineCollector(Collector):
    """A collector for the newest snapshot; before the first snapshot it shows an engine that has done
    nothing."""

    def __init__(self, base: str, info: EngineInfo) -> None:
        count = info.num_pages
        gauges = dataclasses.replace(EngineStats().gauges, pages_total=count, pages_free=count)
        stats = EngineStats(gauges, cold_start_kinds=info.cold_start_kinds)
        self._view = _View(stats, base, info, True)

    def update(self, stats: EngineStats | None) -> None:
        """Store a new snapshot; None where the engine does not answer."""
        known = self._view.stats if stats is None else stats
        self._view = self._view._replace(stats=known, is_up=stats is not None)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the newest snapshot for prometheus_client."""
        view = self._view  # taken once: a scrape on another thread must not see two snapshots
        families = [_family(CounterMetricFamily, row, view) for row in _COUNTERS]
        families += [_family(GaugeMetricFamily, row, view) for row in _GAUGES]
        yield from (family for family in families if family.samples or family.name not in _OPTIONAL)
        yield lora_requests(view.stats.gauges.adapters, view.info.max_num_seqs)


def _family(kind: _Kind, row: _Row, view: _View) -> Metric:
    spec, figures, text = row
    name, _, labels = spec.rstrip("}").partition("{")
    family = kind(name, text, labels=labels.split(",") if labels else ())
    if isinstance(figures, str):
        figure = operator.attrgetter(figures)(view.stats)
        family.add_metric([view.base] if labels else [], figure)
    else:
        for values, figure in figures(view):
            family.add_metric(values, figure)
    return family
