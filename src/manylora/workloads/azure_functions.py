"""Azure Functions traces of 2019 (invocations a minute) and 2021 (one line an invocation): arrivals by function.

They hold no lengths. FastLibra (section 6.2) sorts functions by how often they are invoked and maps the n busiest
to n adapters: ``Invocations.busiest``. Sources and licences: docs/workloads.md.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path

from manylora.config import ConfigError
from manylora.workloads.text_file import BadLine, TextFile, decimal, string

MINUTE_S = 60.0
_MOST_A_MINUTE = 10**6


@dataclasses.dataclass(frozen=True)
class Invocations:
    """When each function was called: seconds from the start of the cut, sorted; the busiest function first.

    Functions as busy as each other keep the order of the file. In a shortened cut some may have no arrival left.
    ``duration_s``: the length of the cut.
    """

    arrivals_s: Mapping[str, tuple[float, ...]]
    duration_s: float
    notes: tuple[str, ...] = ()

    def busiest(self, count: int) -> Invocations:
        """Only the ``count`` busiest functions; raises ConfigError if there are fewer."""
        if not 1 <= count <= len(self.arrivals_s):
            raise ConfigError(f"the trace has {len(self.arrivals_s)} functions, {count} are asked for")
        kept = dict(list(self.arrivals_s.items())[:count])
        return dataclasses.replace(self, arrivals_s=kept)

    def merged(self) -> list[tuple[float, int]]:
        """(arrival in seconds, index of the function: 0 the busiest), in order of arrival."""
        return sorted(
            (arrival_s, index) for index, times in enumerate(self.arrivals_s.values()) for arrival_s in times
        )


def load_2019(
    path: Path | str,
    *,
    seed: int,
    first_minute: int = 1,
    minutes: int | None = None,
    busiest: int | None = None,
    until_s: float | None = None,
    limit: int | None = None,
    skip_bad_lines: bool = False,
) -> Invocations:
    """A day's file, one row a function: an id column (``HashFunction``, or ``function``) and columns 1 to 1440.

    Only the cut of ``minutes`` from ``first_minute`` (as the columns are named, from 1), only functions called
    in it and of these the ``busiest``. Of their arrivals, which may be hundreds of millions a day, only those of
    the minutes that ``until_s`` seconds or the first ``limit`` arrivals need. Within its minute an arrival is
    drawn uniformly, by ``seed`` and function: what else is kept does not change a function's arrivals in a cut.
    Raises ConfigError for a malformed line and for an impossible cut.
    """
    file = TextFile(path, skip_bad_lines)
    counts: dict[str, dict[int, int]] = {}
    last = 0
    for function, row in file.rows(("1",), _row_2019):
        last = last or _last_minute(path, row)
        end = last if minutes is None else first_minute + minutes - 1
        if not 1 <= first_minute <= end <= last:
            raise ConfigError(f"{path} has minutes 1 to {last}; {first_minute} to {end} are asked for")
        its = counts.setdefault(function, {})
        for minute in range(first_minute, end + 1):
            if row[minute]:
                its[minute] = its.get(minute, 0) + row[minute]
    called = sorted((f for f in counts if counts[f]), key=lambda f: -sum(counts[f].values()))
    if not called:
        raise ConfigError(f"{path} has no invocation in the minutes asked for")
    kept = {f: counts[f] for f in called[:busiest]}
    length = last - first_minute + 1 if minutes is None else minutes
    if until_s is not None:
        length = min(length, math.ceil(until_s / MINUTE_S))
    if limit is not None:
        each = (sum(its.get(first_minute + index, 0) for its in kept.values()) for index in range(length))
        length = next((index for index, made in enumerate(accumulate(each), 1) if made >= limit), length)
    arrivals = {
        f: _spread(its, first_minute, length, random.Random(f"{seed}/{f}")) for f, its in kept.items()
    }
    note = f"Azure Functions trace 2019, CC BY 4.0: counts a minute, spread uniformly within it, seed {seed}"
    return Invocations(arrivals, length * MINUTE_S, (note, *file.notes))


def load_2021(
    path: Path | str, *, busiest: int | None = None, limit: int | None = None, skip_bad_lines: bool = False
) -> Invocations:
    """The first ``limit`` rows of app, func, end_timestamp, duration (seconds): arrival is end minus duration.

    Times count from the first arrival. A function is named ``app/func``, as func is unique only within an app.
    Raises ConfigError for a malformed line.
    """
    file = TextFile(path, skip_bad_lines)
    found: dict[str, list[float]] = {}
    columns = ("app", "func", "end_timestamp", "duration")
    for number, (function, start_s) in enumerate(file.rows(columns, _row_2021)):
        if number == limit:
            break
        found.setdefault(function, []).append(start_s)
    if not found:
        raise ConfigError(f"{path} has no invocations")
    first_s = min(min(times) for times in found.values())
    called = sorted(found, key=lambda f: -len(found[f]))
    arrivals = {f: tuple(sorted(start_s - first_s for start_s in found[f])) for f in called}
    duration_s = max(times[-1] for times in arrivals.values())
    kept = {f: arrivals[f] for f in called[:busiest]}
    note = "Azure Functions trace 2021, CC BY 4.0: real arrivals, as end minus duration"
    return Invocations(kept, duration_s, (note, *file.notes))


def _row_2019(row: Mapping[str, str]) -> tuple[str, dict[int, int]]:
    function = row.get("HashFunction") or row.get("function")
    if not function:
        raise BadLine("a function's id in HashFunction or function", "nothing")
    counts = {}
    for name, cell in row.items():
        if name.isdecimal() and len(name) < 9:
            if not cell.isdecimal() or len(cell) > 9 or int(cell) > _MOST_A_MINUTE:
                raise BadLine(f"a count of invocations in minute {name}, up to {_MOST_A_MINUTE}", cell)
            counts[int(name)] = int(cell)
    return function, counts


def _last_minute(path: Path | str, row: Mapping[int, int]) -> int:
    if sorted(row) != list(range(1, len(row) + 1)):
        raise ConfigError(f"{path}, line 1: expected columns for minutes 1, 2, 3, ..., found gaps")
    return len(row)


def _spread(
    counts: Mapping[int, int], first_minute: int, minutes: int, draws: random.Random
) -> tuple[float, ...]:
    return tuple(
        sorted(
            (index + draws.random()) * MINUTE_S
            for index in range(minutes)
            for _ in range(counts.get(first_minute + index, 0))
        )
    )


def _row_2021(row: Mapping[str, str]) -> tuple[str, float]:
    start_s = decimal(row, "end_timestamp") - decimal(row, "duration")
    return f"{string(row, 'app')}/{string(row, 'func')}", start_s
