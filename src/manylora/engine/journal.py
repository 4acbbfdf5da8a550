"""A journal of one replica's events: enough to replay its every decision (design §1).

One JSON line an event, after a first line with the policy's settings. Holds token ids (policy needs them to
know pages), never text. Does not know how events come about.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from manylora.config import PolicyConfig
from manylora.engine.lines import LineFile
from manylora.protocol import Event

_EVENTS: dict[str, type[Any]] = {cls.__name__: cls for cls in typing.get_args(Event)}


class JournalWriter:
    """Appends events as they are handled. A file that cannot be written any more ends the journal alone."""

    def __init__(self, path: Path, config: PolicyConfig) -> None:
        """Start the file anew; raises OSError or ValueError where it cannot be written."""
        self._file = LineFile(path, "journal")
        self._write({"policy": msgspec.to_builtins(config)})

    def _write(self, line: object) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")))

    def record(self, event: Event, now: float) -> None:
        """One event at the time that the replica was told."""
        self._write([now, type(event).__name__, msgspec.to_builtins(event)])

    def close(self) -> None:
        """Write what is still buffered. Idempotent."""
        self._file.close()


def read_journal(path: Path) -> tuple[PolicyConfig, Iterator[tuple[float, Event]]]:
    """The settings and the events of a journal, in order; raises ValueError where it is damaged."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if not lines:
        raise ValueError(f"{path} is empty")
    config = msgspec.convert(json.loads(lines[0])["policy"], PolicyConfig)
    return config, _events(lines[1:])


def _events(lines: list[str]) -> Iterator[tuple[float, Event]]:
    for line in lines:
        now, name, fields = json.loads(line)
        yield now, msgspec.convert(fields, _EVENTS[name])
