"""Sends framed msgpack between two processes of a cluster, each of which has proved that it knows the
cluster's secret.

Owns the check of certificates, the bounds of frames, the handshake, and the end of a link whose other side is
silent. Does not know what messages mean. A frame over the bound ends the link before any memory is allocated
for it. Only msgpack of declared records is ever read. An empty frame is a beat: it shows that its side lives.
With a certificate, the link uses TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import logging
import math
import os
import secrets
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, SupportsIndex

import msgspec

from manylora._version import VERSION
from manylora.cluster.children import Tasks
from manylora.config.cluster import TLS_OPTIONS, TlsFiles
from manylora.config.declaring import ConfigError
from manylora.engine.wire import EMPTY, FrameTooLong, body_of, frame, read_body

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 64 * 2**20
MAX_UNSENT_BYTES = 64 * 2**20
"""The most that may wait to be sent to a peer that does not read. Beyond it the link ends."""
HANDSHAKE_S = 5.0
HANDSHAKE_BYTES = 4096
MOST_STRANGERS = 64
"""The most connections of a listener that have not proved themselves yet. Further ones are closed at once."""
NONCE_BYTES = 32
BEAT_S = 0.5
"""The time between two beats of a side that sends nothing else."""
REDIAL_S = 0.1
"""The time between two attempts at a link."""
FULL_S = 1.0
"""The wait of a listener before it accepts again after an error, such as too many open files."""


@dataclasses.dataclass(frozen=True, slots=True)
class Credentials:
    """The secret and the TLS contexts of a process. ``dialling``, ``listening``: for the two sides of a link;
    None: links are not encrypted."""

    secret: bytes
    dialling: ssl.SSLContext | None = None
    listening: ssl.SSLContext | None = None


def credentials_of(secret: bytes, files: TlsFiles | None, host: str | None = None) -> Credentials:
    """Build the credentials from the secret and this machine's certificate. The certificate must be valid on
    both sides of a link, and for ``host`` where the process listens there. Raises ConfigError."""
    if files is None:
        return Credentials(secret)
    for option, path in zip(TLS_OPTIONS, files, strict=True):
        try:
            with Path(path).open("rb") as file:
                about = os.fstat(file.fileno())
        except OSError as error:
            raise ConfigError(f"cannot read {option} {path}: {error.strerror}") from error
        if path == files.key and (about.st_uid != os.getuid() or about.st_mode & 0o077):
            raise ConfigError(f"{option} {path} can be read by others: chmod 600 it, and make it yours")
    dialling = _context(ssl.PROTOCOL_TLS_CLIENT, files)
    listening = _context(ssl.PROTOCOL_TLS_SERVER, files)
    dialling.check_hostname = host is not None
    try:
        _meet_itself(dialling, listening, host)
    except ssl.SSLError as error:
        raise ConfigError(f"--cluster-tls-cert {files.cert} is no good: {why_broken(error)}") from error
    dialling.check_hostname = True
    return Credentials(secret, dialling, listening)


def why_broken(error: ssl.SSLError) -> str:
    """Describe in a few words why TLS failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message.rstrip(".")
    return (error.reason or str(error)).lower().replace("_", " ")


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    """Build a TLS context for one side; both sides must show a certificate. Raises ConfigError."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(files.ca)
    except ssl.SSLError as error:
        raise ConfigError(f"--cluster-tls-ca {files.ca} has no certificates") from error

    def refuse() -> str:
        raise ConfigError(f"--cluster-tls-key {files.key} must not need a password")

    try:
        context.load_cert_chain(files.cert, files.key, refuse)
    except ssl.SSLError as error:
        reason = why_broken(error)
        raise ConfigError(
            f"--cluster-tls-cert {files.cert} and --cluster-tls-key {files.key} are no pair: {reason}"
        ) from error
    return context


def _meet_itself(dialling: ssl.SSLContext, listening: ssl.SSLContext, host: str | None) -> None:
    """Do a TLS handshake in memory, so that a certificate which others would refuse fails at the start.
    Raises SSLError."""
    to_dialler, to_listener = ssl.MemoryBIO(), ssl.MemoryBIO()
    dialler = dialling.wrap_bio(to_dialler, to_listener, server_hostname=host)
    listener = listening.wrap_bio(to_listener, to_dialler, server_side=True)
    for side in (dialler, listener, dialler, listener):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()


class LinkError(Exception):
    """A link that cannot be made, or has ended; the message gives the reason."""


class LinkRefused(LinkError):
    """A refusal by a side that knows the secret: this process has the wrong version, model or epoch."""


class Hello(msgspec.Struct, frozen=True):
    """The introduction of the side that dials: its role, its number in that role, its epoch, its version and
    its model."""

    role: str
    id: int
    epoch: int
    pid: int
    version: str
    model: str
    nonce: bytes = b""


class _Challenge(msgspec.Struct):
    """The listener's proof, and the nonce that the dialling side is to sign."""

    nonce: bytes
    proof: bytes


