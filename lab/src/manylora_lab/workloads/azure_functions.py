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

import msgspec

from manylora.config.declaring import ConfigError
from manylora_lab.workloads.rows import Number, RowType
from manylora_lab.workloads.text_file import BadLine, TextFile
from manylora_lab.workloads.traces import WHOLE, ReadOptions

MINUTE_S = 60.0
_MOST_A_MINUTE = 10**6


@dataclasses.dataclass(frozen=True)
class Invocations:
    """When each function was called: seconds from the start, sorted; the busiest function first.

    Functions as busy as each other keep the order of the file. Of a part of a day some may have no arrival left.
    ``duration_s``: the length of the part.
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


def load_2019(path: Path | str, options: ReadOptions = WHOLE, busiest: int | None = None) -> Invocations:
    """A day's file, one row a function: an id column (``HashFunction``, or ``function``) and columns 1 to 1440.

    Only functions that are called, and of these the ``busiest`` of the day. Of their arrivals, which may be
    hundreds of millions, only those of the minutes that ``options.duration_s`` or the first ``options.limit``
    arrivals need. Within its minute an arrival is drawn uniformly, by ``options.seed`` and function: what else is
    kept does not change a function's arrivals. Raises ConfigError for a malformed line and for a file without
    invocations.
    """
    file = TextFile(path, options.skip_bad_lines)
    counts: dict[str, dict[int, int]] = {}
    length = 0
    for function, row in file.rows(("1",), _row_2019):
        length = length or _last_minute(path, row)
        its = counts.setdefault(function, {})
        for minute in range(1, length + 1):
            if row[minute]:
                its[minute] = its.get(minute, 0) + row[minute]
    called = sorted((f for f in counts if counts[f]), key=lambda f: -sum(counts[f].values()))
    if not called:
        raise ConfigError(f"{path} has no invocation in the minutes asked for")
    kept = {f: counts[f] for f in called[:busiest]}
    if options.duration_s is not None:
        length = min(length, math.ceil(options.duration_s / MINUTE_S))
    if options.limit is not None:
        each = (sum(its.get(minute, 0) for its in kept.values()) for minute in range(1, length + 1))
        length = next(
            (minute for minute, made in enumerate(accumulate(each), 1) if made >= options.limit), length
        )
    arrivals = {f: _spread(its, length, random.Random(f"{options.seed}/{f}")) for f, its in kept.items()}
    note = "Azure Functions trace 2019, CC BY 4.0: counts a minute, spread uniformly within it"
    return Invocations(arrivals, length * MINUTE_S, (f"{note}, seed {options.seed}", *file.notes))


class _Row2021(msgspec.Struct, frozen=True):
    app: str
    func: str
    end_timestamp: Number
    duration: Number


def load_2021(path: Path | str, options: ReadOptions = WHOLE) -> Invocations:
    """All rows of app, func, end_timestamp, duration (seconds): arrival is end minus duration.

    Times count from the first arrival. A function is named ``app/func``, as func is unique only within an app.
    Raises ConfigError for a malformed line.
    """
    file, row_type = TextFile(path, options.skip_bad_lines), RowType(_Row2021)
    found: dict[str, list[float]] = {}
    for row in file.rows(row_type.columns, row_type):
        found.setdefault(f"{row.app}/{row.func}", []).append(row.end_timestamp - row.duration)
    if not found:
        raise ConfigError(f"{path} has no invocations")
    first_s = min(min(times) for times in found.values())
    called = sorted(found, key=lambda f: -len(found[f]))
    arrivals = {f: tuple(sorted(start_s - first_s for start_s in found[f])) for f in called}
    duration_s = max(times[-1] for times in arrivals.values())
    note = "Azure Functions trace 2021, CC BY 4.0: real arrivals, as end minus duration"
    return Invocations(arrivals, duration_s, (note, *file.notes))


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


def _spread(counts: Mapping[int, int], minutes: int, draws: random.Random) -> tuple[float, ...]:
    return tuple(
        sorted(
            (index + draws.random()) * MINUTE_S
            for index in range(minutes)
            for _ in range(counts.get(1 + index, 0))
        )
    )
