"""Just enough of HTTP/1.1 for a benchmark's client: bodies line by line as they come, connections kept.

Owns connections and their parsing, on asyncio's protocols: a general client would cost more for each token than
the server spends on it, and none has to be installed.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

from manylora.config.declaring import ConfigError

_MOST_HEAD_BYTES = 2**16
SILENCE_S = 300.0
"""A server that says nothing to any open request for so long hangs. One that is overloaded may let a single
request wait for longer, while others hear from it."""


class HttpFailure(Exception):
    """The server answered with an error, or not in HTTP, or broke off; the message is one line."""


class HttpClient:
    """Requests to one server. Used from one event loop."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"--url {url} is not an address: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url must be like http://127.0.0.1:8000, got {url!r}")
        self._is_tls = parts.scheme == "https"
        self._host, self._port = parts.hostname, port or (443 if self._is_tls else 80)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        headers = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._idle: list[_Connection] = []
        self.heard_s = 0.0
        """When the server last said anything, on the event loop's clock."""

    async def fetch(self, path: str) -> bytes:
        """GET; the body. Raises as ``send``."""
        lines: list[bytes] = []
        await self.send("GET", path, b"", lines.append)
        return b"\n".join(lines)

    async def send(self, method: str, path: str, body: bytes, on_line: Callable[[bytes], None]) -> None:
        """``on_line`` is told each line of the answer's body, at once. Raises OSError and HttpFailure, and
        whatever ``on_line`` raises."""
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
        request = head.encode() + body
        while self._idle:
            try:
                return await self._exchange(self._idle.pop(), request, on_line)
            except _Stale:
                pass  # The server had closed it before it read anything.
        await self._exchange(await self._connect(), request, on_line)

    async def close(self) -> None:
        """Close the connections that are kept."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connect(self) -> _Connection:
        context = ssl.create_default_context() if self._is_tls else None
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: _Connection(self), self._host, self._port, ssl=context
        )
        return connection

    async def _exchange(
        self, connection: _Connection, request: bytes, on_line: Callable[[bytes], None]
    ) -> None:
        is_pinned = False
        try:
            is_pinned = await connection.exchange(request, on_line)
        finally:
            if is_pinned:
                self._idle.append(connection)
            else:
                connection.close()


class _Stale(Exception):
    """A kept connection was closed by the server meanwhile."""


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._is_fresh = True
        self._is_lost = False
        self._done: asyncio.Future[bool] | None = None
        self._begin(lambda line: None)

    def _begin(self, on_line: Callable[[bytes], None]) -> None:
        self._on_line = on_line
        self._buffer = b""
        self._line = b""
        self._status = 0
        self._is_chunked = False
        self._left: int | None = 0  # of the chunk, or of the body; None: until the server closes
        self._is_kept = True
        self._error_lines: list[bytes] = []

    async def exchange(self, request: bytes, on_line: Callable[[bytes], None]) -> bool:
        """Whether another request can follow."""
        if self._is_lost or self._transport is None:
            raise HttpFailure("the connection broke off") if self._is_fresh else _Stale
        self._begin(on_line)
        loop = asyncio.get_running_loop()
        self._done = loop.create_future()
        self._transport.write(request)
        self._limit = loop.call_later(SILENCE_S, self._check_silence)
        try:
            is_pinned = await self._done
        finally:
            self._limit.cancel()
            self._done = None
        self._is_fresh = False
        if self._status != 200:
            text = b" ".join(self._error_lines).decode(errors="replace")
            raise HttpFailure(f"HTTP {self._status}: {' '.join(text.split())[:300]}")
        return is_pinned

    def close(self) -> None:
        self._is_lost = True
        if self._transport is not None:
            self._transport.abort()

    def _check_silence(self) -> None:
        loop = asyncio.get_running_loop()
        left_s = self._client.heard_s + SILENCE_S - loop.time()
        if left_s > 0:
            self._limit = loop.call_later(left_s, self._check_silence)
        elif self._done is not None and not self._done.done():
            self._done.set_exception(HttpFailure(f"the server has said nothing for {SILENCE_S:.0f} s"))

    # ------------------------------------------------------------ asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by name

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        if self._done is None or self._done.done():
            return
        if not self._status and not self._is_fresh and not self._buffer:
            self._done.set_exception(_Stale())
        elif self._status and self._left is None:
            self._end_body()
        else:
            self._done.set_exception(error or HttpFailure("the connection broke off"))

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            self.close()  # Nothing was asked.
            return
        self._client.heard_s = asyncio.get_running_loop().time()
        self._buffer += data
        try:
            if self._status or self._read_head():
                self._read_body()
        except Exception as error:
            if not self._done.done():
                self._done.set_exception(error)

    # ------------------------------------------------------------ parsing

    def _read_head(self) -> bool:
        """Whether it is there, whole."""
        raw, end, rest = self._buffer.partition(b"\r\n\r\n")
        if not raw.startswith(b"HTTP/"[: len(raw)]) or len(raw) > _MOST_HEAD_BYTES:
            raise HttpFailure("it does not speak HTTP")
        if not end:
            return False
        self._buffer = rest
        first, *lines = raw.decode("latin-1").split("\r\n")
        words = first.split()
        if len(words) < 2 or not words[1].isdigit():
            raise HttpFailure("it does not speak HTTP")
        pairs = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip().lower() for name, _, value in pairs}
        self._status = int(words[1])
        self._is_kept = words[0] == "HTTP/1.1" and headers.get("connection") != "close"
        self._is_chunked = "chunked" in headers.get("transfer-encoding", "")
        length = headers.get("content-length")
        self._left = 0 if self._is_chunked else None if length is None else int(length)
        self._is_kept &= self._left is not None
        return True

    def _read_body(self) -> None:
        if self._is_chunked:
            self._read_chunks()
            return
        data = self._buffer if self._left is None else self._buffer[: self._left]
        self._buffer = b""
        if self._left is not None:
            self._left -= len(data)
        self._take(data)
        if self._left == 0:
            self._end_body()

    def _read_chunks(self) -> None:
        while True:
            size, end, rest = self._buffer.partition(b"\r\n")
            if not end:
                return
            length = int(size.split(b";")[0], 16)
            if len(rest) < length + 2:
                return
            self._buffer = rest[length + 2 :]
            self._take(rest[:length])
            if length == 0:
                self._end_body()
                return

    def _take(self, data: bytes) -> None:
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            self._tell(line.removesuffix(b"\r"))

    def _tell(self, line: bytes) -> None:
        if self._status == 200:
            self._on_line(line)
        else:
            self._error_lines.append(line)

    def _end_body(self) -> None:
        if self._line:
            self._tell(self._line)
        assert self._done is not None
        self._done.set_result(self._is_kept)


def allow_many_connections() -> None:
    """Raise this process's limit of open files as far as it may."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError):
        pass
