"""Published text files, line by line: gzip or plain, CSV or JSON, and an error that names the file and the line.

Owns reading, positions and the count of lines left out; does not know what any format means. A loader gives a
function that turns one line, row or record into a value and raises ``BadLine`` where it cannot.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from manylora.config.declaring import ConfigError

Value = TypeVar("Value")

_GZIP = b"\x1f\x8b"
_BYTE_ORDER_MARK = "\ufeff"
_SHOWN_CHARS = 60
LARGEST_COUNT = 10**9
"""The largest count of tokens and the like: more is surely a slip."""
_LARGEST_NUMBER = 1e15
"""Times and rates beyond it are a slip, and their squares would overflow."""
_MISSING = object()


class BadLine(ValueError):
    """A line that is not what the format promises: what was expected, and what is there."""

    def __init__(self, expected: str, found: object) -> None:
        super().__init__(f"expected {expected}, found {shown(found)}")


class TextFile:
    """One file. Malformed lines raise ConfigError, or with ``skip_bad_lines`` are left out and counted.

    ``skipped`` counts while the file is read; it is complete when the iterator ends. ``line``: the number, from 1,
    of the line that was handed to be parsed last, where that began. Every method reads the file
    from its beginning, once. All raise ConfigError, in one line, for a file that cannot be read.
    """

    def __init__(self, path: Path | str, skip_bad_lines: bool = False) -> None:
        self.path = Path(path)
        self.skipped = 0
        self.line = 0
        self._skip = skip_bad_lines

    @property
    def notes(self) -> tuple[str, ...]:
        """The stream's notes: how many lines were left out, nothing if none."""
        return (f"{self.path.name}: {self.skipped} malformed lines left out",) if self.skipped else ()

    def lines(self, parse: Callable[[str], Value]) -> Iterator[Value]:
        """What ``parse`` makes of each line that is not blank."""
        for number, raw in self._raw_lines():
            yield from self._parsed(number, raw, parse)

    def every_line(self) -> Iterator[str | None]:
        """Each line, blank ones as well; None for one that is not UTF-8. Nothing is skipped."""
        for _, raw in self._raw_lines(blank=True):
            try:
                yield raw.decode().rstrip("\r\n").removeprefix(_BYTE_ORDER_MARK)
            except UnicodeDecodeError:
                yield None

    def rows(
        self,
        columns: Sequence[str],
        parse: Callable[[Mapping[str, str]], Value],
        *,
        delimiter: str = ",",
        quoted: bool = True,
        header: bool = True,
    ) -> Iterator[Value]:
        """What ``parse`` makes of each row of a table whose header has at least ``columns``.

        ``header`` False: there is none, and the columns are exactly these. ``quoted``: cells may stand in double
        quotes. Raises ConfigError for a header that lacks a column, also when lines are skipped.
        """
        names: list[str] | None = None if header else list(columns)
        is_empty = True

        def cells(line: str) -> list[str]:
            if not quoted:
                return line.split(delimiter)
            try:
                return next(csv.reader([line], delimiter=delimiter, strict=True), [])
            except csv.Error:
                raise BadLine("cells, each quoted wholly or not at all", line) from None

        def row(line: str) -> Value:
            assert names is not None
            found = cells(line)
            if len(found) != len(names):
                raise BadLine(f"{len(names)} columns", f"{len(found)}: {line}")
            return parse(dict(zip(names, found)))

        for number, raw in self._raw_lines():
            if names is None:
                names = self._header(number, raw, cells, columns)
            else:
                is_empty = False
                yield from self._parsed(number, raw, row)
        if names is None:
            raise ConfigError(
                f"{self.path}: expected a header with {', '.join(columns)}, found an empty file"
            )
        if is_empty and header:
            raise ConfigError(f"{self.path}: expected rows below the header, found none")

    def records(self, parse: Callable[[Mapping[str, Any]], Value]) -> Iterator[Value]:
        """What ``parse`` makes of each JSON object: one a line (JSONL), or in one array over the whole file.

        An array is held in memory whole. Where its JSON breaks, nothing after can be read: with
        ``skip_bad_lines`` that counts as one line.
        """
        start = b""
        for _, raw in self._raw_lines():
            start = raw.lstrip(_BYTE_ORDER_MARK.encode()).lstrip()[:1]
            break
        if not start:
            raise ConfigError(f"{self.path}: expected JSON objects, found an empty file")
        if start == b"[":
            yield from self._array(parse)
        else:
            yield from self.lines(lambda line: parse(an_object(_json(line))))

    def members(self, parse: Callable[[str, Any], Value]) -> Iterator[Value]:
        """What ``parse`` makes of each name and value of the one JSON object that is the whole file.

        A file whose JSON breaks has nothing to read: with ``skip_bad_lines`` that counts as one line.
        """
        whole_text = self._whole()
        try:
            found = an_object(json.loads(whole_text))
        except json.JSONDecodeError as error:
            self._refuse(error.lineno, BadLine("JSON to the end of the file", whole_text[error.pos :]))
            return
        except (ValueError, RecursionError):  # a BadLine, or a number of thousands of digits
            self._refuse(1, BadLine("one JSON object", whole_text))
            return
        for name, value in found.items():
            try:
                member = parse(name, value)
            except BadLine as error:
                place = whole_text.find(json.dumps(name, ensure_ascii=False))  # -1: spelled otherwise
                self._refuse(whole_text.count("\n", 0, max(place, 0)) + 1, error)
            else:
                yield member

    def _header(
        self, number: int, raw: bytes, cells: Callable[[str], list[str]], columns: Sequence[str]
    ) -> list[str]:
        line = raw.decode("utf-8-sig", "replace").rstrip("\r\n")
        try:
            names = [name.strip() for name in cells(line)]
        except BadLine:
            names = []
        if not set(columns) <= set(names):
            expected = f"a header with {', '.join(columns)}"
            raise ConfigError(f"{self.path}, line {number}: {BadLine(expected, line)}")
        return names

    def _raw_lines(self, blank: bool = False) -> Iterator[tuple[int, bytes]]:
        """Numbered from 1; without blank ones unless asked for."""
        number = 0
        try:
            with self.path.open("rb") as probe:
                zipped = probe.read(2) == _GZIP
            with gzip.open(self.path, "rb") if zipped else self.path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if blank or not line.isspace():
                        yield number, line
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            # What follows the damage is unreadable, so this is one line, the last.
            self._refuse(number + 1, BadLine("gzip data to the end of the file", str(error)))
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror or error}") from error

    def _parsed(self, number: int, raw: bytes, parse: Callable[[str], Value]) -> Iterator[Value]:
        self.line = number
        try:
            line = raw.decode().rstrip("\r\n").removeprefix(_BYTE_ORDER_MARK)
            value = parse(line)
        except UnicodeDecodeError:
            self._refuse(number, BadLine("UTF-8 text", raw[:_SHOWN_CHARS]))
        except BadLine as error:
            self._refuse(number, error)
        else:
            yield value

    def _array(self, parse: Callable[[Mapping[str, Any]], Value]) -> Iterator[Value]:
        text = self._whole()
        decoder = json.JSONDecoder()
        at, line, counted = text.index("[") + 1, 1, 0
        while True:
            at = _after_space(text, at)
            line, counted = line + text.count("\n", counted, at), at
            self.line = line
            if text.startswith("]", at):
                after = _after_space(text, at + 1)
                if after < len(text):
                    line += text.count("\n", at, after)
                    self._refuse(line, BadLine("nothing after the array", text[after : after + _SHOWN_CHARS]))
                return
            try:
                record, at = decoder.raw_decode(text, at)
            except (ValueError, RecursionError):
                self._refuse(
                    line, BadLine("a whole JSON object in the array", text[at : at + 2 * _SHOWN_CHARS])
                )
                return
            try:
                value = parse(an_object(record))
            except BadLine as error:
                self._refuse(line, error)
            else:
                yield value
            at = _after_space(text, at)
            if text.startswith(",", at):
                at += 1
            elif not text.startswith("]", at):
                line += text.count("\n", counted, at)
                self._refuse(line, BadLine("a comma or the array's end", text[at : at + _SHOWN_CHARS]))
                return

    def _whole(self) -> str:
        return b"".join(raw for _, raw in self._raw_lines(blank=True)).decode("utf-8-sig", "replace")

    def _refuse(self, number: int, problem: Exception) -> None:
        if not self._skip:
            raise ConfigError(f"{self.path}, line {number}: {problem}") from problem
        self.skipped += 1


