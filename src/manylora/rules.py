"""What the values of a field must be, said once, in the field's annotation: ``Annotated[int, at_least(1)]``.

Owns the rules and the question which of them a record breaks; knows neither settings nor requests, nor the errors
that these raise. A module that declares such fields does not postpone its annotations: each rule is made once, and
finds the module's own names.
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
    """A condition on a value: ``says`` completes "must be"."""

    says: str
    holds: Callable[[Any], bool]
    choices: tuple[Any, ...] = ()
    """Where only these values hold."""


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
    """A field as it is declared."""

    name: str
    kind: Any
    """Its type without None; of a Literal, one of which must be chosen, the type of these."""
    default: Any
    """``dataclasses.MISSING`` where it has none."""
    is_optional: bool
    """Whether None is a value; no rule is asked about it."""
    rules: tuple[Rule, ...]
    metadata: Mapping[Any, Any]


@functools.cache
def fields_of(record: type) -> tuple[Field, ...]:
    """The fields of a dataclass, in order."""
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
    """The first of a record's fields whose value breaks a rule, and what it must be; None where all hold.

    Defaults are taken to hold.
    """
    kind: type = type(record)
    for field in fields_of(kind):
        value = getattr(record, field.name)
        if value is field.default or (value is None and field.is_optional):
            continue
        for rule in field.rules:
            if not rule.holds(value):
                # A list may be long, or hold secrets.
                got = f", got {value!r}" if isinstance(value, str | int | float) else ""
                return field, f"must be {rule.says}{got}"
    return None
