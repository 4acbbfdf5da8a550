"""Journals and traces of a cluster's processes: what cannot be written ends a start, and nothing later."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from manylora.cluster.names import journal_name
from manylora.config import ConfigError, EngineSettings
from manylora.config.routing import RouterConfig
from manylora.engine.journal import JournalWriter
from manylora.engine.lines import LineFile, private
from manylora.main import open_output

log = logging.getLogger(__name__)

_File = TypeVar("_File")


def open_of_router(
    settings: EngineSettings, config: RouterConfig, epoch: int
) -> tuple[JournalWriter | None, LineFile | None]:
    """The router's own journal and trace, as far as they are wanted, and as far as a router that takes another's
    place can write them. Raises ConfigError where the first one cannot."""

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
