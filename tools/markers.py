"""Markers in a page: where a figure or a table stands, and what is wrong with how it is written.

A comment that begins a line would end its paragraph in Markdown, so a figure's may not, and a table's must."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_LOOKS_LIKE = re.compile(r"<!--\s*(?:fig\b|table\b|/)")
_COMMENT = re.compile(r"<!--(?P<text>[^\n]*?)-->")
_OPENS = re.compile(r"(?P<kind>fig|table) (?P<name>[\w.-]+): (?P<rest>.+)")
_CODE = re.compile(
    r"^(?P<fence>```+|~~~+).*?^(?P=fence)|(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)", re.S | re.M
)
_LINE_START = re.compile(r"\s*(?:(?:[-*+>]|\d+[.)])\s*)*")
_ENDS = {"/": "fig", "/table": "table"}


@dataclass(frozen=True)
class Marker:
    """``rest``: what follows its name. ``start``, ``end``: where its value stands in the page, in characters."""

    line: int
    kind: str
    name: str
    rest: str
    start: int
    end: int


@dataclass(frozen=True)
class Problem:
    line: int
    reason: str


def scan(text: str) -> Iterator[Marker | Problem]:
    """The markers of a page in order, between what is malformed. Code is text."""
    opened: Marker | None = None  # its end is not known yet
    for line, start, comment in _comments(text):
        if comment is None:
            yield Problem(line, "a marker that does not end in its line")
        elif comment["text"] in _ENDS:
            if opened is None:
                yield Problem(line, "a marker ends that did not begin")
            else:
                yield _closed(opened, _ENDS[comment["text"]], text, start)
            opened = None
        else:
            if opened is not None:
                yield Problem(opened.line, f"{opened.name} does not end")
            opened = None
            match = _OPENS.fullmatch(comment["text"])
            if match is None:
                yield Problem(line, f"malformed marker {comment[0]}")
                continue
            kind, name, rest = match["kind"], match["name"], match["rest"]
            if kind == "fig" and _begins_line(text, start):
                yield Problem(line, f"{name} begins its line, which ends the paragraph")
            elif kind == "table" and not _begins_line(text, start):
                yield Problem(line, f"{name} does not begin its line")
            opened = Marker(line, kind, name, rest, comment.end(), comment.end())
    if opened is not None:
        yield Problem(opened.line, f"{opened.name} does not end")


def _comments(text: str) -> Iterator[tuple[int, int, re.Match[str] | None]]:
    """Line, place and comment of all that looks like a marker outside of code; None where it does not end."""
    code = [match.span() for match in _CODE.finditer(text)]
    for match in _LOOKS_LIKE.finditer(text):
        start = match.start()
        if not any(first <= start < last for first, last in code):
            yield text.count("\n", 0, start) + 1, start, _COMMENT.match(text, start)


def _closed(opened: Marker, kind: str, text: str, end: int) -> Marker | Problem:
    value = text[opened.start : end]
    if kind != opened.kind or (kind == "fig" and re.search("[<\n]", value)):
        return Problem(opened.line, f"{opened.name} does not end")
    return Marker(opened.line, opened.kind, opened.name, opened.rest, opened.start, end)


def _begins_line(text: str, start: int) -> bool:
    return _LINE_START.fullmatch(text, text.rfind("\n", 0, start) + 1, start) is not None
