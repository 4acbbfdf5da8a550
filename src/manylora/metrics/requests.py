"""Measures requests, beside the figures that the engine reports: a page to scrape, or a dict.

Names and buckets are vLLM's wherever vLLM has the metric; ours start with ``manylora:``. Each server, and
each engine in process, has a registry of its own.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from manylora.engine.client import EngineStats, GenerationRequest
from manylora.metrics.engine import EngineCollector
from manylora.text.generate import TextDelta, TextStream
from manylora.types import EngineInfo

_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip
# One histogram per adapter: few buckets keep the page small with thousands of adapters.
_ADAPTER_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

_MOST_LABELLED = 10

PARTS = ("queue", "adapter", "kv", "prefill")
"""The parts of a request's time to its first token, in order: waiting for admission, for its adapter, for its
cached KV, and the rest."""


class Metrics:
    """The metrics of one server, or of one engine in process. ``base`` is the base model's id."""

    def __init__(self, base: str, info: EngineInfo, engines: Collector | None = None) -> None:
        """Register all metrics. ``engines``: a collector of the engines' figures, where there are several
        engines or none in reach."""
        self._base = base
        self._registry = CollectorRegistry()
        self._engine = EngineCollector(base, info)
        self._registry.register(engines or self._engine)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            labelled = Histogram(name, text, ["model_name"], buckets=buckets, registry=self._registry)
            return labelled.labels(base)

        self.first_token_s = histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_S
        )
        self.inter_token_s = TokenHistogram(
            "vllm:inter_token_latency_seconds", "From one token of a sample to its next.",
            {"model_name": base}, _TOKEN_S,
        )  # fmt: skip
        self._registry.register(self.inter_token_s)
        self.per_output_token_s = histogram(
            "vllm:request_time_per_output_token_seconds", "A sample's mean time per token after its first.",
            _TOKEN_S,
        )  # fmt: skip
        self.end_to_end_s = histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to the last token.", _REQUEST_S
        )
        self.queue_s = histogram(
            "vllm:request_queue_time_seconds", "Time spent waiting for admission.", _REQUEST_S
        )
        self.success = Counter(
            "vllm:request_success", "Finished samples by reason.", ["model_name", "finished_reason"],
            registry=self._registry,
        )  # fmt: skip
        for reason in ("stop", "length", "abort", "error"):
            self.success.labels(base, reason)
        self._adapter_requests = self._per_adapter("requests", "Requests taken.")
        self._adapter_prompt = self._per_adapter("prompt_tokens", "Prompt tokens of requests taken.")
        self._adapter_generated = self._per_adapter("generation_tokens", "Tokens generated.")
        self._adapter_first_token_s = Histogram(
            "manylora:adapter_time_to_first_token_seconds", "Arrival to first token, by adapter.",
            ["adapter_name"], buckets=_ADAPTER_FIRST_TOKEN_S, registry=self._registry,
        )  # fmt: skip
        part_s = Histogram(
            "manylora:ttft_part_seconds",
            "Arrival to first token in parts: queue (until admission), adapter (until its adapter was there), kv "
            "(until its cached KV was), prefill (the rest).",
            ["part"], buckets=_FIRST_TOKEN_S, registry=self._registry,
        )  # fmt: skip
        self._part_s = [part_s.labels(part) for part in PARTS]
        self._adapter_part_s = Counter(
            "manylora:adapter_ttft_part_seconds",
            "Parts of the time to first token, summed by adapter; manylora:adapter_time_to_first_token_seconds "
            "counts the requests.",
            ["adapter_name", "part"], registry=self._registry,
        )  # fmt: skip

        self._has_priorities = info.has_priorities
        self._wait_s = Histogram(
            "manylora:priority_queue_time_seconds",
            f"Time spent waiting for admission, by priority; those past {_MOST_LABELLED} count together.",
            ["priority"], buckets=_REQUEST_S, registry=self._registry,
        )  # fmt: skip

    def _per_adapter(self, name: str, text: str) -> Counter:
        text += " The base model counts under its own id."
        return Counter(f"manylora:adapter_{name}", text, ["adapter_name"], registry=self._registry)

    def request(self, asked: GenerationRequest, start_s: float) -> RequestRecorder:
        """Start to record one engine request that arrived at ``start_s`` (time.perf_counter)."""
        name = asked.adapter or self._base
        self._adapter_requests.labels(name).inc()
        self._adapter_prompt.labels(name).inc(len(asked.prompt))
        generated = self._adapter_generated.labels(name)
        return RequestRecorder(self, name, generated, asked.params.n, start_s, asked.priority)

    def count_first_token(self, adapter: str, delta: TextDelta, seconds: float, priority: int = 0) -> None:
        """Record the time of a request's first token, which ``delta`` holds, and the parts of that time."""
        self.first_token_s.observe(seconds)
        self._adapter_first_token_s.labels(adapter).observe(seconds)
        timing = delta.timing
        self.queue_s.observe(timing.queue_s)
        if self._has_priorities:
            self._wait_s.labels(_priority_label(priority)).observe(timing.queue_s)
        waited = (timing.queue_s, timing.adapter_s, timing.kv_s)
        # The times are from the clocks of two processes, so the difference could be negative.
        parts_s = (*waited, max(seconds - sum(waited), 0.0))
        for part, part_s, histogram in zip(PARTS, parts_s, self._part_s, strict=True):
            histogram.observe(part_s)
            self._adapter_part_s.labels(adapter, part).inc(part_s)

    def count_finished(self, reason: str, num_samples: int = 1) -> None:
        """Count samples that ended for ``reason``."""
        self.success.labels(self._base, reason).inc(num_samples)

    def forget(self, adapter: str) -> None:
        """Drop the series of an adapter that is no longer served."""
        counters = self._adapter_requests, self._adapter_prompt, self._adapter_generated
        for metric in (*counters, self._adapter_first_token_s):
            with contextlib.suppress(KeyError):
                metric.remove(adapter)
        for part in PARTS:
            with contextlib.suppress(KeyError):
                self._adapter_part_s.remove(adapter, part)

    def render(self, stats: EngineStats | None) -> bytes:
        """Return the page to scrape. ``stats`` None: the engine does not answer, and its last snapshot is
        shown."""
        self._engine.update(stats)
        return self.page()

    def page(self) -> bytes:
        """Return the page to scrape, without a new snapshot."""
        return generate_latest(self._registry)

    def figures(self, stats: EngineStats | None) -> dict[str, float]:
        """Return the figures of ``render``, by their names with labels as on the page."""
        lines = self.render(stats).decode().split("\n")
        samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}


