"""Runs the router's process: its start, its end, and the admin socket for an operator's questions.

The socket is in the cluster's folder, for its owner alone. A question is a JSON object with ``do``, in one
line. The answer has ``error``, or the result. Both sides reach the socket by the folder's descriptor, since a
socket's path must be short.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from pathlib import Path
from typing import Any

from manylora.cluster import children, messages
from manylora.cluster.children import Tasks
from manylora.cluster.folder import admin_socket, short_path
from manylora.cluster.members import status_of
from manylora.cluster.operations import Operations, Refusal
from manylora.cluster.registry import AdapterLog
from manylora.cluster.switchboard import Switchboard
from manylora.config.declaring import ConfigError
from manylora.main import adapters_found, warn_of_shares
from manylora.protocol.executor import AdapterError

log = logging.getLogger(__name__)

MOST_BYTES = 4096
LOOK_S = 1.0


def run(launch: children.Launch, starter: children.Starter) -> int:
    """Route until the starter stops this process or is gone, and return the exit code. Raises ConfigError."""
    try:
        adapter_log = AdapterLog(Path(launch.folder) / "registry.sqlite")
        adapter_log.restore(launch.listings, launch.last_adapter)
        adapters, bases = launch.engine.adapters, launch.engine.model.names
        named = [] if launch.takes_over else [*adapters.adapters, *adapters_found(adapters, bases)]
        process = Switchboard(launch, adapter_log, named)
    except AdapterError as error:
        raise ConfigError(str(error)) from error
    if not launch.takes_over:
        _warn_of_shares(launch, adapter_log)

    async def serve() -> int:
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()

        def stop() -> None:
            loop.call_soon_threadsafe(stopped.set)

        await process.start()
        operations = Operations(process, launch.cluster)
        tasks.spawn(operations.watch())
        admin = Admin(process, operations, Path(launch.folder))
        await admin.start()
        tasks.spawn(admin.keep())
        starter.watch(stop, stop)
        starter.report(messages.ChildReady())
        await stopped.wait()
        tasks.cancel()
        process.close()
        children.leave(0)  # this also ends the links
        return 0

    tasks = Tasks()
    return asyncio.run(serve())


def _warn_of_shares(launch: children.Launch, adapter_log: AdapterLog) -> None:
    queue = launch.engine.scheduler.queue
    if queue.fair_by == "key":
        known = [str(place) for place in range(len(launch.http.api_keys))]
    else:
        listed = (each.name for each in adapter_log.current.values() if each.state == "listed")
        known = [launch.engine.model.name, *listed]
    warn_of_shares(queue, known)


class Admin:
    """The admin socket, which answers questions as long as the router runs."""

    def __init__(self, board: Switchboard, operations: Operations, folder: Path) -> None:
        self._board = board
        self._operations = operations
        self._folder = folder

    async def keep(self) -> None:
        """Listen again whenever the socket has vanished."""
        while True:
            await asyncio.sleep(LOOK_S)
            if not admin_socket(self._folder).exists():
                with contextlib.suppress(OSError):  # the folder may have vanished, too
                    await self.start()

    async def start(self) -> None:
        """Listen on the socket; another router's socket is removed. Raises OSError."""
        admin_socket(self._folder).unlink(missing_ok=True)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with short_path(self._folder) as path:
            sock.bind(path)
            os.chmod(path, 0o600)
        await asyncio.start_unix_server(self._serve, sock=sock, limit=MOST_BYTES)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError):
            question = json.loads(await reader.readline())
            if isinstance(question, dict) and question.get("do") == "trace":
                await self._trace(writer)
            else:
                answer = await self._answer(question)
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        writer.close()

    async def _answer(self, question: Any) -> dict[str, Any]:
        operations = self._operations
        try:
            match question:
                case {"do": "status"}:
                    return status_of(self._board)
                case {"do": "drain", "replica": int(replica), "migrate": bool(migrate)}:
                    await operations.empty(replica, "stay", migrate=migrate)
                    return {"said": f"replica {replica} is empty, and gets no more work"}
                case {"do": "scale", "replicas": int(count)}:
                    await operations.in_time(operations.scale(count))
                    return {"said": f"{count} replicas run"}
                case {"do": "remove", "replica": int(replica)}:
                    await operations.in_time(operations.remove(replica))
                    return {"said": f"replica {replica} has ended"}
                case {"do": "restart"}:
                    count = await operations.in_time(operations.restart())
                    return {"said": f"{count} replicas were started anew"}
                case {"do": "move", "request": str(request), "replica": int(replica)}:
                    count = await operations.move(request, replica)
                    return {"said": f"{count} requests moved to replica {replica}"}
        except Refusal as error:
            return {"error": str(error)}
        return {"error": "the router does not understand the question: is it of another version?"}

    async def _trace(self, writer: asyncio.StreamWriter) -> None:
        """Send each decision as a line, until the other side disconnects."""
        lines: asyncio.Queue[str] = asyncio.Queue(10_000)
        with self._board.trace.traced(lines):
            while not writer.is_closing():
                writer.write((await lines.get()).encode() + b"\n")
                await writer.drain()
