"""Routes for load balancers and dashboards: health, version, metrics."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from manylora.engine.client import EngineBusy, EngineClient, EngineDead, EngineSilent, EngineStats
from manylora.metrics.requests import Metrics
from manylora.server.docs import TEXT, Operation
from manylora.server.lifecycle import Lifecycle

# A scrape must be answered even when the engine is too busy, or too dead, to say anything.
_STATS_TIMEOUT_S = 2.0


async def engine_page(client: EngineClient, metrics: Metrics) -> bytes:
    """The page to scrape of one engine."""
    snapshot: EngineStats | None = None
    with contextlib.suppress(EngineDead, EngineBusy, EngineSilent, TimeoutError):
        snapshot = await asyncio.wait_for(client.stats(), _STATS_TIMEOUT_S)
    # With thousands of adapters the page takes milliseconds to write.
    return await asyncio.to_thread(metrics.render, snapshot)


def operations(
    lifecycle: Lifecycle, client: EngineClient, page: Callable[[], Awaitable[bytes]], version: str
) -> list[Operation]:
    """Give /health, /ping, /healthz, /version and /metrics: answered to the end."""

    async def health(request: Request) -> Response:
        return Response(status_code=503 if lifecycle.refusal() or client.why_unready() else 200)

    async def alive(request: Request) -> Response:
        return Response()

    async def show_version(request: Request) -> Response:
        return JSONResponse({"version": version})

    async def show_metrics(request: Request) -> Response:
        return Response(await page(), media_type=CONTENT_TYPE_LATEST)

    is_ready, is_alive = "200 while requests can be served", "200 as long as the process answers"
    return [
        Operation("GET", "/health", health, "probes", is_ready, answers=(), also="HEAD"),
        Operation("GET", "/ping", health, "probes", is_ready, answers=(), also="POST"),
        Operation("GET", "/healthz", alive, "probes", is_alive, answers=(), also="HEAD"),
        Operation("GET", "/version", show_version, "probes", "manylora's version"),
        Operation("GET", "/metrics", show_metrics, "probes", "Prometheus metrics", answers=(TEXT,)),
    ]
