"""A journal of one machine's events, a replica's or a router's: enough to replay its every decision.

One JSON line an event, after a first line with the machine's settings: the moment, the event's name, its
fields, and the fingerprint of the commands that the machine answered with, so that a replay is held against
what was really commanded. Holds token ids (policy needs them to know pages), never text. Does not know how
events come about. The trace, the cache policy's decisions for people to read, is a file of lines like it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import os
import queue
import stat
import threading
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TextIO, TypeVar

import msgspec

from manylora.config.policy import PolicyConfig
from manylora.config.routing import RouterConfig
from manylora.protocol import commands, events
from manylora.protocol.routing import RouterEvent
from manylora.router.policies.policy import find_router

log = logging.getLogger(__name__)


def private(path: Path, flags: int) -> int:
    """Open or make a file that only its owner may read, since it holds clients' requests; return its
    descriptor.

    Raise OSError, ValueError.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o600)
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):  # and no terminal, nor /dev/null
            os.fchmod(descriptor, 0o600)  # it may have been there, with another mode
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class LineFile:
    """A buffered file of lines that may fail without its writer. ``what``: its name in the log when it fails.

    Opening raises OSError or ValueError; no later call raises.
    """

    def __init__(self, path: Path, what: str) -> None:
        self._what = what
        self.file: TextIO | None = os.fdopen(private(path, os.O_TRUNC), "w", encoding="utf-8")
        """None once it is closed or cannot be written."""
        self._has_news = False

    def write(self, line: str) -> None:
        """Append a line; it may stay in the buffer."""
        self._has_news = True
        self._try(lambda file: file.write(line + "\n"))

    def flush(self) -> None:
        """Let readers of the file see all lines; free of cost without new ones."""
        if self._has_news:
            self._has_news = False
            self._try(lambda file: file.flush())

    def close(self) -> None:
        """Write all buffered lines. Idempotent."""
        self._try(lambda file: file.close())
        self.file = None

    def _try(self, act: Callable[[TextIO], object]) -> None:
        if self.file is not None:
            try:
                act(self.file)
            except OSError as error:
                self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """Log why the file ends here, and close it."""
        log.error("the %s ends here, it cannot be written: %s", self._what, error)
        file, self.file = self.file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


class TraceWriter(LineFile):
    """A writer of decisions for people to read. A file that cannot be written any more ends the trace alone."""

    def __init__(self, path: Path) -> None:
        """Start the file anew; raise OSError or ValueError if it cannot be written."""
        super().__init__(path, "trace")

    def record(self, decided: commands.Decided, label: str, at_s: float) -> None:
        """Append a decision, ``at_s`` seconds after the engine's start, on a node of the adapter called
        ``label``."""
        what, why = f"page {decided.depth} of its prefix", decided.reason
        if not decided.depth:
            what = f"adapter of {decided.num_pages} page{'' if decided.num_pages == 1 else 's'}"
        if decided.value is not None:
            why = f"{why:<8}  worth {decided.value:.2f}"
        self.write(f"{at_s:10.3f} s  {decided.action:<10}  {label:<24}  {what:<25}  {why}")


FORM = 2
"""The form of the fingerprints in a journal; those of another form cannot be compared."""

_NO_DEFAULT = object()
_FIELDS: dict[type, tuple[tuple[str, Any], ...]] = {}
_LEFT_OUT = {(commands.SequenceStart, "params"), (commands.SequenceStart, "request")}
"""Fields that the policy hands on unchanged: sampling parameters, and the id."""


def fingerprint(decided: Sequence[object]) -> str:
    """Hash commands to 16 hex digits: equal for equal commands, on every machine and in later versions.

    A field that has its default is left out, so that a command may gain fields and journals of before stay
    valid.
    """
    plain = [(type(command).__name__, _form(command)) for command in decided]
    return hashlib.blake2b(msgspec.json.encode(plain), digest_size=8).hexdigest()


