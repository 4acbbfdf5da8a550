"""Matches regular expressions with names as Python's ``re`` does; also runs as a program of its own, within
limits.

Imports nothing of manylora, so that the program starts in milliseconds.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys

MOST_CPU_S = 2
"""The program's limit of CPU time. 882 expressions, one for each module of a 126-layer model, take half a
second."""

_MOST_BYTES = 512 * 2**20

Question = tuple[str, list[str]]
"""A method of a compiled expression ("match", "fullmatch"), and the expressions."""

Answer = list[tuple[int, str | None] | None]
"""For each name: the number of the first expression that matches and the text of its group ``idx``; None: no
match."""


class UnusableExpression(ValueError):
    """An expression that cannot be compiled or matched. ``args``: the question's number, the expression's
    number, the reason."""


def match(questions: list[Question], names: list[str]) -> list[Answer]:
    """Answer each question for all names. Raises UnusableExpression."""
    return [_match(number, *question, names) for number, question in enumerate(questions)]


def _match(question: int, method: str, expressions: list[str], names: list[str]) -> Answer:
    answer: Answer = [None] * len(names)
    for number, expression in enumerate(expressions):
        try:
            matches = getattr(re.compile(expression), method)
            for at, name in enumerate(names):
                if answer[at] is None and (found := matches(name)):
                    answer[at] = number, found.groupdict().get("idx")
        except (re.error, ArithmeticError, LookupError, MemoryError, RuntimeError, SystemError) as error:
            raise UnusableExpression(question, number, str(error) or type(error).__name__) from error
    return answer


def main() -> None:
    """Read questions and names from stdin in JSON, and write the answers, or the three ``args`` of
    UnusableExpression."""
    os.nice(10)  # the engine computes steps on the same processors
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S + 1))
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    questions, names = json.load(sys.stdin)
    try:
        json.dump({"answers": match(questions, names)}, sys.stdout)
    except UnusableExpression as error:
        json.dump({"unusable": error.args}, sys.stdout)


if __name__ == "__main__":
    main()
