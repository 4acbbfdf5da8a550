"""Regular expressions over module names, matched without backtracking, in time that grows with the names.

adapter_config.json comes from anyone, and ``re`` backtracks: thirty optional characters hold it for hours, and
the interpreter's lock with it. Here Python's own parser reads an expression, so that its syntax is exactly
``re``'s, and what it has parsed becomes the states of an automaton that follows all alternatives at once.
Refuses what no automaton can follow, and sets of expressions that are larger than any adapter needs. No torch
here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from re import _constants as ops  # type: ignore[attr-defined]  # the parser has no public name
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, Generic, NamedTuple, TypeVar

from manylora.protocol import AdapterError

LONGEST_PATTERN = 2000
MOST_PATTERNS = 4096
MOST_CHARACTERS = 2**17
"""The most characters of a set's expressions. One for each module of a 126-layer model: 882, 30,000 characters."""

MOST_STATES = 2**17
MOST_VISITS = 4 * 2**20
"""Visits of states, for all names together: a few seconds, in which other threads run. One expression for each
module of a 126-layer model takes 1.7 million."""

_Value = TypeVar("_Value")
_Default = TypeVar("_Default")


class _Kind(Enum):
    CHARACTER = 0
    FORK = 1
    START = 2
    END = 3
    ACCEPT = 4


_WAITING = (_Kind.CHARACTER, _Kind.END, _Kind.ACCEPT)


class _State(NamedTuple):
    """``following``: where it leads, by a character that passes ``test``, or by none; of ACCEPT the expression."""

    kind: _Kind
    following: tuple[int, ...]
    test: Callable[[str], bool] = bool


class _Place:
    """A set of states that the automaton may be in, and the sets that characters lead to, as far as known."""

    def __init__(self, states: frozenset[int]) -> None:
        self.states = states
        self.moves: dict[str, _Place] = {}


