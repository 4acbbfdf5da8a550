"""Regular expressions of an adapter's configuration, which decide as in PEFT, and take bounded time and memory.

adapter_config.json comes from anyone, and ``re`` backtracks: thirty optional characters hold it for hours, and
the interpreter's lock with it. So a process of its own matches all but plain names (``matching``), and is ended
where it takes too long. Knows no settings and no modules. No torch here.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from typing import NamedTuple

from manylora.adapters import matching
from manylora.protocol import AdapterError

MOST_PATTERNS = 1024
MOST_CHARACTERS = 2**16
"""Of a setting's expressions. One for each module of a 126-layer model: 882, of 30,000 characters."""

_PLAIN = re.compile(r"[\w.]*", re.ASCII)
_MOST_PLAIN = 64
_MOST_WALL_S = 60.0  # it has less of a busy machine than others


class Patterns(NamedTuple):
    """A setting's expressions; ``form``: what PEFT composes of each; ``method``: of ``re``, which it calls."""

    setting: str
    expressions: tuple[str, ...]
    method: str = "fullmatch"
    form: str = "{}"


def first_matches(settings: tuple[Patterns, ...], names: tuple[str, ...]) -> tuple[matching.Answer, ...]:
    """Of each setting and each name: which expression is the first to match. Raises AdapterError."""
    for setting, expressions, *_ in settings:
        if len(expressions) > MOST_PATTERNS or sum(map(len, expressions)) > MOST_CHARACTERS:
            most = f"{MOST_PATTERNS} regular expressions, or {MOST_CHARACTERS} characters of them"
            raise AdapterError(f"{setting}: more than {most}")
    return _first_matches(settings, names)


@functools.lru_cache(maxsize=256)  # thousands of adapters have the same few configurations
def _first_matches(settings: tuple[Patterns, ...], names: tuple[str, ...]) -> tuple[matching.Answer, ...]:
    questions: list[matching.Question] = [
        (method, [form.format(expression) for expression in expressions])
        for _, expressions, method, form in settings
    ]
    own = [expression for _, expressions, *_ in settings for expression in expressions]
    try:
        if len(own) <= _MOST_PLAIN and all(map(_PLAIN.fullmatch, own)):
            return tuple(matching.match(questions, list(names)))
        found = _ask(json.dumps([questions, names]))
        if "answers" in found:
            return tuple(found["answers"])
        raise matching.UnusableExpression(*found["unusable"])
    except matching.UnusableExpression as error:
        question, number, reason = error.args
        setting, expressions, *_ = settings[question]
        shown = f"{setting}: the regular expression {expressions[number][:60]!r}"
        raise AdapterError(f"{shown} cannot be used ({reason})") from error
    except (subprocess.TimeoutExpired, ValueError) as error:
        known = ", ".join(setting for setting, expressions, *_ in settings if expressions)
        raise AdapterError(f"{known}: the regular expressions take too much time or memory") from error


def _ask(question: str) -> dict[str, list[matching.Answer]]:
    """Raises ValueError where the process was ended or crashed, and TimeoutExpired."""
    command = [sys.executable, "-I", "-S", "-W", "ignore", matching.__file__]
    done = subprocess.run(command, input=question.encode(), capture_output=True, timeout=_MOST_WALL_S)
    found: dict[str, list[matching.Answer]] = json.loads(done.stdout)
    return found
