"""How a value of a record was made: the command and the commit that the record tells of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from tools.records import Found


class Origin(NamedTuple):
    """What ran, and of which commit; None: not on record."""

    command: str | None
    commit: str | None

    def __str__(self) -> str:
        command = self.command or "no command on record"
        return f"{command}    (commit {self.commit or 'not on record'})"

    def shell(self) -> str | None:
        """A line for a shell at the repository's root that makes the record again, from nothing; None where the
        record tells too little.

        The command runs in a worktree and an environment of its own. ``--report-only`` is left out, so that what a
        store has not is run.
        """
        if self.command is None or self.commit is None or self.commit.endswith("+"):
            return None
        place = f"../manylora-{self.commit[:12]}"
        command = re.sub(r" --report-only\b", "", self.command)
        return (
            f"git worktree add --detach {place} {self.commit} && cd {place} && python3 -m venv .venv && "
            ". .venv/bin/activate && pip install '.[cpu]' && { [ ! -d lab ] || pip install './lab[plot]'; } && "
            f"{command}"
        )


def origin_of(record: Any, found: Found) -> Origin:
    """The command and commit nearest to the value: of an object around it, of the part of the record's
    ``provenance`` that it lies in, of the record."""
    told: dict[str, str] = {}
    for source in _sources(record, found):
        for name in ("command", "commit"):
            if isinstance(source.get(name), str):
                told.setdefault(name, source[name])
    return Origin(told.get("command"), told.get("commit"))


def origins_of(record: Any) -> list[Origin]:
    """Of a whole record: what it tells of itself; where that is too little, what it tells of each of its parts."""
    own = origin_of(record, Found(record, (), ()))
    if None not in own or not isinstance(record, dict):
        return [own]
    return [Origin(one.get("command"), one.get("commit")) for one in _entries(record)] or [own]


def _sources(record: Any, found: Found) -> Iterator[dict[str, Any]]:
    """From the nearest to the value to the record itself."""
    around = [*found.above, found.value] if found.above else [record]
    yield from (one for one in reversed(around[1:]) if isinstance(one, dict))
    if isinstance(record, dict):
        inside = [one for one in _entries(record) if _holds(one.get("part"), found.place)]
        yield from sorted(inside, key=lambda one: -len(str(one.get("part", ""))))
        yield record


def _entries(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The record's provenance."""
    given = record.get("provenance", [])
    return [one for one in (given if isinstance(given, list) else [given]) if isinstance(one, dict)]


def _holds(part: Any, place: tuple[str, ...]) -> bool:
    """``part``: a path in the record's provenance, whatever joins its steps; none is the whole record."""
    if not isinstance(part, str) or not part:
        return True
    steps = part.replace("/", ".")
    return f"{'.'.join(place)}.".startswith(f"{steps}.")