class NamePatterns(Generic[_Value]):
    """Values by expression, of which the first one that matches a name counts. For one thread at a time.

    An expression matches a whole name (``re.fullmatch``), or with ``ends`` a whole name or a dotted end of it, as
    PEFT's get_pattern_key does: ``re.match(rf"(.*\\.)?({pattern})$", name)``. Names hold no line break.
    """

    def __init__(self, values: Mapping[str, _Value], setting: str, *, ends: bool = False) -> None:
        """Raises AdapterError, naming the ``setting``, where an expression is none or cannot be served."""
        self._setting = setting
        self._values = list(values.values())
        self._states: list[_State] = []
        self._places: dict[frozenset[int], _Place] = {}
        self._visits = 0
        if len(values) > MOST_PATTERNS or sum(map(len, values)) > MOST_CHARACTERS:
            most = f"{MOST_PATTERNS} regular expressions, or {MOST_CHARACTERS} characters of them"
            raise AdapterError(f"{setting}: more than {most}")
        starts = [self._compile(pattern, number, ends) for number, pattern in enumerate(values)]
        start = self._add(_Kind.FORK, *starts)
        if ends:
            start = self._sequence(parser.parse(r"(.*\.)?"), start)
        self._start = self._place(self._spread((start,), at_start=True))

    def get(self, name: str, default: _Default) -> _Value | _Default:
        """The value of the first expression that matches. Raises AdapterError where that takes too long."""
        place = self._start
        for character in name:
            following = place.moves.get(character)
            if following is None:
                following = place.moves[character] = self._step(place, character)
            place = following
        reached = self._spread(place.states, at_start=not name, at_end=True)
        accepted = [self._states[n].following[0] for n in reached if self._states[n].kind is _Kind.ACCEPT]
        return self._values[min(accepted)] if accepted else default

    # ------------------------------------------------------------ running

    def _step(self, place: _Place, character: str) -> _Place:
        states = self._states
        self._count(len(place.states))
        passed = [
            following
            for kind, (following, *_), test in (states[n] for n in place.states)
            if kind is _Kind.CHARACTER and test(character)
        ]
        return self._place(self._spread(passed))

    def _spread(
        self, states: Iterable[int], *, at_start: bool = False, at_end: bool = False
    ) -> frozenset[int]:
        """The states that wait for something, of these and of those that they lead to without a character."""
        left = list(states)
        seen = set(left)
        while left:
            kind, following, _ = self._states[left.pop()]
            if kind is _Kind.FORK or (kind is _Kind.START and at_start) or (kind is _Kind.END and at_end):
                left += (n for n in following if n not in seen)
                seen.update(following)
        self._count(len(seen))
        return frozenset(n for n in seen if self._states[n].kind in _WAITING)

    def _place(self, states: frozenset[int]) -> _Place:
        return self._places.setdefault(states, _Place(states))

    def _count(self, visits: int) -> None:
        self._visits += visits
        if self._visits > MOST_VISITS:
            raise AdapterError(f"{self._setting}: the regular expressions take too long to match")

    # ------------------------------------------------------------ compiling

    def _compile(self, pattern: str, number: int, ends: bool) -> int:
        """The first state of one expression, all of whose ends accept it."""
        shown = f"{self._setting}: the regular expression {pattern[:60]!r}"
        if len(pattern) > LONGEST_PATTERN:
            raise AdapterError(f"{shown} is long: over {LONGEST_PATTERN} characters")
        try:
            parsed = parser.parse(f"({pattern})$" if ends else pattern)
            if parsed.state.flags != re.UNICODE:
                raise _Unsupported("flags")
            return self._sequence(parsed, self._add(_Kind.ACCEPT, number))
        except _Unsupported as error:
            raise AdapterError(f"{shown} is not supported: {error}") from error
        except (re.error, OverflowError, RecursionError) as error:
            raise AdapterError(f"{shown} is not a regular expression ({error})") from error

    def _add(self, kind: _Kind, *following: int, test: Callable[[str], bool] = bool) -> int:
        if len(self._states) >= MOST_STATES:
            raise _Unsupported("it repeats too much")
        self._states.append(_State(kind, following, test))
        return len(self._states) - 1

    def _sequence(self, parsed: Any, following: int) -> int:
        """The first state of what the parser gave, all of whose ends lead to ``following``."""
        for op, argument in reversed(list(parsed)):
            following = self._item(op, argument, following)
        return following

    def _item(self, op: Any, argument: Any, following: int) -> int:
        match op:
            case ops.LITERAL | ops.NOT_LITERAL | ops.ANY | ops.IN:
                return self._add(_Kind.CHARACTER, following, test=_test(op, argument))
            case ops.AT if argument in (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING):
                return self._add(_Kind.START, following)
            case ops.AT if argument in (ops.AT_END, ops.AT_END_STRING):
                return self._add(_Kind.END, following)
            case ops.BRANCH:
                return self._add(_Kind.FORK, *(self._sequence(branch, following) for branch in argument[1]))
            case ops.SUBPATTERN if not (argument[1] or argument[2]):
                return self._sequence(argument[3], following)
            case ops.MAX_REPEAT | ops.MIN_REPEAT:
                least, most, body = argument
                return self._repeat(least, most, body, following)
        raise _Unsupported(f"it needs {str(argument if op is ops.AT else op).lower()}")

    def _repeat(self, least: int, most: int, parsed: Any, following: int) -> int:
        """Greedy and lazy are the same: what matters is whether a name matches, not how."""
        if most == ops.MAXREPEAT:
            loop = self._add(_Kind.FORK)  # leads into its own body
            self._states[loop] = _State(_Kind.FORK, (self._sequence(parsed, loop), following))
            following, most = loop, least
        after = following
        for count in range(most, 0, -1):
            body = self._sequence(parsed, following)
            if body == following:
                break  # it is empty, however often
            following = body if count <= least else self._add(_Kind.FORK, body, after)
        return following


class _Unsupported(Exception):
    """What no automaton of ours can follow."""


def _test(op: Any, argument: Any) -> Callable[[str], bool]:
    """Whether a character is meant."""
    if op is ops.LITERAL:
        return chr(argument).__eq__
    if op is ops.NOT_LITERAL:
        return chr(argument).__ne__
    if op is ops.ANY:
        return "\n".__ne__
    return functools.cache(functools.partial(_is_in, argument))


def _is_in(items: list[tuple[Any, Any]], character: str) -> bool:
    code, is_negated, found = ord(character), False, False
    for op, argument in items:
        if op is ops.NEGATE:
            is_negated = True
        elif op is ops.LITERAL:
            found |= code == argument
        elif op is ops.RANGE:
            found |= argument[0] <= code <= argument[1]
        else:
            found |= _CATEGORIES[argument](character)
    return found != is_negated


def _is_word(character: str) -> bool:
    return character == "_" or character.isalnum()


_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    ops.CATEGORY_DIGIT: str.isdecimal,
    ops.CATEGORY_NOT_DIGIT: lambda character: not character.isdecimal(),
    ops.CATEGORY_SPACE: str.isspace,
    ops.CATEGORY_NOT_SPACE: lambda character: not character.isspace(),
    ops.CATEGORY_WORD: _is_word,
    ops.CATEGORY_NOT_WORD: lambda character: not _is_word(character),
}
