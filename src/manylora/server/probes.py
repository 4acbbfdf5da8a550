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


def routes(
    lifecycle: Lifecycle, client: EngineClient, page: Callable[[], Awaitable[bytes]], version: str
) -> APIRouter:
    """/health, /ping, /healthz, /version and /metrics: answered to the end."""
    router = APIRouter(tags=["probes"])

    async def health() -> Response:
        return Response(status_code=503 if lifecycle.refusal() or client.why_unready() else 200)

    async def alive() -> Response:
        return Response()

    is_ready, is_alive = "200 while requests can be served", "200 as long as the process answers"
    for path, also, answer, summary in (
        ("/health", "HEAD", health, is_ready),
        ("/ping", "POST", health, is_ready),
        ("/healthz", "HEAD", alive, is_alive),
    ):
        router.add_api_route(path, answer, methods=["GET"], summary=summary)
        router.add_api_route(path, answer, methods=[also], include_in_schema=False)

    @router.get("/version", summary="manylora's version")
    async def show_version() -> JSONResponse:
        return JSONResponse({"version": version})

    @router.get("/metrics", summary="Prometheus metrics")
    async def show_metrics() -> Response:
        return Response(await page(), media_type=CONTENT_TYPE_LATEST)

    return router
