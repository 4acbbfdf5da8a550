"""Rows of traces by columns and types: a class names what stands in a row, and its types what each may be.

Knows the types that traces have; does not read files. A column is checked in the order of the class's fields, and
the first one that is not of its type raises ``BadLine``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from manylora_lab.workloads.text_file import (
    LARGEST_COUNT,
    BadLine,
    an_object,
    array,
    decimal,
    string,
    whole,
)

Row = TypeVar("Row")
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_COUNT)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=LARGEST_COUNT)]
Number = Annotated[float, msgspec.Meta(ge=0)]
_Read = Callable[[Mapping[str, Any], str], Any]
"""The value of one column of a row; raises BadLine."""


class RowType(Generic[Row]):
    """Makes rows of a class, from a table's cells or a JSON object; what is there besides is passed over."""

    def __init__(self, kind: type[Row]) -> None:
        types = get_type_hints(kind, include_extras=True)
        info = msgspec.inspect.type_info(kind)
        assert isinstance(info, msgspec.inspect.StructType | msgspec.inspect.DataclassType)
        self._kind = kind
        self._readers = {field.encode_name: _reader(types[field.name]) for field in info.fields}

    @property
    def columns(self) -> tuple[str, ...]:
        """The names that a header must have."""
        return tuple(self._readers)

    def __call__(self, found: Mapping[str, Any]) -> Row:
        """Raises BadLine."""
        return self._kind(*(read(found, name) for name, read in self._readers.items()))


def _reader(kind: Any) -> _Read:
    """What reads a column of this type."""
    plain: dict[Any, _Read] = {str: string, datetime: _moment, list: array}
    if kind in plain:
        return plain[kind]
    if get_origin(kind) is Annotated:
        base, bounds = get_args(kind)
        if base is int:
            return functools.partial(whole, least=bounds.ge, most=bounds.le)
        return functools.partial(decimal, least=bounds.ge)
    if get_origin(kind) is Literal:
        return functools.partial(_choice, choices=get_args(kind))
    (item,) = get_args(kind)
    return _whole_numbers if item is int else functools.partial(_rows, kind=RowType(item))


def _moment(row: Mapping[str, Any], name: str) -> datetime:
    """ISO 8601 with a time of day; UTC without a zone."""
    found = string(row, name)
    try:
        moment = datetime.fromisoformat(found)
    except ValueError:
        moment = None
    if moment is None or ":" not in found:
        raise BadLine(f"{name}, as in 2023-11-16 18:17:03.9799600", found)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _choice(row: Mapping[str, Any], name: str, choices: tuple[str, ...]) -> str:
    found = string(row, name)
    if found not in choices:
        known = " or ".join(choices) if len(choices) == 2 else f"one of {', '.join(choices)}"
        raise BadLine(f"{name}, {known}", found)
    return found


def _whole_numbers(row: Mapping[str, Any], name: str) -> list[int]:
    found = list(array(row, name))
    if not all(type(number) is int for number in found):
        raise BadLine(f"{name}, whole numbers", found)
    return found


def _rows(row: Mapping[str, Any], name: str, kind: RowType[Any]) -> list[Any]:
    return [kind(an_object(found)) for found in array(row, name)]
