"""The cache policy's decisions as lines that a person can read. Does not know why they were taken."""

from __future__ import annotations

from pathlib import Path

from manylora.engine.lines import LineFile
from manylora.protocol import Decided


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
