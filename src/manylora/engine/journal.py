"""A journal of one machine's events, a replica's or a router's: enough to replay its every decision.

One JSON line an event, after a first line with the machine's settings: the moment, the event's name, its fields,
and the fingerprint of the commands that the machine answered with, so that a replay is held against what was
really commanded. Holds token ids (policy needs them to know pages), never text. Does not know how events come
about. The trace, the cache policy's decisions for people to read, is a file of lines like it.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TextIO, TypeVar

import msgspec

from manylora.config import PolicyConfig
from manylora.config.routing import RouterConfig
from manylora.protocol import Decided, Event, SequenceStart
from manylora.protocol.routing import RouterEvent
from manylora.router.policies.policy import find_router

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


FORM = 2
"""The form of the fingerprints in a journal; those of another form say nothing here."""

_NO_DEFAULT = object()
_FIELDS: dict[type, tuple[tuple[str, Any], ...]] = {}
_LEFT_OUT = {(SequenceStart, "params"), (SequenceStart, "request")}
"""Sampling parameters, and the id, are handed on by the policy as they came."""


def fingerprint(commands: Sequence[object]) -> str:
    """Hash commands to 16 hex digits: equal for equal commands, on every machine and in later versions.

    A field that has its default is left out, so that a command may gain fields and journals of before stay valid.
    """
    plain = [(type(command).__name__, _form(command)) for command in commands]
    return hashlib.blake2b(msgspec.json.encode(plain), digest_size=8).hexdigest()


def _form(value: Any) -> Any:
    """The value as plain lists and objects, without what says nothing."""
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
    """A record's fields with their defaults; none for other kinds of values."""
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
"""Entries that wait to be written. A journal with holes could not be replayed, so where more come than the file
takes, the step loop waits for it."""


class JournalWriter:
    """Appends events as they are handled, from one thread; encodes, hashes and writes on a thread of its own.

    A file that cannot be written any more ends the journal alone; one that is slow slows the steps down, see
    ``MOST_WAITING``. With ``part_bytes`` the journal goes on in another part once one has that size: FILE is the
    first, then come FILE.1, FILE.2 and so on. Each ends with the number of the next; a replay needs them all.
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
        """One event at the time that the machine was told. Its line is written with the answer, or without."""
        self._put_unanswered(None)
        self._unanswered = now, event

    def answered(self, commands: Sequence[object]) -> None:
        """What the machine commanded when it was told of the event recorded last; not to be changed any more."""
        self._put_unanswered(commands)

    def _put_unanswered(self, commands: Sequence[object] | None) -> None:
        if self._unanswered is not None:
            self._queue.put((*self._unanswered, commands))
            self._unanswered = None

    def close(self) -> None:
        """Write what is still to be written. Idempotent."""
        self._put_unanswered(None)
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            try:
                self._write(_line(*entry))
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
        if not self._file.is_open:
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


def _line(now: float, event: object, commands: Sequence[object] | None) -> bytes:
    answer = () if commands is None else (fingerprint(commands),)
    return msgspec.json.encode((now, type(event).__name__, event, *answer))


def _part(path: Path, number: int) -> Path:
    """Where the journal at ``path`` goes on."""
    return path.with_name(f"{path.name}.{number}")


class JournalForm(Generic[_Config, _Event]):
    """The journals of one kind of machine: under which key the first line has the settings, their type, and the
    events by name."""

    def __init__(self, key: str, config: type[_Config], events: Sequence[type[_Event]]) -> None:
        self._key = key
        self._config = config
        self._events = {event.__name__: event for event in events}

    def read_answered(self, path: Path) -> tuple[_Config, Iterator[tuple[float, _Event, str | None]]]:
        """The settings and the events of a journal, in order, with the fingerprint of each event's commands.
        Raises ValueError where it is damaged.

        The fingerprint is None where there is none that can be compared: in journals with fingerprints of another
        form, or without, and after an event that the policy failed on. Events are read as they are asked for, one
        line at a time, through all parts.
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
                yield now, msgspec.convert(_present_form(name, fields), self._events[name]), there
            except (ValueError, LookupError, TypeError) as error:
                raise ValueError(f"{file}:{number}: expected [moment, event, fields]: {error!r}") from error


def _present_form(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """An event's fields as they are now. Journals of 0.1 have a ReplicaReport's and its Status' side by side."""
    if name == "ReplicaReport" and "status" not in fields:
        own = {key: fields.pop(key) for key in ("replica", "epoch", "seen_upto")}
        return {**own, "status": fields}
    return fields


def _check_removed(fields: dict[str, Any], config: object) -> None:
    """Raise ValueError where a router decided by a setting of earlier versions, and would decide otherwise now."""
    if isinstance(config, RouterConfig):
        handover = find_router(config.policy).handover
        for name, values in (("across_numerics", (None, False)), ("handover", (None, handover))):
            if fields.get(name) not in values:
                raise ValueError(f"{name} {fields[name]} was removed")


REPLICA: JournalForm[PolicyConfig, Event] = JournalForm("policy", PolicyConfig, typing.get_args(Event))
ROUTER: JournalForm[RouterConfig, RouterEvent]
ROUTER = JournalForm("router", RouterConfig, typing.get_args(RouterEvent))
_KEYS: dict[type, str] = {PolicyConfig: "policy", RouterConfig: "router"}


def read_journal(path: Path) -> tuple[PolicyConfig, Iterator[tuple[float, Event]]]:
    """The settings and the events of a replica's journal, in order; raises ValueError where it is damaged."""
    config, answered = read_answered(path)
    return config, ((now, event) for now, event, _ in answered)


def read_answered(path: Path) -> tuple[PolicyConfig, Iterator[tuple[float, Event, str | None]]]:
    """The same with the fingerprint of each event's commands, see ``JournalForm.read_answered``."""
    return REPLICA.read_answered(path)


def _lines(path: Path) -> Iterator[tuple[Path, int, bytes]]:
    """Every part's lines, with part and line number, but for the settings and the names of the next parts."""
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