class _Proof(msgspec.Struct):
    proof: bytes


class _Welcome(msgspec.Struct):
    """The listener's answer. ``refused``: the reason, or ""; ``epoch``: the listener's; ``silence_s``: see
    ``Listener``."""

    refused: str
    epoch: int
    silence_s: float


class _Reader(asyncio.StreamReader):
    """A reader that notes arrivals. ``has_news``: data has arrived since the link last looked."""

    has_news = False

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        """See StreamReader."""
        self.has_news = True
        super().feed_data(data)


class Link:
    """A connection of two processes. ``peer``: the dialling side's hello; ``epoch``: the listener's epoch."""

    def __init__(
        self, reader: _Reader, writer: asyncio.StreamWriter, receives: Any, peer: Hello, welcome: _Welcome
    ) -> None:
        """Begin to send beats. ``receives``: the type of the messages that arrive."""
        self._reader = reader
        self._writer = writer
        self._decoder = msgspec.msgpack.Decoder(receives)
        self.peer = peer
        self.epoch = welcome.epoch
        self.is_open = True
        self._most_silent_beats = welcome.silence_s / BEAT_S
        self._silent_beats = 0
        self._has_sent = False
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(BEAT_S, self._beat)

    @property
    def silent_s(self) -> float:
        """The time since data last arrived, in seconds, counted in beats."""
        return self._silent_beats * BEAT_S

    def _beat(self) -> None:
        """Send a beat, and end the link where the other side is silent. Silence is counted in beats. So a
        process that stood still itself first reads the data that arrived in that time."""
        self._silent_beats = 0 if self._reader.has_news else self._silent_beats + 1
        self._reader.has_news = False
        if self._silent_beats > self._most_silent_beats:
            log.warning("the link of %s %d is silent, and ends", self.peer.role, self.peer.id)
            self.abort()
        if self._writer.transport.is_closing():
            return
        if not self._has_sent:
            self._writer.write(EMPTY)
        self._has_sent = False
        self._timer = self._loop.call_later(BEAT_S, self._beat)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message, or drop it where the link has ended. A peer with too many unread bytes loses the
        link."""
        if not self.is_open:
            return
        transport = self._writer.transport
        if transport.is_closing() or transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.abort()
            return
        self._writer.write(frame(message))
        self._has_sent = True

    async def receive(self) -> Any | None:
        """Wait for the next message. Returns None when either side has ended the link, or when a frame is no
        message."""
        try:
            while not (body := await _read(self._reader, MAX_FRAME_BYTES)):
                pass
            return self._decoder.decode(body)
        except (LinkError, msgspec.MsgspecError):
            self.abort()
            return None

    def close(self) -> None:
        """Send the remaining messages, then end the link."""
        self.is_open = False
        self._timer.cancel()
        self._writer.close()

    def abort(self) -> None:
        """End the link now."""
        self.is_open = False
        self._timer.cancel()
        self._writer.transport.abort()


def bind(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """Bind a socket to listen on, by default on the loopback, at a port that the system chooses. Raises
    ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small frames at once (TCP_NODELAY) only where the socket names TCP.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(f"links cannot listen on {host}:{port}: {error.strerror}") from error
    return sock


