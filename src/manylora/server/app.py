"""Puts the server together: routes, middleware, error bodies, life cycle."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Awaitable, Callable, Sequence

from starlette.applications import Starlette
from starlette.middleware import Middleware

from manylora.engine.client import EngineClient
from manylora.engine.scopes import CacheScopes
from manylora.metrics.requests import Metrics
from manylora.server import adapters, docs, errors, models, probes, requests, routes
from manylora.server.docs import Operation
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
    more: Sequence[Operation] = (),
    scopes: CacheScopes | None = None,
) -> Starlette:
    """The ASGI app, for ``lifecycle.serve`` to run. Without a tokenizer prompts of token ids still work.

    ``metrics``, ``page``: what is counted and what /metrics shows, where that is not one engine's; ``more``:
    operations beside those of a server; ``scopes``: those of all servers of one cluster.
    """
    lifecycle = Lifecycle()
    if metrics is None:
        metrics = Metrics(settings.served_model_name, client.info)

    served = models.Models(client, texts, settings)
    service = Service(client, lifecycle, metrics, scopes or CacheScopes())
    show = page or functools.partial(probes.engine_page, client, metrics)
    operations = [
        *routes.operations(service, served, settings.trusts_templates),
        *models.operations(served),
        *adapters.operations(client, settings, served, lifecycle, metrics),
        *probes.operations(lifecycle, client, show, settings.version),
        *more,
    ]
    document = docs.document(operations, settings)
    max_body_bytes = settings.max_body_bytes or requests.max_bytes(client.info)
    app = Starlette(
        routes=[*(each.route() for each in operations), *docs.routes(document, settings.root_path)],
        # The first one is the outermost.
        middleware=[
            Middleware(RootPath, root=settings.root_path),
            Middleware(RequestLog),
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
