"""Reads typed fields of a JSON object (config.json and its parts). One-line errors name file and field.

Knows JSON types, not models: the calling code knows what a field means and passes its default.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from manylora.models.spec import ModelError


class Fields:
    """The fields of one JSON object. ``origin`` names the object in error messages.

    Every method that reads a field raises ModelError where the value has the wrong type or range.
    """

    def __init__(self, raw: Mapping[str, Any], origin: str) -> None:
        self._raw = raw
        self.origin = origin

    @classmethod
    def of_file(cls, path: Path) -> Fields:
        """Read a JSON file that holds an object. Raises ModelError if it cannot be read as one."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise ModelError(f"{path}: not valid JSON ({error})") from error
        if not isinstance(raw, dict):
            raise ModelError(f"{path}: must hold a JSON object, holds a {type(raw).__name__}")
        return cls(raw, str(path))

    def fail(self, message: str) -> NoReturn:
        """Raise ModelError with the object's origin before the message."""
        raise ModelError(f"{self.origin}: {message}")

    def __contains__(self, name: str) -> bool:
        """Return whether the field is present and not null."""
        return self._raw.get(name) is not None

    def integer(self, name: str, default: int, minimum: int = 1) -> int:
        value = self._raw.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            self.fail(f"{name} must be a whole number of at least {minimum}, got {value!r}")
        return value

    def integer_or_none(self, name: str, default: int | None, minimum: int = 1) -> int | None:
        if self._raw.get(name, default) is None:
            return None
        return self.integer(name, 0 if default is None else default, minimum)

    def number(self, name: str, default: float) -> float:
        value = self._raw.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            self.fail(f"{name} must be a number, got {value!r}")
        return value

    def positive(self, name: str) -> float:
        """Read a number above 0. The field is required."""
        if name not in self:
            self.fail(f"{name} is missing")
        value = self.number(name, 0.0)
        if value <= 0:
            self.fail(f"{name} must be above 0, got {value!r}")
        return value

    def positive_or_none(self, name: str, default: float | None) -> float | None:
        """Read a number above 0. Null gives None; an absent field gives the default."""
        if name in self:
            return self.positive(name)
        return None if name in self._raw else default

    def number_or_none(self, name: str) -> float | None:
        return self.number(name, 0.0) if name in self else None

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """Read a list of exactly ``count`` numbers above 0. The field is required."""
        value = self._raw.get(name)
        if not isinstance(value, list) or len(value) != count:
            self.fail(f"{name} must be a list of {count} numbers")
        return tuple(Fields({name: each}, self.origin).positive(name) for each in value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._raw.get(name, default)
        if not isinstance(value, bool):
            self.fail(f"{name} must be true or false, got {value!r}")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._raw.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            self.fail(f"{name} must be a string, got {value!r}")
        return value

    def texts_or_none(self, name: str) -> tuple[str, ...] | None:
        value = self._raw.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.fail(f"{name} must be a list of strings, got {value!r}")
        return tuple(value)

    def object_or_none(self, name: str) -> Fields | None:
        """Read a nested object. An absent field, null and {} all give None."""
        value = self._raw.get(name)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            self.fail(f"{name} must be an object, got {value!r}")
        return Fields(value, f"{self.origin}, {name}")

    def strings(self) -> dict[str, str]:
        """Read all fields. Every value must be a string or null; null gives the empty string."""
        return {name: self.text(name, "") for name in self._raw}

    def objects(self) -> tuple[str, ...]:
        """Return the names of the fields whose values are objects."""
        return tuple(name for name, value in self._raw.items() if isinstance(value, dict))

    def token_ids(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """Read one token id or a list, without repeats. Absent gives the default, null gives no ids."""
        if name not in self._raw:
            return default
        value = self._raw[name]
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            self.fail(f"{name} must be a token id or a list of them, got {value!r}")
        return tuple(dict.fromkeys(ids))