def why_strange(hello: Hello, model: str) -> str | None:
    """Explain why a process of another build, or with another model, is refused. Returns None where it is
    accepted."""
    if hello.version != VERSION:
        return f"this cluster runs manylora {VERSION}, and {hello.role} {hello.id} runs {hello.version}"
    if hello.model != model:
        return f"the model of {hello.role} {hello.id} is another one: its files differ"
    return None


async def _read(reader: asyncio.StreamReader, most: int) -> bytes:
    try:
        return await read_body(reader, most)
    except FrameTooLong as error:
        raise LinkError(str(error)) from error
    except ssl.SSLError as error:
        raise LinkError(f"the other side ends TLS: {why_broken(error)}") from error
    except (asyncio.IncompleteReadError, OSError) as error:
        raise LinkError("the other side has gone") from error


def _sign(secret: bytes, side: bytes, hello: bytes, nonce: bytes) -> bytes:
    """Sign a side, the listener's nonce and the hello, which has the dialling side's nonce. With both nonces
    nothing can be replayed."""
    return hmac.digest(secret, side + b"\0" + nonce + hello, "sha256")


@contextlib.asynccontextmanager
async def _streams(
    tls: ssl.SSLContext | None, connect: Callable[..., Awaitable[tuple[Any, Any]]], *where: Any
) -> AsyncIterator[tuple[_Reader, asyncio.StreamWriter]]:
    """Yield streams over a connection, after the TLS handshake where there is TLS. An error in the block aborts
    the connection. ``connect``: the event loop's function that makes a transport of ``where``."""
    limit_s = None if tls is None else HANDSHAKE_S
    reader = _Reader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await connect(
        lambda: protocol, *where, ssl=tls, ssl_handshake_timeout=limit_s, ssl_shutdown_timeout=limit_s
    )
    writer = asyncio.StreamWriter(transport, protocol, reader, asyncio.get_running_loop())
    try:
        yield reader, writer
    except BaseException:
        writer.transport.abort()
        raise


async def dial(address: tuple[str, int], credentials: Credentials, hello: Hello, receives: Any) -> Link:
    """Open a link to the listener at ``address``. ``receives``: the type of the messages that arrive from there.
    Raises LinkError, and LinkRefused where another try will not help."""
    connect = asyncio.get_running_loop().create_connection
    try:
        async with asyncio.timeout(HANDSHAKE_S), _streams(credentials.dialling, connect, *address) as streams:
            return await _introduce(*streams, credentials.secret, hello, receives)
    except TimeoutError as error:
        raise LinkError(f"{address[0]}:{address[1]} does not answer") from error
    except ssl.SSLError as error:
        raise LinkError(f"{address[0]}:{address[1]}: {why_broken(error)}") from error
    except OSError as error:
        raise LinkError(f"{address[0]}:{address[1]}: {error.strerror or error}") from error


async def redial(
    address: tuple[str, int],
    credentials: Credentials,
    hello: Hello,
    receives: Any,
    *,
    most_s: float = math.inf,
    insists: bool = False,
) -> Link:
    """Dial until there is a link, for ``most_s`` at most. Raises LinkError after that. Raises LinkRefused at
    once, unless it ``insists`` on a link in spite of refusals."""
    until_s = time.monotonic() + most_s
    while True:
        try:
            return await dial(address, credentials, hello, receives)
        except LinkError as error:
            is_final = isinstance(error, LinkRefused) and not insists
            if is_final or time.monotonic() >= until_s:
                raise
        await asyncio.sleep(REDIAL_S)


