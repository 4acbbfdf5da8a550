"""Records the requests of a replica's last unfinished step in a file that outlives the process.

An executor wraps the one that runs the steps. Before each step it notes the step's requests; after the step
it notes that there are none. The notes go to memory that is mapped from the file, so the system keeps them
however the process ends. After the replica's death, the file names the requests that may have killed it.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from manylora.protocol import commands
from manylora.protocol.executor import DeviceEvent, Executor, StepResult
from manylora.types import RequestId, SequenceId

_LENGTH = struct.Struct("<Q")
SIZE = 256 * 1024
"""Size of the file in bytes: room for the ids of one step. Ids beyond it are cut off."""


class StepNote:
    """The replica's side of the file. Written by one thread."""

    def __init__(self, path: Path) -> None:
        """Create the file, or empty it, and map it into memory. Raises OSError."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, SIZE)
            self._memory = mmap.mmap(descriptor, SIZE)
        finally:
            os.close(descriptor)

    def begin(self, requests: Iterable[str]) -> None:
        """Note that a step of these requests begins."""
        text = "\n".join(requests).encode("utf-8", "replace")[: SIZE - _LENGTH.size]
        memory = self._memory
        memory[: _LENGTH.size] = _LENGTH.pack(0)  # a half-written note counts as empty
        memory[_LENGTH.size : _LENGTH.size + len(text)] = text
        memory[: _LENGTH.size] = _LENGTH.pack(len(text))

    def end(self) -> None:
        """Note that no step is in flight."""
        self._memory[: _LENGTH.size] = _LENGTH.pack(0)


def read_step(path: Path) -> list[str] | None:
    """Read the requests of the last step that did not end. Returns None where the file cannot be read."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(data[: _LENGTH.size])
    text = data[_LENGTH.size : _LENGTH.size + length].decode("utf-8", "replace")
    return text.split("\n") if text else []


class StepNotingExecutor:
    """An executor that notes each step's requests and passes every command on. Owns the request of each
    sequence and the steps in flight."""

    def __init__(self, executor: Executor, note: StepNote) -> None:
        self._executor = executor
        self.flush, self.wait_step, self.close = executor.flush, executor.wait_step, executor.close
        self._note = note
        self._requests: dict[SequenceId, RequestId] = {}
        self._in_flight: dict[int, frozenset[RequestId]] = {}
        self._lock = threading.Lock()  # a step may end on another thread than it begins on

    def connect(self, report: Callable[[DeviceEvent], None]) -> None:
        """See Executor."""

        def receive(event: DeviceEvent) -> None:
            if isinstance(event, StepResult):
                with self._lock:
                    self._in_flight.pop(event.done.step, None)
                    self._write()
            report(event)

        self._executor.connect(receive)

    def obey(self, command: commands.DeviceCommand) -> None:
        """See Executor."""
        match command:
            case commands.RunStep():
                for start in command.starts:
                    self._requests[start.sequence] = start.request
                found = frozenset(self._requests[row.sequence] for row in command.rows)
                with self._lock:
                    self._in_flight[command.step] = found
                    self._write()
            case commands.EndSequence():
                self._requests.pop(command.sequence, None)
        self._executor.obey(command)

    def _write(self) -> None:
        if self._in_flight:
            self._note.begin(frozenset().union(*self._in_flight.values()))
        else:
            self._note.end()
