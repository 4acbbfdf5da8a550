"""What was commanded, in 64 bits: equal for equal commands, on every machine and in later versions.

A field that has its default is left out, so that a command may gain fields and journals of before stay valid. Does
not know what commands mean.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from manylora.protocol import SequenceStart

FORM = 2
"""The form of the fingerprints in a journal; those of another form say nothing here."""

_NO_DEFAULT = object()
_FIELDS: dict[type, tuple[tuple[str, Any], ...]] = {}
_LEFT_OUT = {(SequenceStart, "params"), (SequenceStart, "request")}
"""Sampling parameters, and the id, are handed on by the policy as they came."""


def fingerprint(commands: Sequence[object]) -> str:
    """16 hex digits."""
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
