"""A journal of one replica's events: enough to replay its every decision (design §1).

One JSON line an event, after a first line with the policy's settings: the moment, the event's name, its fields,
and the fingerprint of the commands that the replica answered with, so that a replay is held against what was
really commanded. Holds token ids (policy needs them to know pages), never text. Does not know how events come
about.
"""

from __future__ import annotations

import hashlib
import json
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from manylora.config import PolicyConfig
from manylora.engine.lines import LineFile
from manylora.protocol import Command, Event, RunStep

_EVENTS: dict[str, type[Any]] = {cls.__name__: cls for cls in typing.get_args(Event)}


def fingerprint(commands: Sequence[Command]) -> str:
    """64 bits of what was commanded, as 16 hex digits: equal for equal commands, on every machine.

    Sampling parameters are left out: the policy hands them on as they came.
    """
    plain = [(type(command).__name__, _decided(command)) for command in commands]
    return hashlib.blake2b(msgspec.json.encode(plain), digest_size=8).hexdigest()


def _decided(command: Command) -> object:
    if not isinstance(command, RunStep):
        return command
    starts = [
        (s.sequence, s.sample, s.adapter, s.tokens, s.num_prompt_tokens, s.num_computed, s.pages, s.stop_ids)
        for s in command.starts
    ]
    return command.step, starts, command.rows


class JournalWriter:
    """Appends events as they are handled. A file that cannot be written any more ends the journal alone."""

    def __init__(self, path: Path, config: PolicyConfig) -> None:
        """Start the file anew; raises OSError or ValueError where it cannot be written."""
        self._file = LineFile(path, "journal")
        self._write({"policy": config})
        self._unanswered: list[object] | None = None

    def _write(self, line: object) -> None:
        self._file.write(msgspec.json.encode(line).decode())

    def record(self, event: Event, now: float) -> None:
        """One event at the time that the replica was told. Its line is written with the answer, or without."""
        self._write_unanswered()
        self._unanswered = [now, type(event).__name__, event]

    def answered(self, commands: Sequence[Command]) -> None:
        """What the replica commanded when it was told of the event recorded last."""
        if self._unanswered is not None:
            self._unanswered.append(fingerprint(commands))
            self._write_unanswered()

    def _write_unanswered(self) -> None:
        line, self._unanswered = self._unanswered, None
        if line is not None:
            self._write(line)

    def close(self) -> None:
        """Write what is still buffered. Idempotent."""
        self._write_unanswered()
        self._file.close()


def read_journal(path: Path) -> tuple[PolicyConfig, Iterator[tuple[float, Event]]]:
    """The settings and the events of a journal, in order; raises ValueError where it is damaged."""
    config, answered = read_answered(path)
    return config, ((now, event) for now, event, _ in answered)


def read_answered(path: Path) -> tuple[PolicyConfig, Iterator[tuple[float, Event, str | None]]]:
    """The same with the fingerprint of each event's commands.

    None where there is none: in journals from before there were any, and after an event that the policy
    failed on.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    if not lines:
        raise ValueError(f"{path} is empty")
    try:
        config = msgspec.convert(json.loads(lines[0])["policy"], PolicyConfig)
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path}:1: expected the policy's settings: {error!r}") from error
    return config, _answered(path, lines[1:])


def _answered(path: Path, lines: list[str]) -> Iterator[tuple[float, Event, str | None]]:
    for number, line in enumerate(lines, 2):
        try:
            now, name, fields, *rest = json.loads(line)
            yield now, msgspec.convert(fields, _EVENTS[name]), rest[0] if rest else None
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{path}:{number}: expected [moment, event, fields]: {error!r}") from error
