"""Builds the server's app: routes, with those of probes, middleware, error bodies and life cycle."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Awaitable, Callable, Sequence

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from manylora.engine.client import CacheScopes, EngineBusy, EngineClient, EngineDead, EngineSilent
from manylora.metrics.requests import Metrics
from manylora.server import adapters, docs, errors, models, requests, routes
from manylora.server.connection import ServerSettings
from manylora.server.docs import TEXT, Operation
from manylora.server.generation import Service
from manylora.server.lifecycle import Lifecycle
from manylora.server.middleware import PROBES, AllowedHosts, ApiKeys, BodyLimit, Gate, RequestLog
from manylora.text.texts import Texts

# A scrape must be answered even when the engine is too busy to answer, or dead.
_STATS_TIMEOUT_S = 2.0


def create_app(
    client: EngineClient,
    texts: Texts,
    settings: ServerSettings,
    *,
    metrics: Metrics | None = None,
    page: Callable[[], Awaitable[bytes]] | None = None,
    more: Sequence[Operation] = (),
    scopes: CacheScopes | None = None,
) -> Starlette:
    """Build the ASGI app, for ``lifecycle.serve`` to run. Without a tokenizer, prompts of token ids still work.

    ``metrics``, ``page``: the counters and the content of /metrics, where these are not one engine's;
    ``more``: operations beside those of every server; ``scopes``: the cache scopes that all servers of one
    cluster share.
    """
    lifecycle, metrics = Lifecycle(), metrics or Metrics(settings.served_model_name, client.info)
    served = models.Models(client, texts, settings)
    service = Service(client, lifecycle, metrics, scopes or CacheScopes())
    show = page or functools.partial(_engine_page, client, metrics)
    operations = [
        *routes.operations(service, served, settings.trusts_templates),
        *models.operations(served),
        *adapters.operations(client, settings, served, lifecycle, metrics),
        *_probes(lifecycle, client, show, settings.version),
        *more,
    ]
    document = docs.document(operations, settings)
    max_body_bytes = settings.max_body_bytes or requests.max_bytes(client.info)
    app = Starlette(
        routes=[*(each.route() for each in operations), *docs.routes(document, settings.root_path)],
        # The first middleware is the outermost.
        middleware=[
            Middleware(RequestLog, root=settings.root_path),
            Middleware(AllowedHosts, patterns=settings.allowed_hosts),
            Middleware(Gate, lifecycle=lifecycle),
            Middleware(ApiKeys, settings=settings),
            Middleware(BodyLimit, max_bytes=max_body_bytes),
        ],
        exception_handlers=dict.fromkeys(errors.EXPECTED, errors.answer),
    )
    app.router.redirect_slashes = False
    app.state.lifecycle = lifecycle
    app.state.document = document
    limits = settings.connections
    probes_under = PROBES | {settings.root_path + path for path in PROBES}
    app.state.connection_limits = dataclasses.replace(
        limits, probes=probes_under, upload_bytes=max(limits.upload_bytes, 2 * max_body_bytes)
    )
    return app


async def _engine_page(client: EngineClient, metrics: Metrics) -> bytes:
    """Render the /metrics page of one engine, without its gauges where it does not answer."""
    snapshot = None
    with contextlib.suppress(EngineDead, EngineBusy, EngineSilent, TimeoutError):
        snapshot = await asyncio.wait_for(client.stats(), _STATS_TIMEOUT_S)
    # With thousands of adapters the page takes milliseconds to write.
    return await asyncio.to_thread(metrics.render, snapshot)


def _probes(
    lifecycle: Lifecycle, client: EngineClient, page: Callable[[], Awaitable[bytes]], version: str
) -> list[Operation]:
    """List /health, /ping, /healthz, /version and /metrics, which are answered until the process ends."""

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
