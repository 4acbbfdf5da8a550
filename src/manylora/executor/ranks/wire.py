"""What the driver's process and a rank's say to each other, and how it is framed.

Each rank has a socket pair with the driver's process. On it go first how the rank is to be built and how far it
has come; then the driver's commands one way, the rank's answers the other. The end of the stream tells of the
other's death.
"""

from __future__ import annotations

import contextlib
import functools
import select
import socket
import struct
import threading
from typing import Any, Literal

import msgspec

from manylora.config.policy import PolicyConfig
from manylora.executor.plan import Loaded, RankTask
from manylora.protocol import commands, events
from manylora.protocol.executor import StepResult
from manylora.types import AdapterId, CopyId, RankTraffic, SequenceId

_LENGTH = struct.Struct("<I")


class Begin(msgspec.Struct, tag=True):
    """The first message to a rank: what to build. Descriptors are those of the rank's process."""

    task: RankTask
    rank: int
    num_threads: int
    log_level: int
    peers_file: int
    parent: int


class Pools(msgspec.Struct, tag=True):
    """The second: what there is to work with, now that all weights are loaded. ``copy_place``: where the copy of
    the base's weights goes, if there is one."""

    limits: PolicyConfig
    copy_place: Literal["device", "host"]


class RankLoading(msgspec.Struct, tag=True):
    """Weights are being loaded."""

    done_bytes: int
    total_bytes: int


class RankReady(msgspec.Struct, tag=True):
    """The rank obeys."""


class RankFailed(msgspec.Struct, tag=True):
    """The rank cannot go on."""

    message: str
    is_user_error: bool = False


class RankStatus(msgspec.Struct, tag=True):
    """What a rank says of itself: every quarter of a second, and with the end of each step. ``pages_pinned``: of
    its host pool; ``preparation_s``: seconds spent on compiling and the like since the start."""

    pages_pinned: int = 0
    preparation_s: float = 0.0
    traffic: RankTraffic = RankTraffic()


class StepAnswer(msgspec.Struct, tag=True):
    """A step has ended here. ``done``: a number that is the same on all ranks where they have done the same:
    of the step's number, its rows, its bucket, its exchanges in order, the tokens that it drew. ``num_exchanges``:
    how many of the step's had begun. ``result``: from the first rank only, or where it is not ``ok``. ``spoilt``,
    ``stall_s``: of its StepDone, by this rank's own copies."""

    step: int
    ok: bool
    done: int
    num_exchanges: int
    status: RankStatus
    result: StepResult | None = None
    spoilt: tuple[SequenceId, ...] = ()
    stall_s: float = 0.0


class Learn(msgspec.Struct, tag=True):
    """A command beside the device's: what inspecting an adapter has found, an AdapterSpec's JSON."""

    adapter: AdapterId
    spec: str


class Pretend(msgspec.Struct, tag=True):
    """A command: ``Worker.pretend_adapter``, for which there is room."""

    adapter: AdapterId
    rank: int


class ForgetCopies(msgspec.Struct, tag=True):
    """A command: no step awaits these copies any more, each with whether it went well on all ranks."""

    answered: tuple[tuple[CopyId, bool], ...]


class End(msgspec.Struct, tag=True):
    """A command: close and end."""


_KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *commands.DEVICE_COMMANDS, Learn, Pretend, ForgetCopies, End,
        Begin, Pools, RankLoading, Loaded, RankReady, RankFailed, RankStatus, StepAnswer,
        events.AdapterRead, events.CopyDone, events.SwitchDone,
    )
}  # fmt: skip
_encoder = msgspec.msgpack.Encoder()


@functools.cache
def _decoder(kind: type) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def packed(message: object) -> bytes:
    """A message: its kind's name, a byte of 0, its fields."""
    return type(message).__name__.encode() + b"\0" + _encoder.encode(message)


def framed(message: object) -> bytes:
    """A message as it goes over a socket."""
    data = packed(message)
    return _LENGTH.pack(len(data)) + data


def unpacked(data: bytes) -> Any:
    """A message as ``packed`` gave it. Raises msgspec.ValidationError where its fields are not its kind's."""
    name, _, fields = data.partition(b"\0")
    return _decoder(_KINDS[name.decode()]).decode(fields)


class Channel:
    """One end of the socket pair. ``send`` may be called from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._sending = threading.Lock()
        self._received = bytearray()

    def send(self, message: object) -> None:
        """Raises OSError where the other is gone."""
        self.send_framed(framed(message))

    def send_framed(self, frame: bytes) -> None:
        """Send what ``framed`` gave. Raises OSError where the other is gone."""
        with self._sending:
            self.sock.sendall(frame)

    def has_some(self) -> bool:
        """Whether a message, or the beginning of one, has arrived."""
        return bool(self._received) or bool(select.select([self.sock], [], [], 0)[0])

    def receive(self) -> Any:
        """The next message; waits for it. None where the other is gone."""
        while True:
            if (message := self._whole()) is not None:
                return message
            if not self._fill():
                return None

    def arrived(self) -> list[Any] | None:
        """What has come, once there is something to read. None where the other is gone."""
        if not self._fill():
            return None
        messages = []
        while (message := self._whole()) is not None:
            messages.append(message)
        return messages

    def _fill(self) -> bool:
        try:
            data = self.sock.recv(2**16)
        except OSError:
            return False
        self._received += data
        return bool(data)

    def _whole(self) -> Any:
        held = self._received
        if len(held) < _LENGTH.size:
            return None
        end = _LENGTH.size + int(_LENGTH.unpack_from(held)[0])
        if len(held) < end:
            return None
        message = unpacked(bytes(held[_LENGTH.size : end]))
        del held[:end]
        return message

    def close(self) -> None:
        """Idempotent; a ``receive`` that waits gives None."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
