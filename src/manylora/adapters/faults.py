"""Whose fault it is when an adapter cannot be read, and how that is told. No torch here."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from manylora.protocol import AdapterError

_log = logging.getLogger(__name__)


class FilesChanged(AdapterError):
    """The files differ from those that were inspected: the fault of neither the adapter nor the client.

    409 where it is being loaded: what was asked for and what lies there contradict each other, until it is asked
    for again.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, status=409)


class WrongInspection(AdapterError):
    """The files are those that were inspected, but what was noted of them is not what they hold."""


@contextmanager
def adapters_fault() -> Iterator[None]:
    """Whatever goes wrong inside is the fault of the adapter that is read there: an AdapterError."""
    try:
        yield
    except AdapterError:
        raise
    except Exception as error:
        _log.warning("reading an adapter failed in an unexpected way", exc_info=True)
        raise AdapterError(f"the adapter cannot be read: {type(error).__name__}: {error}") from error
