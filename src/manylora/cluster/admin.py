"""The admin socket: what an operator on this machine asks of the router, a JSON line each way.

In the cluster's folder, for its owner alone. A question is an object with ``do``; the answer says ``error``, or
what was done. Both sides reach the socket by the folder's descriptor, since a socket's path may be short only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Any

from manylora.cluster.folder import admin_socket, short_path
from manylora.cluster.operations import Operations, Refusal
from manylora.cluster.switchboard import Switchboard

MOST_BYTES = 4096
LOOK_S = 1.0


class Admin:
    """Answers, as long as the router runs."""

    def __init__(self, board: Switchboard, operations: Operations, folder: Path) -> None:
        self._board = board
        self._operations = operations
        self._folder = folder

    async def keep(self) -> None:
        """Listen again where the socket has vanished."""
        while True:
            await asyncio.sleep(LOOK_S)
            if not admin_socket(self._folder).exists():
                with contextlib.suppress(OSError):  # the folder may have vanished, too
                    await self.start()

    async def start(self) -> None:
        """Listen; another router's socket goes. Raises OSError."""
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
                    return self._board.status()
                case {"do": "drain", "replica": int(replica), "migrate": bool(migrate)}:
                    await operations.drain(replica, migrate=migrate)
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
        """Each decision as a line, until the other side leaves."""
        lines: asyncio.Queue[str] = asyncio.Queue(10_000)
        with self._board.trace.traced(lines):
            while not writer.is_closing():
                writer.write((await lines.get()).encode() + b"\n")
                await writer.drain()
