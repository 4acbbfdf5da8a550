"""Declares settings in sections, and the one error for settings that cannot work, missing packages included."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections.abc import Iterator
from typing import Annotated, TypeVar

from manylora.rules import FINITE, Field, Rule, at_least, at_most, broken_rule, fields_of, more_than

_Value = TypeVar("_Value")

_UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "kib": 2**10,
    "m": 10**6, "mb": 10**6, "mib": 2**20,
    "g": 10**9, "gb": 10**9, "gib": 2**30,
    "t": 10**12, "tb": 10**12, "tib": 2**40,
}  # fmt: skip


LARGEST_NUMBER = 2**62
"""The largest size and count, so that each can be sent to another process."""

Count = Annotated[int, at_least(1), at_most(LARGEST_NUMBER)]
Seconds = Annotated[float, more_than(0), FINITE]


class ConfigError(ValueError):
    """A setting that cannot work; the message is one line for the user."""


def parse_size(value: str | int) -> int:
    """Parse bytes from an int or from text such as "512MiB", "10GB", "4096". Raises ConfigError."""
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(value))
        if found is None or found[2].lower() not in _UNITS:
            raise ConfigError(f"{value!r} is not a size; write it as 512MiB or 10GB")
        # Bounded before the conversion to int, since it may be infinite.
        size = int(min(float(found[1]) * _UNITS[found[2].lower()], LARGEST_NUMBER + 1))
    if not 0 <= size <= LARGEST_NUMBER:
        raise ConfigError(f"{value!r} is not a size; it must lie between 0 and {LARGEST_NUMBER}")
    return size


@dataclasses.dataclass(frozen=True, slots=True)
class UserSetting:
    """The form in which users set a field: as a flag, in a config file, or as a keyword of ``LLM``."""

    help: str
    metavar: str | None
    """Its value's name in help texts; None: the usual one for its type."""
    name: str | None
    """Its name for users, where it differs from the field's."""
    is_size: bool
    """Whether it may be given as text, such as 512MiB."""
    takes_numbers: bool
    """Whether a number is accepted in place of text, as a config file has it: 2 beside "auto"."""
    default_follows: bool
    """Whether its default depends on other settings, as ``help`` says."""
    takes_several: bool
    """Whether several values may follow one flag."""
    is_internal: bool
    """Whether only experiments set it (``manylora bench``). It is then no flag of ``serve``, key of a file or
    keyword."""
    needs: tuple[str, Rule] | None
    """Another field of the section, and the rule it must satisfy for this setting to have an effect."""


def setting(
    default: _Value,
    help: str,
    metavar: str | None = None,
    *,
    name: str | None = None,
    is_size: bool = False,
    takes_numbers: bool = False,
    default_follows: bool = False,
    takes_several: bool = False,
    is_internal: bool = False,
    needs: tuple[str, Rule] | None = None,
) -> _Value:
    """Declare a field of a section that users set. Its annotation gives its type and rules."""
    about = UserSetting(
        help, metavar, name, is_size, takes_numbers, default_follows, takes_several, is_internal, needs
    )
    field: _Value = dataclasses.field(default=default, metadata={UserSetting: about})
    return field


def setting_of(field: Field) -> UserSetting | None:
    """Return the setting of a field, or None where users cannot set it."""
    return field.metadata.get(UserSetting)


def option_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def only(value: str) -> Rule:
    """Make the rule that a setting has exactly this value."""
    return Rule(value, lambda given: given == value)


GIVEN = Rule("", lambda given: given is not None)
"""The rule that a setting has any value at all."""


def check_rules(section: object) -> None:
    """Raise ConfigError where a field breaks a rule or lacks another that it needs. The error uses the users'
    names."""
    if broken := broken_rule(section):
        field, must = broken
        raise ConfigError(f"{_shown(field)} {must}")
    kind: type = type(section)
    fields = {field.name: field for field in fields_of(kind)}
    for field in fields.values():
        about = setting_of(field)
        if about is not None and about.needs is not None and getattr(section, field.name) != field.default:
            needed, rule = about.needs
            if not rule.holds(getattr(section, needed)):
                raise ConfigError(f"{_shown(field)} needs {_shown(fields[needed])} {rule.says}".rstrip())


def _shown(field: Field) -> str:
    about = setting_of(field)
    return field.name if about is None else option_of(about.name or field.name)


class Section:
    """A dataclass that checks its values when it is created. Raises ConfigError."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_rules(self)


_DISTRIBUTIONS = {"opentelemetry": "opentelemetry-api", "yaml": "pyyaml"}
"""The name for pip, by the imported package, where the two differ."""


@contextlib.contextmanager
def naming_what_is_missing() -> Iterator[None]:
    """Raise ConfigError for an import in the block that fails in another distribution. Failing imports of
    manylora itself are bugs, and stay as they are."""
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package.startswith("manylora") or package in sys.stdlib_module_names:
            raise
        raise ConfigError(_reason(error, package)) from error


def _reason(error: ImportError, package: str) -> str:
    if not package:  # raised explicitly, by a package that lacks another one
        return " ".join(str(error).split())
    distribution = _DISTRIBUTIONS.get(package, package.replace("_", "-"))
    if isinstance(error, ModuleNotFoundError):
        return f"{package} is not installed: pip install {distribution}"
    return f"{package} does not work here ({error}): pip install --upgrade {distribution}"
