"""Routes for load balancers and dashboards: health, version, metrics."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from manylora.engine.client import EngineBusy, EngineClient, EngineDead, EngineSilent, EngineStats
from manylora.metrics.requests import Metrics
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


def routes(lifecycle: Lifecycle, page: Callable[[], Awaitable[bytes]], version: str) -> APIRouter:
    """/health, /ping, /version and /metrics: answered to the end."""
    router = APIRouter(tags=["probes"])

    async def health() -> Response:
        return Response(status_code=503 if lifecycle.refusal() else 200)

    for path, also in (("/health", "HEAD"), ("/ping", "POST")):
        router.add_api_route(path, health, methods=["GET"], summary="200 while requests are taken")
        router.add_api_route(path, health, methods=[also], include_in_schema=False)

    @router.get("/version", summary="manylora's version")
    async def show_version() -> JSONResponse:
        return JSONResponse({"version": version})

    @router.get("/metrics", summary="Prometheus metrics")
    async def show_metrics() -> Response:
        return Response(await page(), media_type=CONTENT_TYPE_LATEST)

    return router
