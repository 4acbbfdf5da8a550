"""A journal of one machine's events, a replica's or a router's: enough to replay its every decision.

One JSON line an event, after a first line with the machine's settings: the moment, the event's name, its fields,
and the fingerprint of the commands that the machine answered with, so that a replay is held against what was
really commanded. Holds token ids (policy needs them to know pages), never text. Does not know how events come
about.
"""

from __future__ import annotations

import itertools
import json
import queue
import threading
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from manylora.config import PolicyConfig
from manylora.config.routing import RouterConfig
from manylora.engine.fingerprint import FORM, fingerprint
from manylora.engine.lines import LineFile
from manylora.protocol import Event
from manylora.protocol.routing import RouterEvent
from manylora.router.policies.policy import find_router

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
