"""/docs and the OpenAPI document behind it."""

from __future__ import annotations

import html
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse

from manylora.server.schemas import (
    BODIES,
    ChatBody,
    CompletionBody,
    LoadAdapterBody,
    LoraBody,
    UnloadAdapterBody,
)

_BODY_OF = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/load_lora_adapter": LoadAdapterBody,
    "/v1/unload_lora_adapter": UnloadAdapterBody,
    "/v1/loras": LoraBody,
}


def _openapi(app: FastAPI, root: str) -> dict[str, Any]:
    """FastAPI's document with the request bodies, which are read by hand and so unknown to it."""
    if app.openapi_schema is None:
        servers = [{"url": root}] if root else None
        document = get_openapi(title=app.title, version=app.version, routes=app.routes, servers=servers)
        _, components = msgspec.json.schema_components(BODIES, ref_template="#/components/schemas/{name}")
        document.setdefault("components", {}).setdefault("schemas", {}).update(components)
        for path, body in _BODY_OF.items():
            schema = {"$ref": f"#/components/schemas/{body.__name__}"}
            document["paths"][path]["post"]["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": schema}},
            }
        app.openapi_schema = document
    return app.openapi_schema


def _plain_list(document: dict[str, Any]) -> str:
    """The routes as plain HTML."""
    rows = [
        f"<li><code>{method.upper()} {html.escape(path)}</code> {html.escape(operation['summary'])}</li>"
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    return f"<ul>{''.join(rows)}</ul>"


def routes(app: FastAPI, root: str) -> APIRouter:
    """/docs: Swagger's page, which a browser takes from the network; the plain list shows without one."""
    router = APIRouter(include_in_schema=False)

    @router.get("/docs")
    async def docs() -> HTMLResponse:
        page = get_swagger_ui_html(openapi_url=f"{root}/openapi.json", title=app.title)
        fallback = (
            f'<div id="swagger-ui"><h1>{html.escape(app.title)}</h1>{_plain_list(app.openapi())}'
            f'<p>Fields: <a href="{html.escape(root)}/openapi.json">openapi.json</a></p>'
        )
        text = bytes(page.body).decode().replace('<div id="swagger-ui">', fallback)
        return HTMLResponse(text)

    return router


def install(app: FastAPI, root: str) -> None:
    """Serve the document at /openapi.json and the page at /docs. ``root``: where a proxy serves them."""
    app.openapi = lambda: _openapi(app, root)  # type: ignore[method-assign]
    app.include_router(routes(app, root))