def _form(value: Any) -> Any:
    """Return the value as plain lists and objects, without defaults."""
    kind = type(value)
    if kind is tuple or kind is list:
        return [_form(part) for part in value] if value and not isinstance(value[0], int) else value
    fields = _FIELDS.get(kind)
    if fields is None:
        fields = _FIELDS[kind] = _fields(kind)
    if not fields:
        return value
    if isinstance(value, tuple):  # a record of which there are many: its fields go by place
        count = len(fields)
        while count and value[count - 1] == fields[count - 1][1]:
            count -= 1
        return value[:count]
    given = ((name, getattr(value, name), default) for name, default in fields)
    return {name: _form(part) for name, part, default in given if part != default}


def _fields(kind: type) -> tuple[tuple[str, Any], ...]:
    """Return a record's fields with their defaults; none for other kinds of values."""
    if dataclasses.is_dataclass(kind):
        return tuple(
            (field.name, _NO_DEFAULT if field.default is dataclasses.MISSING else field.default)
            for field in dataclasses.fields(kind)
            if (kind, field.name) not in _LEFT_OUT
        )
    defaults: dict[str, Any] = getattr(kind, "_field_defaults", {})
    return tuple((name, defaults.get(name, _NO_DEFAULT)) for name in getattr(kind, "_fields", ()))


_Config = TypeVar("_Config")
_Event = TypeVar("_Event")

_Entry = tuple[float, object, Sequence[object] | None]

MOST_WAITING = 1024
"""The most entries that wait to be written. A journal with holes could not be replayed, so the step loop waits
for a slow file."""


class JournalWriter:
    """A writer of events from one thread; it encodes, hashes and writes on a thread of its own.

    A file that cannot be written any more ends the journal alone; one that is slow slows the steps down, see
    ``MOST_WAITING``. With ``part_bytes`` the journal goes on in another part once one has that size: FILE is
    the first, then come FILE.1, FILE.2 and so on. Each ends with the number of the next; a replay needs them
    all.
    """

    def __init__(
        self, path: Path, config: PolicyConfig | RouterConfig, part_bytes: int | None = None
    ) -> None:
        """Start the file anew; raises OSError or ValueError where it cannot be written."""
        self._path = path
        self._part_bytes = part_bytes
        self._file = LineFile(path, "journal")
        self._num_parts = 1
        self._num_bytes = 0  # of this part
        self._write(msgspec.json.encode({_KEYS[type(config)]: config, "fingerprints": FORM}))
        self._file.flush()  # a process that is killed before its first event leaves a journal, too
        self._unanswered: tuple[float, object] | None = None
        self._queue: queue.Queue[_Entry | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="manylora-journal", daemon=True)
        self._thread.start()

    def record(self, event: object, now: float) -> None:
        """Record an event at its time. Its line is written with the answer, or without."""
        self.answered(None)
        self._unanswered = now, event

    def answered(self, decided: Sequence[object] | None) -> None:
        """Record the machine's commands for the last event, or None if it gave no answer. The caller must not
        change them any more."""
        if self._unanswered is not None:
            self._queue.put((*self._unanswered, decided))
            self._unanswered = None

    def close(self) -> None:
        """Write all entries. Idempotent."""
        self.answered(None)
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            try:
                now, event, decided = entry
                answer = () if decided is None else (fingerprint(decided),)
                self._write(msgspec.json.encode((now, type(event).__name__, event, *answer)))
            except Exception as error:  # a bug; the loop must not wait for this thread for ever
                self._file.give_up(error)
            if self._queue.empty():
                self._file.flush()
        self._file.close()

    def _write(self, line: bytes) -> None:
        if self._part_bytes is not None and self._num_bytes >= self._part_bytes:
            self._begin_part()
        self._file.write(line.decode())
        self._num_bytes += len(line) + 1

    def _begin_part(self) -> None:
        if self._file.file is None:
            return
        try:
            part = LineFile(_part(self._path, self._num_parts), "journal")
        except (OSError, ValueError) as error:
            self._file.give_up(error)
            return
        self._file.write(msgspec.json.encode({"part": self._num_parts}).decode())
        self._file.close()
        self._file, self._num_bytes = part, 0
        self._num_parts += 1


def _part(path: Path, number: int) -> Path:
    """Return the path of a later part of the journal."""
    return path.with_name(f"{path.name}.{number}")


