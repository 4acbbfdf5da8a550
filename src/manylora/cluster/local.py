"""The local launcher: every process of the cluster is a child of the supervisor's."""

from __future__ import annotations

import asyncio
import asyncio.subprocess
import contextlib
import os
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from manylora.cluster import messages
from manylora.cluster.children import Launch
from manylora.cluster.node_share import NodeShare
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
        """End it, and what it has started, stopped or not."""

    async def wait(self) -> int:
        """Wait for its end; its exit code, negative for a signal."""


class Launcher(Protocol):
    """Where processes come from. ``most_replicas``: how many it can start; None: any number."""

    name: str
    most_replicas: int | None

    async def open(self) -> None:
        """Before the first start. Raises ConfigError where nothing can be started."""

    async def close(self) -> None:
        """After the last process has ended."""

    async def start(self, launch: Launch, descriptors: Sequence[int] = ()) -> Started:
        """Start a process; it gets these descriptors under their own numbers, and a replica its share of its
        machine. Raises OSError."""


class LocalLauncher:
    """See Launcher."""

    name = "local"

    def __init__(self, node: NodeShare) -> None:
        self._node = node
        self.most_replicas = node.most_replicas

    async def open(self) -> None:
        """See Launcher."""

    async def close(self) -> None:
        """See Launcher."""

    async def start(self, launch: Launch, descriptors: Sequence[int] = ()) -> LocalProcess:
        """See Launcher."""
        if launch.role != messages.REPLICA:
            return await start_child(launch, {}, descriptors)
        launch = msgspec.structs.replace(launch, engine=self._node.share(launch.engine, launch.id))
        return await start_child(launch, self._node.environment(launch.id), descriptors)


async def start_child(
    launch: Launch, environment: Mapping[str, str], descriptors: Sequence[int] = ()
) -> LocalProcess:
    """A process of this machine, in a process group of its own: what a terminal signals is the supervisor's to
    hand on."""
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

    def tell(self, message: messages.ToChild) -> None:
        """Hand it a message."""
        self._writer.write(frame(message))

    def stop(self) -> None:
        """See Started."""
        self.tell(messages.StopChild())

    def kill(self) -> None:
        """See Started. With all that it has started, which may be stopped, too."""
        if self._process.returncode is None:  # later the number may be another's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def wait(self) -> int:
        """See Started."""
        code = await self._process.wait()
        self._writer.close()
        return code
