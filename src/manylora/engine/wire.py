"""Messages between a server process and its engine process, and frames: a length in four bytes, then msgpack.

All processes of a server or a cluster frame and read their messages here.

Frames over one socket pair: both sides learn of the other's death from the end of the
stream, at once and without polling. Does not know what messages are for.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
from typing import Any

import msgspec

from manylora.config.sections import EngineSettings
from manylora.engine.client import Delta, EngineStats, GenerationRequest
from manylora.engine.watchdog import Pulse
from manylora.reports import AdapterUse
from manylora.types import AdapterCard, EngineInfo

_LENGTH = struct.Struct("<I")
_MOST_AT_ONCE = 1 << 20
EMPTY = _LENGTH.pack(0)
"""A frame without a message."""
_encoder = msgspec.msgpack.Encoder()


class FrameTooLong(Exception):
    """An error: a length is over the bound; nothing was allocated for it."""


def frame(message: Any) -> bytes:
    """Encode a message, a msgspec type, with its length before it."""
    try:
        body = _encoder.encode(message)
    except UnicodeEncodeError:
        # A broken file's own words, or a path that is not UTF-8: half a character must not end the conversation.
        body = _encoder.encode(_without_surrogates(msgspec.to_builtins(message)))
    return _LENGTH.pack(len(body)) + body


def body_of(framed: bytes) -> bytes:
    """Return the encoded message of a frame."""
    return framed[_LENGTH.size :]


async def open_stream(sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open asyncio's streams over a connected socket. What arrived before the stream broke is still read."""
    loop = asyncio.get_running_loop()
    reader = _EndingReader(sock)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await loop.create_connection(lambda: protocol, sock=sock)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


class _EndingReader(asyncio.StreamReader):
    """A reader for which a broken stream ends like a closed one, after all that had arrived.

    asyncio's own drops what a process said just before it died, where a question to it could not be sent or was
    not read.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self._sock = sock

    def set_exception(self, exc: Exception) -> None:
        """Read the rest and end."""
        with contextlib.suppress(OSError):
            while data := self._sock.recv(_MOST_AT_ONCE):
                self.feed_data(data)
        self.feed_eof()


async def read_body(reader: asyncio.StreamReader, most: int = sys.maxsize) -> bytes:
    """Read the body of the next frame. Raises FrameTooLong; IncompleteReadError or OSError where the stream has
    ended."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > most:
        raise FrameTooLong(f"a frame of {length} bytes, of at most {most}")
    return await reader.readexactly(length)


async def read_message(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[Any]) -> Any | None:
    """Read the next message; None where the stream has ended."""
    try:
        return decoder.decode(await read_body(reader))
    except (asyncio.IncompleteReadError, OSError):
        return None


def receive_message(sock: socket.socket, decoder: msgspec.msgpack.Decoder[Any]) -> Any | None:
    """Wait for the next message; None where the other side has gone."""
    header = _receive(sock, _LENGTH.size)
    body = None if header is None else _receive(sock, _LENGTH.unpack(header)[0])
    return None if body is None else decoder.decode(body)


def _receive(sock: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        try:
            chunk = sock.recv(min(size - len(data), _MOST_AT_ONCE))
        except OSError:
            return None
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {key: _without_surrogates(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_surrogates(inner) for inner in value]
    return value


class Start(msgspec.Struct, tag=True):
    """The first message: build an engine with these settings."""

    settings: EngineSettings


class Submit(msgspec.Struct, tag=True):
    """Run a request."""

    request: GenerationRequest


class Cancel(msgspec.Struct, tag=True):
    """End a request or one of its samples early."""

    request: str
    sample: int | None
    reason: str


class Call(msgspec.Struct, tag=True):
    """Ask for something that is answered once: add, remove, adapters or stats."""

    id: int
    what: str
    name: str = ""
    path: str = ""


class DropCall(msgspec.Struct, tag=True):
    """Drop a Call: if it has not begun, it need not be done or answered."""

    id: int


ToEngine = Start | Submit | Cancel | Call | DropCall


class EngineReady(msgspec.Struct, tag=True):
    """The engine serves, in this process."""

    info: EngineInfo
    pid: int = 0


class Failed(msgspec.Struct, tag=True):
    """The engine will not come up, or has just died."""

    message: str
    is_user_error: bool = False


class Deltas(msgspec.Struct, tag=True):
    """Deltas of requests."""

    deltas: list[Delta]


class Loads(msgspec.Struct, tag=True):
    """Some of the adapters of a Call's Answer, which follows after them all."""

    id: int
    loads: tuple[AdapterUse, ...]


class Answer(msgspec.Struct, tag=True):
    """The one answer to a Call; ``status`` 0: success."""

    id: int
    status: int = 0
    message: str = ""
    cards: tuple[AdapterCard, ...] = ()
    stats: EngineStats | None = None


class Beat(msgspec.Struct, tag=True):
    """A sign of life of the engine's process, with its loop's work."""

    pulse: Pulse


ToServer = EngineReady | Failed | Deltas | Loads | Answer | Beat

_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_server = msgspec.msgpack.Decoder(ToServer)


async def read_from_engine(reader: asyncio.StreamReader) -> ToServer | None:
    """Read the engine's next message; None if it has gone."""
    message: ToServer | None = await read_message(reader, _to_server)
    return message


def read_from_server(sock: socket.socket) -> ToEngine | None:
    """Read the server's next message (blocking); None if it has gone."""
    message: ToEngine | None = receive_message(sock, _to_engine)
    return message