class JournalForm(Generic[_Config, _Event]):
    """The form of journals of one kind of machine: the settings' key in the first line, their type, the events
    by name."""

    def __init__(self, key: str, config: type[_Config], happened: Sequence[type[_Event]]) -> None:
        self._key = key
        self._config = config
        self._events = {event.__name__: event for event in happened}

    def read_answered(self, path: Path) -> tuple[_Config, Iterator[tuple[float, _Event, str | None]]]:
        """Return the settings, and the events in order, with the fingerprint of each event's commands.

        Raise ValueError if the journal is damaged. A fingerprint is None if it cannot be compared: in journals
        of another form, or without fingerprints, and after an event that the policy failed on. Events are read
        lazily, one line at a time, through all parts.
        """
        with path.open("rb") as file:
            first = file.readline()
        if not first:
            raise ValueError(f"{path} is empty")
        try:
            header = json.loads(first)
            config = msgspec.convert(header[self._key], self._config)
            _check_removed(header[self._key], config)
            is_comparable = header.get("fingerprints") == FORM
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{path}:1: expected the {self._key}'s settings: {error!r}") from error
        return config, self._answered(path, is_comparable)

    def _answered(self, path: Path, is_comparable: bool) -> Iterator[tuple[float, _Event, str | None]]:
        for file, number, line in _lines(path):
            try:
                now, name, fields, *rest = json.loads(line)
                there = rest[0] if rest and is_comparable else None
                name, fields = _present_form(name, fields)
                yield now, msgspec.convert(fields, self._events[name]), there
            except (ValueError, LookupError, TypeError) as error:
                raise ValueError(f"{file}:{number}: expected [moment, event, fields]: {error!r}") from error


def _present_form(name: str, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return an event's name and fields in the present form. Journals of 0.1 have other names, and a
    ReplicaReport's fields and its Status' side by side."""
    if name == "ReplicaReport" and "status" not in fields:
        own = {key: fields.pop(key) for key in ("replica", "epoch", "seen_upto")}
        return name, {**own, "status": fields}
    return _RENAMED.get(name, name), {_RENAMED.get(key, key): value for key, value in fields.items()}


_RENAMED = {"LetGo": "Release", "Keep": "PinAdapter", "is_kept": "is_pinned", "spoilt": "invalid"}
"""Present names of events and of their fields, by the names that journals of 0.1 have."""


def _check_removed(fields: dict[str, Any], config: object) -> None:
    """Raise ValueError if a router decided by a removed setting, and would decide otherwise now."""
    if isinstance(config, RouterConfig):
        handover = find_router(config.policy).handover
        for name, values in (("across_numerics", (None, False)), ("handover", (None, handover))):
            if fields.get(name) not in values:
                raise ValueError(f"{name} {fields[name]} was removed")


REPLICA: JournalForm[PolicyConfig, events.Event]
REPLICA = JournalForm("policy", PolicyConfig, typing.get_args(events.Event))
ROUTER: JournalForm[RouterConfig, RouterEvent]
ROUTER = JournalForm("router", RouterConfig, typing.get_args(RouterEvent))
_KEYS: dict[type, str] = {PolicyConfig: "policy", RouterConfig: "router"}
read_answered = REPLICA.read_answered
"""Reads a replica's journal with fingerprints."""


def read_journal(path: Path) -> tuple[PolicyConfig, Iterator[tuple[float, events.Event]]]:
    """Return the settings and the events of a replica's journal; raise ValueError if it is damaged."""
    config, answered = read_answered(path)
    return config, ((now, event) for now, event, _ in answered)


def _lines(path: Path) -> Iterator[tuple[Path, int, bytes]]:
    """Yield every part's lines, with part and line number, without settings and names of parts."""
    part: Path | None = path
    for number in itertools.count(1):
        if part is None:
            return
        here, part = part, None
        try:
            file = here.open("rb")
        except FileNotFoundError as error:
            raise ValueError(f"{here} is missing: the journal goes on there") from error
        with file:
            for place, line in enumerate(file, 1):
                if number == place == 1:
                    continue
                if line.startswith(_GOES_ON):
                    part = _part(path, number)
                    break
                yield here, place, line


_GOES_ON = b'{"part":'
