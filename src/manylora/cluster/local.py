"""The local launcher: every process of the cluster is a child of the supervisor's."""

from __future__ import annotations

import asyncio
import asyncio.subprocess
import contextlib
import os
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from manylora.cluster import messages
from manylora.cluster.children import Launch
from manylora.engine.frames import frame
from manylora.engine.wire import Failed

_LENGTH = struct.Struct("<I")
_from_child = msgspec.msgpack.Decoder(messages.FromChild)


class Started(Protocol):
    """A process that a launcher has started."""

    pid: int

    async def receive(self) -> messages.ChildReady | Failed | None:
        """The next thing that it says; None when it will say nothing any more."""

    def stop(self) -> None:
        """Tell it to end in order; a second time: now."""

    def kill(self) -> None:
        """End it, stopped or not."""

    async def wait(self) -> int:
        """Wait for its end; its exit code, negative for a signal."""


class Launcher(Protocol):
    """Where processes come from."""

    name: str

    async def start(
        self, launch: Launch, environment: Mapping[str, str], descriptors: Sequence[int] = ()
    ) -> Started:
        """Start a process; it gets these descriptors under their own numbers. Raises OSError."""


class LocalLauncher:
    """See Launcher."""

    name = "local"

    async def start(
        self, launch: Launch, environment: Mapping[str, str], descriptors: Sequence[int] = ()
    ) -> LocalProcess:
        """See Launcher. In a process group of its own: what a terminal signals is the supervisor's to hand on."""
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "manylora.cluster.process",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno(), *descriptors],
                env={**os.environ, **environment},
                process_group=0,
                stdin=asyncio.subprocess.DEVNULL,
            )
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(frame(launch))
        return LocalProcess(process, reader, writer)


class LocalProcess:
    """See Started."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.pid = process.pid
        self._process = process
        self._reader = reader
        self._writer = writer

    async def receive(self) -> Any | None:
        """See Started."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return _from_child.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError):
            return None

    def stop(self) -> None:
        """See Started."""
        self._writer.write(frame(messages.StopChild()))

    def kill(self) -> None:
        """See Started."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def wait(self) -> int:
        """See Started."""
        code = await self._process.wait()
        self._writer.close()
        return code
