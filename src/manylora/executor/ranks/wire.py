"""Defines the messages between the driver's process and a rank's process, and their framing.

Each rank shares a socket pair with the driver's process. First it carries the rank's task and the rank's
progress. Then the driver sends commands, and the rank sends answers. The end of the stream shows that the
other process has ended.
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
    """The first message to a rank: the task of building it. ``num_threads``: torch's threads in the rank;
    ``peers_file``: a descriptor in the rank's process of the file by which the ranks find each other;
    ``parent``: the driver's process id."""

    task: RankTask
    rank: int
    num_threads: int
    log_level: int
    peers_file: int
    parent: int


class Pools(msgspec.Struct, tag=True):
    """The second message to a rank: the policy's limits, known once all weights are loaded. ``copy_place``:
    the place of the copy of the base's weights, if there is one."""

    limits: PolicyConfig
    copy_place: Literal["device", "host"]


class RankLoading(msgspec.Struct, tag=True):
    """A report of progress while weights load."""

    done_bytes: int
    total_bytes: int


class RankReady(msgspec.Struct, tag=True):
    """A report that the rank accepts commands."""


class RankFailed(msgspec.Struct, tag=True):
    """A report that the rank cannot continue. ``is_user_error``: the settings or the model are at fault."""

    message: str
    is_user_error: bool = False


class RankStatus(msgspec.Struct, tag=True):
    """A rank's state, sent every quarter of a second and with each step's end. ``pages_pinned``: the pinned
    pages of its host pool; ``preparation_s``: seconds spent on compiling and similar work since the start."""

    pages_pinned: int = 0
    preparation_s: float = 0.0
    traffic: RankTraffic = RankTraffic()


class StepAnswer(msgspec.Struct, tag=True):
    """A report that a step has ended on this rank. ``done``: a checksum that is equal on all ranks that have
    done the same. It covers the step's number, success, rows and bucket, its exchanges in order, and its
    drawn tokens. ``num_exchanges``: the number of the step's exchanges that had begun. ``result``: sent by
    the first rank, and by any rank where the step failed. ``invalid``, ``stall_s``: as in StepDone, for this
    rank's own copies."""

    step: int
    ok: bool
    done: int
    num_exchanges: int
    status: RankStatus
    result: StepResult | None = None
    invalid: tuple[SequenceId, ...] = ()
    stall_s: float = 0.0


class Learn(msgspec.Struct, tag=True):
    """A command to record the result of inspecting an adapter. ``spec``: the JSON of its AdapterSpec."""

    adapter: AdapterId
    spec: str


class Pretend(msgspec.Struct, tag=True):
    """A command to call ``Worker.pretend_adapter``. The driver has checked that there is room."""

    adapter: AdapterId
    rank: int


class ForgetCopies(msgspec.Struct, tag=True):
    """A command to forget copies that no step will await any more. Each comes with whether it went well on
    all ranks."""

    answered: tuple[tuple[CopyId, bool], ...]


class End(msgspec.Struct, tag=True):
    """A command to close the worker and end the process."""


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
    """Encode a message: the name of its kind, a zero byte, and its fields."""
    return type(message).__name__.encode() + b"\0" + _encoder.encode(message)


def framed(message: object) -> bytes:
    """Encode a message as it goes over a socket: its length as four bytes, then ``packed``."""
    data = packed(message)
    return _LENGTH.pack(len(data)) + data


def unpacked(data: bytes) -> Any:
    """Decode a message that ``packed`` encoded. Raises msgspec.ValidationError where the fields do not fit
    its kind."""
    name, _, fields = data.partition(b"\0")
    return _decoder(_KINDS[name.decode()]).decode(fields)


class Channel:
    """One end of a socket pair. ``send`` may be called from any thread; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._sending = threading.Lock()
        self._received = bytearray()

    def send(self, message: object) -> None:
        """Send a message. Raises OSError where the other end is closed."""
        self.send_framed(framed(message))

    def send_framed(self, frame: bytes) -> None:
        """Send a message that ``framed`` encoded. Raises OSError where the other end is closed."""
        with self._sending:
            self.sock.sendall(frame)

    def has_some(self) -> bool:
        """Return whether a message, or the beginning of one, has arrived. True also where the other end is
        closed."""
        return bool(self._received) or bool(select.select([self.sock], [], [], 0)[0])

    def receive(self) -> Any:
        """Wait for the next message and return it. Return None where the other end is closed."""
        while (message := self._whole()) is None:
            if not self._fill():
                return None
        return message

    def arrived(self) -> list[Any] | None:
        """Wait until there is something to read, and return the complete messages, perhaps none. Return None
        where the other end is closed."""
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
        """Close this end. A waiting ``receive`` then returns None. Idempotent."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
