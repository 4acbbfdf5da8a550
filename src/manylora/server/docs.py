"""Describes the operations of a server: their routes, the OpenAPI document, and /docs, which shows it."""

from __future__ import annotations

import dataclasses
import html
import http
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from manylora.server.connection import ServerSettings
from manylora.server.errors import TYPES, ErrorBody
from manylora.server.requests import as_read

JSON, TEXT, EVENTS = "application/json", "text/plain", "text/event-stream"

TITLE = "manylora"
_ANY = (400, 403, 408, 413, 431, 500, 503)
"""The errors that the connection and the middleware may return on any route."""

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """An operation: one method of one path.

    ``body``: the type of the request's body; ``answers``: the media types of an answer; ``errors``: statuses
    beside those of every route; ``also``: a second method, which the document omits.
    """

    method: str
    path: str
    endpoint: Endpoint
    tag: str
    summary: str
    body: type[msgspec.Struct] | None = None
    answers: tuple[str, ...] = (JSON,)
    errors: tuple[int, ...] = ()
    also: str | None = None

    def route(self) -> Route:
        """Return the route, which takes HEAD only where that is ``also``."""
        route = Route(self.path, self.endpoint)
        route.methods = {self.method} if self.also is None else {self.method, self.also}
        return route

    def described(self, has_key: bool) -> dict[str, Any]:
        """Return the operation in OpenAPI's form. ``has_key``: whether the server asks for a key."""
        route = self.route()
        statuses = {*_ANY, *self.errors, *[401] * has_key, *[415] * (self.body is not None)}
        found: dict[str, Any] = {
            "tags": [self.tag],
            "summary": self.summary,
            "operationId": re.sub(r"\W", "_", f"{route.name}{route.path_format}_{self.method.lower()}"),
            "responses": {
                "200": {"description": "Successful Response", "content": _content(self.answers, {})}
            }
            | {str(status): {"$ref": f"#/components/responses/{status}"} for status in sorted(statuses)},
        }
        if has_key:
            found["security"] = [{"key": []}]
        if route.param_convertors:
            place = {"in": "path", "required": True}
            found["parameters"] = [
                {"name": name, **place, "schema": {"type": "string", "title": name.title()}}
                for name in route.param_convertors
            ]
        if self.body is not None:
            found["requestBody"] = {"required": True, "content": _content((JSON,), _schema(self.body))}
        return found


def _content(media_types: tuple[str, ...], schema: dict[str, Any]) -> dict[str, Any]:
    return {media_type: {"schema": schema} for media_type in media_types}


def _schema(kind: type) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def document(operations: Sequence[Operation], settings: ServerSettings) -> dict[str, Any]:
    """Build the OpenAPI document."""
    kinds = [ErrorBody, *(as_read(each.body) for each in operations if each.body is not None)]
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        described = each.described(settings.asks_key(each.path))
        paths.setdefault(each.route().path_format, {})[each.method.lower()] = described
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "version": settings.version},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {
                str(status): {
                    "description": f"{http.HTTPStatus(status).phrase} ({kind})",
                    "content": _content((JSON,), _schema(ErrorBody)),
                }
                for status, kind in TYPES.items()
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    return found | {"servers": [{"url": settings.root_path}]} if settings.root_path else found


def routes(document: dict[str, Any], root: str) -> list[Route]:
    """Return the routes of the document at /openapi.json and of a page for it at /docs. ``root``: the path at
    which a proxy serves them."""
    page = _page(document, root)

    async def openapi(request: Request) -> Response:
        return JSONResponse(document)

    async def docs(request: Request) -> Response:
        return HTMLResponse(page)

    at_docs = Route("/docs", docs)
    at_docs.methods = {"GET"}
    return [Route("/openapi.json", openapi), at_docs]


def _page(document: dict[str, Any], root: str) -> str:
    """Write Swagger's page, whose scripts a browser loads from the network. Without a network it shows a
    plain list."""
    rows = [
        f"<li><code>{method.upper()} {html.escape(path)}</code> {html.escape(operation['summary'])}</li>"
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    address = html.escape(f"{root}/openapi.json")
    quoted = msgspec.json.encode(f"{root}/openapi.json").decode().replace("<", r"\u003c")
    return f"""<!DOCTYPE html>
<html>
<head>
<meta name="viewport" content="width=device-width, initial-scale=1.0">
<link type="text/css" rel="stylesheet" href="{_SWAGGER}/swagger-ui.css">
<title>{TITLE}</title>
</head>
<body>
<div id="swagger-ui"><h1>{TITLE}</h1><ul>{"".join(rows)}</ul>
<p>Fields: <a href="{address}">openapi.json</a></p></div>
<script src="{_SWAGGER}/swagger-ui-bundle.js"></script>
<script>
SwaggerUIBundle({{
  url: {quoted},
  dom_id: "#swagger-ui", layout: "BaseLayout", deepLinking: true, showExtensions: true,
  showCommonExtensions: true,
  presets: [SwaggerUIBundle.presets.apis, SwaggerUIBundle.SwaggerUIStandalonePreset],
}})
</script>
</body>
</html>
"""


_SWAGGER = "https://cdn.jsdelivr.net/npm/swagger-ui-dist@5"
