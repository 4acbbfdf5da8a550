"""The records in docs/results, and the paths by which a page names a value in one.

A path is steps joined by ``/``:

| step | of | is |
|---|---|---|
| ``name`` | an object, a list | the value of that key; of a list the item at that place, from 0 |
| ``"name"`` | an object | the same, for a key that holds ``/``, ``;``, ``{`` or ``[`` |
| ``*`` | an object, a list | every value |
| ``{a,b}`` | an object | the values of these keys |
| ``[key=value & key!=value & key & !key]`` | a list | the items whose key is (is not) that, that have (lack) it |

It knows nothing of pages and markers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STEP = re.compile(r'"([^"]+)"|\[([^\]]+)\]|\{([^}]+)\}|([^/"\[\]{}]+)')
_CONDITION = re.compile(r"^\s*(.+?)\s*(?:(!?=)\s*(.*?)\s*)?$")


class FigureError(ValueError):
    """What is wrong with a figure, in words."""


@dataclass(frozen=True)
class Found:
    """A value in a record and the objects and lists above it, the record itself first; ``place`` has the keys."""

    value: Any
    above: tuple[Any, ...]
    place: tuple[str, ...]


class Records:
    """Records by file name, each read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """The record of that name. Raises FigureError where it is missing or is no JSON."""
        if name not in self._read:
            try:
                text = (self._folder / name).read_text(encoding="utf-8")
                self._read[name] = json.loads(text, parse_constant=_refuse, parse_float=_finite)
            except OSError:
                raise FigureError(f"there is no record {name}") from None
            except (ValueError, RecursionError) as error:
                raise FigureError(f"{name} is no JSON: {error}") from None
        return self._read[name]

    def find(self, name: str, path: str) -> list[Found]:
        """All values that the path names, in the record's order, one at least. Raises FigureError."""
        found = [Found(self[name], (), ())]
        for step in steps_of(path):
            found = [after for before in found for after in _take(before, step)]
            if not found:
                raise FigureError(f"{name} has no {path}: nothing at {step}")
        return found

    def numbers(self, name: str, path: str) -> list[float]:
        """The numbers that the path names. Raises FigureError where one is something else."""
        values = [found.value for found in self.find(name, path)]
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise FigureError(f"{name}: {path} is no number but {json.dumps(value)[:40]}")
        return values


def _refuse(constant: str) -> Any:
    raise ValueError(f"it has {constant}")


def _finite(number: str) -> float:
    """1e999 is JSON, and infinite."""
    return float(number) if math.isfinite(float(number)) else _refuse(number)


def steps_of(path: str) -> list[str]:
    """The steps of a path as written. Raises FigureError where it is malformed."""
    steps = []
    position = 0
    while True:
        match = _STEP.match(path, position)
        if match is None:
            raise FigureError(f"malformed path {path!r}")
        steps.append(match[0])
        position = match.end()
        if position == len(path):
            return steps
        if path[position] != "/":
            raise FigureError(f"malformed path {path!r}")
        position += 1


def _take(before: Found, step: str) -> Iterator[Found]:
    for key, value in _children(before.value, step):
        yield Found(value, (*before.above, before.value), (*before.place, key))


def _children(value: Any, step: str) -> list[tuple[str, Any]]:
    named = dict(value) if isinstance(value, dict) else {}
    if isinstance(value, list):
        named = {str(place): item for place, item in enumerate(value)}
    match = _STEP.fullmatch(step)
    assert match is not None
    quoted, conditions, several, plain = match.groups()
    if conditions is not None:
        wanted = [_condition(text) for text in conditions.split("&")]
        return [(key, item) for key, item in named.items() if _fits(item, wanted)]
    if several is not None:
        keys = [key.strip() for key in several.split(",")]
        return [(key, named[key]) for key in keys] if all(key in named for key in keys) else []
    if plain == "*":
        return list(named.items())
    key = quoted or plain
    return [(key, named[key])] if key in named else []


def _condition(text: str) -> tuple[str, str | None, str]:
    match = _CONDITION.match(text)
    if match is None:
        raise FigureError(f"malformed condition [{text}]")
    key, sign, value = match.groups()
    return key, sign, value or ""


def _fits(item: Any, wanted: Sequence[tuple[str, str | None, str]]) -> bool:
    if not isinstance(item, dict):
        return False
    for key, sign, value in wanted:
        if key.startswith("!"):
            if key[1:] in item:
                return False
            continue
        if key not in item:
            return False
        shown = item[key] if isinstance(item[key], str) else json.dumps(item[key])
        if sign is not None and (shown == value) != (sign == "="):
            return False
    return True
