"""From where a browser may come: names that it may know this server by, and pages that may manage adapters.

A page of any site can have its visitor's browser send requests to servers of the visitor's own machine. A site
that gives its name that machine's address can read the answers as well.
"""

from __future__ import annotations

import functools
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable
from fnmatch import fnmatchcase

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from manylora.server.errors import ApiError, clipped

_PORT = re.compile(r":\d*$")


def allowed_hosts(given: tuple[str, ...], bound: str, sock: socket.socket) -> tuple[str, ...]:
    """The patterns of names that clients may use: by default those of the loopback, where ``sock`` listens on that
    alone, and the name ``bound`` that it was given."""
    if not given:
        is_ip = sock.family in (socket.AF_INET, socket.AF_INET6)
        is_local = is_ip and ipaddress.ip_address(sock.getsockname()[0]).is_loopback
        given = ("localhost", "127.0.0.1", "::1", bound) if is_local else ("*",)
    return tuple(name.strip(" []").lower() for names in given for name in names.split(","))


class AllowedHosts:
    """Refuses requests to a host of another name. One without a name comes from no browser."""

    def __init__(self, app: ASGIApp, patterns: tuple[str, ...]) -> None:
        self._app = app
        self._patterns = patterns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        app = self._app
        if scope["type"] == "http":
            for host in Headers(scope=scope).getlist("host"):
                name = _PORT.sub("", host).strip("[]").lower()
                if not any(fnmatchcase(name, pattern) for pattern in self._patterns):
                    error = f"this server is not to be called {clipped(name)!r}; see --allowed-hosts"
                    app = ApiError(403, error).response()
        await app(scope, receive, send)


def same_origin(
    endpoint: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """Let the endpoint refuse requests that a page of another origin sends."""

    @functools.wraps(endpoint)
    async def checked(request: Request) -> Response:
        origin = request.headers.get("origin")
        if (
            origin is not None
            and origin.partition("://")[2].lower() != request.headers.get("host", "").lower()
        ):
            raise ApiError(403, f"pages of {clipped(origin)} may not manage this server")
        return await endpoint(request)

    return checked
