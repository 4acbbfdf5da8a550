"""Handles one HTTP connection: uvicorn's, with bounds on its requests' heads, on time, and on the number of
connections.

Refuses, with the error body of all routes, requests that reach no route: malformed HTTP, heads that are too
large, incomplete requests, and connections beyond the limit. Disconnects clients that do not read. Does not
know what is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import logging
import math
import resource
import sys
import termios
import uuid
from pathlib import Path
from typing import Any, Literal

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from manylora.server.errors import ApiError, try_later

access = logging.getLogger("manylora.server.access")

MAX_AHEAD = 16
"""The most requests that a client may send before the answer to an earlier one has ended."""
PROBE_CONNECTIONS = 32
"""The number of further connections for probes only. Each serves one probe, whose headers must arrive quickly."""
_PROBE_HEAD_S = 2.0
LINGER_S = 2.0
"""The time for which bytes after the answer are read and dropped, so that the client can read the reason."""
_LOOKS = 8  # the number of checks in ``write_s``
# Files other than connections: the engine, log files, libraries that are loaded late.
_RESERVED_FILES = 128


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits of a connection. ``head_bytes``: of the request line with all headers, or of the trailers of
    a chunked body.

    ``head_s``: from a connection to its first byte, and from a request's first byte to the end of its
    headers. ``body_s``: the time over which a body must arrive at ``body_bytes_per_s`` or faster.
    ``upload_bytes``: of all incomplete bodies together. ``write_s``: the time for which a client may read
    nothing of a waiting answer. ``probes``: paths that have connections beside ``max_connections``.
    """

    max_connections: int = 16_384
    head_bytes: int = 64 * 2**10
    head_s: float = 10.0
    body_s: float = 30.0
    body_bytes_per_s: int = 1024
    upload_bytes: int = 128 * 2**20
    write_s: float = 30.0
    probes: frozenset[str] = frozenset()

    @property
    def least_body_bytes(self) -> int:
        """The number of bytes of a body that must arrive in ``body_s``."""
        return int(self.body_s * self.body_bytes_per_s)


@dataclasses.dataclass(frozen=True, slots=True)
class ServerSettings:
    """The settings of one server. ``served_model_name``: the base's id in answers; ``other_names``: further
    ids that clients may use for it; ``model_root``: the model as the operator named it.

    ``adapter_dir`` is the only folder that runtime loads may read; without it runtime loading is off. Without
    ``api_keys`` everyone may use /v1/* and /metrics. ``metrics_open``: everyone may use /metrics also with
    keys. ``max_body_bytes``: None: as the model's context and vocabulary need. ``trusts_templates``: whether
    requests may contain chat templates. ``root_path``: the path at which a proxy serves the app, without a
    slash at its end. ``allowed_hosts``: patterns of the host names that clients may use.
    """

    served_model_name: str
    model_root: str
    version: str
    adapter_dir: Path | None = None
    api_keys: tuple[str, ...] = ()
    metrics_open: bool = False
    max_body_bytes: int | None = None
    trusts_templates: bool = False
    connections: ConnectionLimits = dataclasses.field(default_factory=ConnectionLimits)
    other_names: tuple[str, ...] = ()
    root_path: str = ""
    allowed_hosts: tuple[str, ...] = ("*",)

    def asks_key(self, path: str) -> bool:
        """Return whether a request to the path needs one of the keys. /v1/* and /cluster need one, and
        /metrics, which names every adapter, unless ``metrics_open``."""
        if not self.api_keys:
            return False
        if path == "/metrics":
            return not self.metrics_open
        return path in ("/v1", "/cluster") or path.startswith("/v1/")

    @property
    def names(self) -> tuple[str, ...]:
        """The ids of the base, its id in answers first."""
        return (self.served_model_name, *self.other_names)


def connections_allowed(wanted: int) -> int:
    """Raise the limit on open files, and return how many of ``wanted`` connections it allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a system may allow fewer files than it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files == resource.RLIM_INFINITY:
        return wanted
    return min(wanted, num_files - min(_RESERVED_FILES, num_files // 2))


def log_request(
    request_id: str, model: str | None, status: int, duration_s: float, method: str = "-", path: str = "-"
) -> None:
    """Write a request's log line. One that could not be read has "-" as method and path."""
    facts = request_id, model, status, duration_s, method, path
    access.info("id=%s model=%r status=%d duration=%.3fs %s %r", *facts)


def _no_room() -> ApiError:
    return try_later(503, "the server has as many connections as it may have")


def _end_by_closing(cycle: RequestResponseCycle) -> None:
    """Answer in HTTP/1.0, which has no chunks: without a length, the end of the connection ends the body."""
    cycle.waiting_for_100_continue = False
    send = cycle.send

    async def send_plain(message: Any) -> None:
        if message["type"] == "http.response.start":
            if all(name.lower() != b"content-length" for name, _ in message.get("headers", ())):
                cycle.chunked_encoding = False
        elif cycle.chunked_encoding is False and not cycle.expected_content_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]


