"""Small terms such as ``gamma(2)`` or ``uniform(8,512)``, in which distributions are named on a command line."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Collection, Mapping

from manylora.config.declaring import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """One number of a term and its bounds. They are wide: beyond them floating point or memory gives in."""

    name: str
    least: float
    most: float

    def check(self, value: float, term: str) -> None:
        """Raises ConfigError for a number out of bounds."""
        if not self.least <= value <= self.most:
            bounds = f"from {self.least:g} to {self.most:g}"
            raise ConfigError(f"{term}: {self.name} must be a number {bounds}, got {value:g}")


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """What stands in a term's brackets. ``repeats``: the last number may come several times."""

    numbers: tuple[Number, ...] = ()
    repeats: bool = False

    def shown(self, name: str) -> str:
        """How it is written: 'gamma(cv)'."""
        inside = ",".join(number.name for number in self.numbers) + (",..." if self.repeats else "")
        return f"{name}({inside})" if inside else name


def parse_term(what: str, text: str, forms: Mapping[str, Form]) -> tuple[str, tuple[float, ...]]:
    """Name and numbers of ``text``; ``what`` it is, for the message. Raises ConfigError."""
    found = re.fullmatch(r"\s*([a-z-]+)\s*(?:\(([^()]*)\))?\s*", text)
    if found is None or found[1] not in forms:
        known = ", ".join(form.shown(name) for name, form in forms.items())
        guess = suggestion(found[1] if found else text, forms)
        raise ConfigError(f"{text!r} is not {what}; there are {known}{guess}")
    form = forms[found[1]]
    given = [part.strip() for part in found[2].split(",")] if (found[2] or "").strip() else []
    try:
        values = tuple(float(part) for part in given)
    except ValueError:
        raise ConfigError(f"{text!r} is not {what}: write numbers, {form.shown(found[1])}") from None
    expected = form.numbers + form.numbers[-1:] * (len(values) - len(form.numbers)) * form.repeats
    if len(values) != len(expected):
        raise ConfigError(f"{text!r} is not {what}: write {form.shown(found[1])}")
    for number, value in zip(expected, values):
        number.check(value, text)
    return found[1], values


def suggestion(name: str, known: Collection[str]) -> str:
    """', did you mean ...?' for the known names nearest to ``name``; nothing if none is near."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def split_terms(text: str) -> list[str]:
    """``text`` cut at the commas that stand outside brackets."""
    return [part.strip() for part in re.split(r",(?![^()]*\))", text)]
