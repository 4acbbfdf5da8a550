"""Handles every request, whatever its route: id and log line, host, refusal, API key, body size.

Pure ASGI, so that streams pass through untouched and context variables survive. The server speaks HTTP only, so
every scope is one of HTTP.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import ipaddress
import logging
import re
import socket
import time
import uuid
from collections.abc import Awaitable, Callable
from fnmatch import fnmatchcase

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from manylora.server.connection import ServerSettings, log_request
from manylora.server.errors import ApiError, clipped
from manylora.server.lifecycle import Disconnected, Lifecycle

logger = logging.getLogger("manylora.server")

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
PROBES = frozenset({"/health", "/healthz", "/ping", "/version", "/metrics"})
"""The paths that are answered while the server drains, its engine is dead or its connections are all taken."""
_PORT = re.compile(r":\d*$")
_CLIENT_CLOSED_REQUEST = 499


class RequestLog:
    """Gives each request its id (the client's own if it sent one) and writes one log line at its end.

    Removes ``root``, the path at which a proxy serves the app, from a request's path, where the proxy has not done
    so. Nothing else does this, so every part that checks a path, such as for keys, sees the same one.
    """

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app = app
        self._root = root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        start_s = time.perf_counter()
        if scope["path"].startswith(self._root + "/"):
            scope["path"] = scope["path"].removeprefix(self._root)
        scope["path"] = scope["path"].rstrip("/") or "/"  # a trailing slash is ignored
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        status = _CLIENT_CLOSED_REQUEST

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except (Disconnected, ClientDisconnect):
            status = _CLIENT_CLOSED_REQUEST
        except Exception:
            logger.exception("request %s failed", request_id)
            if status != _CLIENT_CLOSED_REQUEST:
                raise
            error = f"internal error; the server's log says more under request id {request_id}"
            await ApiError(500, error).response()(scope, receive, send_with_id)
        finally:
            duration_s = time.perf_counter() - start_s
            path = clipped(scope["path"])
            log_request(request_id, state.get("model"), status, duration_s, scope["method"], path)


class Gate:
    """Counts open requests. Refuses new and incomplete ones while the server drains or its engine is dead."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        refusal = self._lifecycle.refusal()
        if refusal is not None:
            await refusal.response()(scope, receive, send)
            return
        with self._lifecycle.opened():
            await self._app(scope, self._body_of(receive), send)

    def _body_of(self, receive: Receive) -> Receive:
        """Wrap ``receive`` so that a wait for more of the body ends when requests are refused."""
        is_whole = False

        async def receive_body() -> Message:
            nonlocal is_whole
            if is_whole:
                return await receive()
            async with self._lifecycle.reading():
                message = await receive()
            is_whole = not message.get("more_body", False)
            return message

        return receive_body


class ApiKeys:
    """Asks for one of the keys where ``settings`` require it.

    Stores the digest of the key that was sent as ``state["api_key"]``, and its place among the keys as
    ``state["api_key_place"]``.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        # Digests have equal lengths, so that a comparison takes the same time for any key.
        self._digests = [_digest(key.encode()) for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if self._settings.asks_key(scope["path"]) and not self._is_allowed(scope):
            error = ApiError(401, "missing or wrong API key", headers={"WWW-Authenticate": "Bearer"})
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        # Header values are decoded as latin-1; a key's UTF-8 is compared with the bytes.
        digest = _digest(key.strip().encode("latin-1"))
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            return False
        state = scope.setdefault("state", {})
        state["api_key"], state["api_key_place"] = digest, matches.index(True)
        return True


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class BodyLimit:
    """Refuses a body over a size, by its announced length or, where none is announced, while it arrives.

    Also refuses a body that the connection has refused while it arrived: a malformed or incomplete one.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > self._max_bytes:
            await self._too_large().response()(scope, receive, send)
            return
        num_bytes = 0

        async def receive_counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            refusal: ApiError | None = scope["state"].get("refusal")
            if refusal is not None:
                raise refusal
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_bytes:
                    raise self._too_large()
            return message

        await self._app(scope, receive_counted, send)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the request's body is over the limit of {self._max_bytes} bytes")


# A page of any site can have its visitor's browser send requests to servers of the visitor's own machine. A site
# whose name resolves to that machine's address can also read the answers.


def allowed_hosts(given: tuple[str, ...], bound: str, sock: socket.socket) -> tuple[str, ...]:
    """Return the patterns of host names that clients may use. The default is the loopback's names and
    ``bound``, the name in the settings, where ``sock`` listens on the loopback only; else every name."""
    if not given:
        is_ip = sock.family in (socket.AF_INET, socket.AF_INET6)
        is_local = is_ip and ipaddress.ip_address(sock.getsockname()[0]).is_loopback
        given = ("localhost", "127.0.0.1", "::1", bound) if is_local else ("*",)
    return tuple(name.strip(" []").lower() for names in given for name in names.split(","))


class AllowedHosts:
    """Refuses requests to a host of another name. A request without a host name comes from no browser."""

    def __init__(self, app: ASGIApp, patterns: tuple[str, ...]) -> None:
        self._app = app
        self._patterns = patterns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        app = self._app
        for host in Headers(scope=scope).getlist("host"):
            name = _PORT.sub("", host).strip("[]").lower()
            if not any(fnmatchcase(name, pattern) for pattern in self._patterns):
                error = f"this server is not to be called {clipped(name)!r}; see --allowed-hosts"
                app = ApiError(403, error).response()
        await app(scope, receive, send)


def same_origin(
    endpoint: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """Wrap an endpoint so that it refuses requests from pages of another origin."""

    @functools.wraps(endpoint)
    async def checked(request: Request) -> Response:
        origin, host = request.headers.get("origin"), request.headers.get("host", "")
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            raise ApiError(403, f"pages of {clipped(origin)} may not manage this server")
        return await endpoint(request)

    return checked
