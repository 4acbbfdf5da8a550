"""Journals and traces of a cluster's processes: what cannot be written ends a start, and nothing later."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from manylora.cluster.names import journal_name
from manylora.config import ConfigError, EngineSettings
from manylora.config.routing import RouterConfig
from manylora.engine.journal import JournalWriter
from manylora.engine.lines import LineFile
from manylora.main import open_output

log = logging.getLogger(__name__)

_File = TypeVar("_File")


def open_of_router(
    settings: EngineSettings, config: RouterConfig, epoch: int
) -> tuple[JournalWriter | None, LineFile | None]:
    """The router's own journal and trace, as far as they are wanted, and as far as a router that takes another's
    place can write them. Raises ConfigError where the first one cannot."""
    rotate = settings.journal_part_bytes
    journal = _opened("journal", settings.journal, epoch, lambda path: JournalWriter(path, config, rotate))
    return journal, _opened("trace", settings.cache.trace, epoch, lambda path: LineFile(path, "trace"))


def _opened(what: str, path: str | None, epoch: int, opened: Callable[[Path], _File]) -> _File | None:
    if path is None:
        return None
    name = journal_name(path, "router", epoch)
    try:
        return open_output(what, name, opened)
    except ConfigError as error:
        if epoch == 1:
            raise
        log.warning("the router keeps no %s: %s", what, error)
        return None


def without_what_fails(settings: EngineSettings) -> EngineSettings:
    """The settings of a replica that takes another's place, without files that it could not write."""
    journal = _if_writable("journal", settings.journal)
    trace = _if_writable("trace", settings.cache.trace)
    return dataclasses.replace(
        settings, journal=journal, cache=dataclasses.replace(settings.cache, trace=trace)
    )


def _if_writable(what: str, path: str | None) -> str | None:
    if path is None:
        return None
    with contextlib.suppress(OSError, ValueError):
        Path(path).open("a").close()
        return path
    log.warning("the replica keeps no %s: it cannot write %s", what, path)
    return None