async def _introduce(
    reader: _Reader, writer: asyncio.StreamWriter, secret: bytes, hello: Hello, receives: Any
) -> Link:
    hello = msgspec.structs.replace(hello, nonce=secrets.token_bytes(NONCE_BYTES))
    framed = frame(hello)
    said = body_of(framed)
    writer.write(framed)
    try:
        first = await _read(reader, HANDSHAKE_BYTES)
    except LinkError as error:
        raise LinkError(
            f"{error}: one of the two may use TLS and the other not, or not take its certificate"
        ) from error
    try:
        challenge = msgspec.msgpack.decode(first, type=_Challenge)
        if not hmac.compare_digest(challenge.proof, _sign(secret, b"listener", said, challenge.nonce)):
            raise LinkError("the other side does not know the cluster's secret")
        writer.write(frame(_Proof(_sign(secret, b"dialler", said, challenge.nonce))))
        welcome = msgspec.msgpack.decode(await _read(reader, HANDSHAKE_BYTES), type=_Welcome)
    except msgspec.MsgspecError as error:
        raise LinkError("the other side is not of a cluster") from error
    if welcome.refused:
        raise LinkRefused(welcome.refused)
    return Link(reader, writer, receives, hello, welcome)


Role = tuple[Any, Callable[[Link], Awaitable[None]]]
"""The type of a role's messages, and the function that handles its link, which ends when that returns."""


class Listener:
    """A listener that accepts links. ``judge`` gives the reason to refuse a process that knows the secret, or
    None."""

    def __init__(
        self,
        sock: socket.socket,
        credentials: Credentials,
        epoch: int,
        silence_s: float,
        roles: Mapping[str, Role],
        judge: Callable[[Hello], str | None],
    ) -> None:
        """Prepare to listen on a bound socket. ``silence_s``: a link ends, at both sides, when nothing has
        arrived for this long."""
        self._sock = sock
        self._secret = credentials.secret
        self._tls = credentials.listening
        self._epoch = epoch
        self._silence_s = silence_s
        self._roles = roles
        self._judge = judge
        self._num_strangers = 0
        self._tasks = Tasks()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._sock.getsockname()[:2]
        return host, port

    async def start(self) -> None:
        """Start to accept links."""
        self._sock.listen()
        self._sock.setblocking(False)
        self._tasks.spawn(self._accept())

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._sock)
            except ConnectionError:
                continue  # the other side has disconnected already
            except OSError as error:
                log.warning("links cannot be accepted: %s", error.strerror)
                await asyncio.sleep(FULL_S)
                continue
            if self._num_strangers < MOST_STRANGERS:
                self._num_strangers += 1
                self._tasks.spawn(self._meet(sock))
            else:
                sock.close()

    async def _meet(self, sock: socket.socket) -> None:
        link, accept = None, asyncio.get_running_loop().connect_accepted_socket
        try:
            async with asyncio.timeout(HANDSHAKE_S), _streams(self._tls, accept, sock) as streams:
                link = await self._agree(*streams)
        except (LinkError, TimeoutError, msgspec.MsgspecError, OSError):
            pass
        finally:
            self._num_strangers -= 1
        if link is None:
            return
        _, serve = self._roles[link.peer.role]
        try:
            await serve(link)
        finally:
            link.close()

    async def _agree(self, reader: _Reader, writer: asyncio.StreamWriter) -> Link | None:
        """Agree on a link. Returns None where the other side was refused. Raises an error where it is no peer."""
        said = await _read(reader, HANDSHAKE_BYTES)
        hello = msgspec.msgpack.decode(said, type=Hello)
        nonce = secrets.token_bytes(NONCE_BYTES)
        writer.write(frame(_Challenge(nonce, _sign(self._secret, b"listener", said, nonce))))
        proof = msgspec.msgpack.decode(await _read(reader, HANDSHAKE_BYTES), type=_Proof)
        if not hmac.compare_digest(proof.proof, _sign(self._secret, b"dialler", said, nonce)):
            raise LinkError("the other side does not know the cluster's secret")
        receives, _ = self._roles.get(hello.role, (None, None))
        refused = f"there is no role {hello.role!r}" if receives is None else self._judge(hello)
        welcome = _Welcome(refused or "", self._epoch, self._silence_s)
        writer.write(frame(welcome))
        if refused:
            with contextlib.suppress(OSError):
                await writer.drain()
            writer.close()
            return None
        return Link(reader, writer, receives, hello, welcome)
