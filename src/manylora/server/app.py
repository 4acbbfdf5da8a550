"""Puts the server together: routes, middleware, error bodies, life cycle."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Awaitable, Callable

from fastapi import APIRouter, FastAPI

from manylora.engine.client import EngineClient
from manylora.engine.scopes import CacheScopes
from manylora.metrics.requests import Metrics
from manylora.server import adapters, bodies, chat, completions, docs, errors, models, probes
from manylora.server.generation import Service
from manylora.server.hosts import AllowedHosts
from manylora.server.lifecycle import Lifecycle
from manylora.server.middleware import PROBES, ApiKeys, BodyLimit, Gate, RequestLog, RootPath
from manylora.server.settings import ServerSettings
from manylora.text.texts import Texts


def create_app(
    client: EngineClient,
    texts: Texts,
    settings: ServerSettings,
    *,
    metrics: Metrics | None = None,
    page: Callable[[], Awaitable[bytes]] | None = None,
    routes: APIRouter | None = None,
    scopes: CacheScopes | None = None,
) -> FastAPI:
    """The ASGI app, for ``lifecycle.serve`` to run. Without a tokenizer prompts of token ids still work.

    ``metrics``, ``page``: what is counted and what /metrics shows, where that is not one engine's; ``routes``:
    others beside those of a server; ``scopes``: those of all servers of one cluster.
    """
    lifecycle = Lifecycle()
    if metrics is None:
        metrics = Metrics(settings.served_model_name, client.info)

    app = FastAPI(
        title="manylora",
        version=settings.version,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.lifecycle = lifecycle
    max_body_bytes = settings.max_body_bytes or bodies.max_bytes(client.info)
    limits = settings.connections
    probes_under = PROBES | {settings.root_path + path for path in PROBES}
    app.state.connection_limits = dataclasses.replace(
        limits, probes=probes_under, upload_bytes=max(limits.upload_bytes, 2 * max_body_bytes)
    )
    errors.install(app)

    served = models.Models(client, texts, settings)
    service = Service(client, lifecycle, metrics, scopes or CacheScopes())
    app.include_router(completions.routes(service, served))
    app.include_router(chat.routes(service, served, settings.trusts_templates))
    app.include_router(models.routes(served))
    app.include_router(adapters.routes(client, settings, served, lifecycle, metrics))
    show = page or functools.partial(probes.engine_page, client, metrics)
    app.include_router(probes.routes(lifecycle, client, show, settings.version))
    if routes is not None:
        app.include_router(routes)
    docs.install(app, settings.root_path)

    # The last one added is the outermost.
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    app.add_middleware(ApiKeys, api_keys=settings.api_keys, metrics_open=settings.metrics_open)
    app.add_middleware(Gate, lifecycle=lifecycle)
    app.add_middleware(AllowedHosts, patterns=settings.allowed_hosts)
    app.add_middleware(RequestLog)
    app.add_middleware(RootPath, root=settings.root_path)
    return app