class Connection(HttpToolsProtocol):
    """A connection that parses requests and runs the app for each.

    A request that is refused while its body is read gets the refusal as its answer (``refusal`` in its
    scope's state). A request that never reached the app is answered here, after all earlier requests. Then
    the connection closes, and further bytes are dropped.
    """

    def __init__(self, limits: ConnectionLimits, uploads: Uploads, **given: Any) -> None:
        """``given``: uvicorn's own arguments."""
        super().__init__(**given)
        self._limits = limits
        self._uploads = uploads
        self._part: Literal["head", "body"] | None = None  # of a request: it is expected next
        self._num_begun = 0
        self._num_unanswered = 0
        # Bytes since the parser last reached the end of a head, a piece of body, or a request.
        self._num_unseen = 0
        self._num_body_bytes = 0  # since the deadline was set
        self._refusal: ApiError | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._start_s = self.loop.time()

    # ------------------------------------------------------------ the transport's side

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        num_beyond = len(self.connections) - self._limits.max_connections
        self._is_for_probes = num_beyond > 0
        self._head_s = min(self._limits.head_s, _PROBE_HEAD_S if self._is_for_probes else math.inf)
        if num_beyond > PROBE_CONNECTIONS:
            self._refusal = _no_room()
            self._write(self._refusal)
            transport.close()
            return
        self._set_deadline(self._head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._set_deadline(None)
        self._stop_watching()
        self._uploads.end(self)
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
            except httptools.HttpParserUpgrade as upgrade:
                data = self._head_again() + piece[upgrade.args[0] :] + data
                self._num_unseen = 0
                self.parser = httptools.HttpRequestParser(self)
            except httptools.HttpParserError:
                self.refuse(ApiError(400, "the request is not valid HTTP"))
            else:
                if self._num_unseen >= most:
                    what = "trailers" if self._part == "body" else "headers"
                    self.refuse(ApiError(431, f"the request's {what} are over the limit of {most} bytes"))
        self._watch(is_new=(self._part, self._num_begun) != before)

    def _head_again(self) -> bytes:
        """Rebuild the request's head without its ``Upgrade`` header. No other protocol is spoken here, and
        the parser reads no body after such a header."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [name + b":" + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    # ------------------------------------------------------------ the parser's side

    def on_message_begin(self) -> None:
        """Begin a request, at its first byte."""
        self._unset_keepalive_if_required()
        self._num_begun += 1
        self._part = "head"
        if not self._num_unanswered:
            self._start_s = self.loop.time()
        super().on_message_begin()
        self.scope["state"]["flow"] = self.flow  # a stream continues while its client does not read

    def on_headers_complete(self) -> None:
        """Check a request's headers, and begin its body."""
        self._num_unseen = 0
        self._unset_keepalive_if_required()
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise httptools.HttpParserError("no proxy")
            return
        path = self.url.partition(b"?")[0].rstrip(b"/").decode("latin-1")
        if self._is_for_probes and path not in self._limits.probes:
            self.refuse(_no_room())
            raise httptools.HttpParserError("nothing more is read")
        super().on_headers_complete()
        if self._is_for_probes:
            self.cycle.keep_alive = False
        if self.parser.get_http_version() == "1.0":
            _end_by_closing(self.cycle)
        self._part = "body"
        self._num_unanswered += 1
        if len(self.pipeline) > MAX_AHEAD:
            self.refuse(ApiError(400, f"more than {MAX_AHEAD} requests were sent ahead"))
            raise httptools.HttpParserError("nothing more is read")

    def on_body(self, body: bytes) -> None:
        """Count and pass on a piece of a request's body."""
        self._num_unseen = 0
        self._num_body_bytes += len(body)
        if not self.cycle.response_complete:
            self._uploads.add(self, len(body), self.loop.time())
        super().on_body(body)  # this pauses reading where the app lags behind

    def on_message_complete(self) -> None:
        """End a request: its last byte has arrived."""
        if self.parser.should_upgrade():
            return
        self._num_unseen = 0
        self._part = None
        self._uploads.end(self)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """End an answer: its last byte has been handed to the transport."""
        self._num_unanswered -= 1
        super().on_response_complete()
        if self.cycle.response_complete:
            self._uploads.end(self)  # the rest of the body is dropped
        if self.transport.is_closing():
            self._watch_reader()
        if self._refusal is not None and not self._num_unanswered:
            self._answer_refusal()
        else:
            self._watch(is_new=True)

    # ------------------------------------------------------------ deadlines

    def _watch(self, is_new: bool) -> None:
        """Set the deadline for the next bytes from the client. ``is_new``: the awaited part has changed."""
        if self._refusal is not None or self.transport.is_closing():
            return
        # While an earlier request is answered, reading may be paused, which is no fault of the client.
        if self._part == "body" and self._num_unanswered <= 1:
            if is_new or (self._num_unanswered and self._num_body_bytes >= self._limits.least_body_bytes):
                self._num_body_bytes = 0
                self._set_deadline(self._limits.body_s if self._num_unanswered else LINGER_S)
        elif self._part == "head" and not self._num_unanswered:
            if is_new:
                self._set_deadline(self._head_s)
        elif self._num_begun:
            self._set_deadline(None)  # between requests uvicorn's own deadline holds

    def _set_deadline(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self._deadline_passed)

    def _deadline_passed(self) -> None:
        if self._refusal is not None:
            self.transport.abort()
        elif self._part == "body" and not self._num_unanswered:
            self.transport.close()  # the rest of the body has been dropped for long enough
        elif self._part == "body" and self.flow.read_paused:
            self._watch(is_new=True)
        elif self._part == "body":
            come = f"{self._num_body_bytes} bytes of the body came in {self._limits.body_s:g} s"
            self.refuse(ApiError(408, f"{come}, not {self._limits.least_body_bytes}"))
        elif self._is_for_probes:
            self.refuse(_no_room())
        elif self._part == "head":
            self.refuse(ApiError(408, f"the headers were not complete within {self._limits.head_s:g} s"))
        else:
            self.transport.close()

    # ------------------------------------------------------------ clients that do not read

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self._stop_watching()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection on which no further request has arrived."""
        if not self.transport.is_closing():
            super().timeout_keep_alive_handler()
            self._watch_reader()

    def _watch_reader(self, before: int = -1, num_looks: int = 0) -> None:
        """Disconnect the client when it has read nothing of an answer for ``write_s``.

        ``before``: the system's unsent bytes at the last ``num_looks`` checks. The connection's own buffer
        does not show whether a slow client reads, since it waits until much of the system's buffer is free.
        """
        sock = self.transport.get_extra_info("socket")
        unsent = int.from_bytes(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        self._stop_watching()
        num_looks = num_looks + 1 if unsent == before else 0
        if num_looks == _LOOKS:
            self.transport.abort()
        else:
            wait_s = self._limits.write_s / _LOOKS
            self._stall = self.loop.call_later(wait_s, self._watch_reader, unsent, num_looks)

    def _stop_watching(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    # ------------------------------------------------------------ refusals

    def refuse(self, error: ApiError) -> None:
        """Read no more, and answer with this error after the answers that are due."""
        if self._refusal is not None:
            return
        self._refusal = error
        self._uploads.end(self)
        self._set_deadline(None)
        if self._part == "body":
            if self.pipeline:
                self.pipeline.popleft()  # the newest request, which will never be complete
                self._num_unanswered -= 1
            elif not self.cycle.response_complete:
                self.cycle.keep_alive = False
                self.cycle.scope["state"]["refusal"] = error
                self.cycle.message_event.set()
                return
        if not self._num_unanswered:
            self._answer_refusal()

    def _answer_refusal(self) -> None:
        """Send the refusal, and close so that a client that is still sending can read it."""
        if self.transport.is_closing() or self._refusal is None:
            return
        if self._part == "body" and self.cycle.response_complete and not self.pipeline:
            self.transport.close()  # the request at fault has had its answer
            return
        self._write(self._refusal)
        if self._is_for_probes:
            self.transport.close()  # another probe needs the connection
            return
        self.flow.resume_reading()
        self.transport.write_eof()
        self._set_deadline(LINGER_S)

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
        log_request(request_id, None, error.status, self.loop.time() - self._start_s)


@dataclasses.dataclass(slots=True)
class _Upload:
    start_s: float
    num_bytes: int = 0

    def bytes_per_s(self, now_s: float) -> float:
        return self.num_bytes / max(now_s - self.start_s, 1e-3)


class Uploads:
    """The bodies that are not complete yet. A complete body belongs to its request."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._open: dict[Connection, _Upload] = {}

    def add(self, uploader: Connection, num_bytes: int, now_s: float) -> None:
        """Count a piece. Beyond the bound the slowest bodies are refused, since fast ones are complete soon."""
        self._open.setdefault(uploader, _Upload(now_s)).num_bytes += num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            slowest = min(self._open, key=lambda each: self._open[each].bytes_per_s(now_s))
            self.end(slowest)
            fault = f"bodies of {self._max_bytes} bytes are on their way; this one is the slowest"
            slowest.refuse(try_later(503, fault))

    def end(self, uploader: Connection) -> None:
        """Forget a body that is complete or is read no more. It may be called repeatedly."""
        if (upload := self._open.pop(uploader, None)) is not None:
            self._num_bytes -= upload.num_bytes
