"""The operator's side of the admin socket: one question, and the lines of its answer."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from manylora.cluster.folder import admin_socket


@contextlib.contextmanager
def short_path(folder: Path) -> Iterator[str]:
    """The socket's path by the folder's descriptor. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{admin_socket(folder).name}"
    finally:
        os.close(descriptor)


class NotThere(Exception):
    """There is no cluster to ask; the message is a line for people."""


def ask(folder: Path, question: dict[str, Any]) -> Iterator[str]:
    """The lines of an answer, as they come. Raises NotThere."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            with short_path(folder) as path:
                sock.connect(path)
            sock.sendall(json.dumps(question).encode() + b"\n")
            with sock.makefile("rb") as lines:
                for line in lines:
                    yield line.decode()
        except OSError as error:
            raise NotThere(f"no cluster answers in {folder}: {error.strerror or error}") from error