def _priority_label(priority: int) -> str:
    """Return a priority's label. Large priorities share a label, since clients choose priorities and must not
    choose the number of series."""
    if abs(priority) <= _MOST_LABELLED:
        return str(priority)
    return f"above {_MOST_LABELLED}" if priority > 0 else f"below -{_MOST_LABELLED}"


class RequestRecorder:
    """A recorder of one engine request's deltas. It is cheap, because it runs once for every delta."""

    def __init__(
        self, metrics: Metrics, adapter: str, generated: Counter, n: int, start_s: float, priority: int = 0
    ) -> None:
        self._metrics = metrics
        self._priority = priority
        self._adapter = adapter
        self._generated = generated
        self._start_s = start_s
        self._num_open = n
        self._has_token = False
        self._first_s = [0.0] * n
        self._last_s = [0.0] * n
        self._num_tokens = [0] * n

    def observe(self, delta: TextDelta) -> None:
        """Record a delta that is about to be sent."""
        sample, num_new = delta.sample, len(delta.token_ids)
        if num_new:
            now_s = time.perf_counter()
            first_s = now_s - delta.timing.spread_s
            self._generated.inc(num_new)
            if not self._has_token:
                self._has_token = True
                seconds = max(first_s - self._start_s, 0.0)
                self._metrics.count_first_token(self._adapter, delta, seconds, self._priority)
            if self._num_tokens[sample]:
                num_gaps, since_s = num_new, self._last_s[sample]
            else:
                num_gaps, since_s = num_new - 1, first_s
                self._first_s[sample] = first_s
            if num_gaps:
                self._metrics.inter_token_s.observe((now_s - since_s) / num_gaps, num_gaps)
            self._last_s[sample] = now_s
            self._num_tokens[sample] += num_new
        if delta.finish_reason is not None:
            self._finish(sample, delta.finish_reason)

    def _finish(self, sample: int, reason: str) -> None:
        self._num_open -= 1
        self._metrics.count_finished(reason)
        num_later = self._num_tokens[sample] - 1
        if num_later > 0:
            seconds = self._last_s[sample] - self._first_s[sample]
            self._metrics.per_output_token_s.observe(seconds / num_later)
        if self._num_open == 0:
            self._metrics.end_to_end_s.observe(time.perf_counter() - self._start_s)

    def close(self) -> None:
        """End the record; samples that have not finished count as aborted. Idempotent."""
        if self._num_open > 0:
            self._metrics.count_finished("abort", self._num_open)
            self._num_open = 0


class RecordedStream:
    """A request's deltas, each recorded as it is read. Closing the stream ends the record."""

    def __init__(self, stream: TextStream, recorder: RequestRecorder) -> None:
        self._stream = stream
        self._recorder = recorder

    def __aiter__(self) -> AsyncIterator[TextDelta]:
        return self

    async def __anext__(self) -> TextDelta:
        delta = await self._stream.__anext__()
        self._recorder.observe(delta)
        return delta

    async def aclose(self) -> None:
        """Abort the samples that still run, and end the record. Idempotent."""
        self._recorder.close()
        await self._stream.aclose()


class TokenHistogram(Collector):
    """One series in which an observation may count several times, for a delta of many tokens.

    prometheus_client's Histogram takes one observation at a time, which would cost time for every token.
    """

    def __init__(self, name: str, text: str, labels: Mapping[str, str], buckets: Sequence[float]) -> None:
        """Start empty. ``buckets``: upper bounds, rising."""
        self._name = name
        self._text = text
        self._labels = dict(labels)
        self._bounds = (*buckets, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        self._created_s = time.time()
        self._lock = threading.Lock()

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value ``times`` times. Thread-safe."""
        place = bisect.bisect_left(self._bounds, value)
        with self._lock:
            self._counts[place] += times
            self._sum += value * times

    def collect(self) -> Iterator[Metric]:
        """Yield the histogram's family for prometheus_client."""
        with self._lock:
            counts, total = self._counts[:], self._sum
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        bounds = map(floatToGoString, self._bounds)
        buckets = list(zip(bounds, map(float, itertools.accumulate(counts))))
        family.add_metric(list(self._labels.values()), buckets, total)
        family.add_sample(f"{self._name}_created", self._labels, self._created_s)
        yield family
