"""One HTTP connection: uvicorn's, with bounds on its requests' heads, on time, and on the number of connections.

Refuses, in the error body of all routes, what no route gets to see: malformed HTTP, heads that are too large,
requests that do not come to their end, connections beyond the limit. Does not know what is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import resource
import uuid
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from manylora.server.access import log_request
from manylora.server.errors import ApiError, try_later

MAX_AHEAD = 16
"""Requests that a client may send before the answer to an earlier one has ended."""
_LINGER_S = 2.0
# For all that is not a connection: the engine, log files, libraries that are loaded late.
_RESERVED_FILES = 128


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """``head_bytes`` bound the request line with all headers, or the trailers of a chunked body.

    ``head_s``: from a connection to its first byte, and from a request's first byte to the end of its headers.
    ``body_s``: within a body, without a byte.
    """

    max_connections: int = 16_384
    head_bytes: int = 64 * 2**10
    head_s: float = 10.0
    body_s: float = 30.0


def connections_allowed(wanted: int) -> int:
    """How many of ``wanted`` connections the limit on open files allows, after raising it as far as it goes."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a system may allow less than it names
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files == resource.RLIM_INFINITY:
        return wanted
    return min(wanted, num_files - min(_RESERVED_FILES, num_files // 2))


class _Part(enum.Enum):
    """What of a request is expected next."""

    NOTHING = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()


class Connection(HttpToolsProtocol):
    """Parses requests and runs the app for each.

    A request that is refused while its body is read gets the refusal as its answer (``refusal`` in its scope's
    state); one without an answer of its own is answered here, once all before it have been; then the connection
    closes, and what still comes is dropped.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._part = _Part.NOTHING
        self._num_begun = 0
        self._num_unanswered = 0
        # Bytes since the parser last came to the end of a head, a piece of body, or a request.
        self._num_unseen = 0
        self._refusal: ApiError | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._start_s = self.loop.time()

    # ------------------------------------------------------------ the transport's side

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._refusal = try_later(503, "the server has as many connections as it may have")
            self._write(self._refusal)
            transport.close()
            return
        self._set_deadline(self._limits.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._set_deadline(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._refusal is not None:
            return
        before = self._part, self._num_begun
        most = self._limits.head_bytes
        while data and self._refusal is None:
            room = most - self._num_unseen
            piece, data = (data, b"") if len(data) <= room else (data[:room], data[room:])
            self._num_unseen += len(piece)
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade:
                break  # no other protocol is spoken here; the request is served as it is
            except httptools.HttpParserError:
                self._refuse(ApiError(400, "the request is not valid HTTP"))
            else:
                if self._num_unseen >= most:
                    what = "trailers" if self._part is _Part.BODY else "headers"
                    self._refuse(ApiError(431, f"the request's {what} are over the limit of {most} bytes"))
        self._watch(is_new=(self._part, self._num_begun) != before)

    # ------------------------------------------------------------ the parser's side

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self._unset_keepalive_if_required()
        self._num_begun += 1
        self._part = _Part.HEAD
        if not self._num_unanswered:
            self._start_s = self.loop.time()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The end of a request's headers."""
        self._num_unseen = 0
        self._unset_keepalive_if_required()
        super().on_headers_complete()
        self._part = _Part.BODY
        self._num_unanswered += 1
        if len(self.pipeline) > MAX_AHEAD:
            self._refuse(ApiError(400, f"more than {MAX_AHEAD} requests were sent ahead"))
            raise httptools.HttpParserError("nothing more is read")

    def on_body(self, body: bytes) -> None:
        """A piece of a request's body."""
        self._num_unseen = 0
        super().on_body(body)  # which stops reading where much has come that the app has not asked for

    def on_message_complete(self) -> None:
        """The end of a request."""
        self._num_unseen = 0
        self._part = _Part.NOTHING
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The last byte of an answer has been handed over."""
        self._num_unanswered -= 1
        super().on_response_complete()
        if self._refusal is not None and not self._num_unanswered:
            self._answer_refusal()
        else:
            self._watch(is_new=True)

    # ------------------------------------------------------------ deadlines

    def _watch(self, is_new: bool) -> None:
        """Set the deadline for what the client has to send. ``is_new``: it is something else than before."""
        if self._refusal is not None or self.transport.is_closing():
            return
        # While an earlier request is answered, reading may be paused, which is no fault of the client.
        if self._part is _Part.BODY and self._num_unanswered <= 1:
            self._set_deadline(self._limits.body_s)
        elif self._part is _Part.HEAD and not self._num_unanswered:
            if is_new:
                self._set_deadline(self._limits.head_s)
        elif self._num_begun:
            self._set_deadline(None)  # between requests uvicorn's own one holds

    def _set_deadline(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self._deadline_passed)

    def _deadline_passed(self) -> None:
        if self._refusal is not None:
            self.transport.abort()
        elif self._part is _Part.HEAD:
            self._refuse(ApiError(408, f"the headers were not complete within {self._limits.head_s:g} s"))
        elif self._part is _Part.BODY:
            self._refuse(ApiError(408, f"nothing came of the body for {self._limits.body_s:g} s"))
        else:
            self.transport.close()

    # ------------------------------------------------------------ refusals

    def _refuse(self, error: ApiError) -> None:
        """Read no more; the answers that are due come first."""
        if self._refusal is not None:
            return
        self._refusal = error
        self._set_deadline(None)
        if self._part is _Part.BODY:
            if self.pipeline:
                self.pipeline.popleft()  # the newest, which will never be whole
                self._num_unanswered -= 1
            elif not self.cycle.response_complete:
                self.cycle.keep_alive = False
                self.cycle.scope["state"]["refusal"] = error
                self.cycle.message_event.set()
                return
        if not self._num_unanswered:
            self._answer_refusal()

    def _answer_refusal(self) -> None:
        """Close in such a way that a client that is still sending gets to read why."""
        if self.transport.is_closing() or self._refusal is None:
            return
        if self._part is _Part.BODY and self.cycle.response_complete and not self.pipeline:
            self.transport.close()  # the request at fault has had its answer
            return
        self._write(self._refusal)
        self.flow.resume_reading()
        self.transport.write_eof()
        self._set_deadline(_LINGER_S)

    def _write(self, error: ApiError) -> None:
        request_id, body = uuid.uuid4().hex, error.body()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-request-id": request_id,
            "connection": "close",
            **(error.headers or {}),
        }
        lines = [name + b": " + value + b"\r\n" for name, value in self.server_state.default_headers]
        lines += [f"{name}: {value}\r\n".encode() for name, value in headers.items()]
        self.transport.write(b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body]))
        log_request(request_id, None, error.status, self.loop.time() - self._start_s, "-", "-")