def shown(found: object) -> str:
    """One short line of whatever was found."""
    if found is _MISSING:
        return "nothing"
    text = found if isinstance(found, str) else repr(found)
    text = " ".join(text.split())
    return repr(text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "...")


def an_object(value: object) -> Mapping[str, Any]:
    """A JSON object; raises BadLine."""
    if not isinstance(value, dict):
        raise BadLine("a JSON object", value)
    return value


def whole(row: Mapping[str, Any], name: str, least: int = 0, most: int = LARGEST_COUNT) -> int:
    """The count ``name``, from text or JSON; raises BadLine, also below ``least`` and above ``most``."""
    found = row.get(name, _MISSING)
    expected = f"{name}, a whole number from {least} to {most}"
    # int() also takes 1_000, which no format here means.
    plain = isinstance(found, str) and found.isascii() and found.strip().removeprefix("-").isdecimal()
    number = int(found) if plain and len(found) < _SHOWN_CHARS else found
    if type(number) is not int or not least <= number <= most:
        raise BadLine(expected, found)
    return number


def decimal(row: Mapping[str, Any], name: str, least: float = 0.0) -> float:
    """The number ``name``, from text or JSON; raises BadLine, also below ``least`` and for absurdly large ones."""
    found = row.get(name, _MISSING)
    try:
        number = float(found) if type(found) in (str, int, float) and "_" not in str(found) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not least <= number <= _LARGEST_NUMBER:
        raise BadLine(f"{name}, a number from {least:g} to {_LARGEST_NUMBER:g}", found)
    return number


def string(row: Mapping[str, Any], name: str) -> str:
    """The text ``name``; raises BadLine for anything else, also for none."""
    found = row.get(name, _MISSING)
    if not isinstance(found, str):
        raise BadLine(f"{name}, a text", found)
    return found


def array(row: Mapping[str, Any], name: str) -> Sequence[Any]:
    """The JSON array ``name``; raises BadLine."""
    found = row.get(name, _MISSING)
    if not isinstance(found, list):
        raise BadLine(f"{name}, an array", found)
    return found


def parsed_json(line: str, what: str) -> Any:
    """JSON inside a field; raises BadLine saying ``what`` it should be."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise BadLine(what, line) from None


def _json(line: str) -> Any:
    return parsed_json(line, "one JSON object a line")


def _after_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at
