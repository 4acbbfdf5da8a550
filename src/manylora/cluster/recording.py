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

log = logging.getLogger(__name__)

_File = TypeVar("_File")


def open_of_router(what: str, path: str | None, epoch: int, opened: Callable[[Path], _File]) -> _File | None:
    """The router's own file; None where none is wanted, or where a router that takes another's place cannot write
    it. Raises ConfigError."""
    if path is None:
        return None
    name = journal_name(path, "router", epoch)
    try:
        return opened(Path(name))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        if epoch == 1:
            raise ConfigError(f"cannot write the {what} {name}: {reason}") from error
        log.warning("the router keeps no %s: it cannot write %s: %s", what, name, reason)
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
