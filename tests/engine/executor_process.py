"""An executor in another process: all that it is told and says crosses a socket as bytes.

The other process runs ``FakeExecutor``. Only values cross: a name and a msgspec encoding of the fields, which the
other side checks against the types.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec

from manylora.protocol.commands import DEVICE_COMMANDS, DeviceCommand, RunStep
from manylora.protocol.executor import DeviceEvent, StepResult
from tests.engine.fake_executor import FakeExecutor

COMMANDS = {kind.__name__: kind for kind in DEVICE_COMMANDS}
EVENTS: dict[str, type] = {kind.__name__: kind for kind in get_args(DeviceEvent)}
_ROOT = Path(__file__).parents[2]


def packed(message: object) -> bytes:
    return msgspec.msgpack.encode((type(message).__name__, msgspec.msgpack.encode(message)))


def unpacked(data: bytes, kinds: dict[str, type]) -> Any:
    name, fields = msgspec.msgpack.decode(data, type=tuple[str, bytes])
    return msgspec.msgpack.decode(fields, type=kinds[name])


def send(sock: socket.socket, message: object) -> None:
    data = packed(message)
    sock.sendall(struct.pack("<I", len(data)) + data)


def receive(sock: socket.socket, kinds: dict[str, type]) -> Any:
    """The next message; None at the end."""
    with sock.makefile("rb", buffering=0) as file:
        head = _exactly(file, 4)
        return unpacked(_exactly(file, struct.unpack("<I", head)[0]), kinds) if head else None


def _exactly(file: Any, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = file.read(count - len(data))
        if not part:
            return b""
        data += part
    return data


class RemoteExecutor:
    """``protocol.Executor`` that obeys in another process."""

    def __init__(self) -> None:
        self._sock, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.executor_process", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=_ROOT,
        )
        theirs.close()
        self._sending = threading.Lock()
        self._has_ended = threading.Condition()
        self._num_steps = 0  # on their way
        self._is_closed = False
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def connect(self, tell: Callable[[DeviceEvent], None]) -> None:
        self._tell = tell
        self._thread.start()

    def obey(self, command: DeviceCommand) -> None:
        with self._sending:
            if not self._is_closed:  # a watchdog may ask for the state until the end
                self._num_steps += isinstance(command, RunStep)
                send(self._sock, command)

    def flush(self) -> None:
        return

    def wait_step(self) -> None:
        with self._has_ended:
            before = self._num_steps
            if before:
                self._has_ended.wait_for(lambda: self._num_steps < before or self._is_closed)

    def close(self, *, frees: bool = True) -> None:
        if self._is_closed:
            return
        with self._sending:
            self._is_closed = True
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._sock.close()
        assert self._process.wait(30) == 0

    def _listen(self) -> None:
        while (event := receive(self._sock, EVENTS)) is not None:
            self._tell(event)
            if isinstance(event, StepResult):
                with self._has_ended:
                    self._num_steps -= 1
                    self._has_ended.notify_all()


def main() -> None:
    """The other process: obeys until the socket ends."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    executor = FakeExecutor()
    sending = threading.Lock()

    def tell(event: DeviceEvent) -> None:
        with sending, contextlib.suppress(OSError):  # the engine has ended: nothing hears it
            send(sock, event)

    executor.connect(tell)
    while (command := receive(sock, COMMANDS)) is not None:
        executor.obey(command)
        executor.flush()
        if isinstance(command, RunStep):
            executor.wait_step()
    executor.close()


if __name__ == "__main__":
    main()
