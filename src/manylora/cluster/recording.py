"""Journals and traces of a cluster's processes: their names, how they are opened, and the router's trace.

What cannot be written ends a start, and nothing later. Decides nothing.
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


def journal_name(path: str, role: str, epoch: int) -> str:
    """Name a router's or a replica's own file for ``path``; the name of the first router has no epoch."""
    if role == "router":
        return f"{path}.router" if epoch == 1 else f"{path}.router.e{epoch}"
    return f"{path}.{role}.e{epoch}"


def open_of_router(
    settings: EngineSettings, config: RouterConfig, epoch: int
) -> tuple[JournalWriter | None, LineFile | None]:
    """Open the router's journal and trace where they are wanted. Raises ConfigError where the first router cannot
    write them; a later one does without."""

    def opened(what: str, path: str | None, make: Callable[[Path], _File]) -> _File | None:
        name = None if path is None else journal_name(path, "router", epoch)
        return _opened("router", what, name, make, is_first=epoch == 1)

    rotate = settings.journal_part_bytes
    journal = opened("journal", settings.journal, lambda path: JournalWriter(path, config, rotate))
    return journal, opened("trace", settings.cache.trace, lambda path: LineFile(path, "trace"))


def without_what_fails(settings: EngineSettings) -> EngineSettings:
    """The settings of a replica that takes another's place, without files that it could not write."""
    journal = _opened("replica", "journal", settings.journal, _tried)
    trace = _opened("replica", "trace", settings.cache.trace, _tried)
    return dataclasses.replace(
        settings, journal=journal, cache=dataclasses.replace(settings.cache, trace=trace)
    )


def _opened(
    whose: str, what: str, path: str | None, opened: Callable[[Path], _File], *, is_first: bool = False
) -> _File | None:
    """None where it is not wanted, or cannot be written, which a line of the log says; the first one of its place
    raises ConfigError instead."""
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

    ``file``: None where no trace is kept. ``traced`` lets others have the lines, too.
    """

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
        """Write a decision."""
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
