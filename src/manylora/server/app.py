"""Puts the server together: routes, middleware, error bodies, life cycle."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI

from manylora.engine.client import EngineClient
from manylora.server import adapters, chat, completions, docs, errors, models, probes
from manylora.server.generation import Service
from manylora.server.lifecycle import Lifecycle, watch_engine
from manylora.server.metrics import Metrics
from manylora.server.middleware import ApiKeys, BodyLimit, Gate, RequestLog
from manylora.server.settings import ServerSettings
from manylora.text.tokenizer import Tokenizer


def create_app(client: EngineClient, tokenizer: Tokenizer | None, settings: ServerSettings) -> FastAPI:
    """The ASGI app. Without a tokenizer prompts of token ids still work. Does not close the client."""
    lifecycle = Lifecycle()
    metrics = Metrics(settings.served_model_name, client.info)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watch = asyncio.create_task(watch_engine(client, lifecycle))
        try:
            yield
        finally:
            watch.cancel()

    app = FastAPI(
        title="manylora",
        version=settings.version,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.lifecycle = lifecycle
    errors.install(app)

    served = models.Models(client, settings)
    service = Service(client, tokenizer, lifecycle, metrics)
    app.include_router(completions.routes(service, served))
    app.include_router(chat.routes(service, served))
    app.include_router(models.routes(served))
    app.include_router(adapters.routes(client, settings, lifecycle, metrics))
    app.include_router(probes.routes(client, lifecycle, metrics, settings.version))
    docs.install(app)

    # The last one added is the outermost.
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(ApiKeys, api_keys=settings.api_keys)
    app.add_middleware(Gate, lifecycle=lifecycle)
    app.add_middleware(RequestLog)
    return app
