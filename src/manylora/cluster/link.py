"""Framed msgpack between two processes of a cluster, each of which has proved that it knows the cluster's secret.

Owns framing, its bounds, and the handshake. Does not know what messages mean. A frame is a length of four bytes
and msgpack; a length over the bound ends the link before anything is allocated for it. Nothing but msgpack into
declared records is ever read.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from manylora._version import VERSION
from manylora.engine.frames import LENGTH, encoder, frame

MAX_FRAME_BYTES = 64 * 2**20
MAX_UNSENT_BYTES = 64 * 2**20
"""What may wait to be sent to a peer that does not read; then the link ends."""
HANDSHAKE_S = 5.0
HANDSHAKE_BYTES = 4096
MOST_STRANGERS = 64
"""Connections of a listener that have not proved themselves yet; more are closed at once."""
NONCE_BYTES = 32


class LinkError(Exception):
    """The link cannot be had, or has ended; the message says why."""


class LinkRefused(LinkError):
    """The other side knows the secret and does not want this process: its version, its model, its epoch."""


class Hello(msgspec.Struct, frozen=True):
    """What the side that dials says of itself: which of its ``role`` it is, in which epoch, and what it runs."""

    role: str
    id: int
    epoch: int
    pid: int
    version: str
    model: str
    nonce: bytes = b""


class _Challenge(msgspec.Struct):
    """The listener's proof, and what is to be signed."""

    nonce: bytes
    proof: bytes


class _Proof(msgspec.Struct):
    proof: bytes


class _Welcome(msgspec.Struct):
    """``refused``: why not, or nothing. ``epoch``: the listener's."""

    refused: str
    epoch: int


class Link:
    """One connection. ``peer``: what the side that dialled said of itself; ``epoch``: the listener's."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decoder: msgspec.msgpack.Decoder[Any],
        peer: Hello,
        epoch: int,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder
        self.peer = peer
        self.epoch = epoch
        self.is_open = True

    def send(self, message: msgspec.Struct) -> None:
        """Hand a message over; dropped where the link has ended. A peer that does not read loses the link."""
        if not self.is_open:
            return
        transport = self._writer.transport
        if transport.is_closing() or transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.abort()
            return
        self._writer.write(frame(message))

    async def receive(self) -> Any | None:
        """The next message; None when the link has ended, by whichever side or by what is no message."""
        try:
            return self._decoder.decode(await _read(self._reader, MAX_FRAME_BYTES))
        except (LinkError, msgspec.MsgspecError):
            self.abort()
            return None

    def close(self) -> None:
        """End the link when what was handed over has gone."""
        self.is_open = False
        self._writer.close()

    def abort(self) -> None:
        """End the link now."""
        self.is_open = False
        self._writer.transport.abort()


def bind(host: str = "127.0.0.1") -> socket.socket:
    """A socket to listen on, at a port that the system chooses; on the loopback unless told otherwise."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.bind((host, 0))
    return sock


def adopt(descriptor: int) -> socket.socket:
    """A socket that another process has bound, at this process's end of it."""
    return socket.socket(fileno=descriptor)


def why_strange(hello: Hello, model: str) -> str | None:
    """Why a process of another build, or with another model, is not wanted; None where it is."""
    if hello.version != VERSION:
        return f"this cluster runs manylora {VERSION}, and {hello.role} {hello.id} runs {hello.version}"
    if hello.model != model:
        return f"the model of {hello.role} {hello.id} is another one: its files differ"
    return None


async def _read(reader: asyncio.StreamReader, most: int) -> bytes:
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        if length > most:
            raise LinkError(f"a frame of {length} bytes, of at most {most}")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, OSError) as error:
        raise LinkError("the other side has gone") from error


def _sign(secret: bytes, side: bytes, hello: bytes, nonce: bytes) -> bytes:
    """Both nonces are signed (the dialling side's is in its hello), so that nothing can be replayed."""
    return hmac.digest(secret, side + b"\0" + nonce + hello, "sha256")


