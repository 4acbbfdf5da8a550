"""Names and opens the journals and traces of a cluster's processes, and writes the router's trace.

A file that cannot be written ends a start, and nothing later. This module decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from manylora.config.declaring import ConfigError
from manylora.config.routing import RouterConfig
from manylora.config.sections import EngineSettings
from manylora.engine.journal import JournalWriter, LineFile, private
from manylora.main import open_output
from manylora.protocol.routing import Planned, Routed

log = logging.getLogger(__name__)

_File = TypeVar("_File")


def journal_name(path: str | None, role: str, epoch: int) -> str | None:
    """Name the file of one router or replica for ``path``, if any. The first router's name has no epoch."""
    if path is None:
        return None
    if role == "router":
        return f"{path}.router" if epoch == 1 else f"{path}.router.e{epoch}"
    return f"{path}.{role}.e{epoch}"


def open_of_router(
    settings: EngineSettings, config: RouterConfig, epoch: int
) -> tuple[JournalWriter | None, LineFile | None]:
    """Open the router's journal and trace where the settings name them. Raises ConfigError where the first
    router cannot write them; a later one runs without."""

    rotate, is_first = settings.journal_part_bytes, epoch == 1
    name = journal_name(settings.journal, "router", epoch)
    journal = _opened(
        "router", "journal", name, lambda path: JournalWriter(path, config, rotate), is_first=is_first
    )
    name = journal_name(settings.cache.trace, "router", epoch)
    return journal, _opened("router", "trace", name, lambda path: LineFile(path, "trace"), is_first=is_first)


def without_what_fails(settings: EngineSettings) -> EngineSettings:
    """Return the settings of a replica that replaces another, without the files that it could not write."""
    journal = _opened("replica", "journal", settings.journal, _tried)
    trace = _opened("replica", "trace", settings.cache.trace, _tried)
    return dataclasses.replace(
        settings, journal=journal, cache=dataclasses.replace(settings.cache, trace=trace)
    )


def _opened(
    whose: str, what: str, path: str | None, opened: Callable[[Path], _File], *, is_first: bool = False
) -> _File | None:
    """Open a file, or return None where ``path`` is None. Where it cannot be written, log a warning and
    return None, or raise ConfigError if it ``is_first``."""
    if path is None:
        return None
    try:
        return open_output(what, path, opened)
    except ConfigError as error:
        if is_first:
            raise
        log.warning("the %s keeps no %s: %s", whose, what, error)
        return None


def _tried(path: Path) -> str:
    os.close(private(path, os.O_APPEND))
    return str(path)


class TraceLines:
    """The router's decisions as lines, for the trace file and for ``manylora cluster trace``.

    ``file``: None where no trace is kept. ``traced`` sends the lines to others, too.
    """

    def __init__(self, file: LineFile | None) -> None:
        self._file = file
        self._listeners: list[asyncio.Queue[str]] = []
        self._start_s = time.monotonic()

    def close(self) -> None:
        """Write the remaining lines and close the file."""
        if self._file is not None:
            self._file.close()

    @contextlib.contextmanager
    def traced(self, lines: asyncio.Queue[str]) -> Iterator[None]:
        """Put each decision into this queue as a line during the block. Lines for which it has no room are
        dropped."""
        self._listeners.append(lines)
        try:
            yield
        finally:
            self._listeners.remove(lines)

    def write(self, now: float, command: Routed | Planned) -> None:
        """Write a decision as a line."""
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
