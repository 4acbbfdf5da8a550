"""Shows a cluster over HTTP: /metrics of all replicas and of the router, and /cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from manylora.cluster.client import ClusterClient
from manylora.cluster.members import STATES
from manylora.engine.client import EngineBusy, EngineSilent, EngineStats
from manylora.listening import is_loopback
from manylora.metrics.engine import EngineCollector, busy_pages, lora_requests
from manylora.metrics.requests import Metrics
from manylora.protocol.executor import AdapterError
from manylora.protocol.routing import ReplicaId
from manylora.server.docs import Operation
from manylora.server.errors import ApiError, unavailable
from manylora.server.middleware import same_origin
from manylora.types import EngineInfo

_STATUS_S = 2.0
_MOVES = ("asked", "drain", "lost")
"""The reasons for which any router moves requests. They are shown with a count of 0 before the first move."""


class _Replicas(Collector):
    """A collector of every engine's metrics, each under a label ``replica``, and of the router's metrics."""

    def __init__(self, base: str, info: EngineInfo) -> None:
        self._base = base
        self._info = info
        self._engines: dict[ReplicaId, EngineCollector] = {}
        self._stats: list[EngineStats] = []
        self._status: dict[str, Any] = {}

    def update(self, replicas: Mapping[ReplicaId, EngineStats | None], status: dict[str, Any]) -> None:
        """Take new snapshots. An empty ``status`` means that there is no router."""
        engines = {}
        for replica, stats in replicas.items():
            engine = engines[replica] = self._engines.get(replica) or EngineCollector(self._base, self._info)
            engine.update(stats)
        self._engines, self._status = engines, status
        self._stats = [stats for stats in replicas.values() if stats is not None]

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        families: dict[str, Metric] = {}
        for replica, engine in self._engines.items():
            for family in engine.collect():
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = sample.labels | {"replica": str(replica)}
                    merged.samples.append(sample._replace(labels=labels))
        for family in _of_all(self._stats, self._info, self._status):
            if (each := families.setdefault(family.name, family)) is not family:
                each.samples[:0] = family.samples
        yield from families.values()
        if self._status:
            yield from _of_router(self._status)


def _of_all(replicas: Sequence[EngineStats], info: EngineInfo, status: dict[str, Any]) -> Iterator[Metric]:
    """Give the metrics of the whole cluster as those of one server, for routers that read one series of a
    server."""
    # This timestamp must be later than each replica's: llm-d uses the latest series.
    yield lora_requests(
        (load for stats in replicas for load in stats.gauges.adapters), len(replicas) * info.max_num_seqs
    )
    running = sum(stats.gauges.num_running for stats in replicas)
    waiting = sum(stats.gauges.num_waiting for stats in replicas)
    waiting += status["router"]["waiting"] if status else 0
    pages = sum(stats.gauges.pages_total for stats in replicas)
    text = "Requests in running batches, of all replicas."
    yield GaugeMetricFamily("manylora:cluster_requests_running", text, value=running)
    text = "Requests waiting for admission at replicas, and those on none."
    yield GaugeMetricFamily("manylora:cluster_requests_waiting", text, value=waiting)
    yield GaugeMetricFamily(
        "manylora:cluster_kv_usage_perc",
        "Share (0 to 1) of all replicas' pools held by running requests and their adapters.",
        value=sum(map(busy_pages, replicas)) / max(pages, 1),
    )


def _of_router(status: dict[str, Any]) -> Iterator[Metric]:
    router, frontends = status["router"], status["frontends"]
    decisions = router["decisions"]
    buckets = [("+Inf" if bound is None else str(bound), below) for bound, below in decisions["buckets"]]
    yield HistogramMetricFamily(
        "manylora:router_decision_seconds",
        "Time that the router takes for an event.",
        buckets=buckets,
        sum_value=decisions["sum_s"],
    )
    moved = CounterMetricFamily(
        "manylora:requests_moved", "Requests that went from one replica to another.", labels=["reason"]
    )
    for reason, count in sorted((dict.fromkeys(_MOVES, 0) | router["moved"]).items()):
        moved.add_metric([reason], count)
    yield moved
    for name, text in (
        ("stale_tokens", "Tokens that were dropped, being of an attempt that was not the last."),
        ("recomputed_tokens", "Tokens of prompts and answers that later attempts computed again."),
    ):
        total = sum(each[name] for each in frontends)
        yield CounterMetricFamily(f"manylora:{name}", text, value=total)
    states = GaugeMetricFamily(
        "manylora:replica_state", "1 for the state that each replica is in.", labels=["replica", "state"]
    )
    for replica in status["replicas"]:
        for state in STATES:
            states.add_metric([str(replica["id"]), state], float(replica["state"] == state))
    yield states
    yield GaugeMetricFamily(
        "manylora:scale_hint",
        "How many replicas more (or less) the cluster would do with.",
        value=status["scale_hint"]["delta"],
    )
    yield GaugeMetricFamily("manylora:router_waiting", "Requests on no replica.", value=router["waiting"])


class ClusterPage:
    """The page that Prometheus scrapes. ``metrics``: the front end's own counts of requests."""

    def __init__(self, client: ClusterClient, base: str, info: EngineInfo) -> None:
        self._client = client
        self._replicas = _Replicas(base, info)
        self.metrics = Metrics(base, info, self._replicas)

    async def render(self) -> bytes:
        """Render the page. A replica that does not answer shows its last snapshot."""
        replicas, status = await asyncio.gather(self._client.replica_stats(), self._status())
        self._replicas.update(replicas, status)
        return await asyncio.to_thread(self.metrics.page)

    async def _status(self) -> dict[str, Any]:
        try:
            return await asyncio.wait_for(self._client.cluster_status(), _STATUS_S)
        except (EngineBusy, EngineSilent, AdapterError, TimeoutError):
            return {}


def cluster_operation(client: ClusterClient, api_keys: Sequence[str]) -> Operation:
    """Build the operation GET /cluster. Where API keys are set, the server asks for one; otherwise only
    loopback clients may use it."""

    async def show(request: Request) -> Response:
        if not api_keys and (request.client is None or not is_loopback(request.client.host)):
            raise ApiError(403, "without API keys /cluster is for clients on this machine")
        try:
            return JSONResponse(await asyncio.wait_for(client.cluster_status(), _STATUS_S))
        except (EngineSilent, TimeoutError) as error:
            raise unavailable("the cluster has no router at the moment") from error

    summary = "The cluster's processes, their state and their load"
    return Operation("GET", "/cluster", same_origin(show), "cluster", summary)
