"""What a server process and its engine process say to each other.

Frames over one socket pair: both sides learn of the other's death from the end of the
stream, at once and without polling. Does not know what messages are for.
"""

from __future__ import annotations

import asyncio
import socket

import msgspec

from manylora.config import EngineSettings
from manylora.engine.client import Delta, EngineStats, GenerationRequest
from manylora.engine.frames import frame as frame  # of this module, too
from manylora.engine.frames import read_message, receive_message
from manylora.engine.watchdog import Pulse
from manylora.reports import AdapterUse
from manylora.types import AdapterCard, EngineInfo


class Start(msgspec.Struct, tag=True):
    """The first message: what engine to build."""

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
    """The client has dropped this Call: what has not begun need not be done, nor answered."""

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
    """News of requests."""

    deltas: list[Delta]


class Loads(msgspec.Struct, tag=True):
    """Some of the adapters that the Answer to this Call leaves out; it comes after them all."""

    id: int
    loads: tuple[AdapterUse, ...]


class Answer(msgspec.Struct, tag=True):
    """The one answer to a Call; ``status`` is 0 when it went well."""

    id: int
    status: int = 0
    message: str = ""
    cards: tuple[AdapterCard, ...] = ()
    stats: EngineStats | None = None


class Beat(msgspec.Struct, tag=True):
    """The engine's process lives, and this is what its loop does."""

    pulse: Pulse


ToServer = EngineReady | Failed | Deltas | Loads | Answer | Beat

_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_server = msgspec.msgpack.Decoder(ToServer)


async def read_from_engine(reader: asyncio.StreamReader) -> ToServer | None:
    """The engine's next message; None when it has gone."""
    message: ToServer | None = await read_message(reader, _to_server)
    return message


def read_from_server(sock: socket.socket) -> ToEngine | None:
    """The server's next message (blocking); None when it has gone."""
    message: ToEngine | None = receive_message(sock, _to_engine)
    return message
