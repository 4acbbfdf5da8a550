"""Text files that grow by lines and may fail without taking their writers down; and the trace, which is one.

The trace has the cache policy's decisions as lines that a person can read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from pathlib import Path
from typing import TextIO

from manylora.protocol import Decided

log = logging.getLogger(__name__)


def private(path: Path, flags: int) -> int:
    """Open or make a file that its owner alone may read, since it says what clients ask; its descriptor, for
    writing. Raises OSError, ValueError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o600)
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):  # and no terminal, nor /dev/null
            os.fchmod(descriptor, 0o600)  # it may have been there, with another mode
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class LineFile:
    """Buffered. ``what`` names it in the log, once, where it cannot be written any more.

    Opening raises OSError or ValueError; nothing later raises.
    """

    def __init__(self, path: Path, what: str) -> None:
        self._what = what
        self._file: TextIO | None = os.fdopen(private(path, os.O_TRUNC), "w", encoding="utf-8")
        self._has_news = False

    @property
    def is_open(self) -> bool:
        """Whether what is written goes anywhere."""
        return self._file is not None

    def write(self, line: str) -> None:
        """Append a line; it may stay in the buffer."""
        if self._file is None:
            return
        try:
            self._file.write(line + "\n")
            self._has_news = True
        except OSError as error:
            self.give_up(error)

    def flush(self) -> None:
        """Let readers of the file see what was written; costs nothing where nothing was."""
        if self._file is None or not self._has_news:
            return
        self._has_news = False
        try:
            self._file.flush()
        except OSError as error:
            self.give_up(error)

    def close(self) -> None:
        """Write what is still buffered. Idempotent."""
        if self._file is None:
            return
        try:
            self._file.close()
            self._file = None
        except OSError as error:
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """Say why it ends here, and close it."""
        log.error("the %s ends here, it cannot be written: %s", self._what, error)
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


class TraceWriter:
    """Appends decisions as they are taken. A file that cannot be written any more ends the trace alone."""

    def __init__(self, path: Path) -> None:
        """Start the file anew; raises OSError or ValueError where it cannot be written."""
        self._file = LineFile(path, "trace")

    def write(self, decided: Decided, label: str, at_s: float) -> None:
        """One decision, ``at_s`` seconds after the engine's start, on a node of the adapter called ``label``."""
        self._file.write(
            f"{at_s:10.3f} s  {decided.action:<10}  {label:<24}  {_what(decided):<25}  "
            + (
                f"{decided.reason:<8}  worth {decided.value:.2f}"
                if decided.value is not None
                else decided.reason
            )
        )

    def flush(self) -> None:
        """Let readers see what was written."""
        self._file.flush()

    def close(self) -> None:
        """Write what is still buffered. Idempotent."""
        self._file.close()


def _what(decided: Decided) -> str:
    if decided.depth:
        return f"page {decided.depth} of its prefix"
    return f"adapter of {decided.num_pages} page{'' if decided.num_pages == 1 else 's'}"