async def dial(
    address: tuple[str, int], secret: bytes, hello: Hello, decoder: msgspec.msgpack.Decoder[Any]
) -> Link:
    """A link to the listener at ``address``. Raises LinkError; LinkRefused where asking again will not help."""
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            reader, writer = await asyncio.open_connection(*address)
            try:
                return await _introduce(reader, writer, secret, hello, decoder)
            except BaseException:
                writer.transport.abort()
                raise
    except TimeoutError as error:
        raise LinkError(f"{address[0]}:{address[1]} does not answer") from error
    except OSError as error:
        raise LinkError(f"{address[0]}:{address[1]}: {error.strerror or error}") from error


async def _introduce(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    secret: bytes,
    hello: Hello,
    decoder: msgspec.msgpack.Decoder[Any],
) -> Link:
    hello = msgspec.structs.replace(hello, nonce=secrets.token_bytes(NONCE_BYTES))
    said = encoder.encode(hello)
    writer.write(LENGTH.pack(len(said)) + said)
    try:
        challenge = msgspec.msgpack.decode(await _read(reader, HANDSHAKE_BYTES), type=_Challenge)
        if not hmac.compare_digest(challenge.proof, _sign(secret, b"listener", said, challenge.nonce)):
            raise LinkError("the other side does not know the cluster's secret")
        writer.write(frame(_Proof(_sign(secret, b"dialler", said, challenge.nonce))))
        welcome = msgspec.msgpack.decode(await _read(reader, HANDSHAKE_BYTES), type=_Welcome)
    except msgspec.MsgspecError as error:
        raise LinkError("the other side is not of a cluster") from error
    if welcome.refused:
        raise LinkRefused(welcome.refused)
    _keep_small_frames_quick(writer)
    return Link(reader, writer, decoder, hello, welcome.epoch)


class Listener:
    """Accepts links. ``judge`` says why a process that knows the secret is not wanted, or None; ``serve`` has a
    link until it returns."""

    def __init__(
        self,
        sock: socket.socket,
        secret: bytes,
        epoch: int,
        decoder_of: Callable[[str], msgspec.msgpack.Decoder[Any] | None],
        judge: Callable[[Hello], str | None],
        serve: Callable[[Link], Awaitable[None]],
    ) -> None:
        """``decoder_of``: of what a role says; None: there is no such role."""
        self._sock = sock
        self._secret = secret
        self._epoch = epoch
        self._decoder_of = decoder_of
        self._judge = judge
        self._serve = serve
        self._num_strangers = 0
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._sock.getsockname()[:2]
        return host, port

    async def start(self) -> None:
        """Accept from now on."""
        self._server = await asyncio.start_server(self._meet, sock=self._sock)

    def close(self) -> None:
        """Accept no more."""
        if self._server is not None:
            self._server.close()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = None
        if self._num_strangers < MOST_STRANGERS:
            self._num_strangers += 1
            try:
                async with asyncio.timeout(HANDSHAKE_S):
                    link = await self._examine(reader, writer)
            except (LinkError, TimeoutError, msgspec.MsgspecError, OSError):
                pass
            finally:
                self._num_strangers -= 1
        if link is None:
            if not writer.is_closing():  # one that was told why may read it
                writer.transport.abort()
            return
        try:
            await self._serve(link)
        finally:
            link.close()

    async def _examine(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Link | None:
        said = await _read(reader, HANDSHAKE_BYTES)
        hello = msgspec.msgpack.decode(said, type=Hello)
        nonce = secrets.token_bytes(NONCE_BYTES)
        writer.write(frame(_Challenge(nonce, _sign(self._secret, b"listener", said, nonce))))
        proof = msgspec.msgpack.decode(await _read(reader, HANDSHAKE_BYTES), type=_Proof)
        if not hmac.compare_digest(proof.proof, _sign(self._secret, b"dialler", said, nonce)):
            return None
        decoder = self._decoder_of(hello.role)
        refused = f"there is no role {hello.role!r}" if decoder is None else self._judge(hello)
        writer.write(frame(_Welcome(refused or "", self._epoch)))
        if refused or decoder is None:
            with contextlib.suppress(OSError):
                await writer.drain()
            writer.close()
            return None
        _keep_small_frames_quick(writer)
        return Link(reader, writer, decoder, hello, self._epoch)


def _keep_small_frames_quick(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
