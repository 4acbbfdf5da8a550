"""The router's decisions as lines: for the trace file, and for people that look on. Does not decide any."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

from manylora.engine.lines import LineFile
from manylora.protocol.routing import Planned, Routed


class TraceLines:
    """``file``: None where no trace is kept. ``traced`` lets others have the lines, too."""

    def __init__(self, file: LineFile | None) -> None:
        self._file = file
        self._listeners: list[asyncio.Queue[str]] = []
        self._start_s = time.monotonic()

    def close(self) -> None:
        """Write what is still to be written."""
        if self._file is not None:
            self._file.close()

    @contextlib.contextmanager
    def traced(self, lines: asyncio.Queue[str]) -> Iterator[None]:
        """Each decision goes there as a line meanwhile, as far as there is room."""
        self._listeners.append(lines)
        try:
            yield
        finally:
            self._listeners.remove(lines)

    def write(self, now: float, command: Routed | Planned) -> None:
        """A decision."""
        if self._file is None and not self._listeners:
            return
        if isinstance(command, Routed):
            origin = "" if command.source is None else f" from {command.source}"
            text = f"{command.request}  attempt {command.attempt}  to {command.replica}{origin}"
            text += f"  {command.reason}  waited {command.waited_s:.3f} s"
        else:
            text = f"plan {command.number}  {command.num_moves} moves of {command.num_requests}"
            text += f"  {command.value_s:.3f} s, before {command.before_s:.3f} s, at least {command.bound_s:.3f} s"
        line = f"{now - self._start_s:10.3f} s  {text}"
        for listener in self._listeners:
            with contextlib.suppress(asyncio.QueueFull):
                listener.put_nowait(line)
        if self._file is not None:
            self._file.write(line)
            self._file.flush()
