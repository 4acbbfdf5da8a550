"""Declares what values a field may have, in the field's annotation: ``Annotated[int, at_least(1)]``.

Owns the rules, and finds the rule that a record breaks. Knows neither settings nor requests, nor the errors
that they raise. A module that declares such fields must not import ``annotations`` from ``__future__``: its
annotations are then evaluated in place, so each rule is made once and can use the names around it.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

INFINITE = float("inf")


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """A condition on a value. ``says`` is its text, which completes "must be"."""

    says: str
    holds: Callable[[Any], bool]
    choices: tuple[Any, ...] = ()
    """The only allowed values, where the rule is a list of values; else empty."""


def at_least(least: float, unit: str = "") -> Rule:
    return Rule(f"at least {least}{unit}", lambda value: value >= least)


def at_most(most: float) -> Rule:
    return Rule(f"at most {most}", lambda value: value <= most)


def more_than(bound: float, unit: str = "") -> Rule:
    return Rule(f"more than {bound}{unit}", lambda value: value > bound)


def less_than(bound: float) -> Rule:
    return Rule(f"less than {bound}", lambda value: value < bound)


def between(least: float, most: float) -> Rule:
    return Rule(f"between {least} and {most}", lambda value: least <= value <= most)


def one_of(choices: Sequence[Any]) -> Rule:
    return Rule(f"one of {', '.join(map(str, choices))}", lambda value: value in choices, tuple(choices))


FINITE = Rule("finite", lambda value: -INFINITE < value < INFINITE)


class Field(NamedTuple):
    """A field as its record declares it."""

    name: str
    kind: Any
    """The field's type, without None. For a Literal it is the type of the choices, which become a rule."""
    default: Any
    """The default; ``dataclasses.MISSING`` where there is none."""
    is_optional: bool
    """Whether None is allowed. Rules are not applied to None."""
    rules: tuple[Rule, ...]
    metadata: Mapping[Any, Any]


@functools.cache
def fields_of(record: type) -> tuple[Field, ...]:
    """Return the fields of a dataclass, in order."""
    hints = typing.get_type_hints(record, include_extras=True)
    return tuple(_field(field, hints[field.name]) for field in dataclasses.fields(record))


def _field(field: dataclasses.Field[Any], hint: Any) -> Field:
    rules: list[Rule] = []
    is_optional = False
    while True:
        origin, parts = typing.get_origin(hint), typing.get_args(hint)
        if origin is Annotated:
            hint = parts[0]
            rules[:0] = (note for note in parts[1:] if isinstance(note, Rule))
        elif origin in (types.UnionType, typing.Union) and types.NoneType in parts:
            is_optional = True
            (hint,) = (part for part in parts if part is not types.NoneType)
        elif origin is Literal:
            hint = type(parts[0])
            rules.append(one_of(parts))
        else:
            return Field(field.name, hint, field.default, is_optional, tuple(rules), field.metadata)


def broken_rule(record: object) -> tuple[Field, str] | None:
    """Return the record's first field that breaks a rule, and a text ("must be ..."); None if all rules hold.

    A value that is the field's default is not checked.
    """
    kind: type = type(record)
    for field in fields_of(kind):
        value = getattr(record, field.name)
        if value is field.default or (value is None and field.is_optional):
            continue
        for rule in field.rules:
            if not rule.holds(value):
                # Lists are not shown: they may be long or hold secrets.
                got = f", got {value!r}" if isinstance(value, str | int | float) else ""
                return field, f"must be {rule.says}{got}"
    return None
