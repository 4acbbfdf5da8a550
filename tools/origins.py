"""How a value of a record was made: the command and the commit that the record tells of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tools.records import Found


def origin_of(record: Any, found: Found) -> str:
    """The command and commit nearest to the value: of an object around it, of the part of the record's
    ``provenance`` that it lies in, of the record."""
    told: dict[str, str] = {}
    for source in _sources(record, found):
        for name in ("command", "commit"):
            if isinstance(source.get(name), str):
                told.setdefault(name, source[name])
    command = told.get("command", "no command on record")
    return f"{command}    (commit {told.get('commit', 'not on record')})"


def _sources(record: Any, found: Found) -> Iterator[dict[str, Any]]:
    """From the nearest to the value to the record itself."""
    around = [*found.above, found.value] if found.above else [record]
    yield from (one for one in reversed(around[1:]) if isinstance(one, dict))
    if isinstance(record, dict):
        given = record.get("provenance", [])
        parts = [one for one in (given if isinstance(given, list) else [given]) if isinstance(one, dict)]
        inside = [one for one in parts if _holds(one.get("part"), found.place)]
        yield from sorted(inside, key=lambda one: -len(str(one.get("part", ""))))
        yield record


def _holds(part: Any, place: tuple[str, ...]) -> bool:
    """``part``: a path in the record's provenance, whatever joins its steps; none is the whole record."""
    if not isinstance(part, str) or not part:
        return True
    steps = part.replace("/", ".").split(".")
    return ".".join(place).startswith(".".join(steps))
