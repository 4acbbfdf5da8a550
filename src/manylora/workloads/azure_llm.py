"""Azure LLM inference traces of 2023 and 2024: CSV with TIMESTAMP, ContextTokens, GeneratedTokens.

Arrival times and lengths are real; who asks is not in the file. Sources and licences: docs/workloads.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from manylora.workloads.assembly import Adapters, lone_request
from manylora.workloads.stream import Stream, StreamRequest, in_order
from manylora.workloads.text_file import BadLine, TextFile, string, whole

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def load(
    path: Path | str,
    *,
    adapters: Adapters | None = None,
    start_s: float = 0.0,
    duration_s: float | None = None,
    limit: int | None = None,
    skip_bad_lines: bool = False,
) -> Stream:
    """The requests of ``duration_s`` seconds from ``start_s`` after the file's first, at most ``limit``.

    Arrivals count from ``start_s``. Timestamps are spelled ``2023-11-16 18:17:03.9799600`` (2023; no zone: UTC) or
    ``2024-05-10 00:00:00.009930+00:00``, fraction perhaps left out (2024); beyond the microsecond they are cut.
    Key of a request: its number in the file, from 0. Raises ConfigError for a malformed line and for a request
    before the file's first, which would be before the start.
    """
    file = TextFile(path, skip_bad_lines)
    adapters = adapters or Adapters()
    end_s = float("inf") if duration_s is None else start_s + duration_s
    requests: list[StreamRequest] = []
    first: datetime | None = None

    def row(cells: Mapping[str, str]) -> tuple[float, int, int]:
        nonlocal first
        moment, input_tokens, output_tokens = _row(cells)
        first = first or moment
        if moment < first:
            raise BadLine(f"TIMESTAMP, not before the first line's {first}", cells["TIMESTAMP"])
        return (moment - first).total_seconds(), input_tokens, output_tokens

    for number, (after_s, input_tokens, output_tokens) in enumerate(file.rows(COLUMNS, row)):
        if len(requests) == limit:
            break
        if start_s <= after_s < end_s:
            adapter = adapters.choose(str(number))
            requests.append(
                lone_request(after_s - start_s, number, input_tokens, output_tokens, adapter, "azure-llm")
            )
    notes = ("Azure LLM inference trace, CC BY 4.0: real arrivals and lengths, no adapters", *file.notes)
    return in_order("azure-llm", requests, adapters.ranks, notes)


def _row(row: Mapping[str, str]) -> tuple[datetime, int, int]:
    return _moment(row), whole(row, "ContextTokens", 1), whole(row, "GeneratedTokens", 1)


def _moment(row: Mapping[str, str]) -> datetime:
    found = string(row, "TIMESTAMP")
    try:
        moment = datetime.fromisoformat(found)
    except ValueError:
        moment = None
    if moment is None or ":" not in found:
        raise BadLine("TIMESTAMP, as in 2023-11-16 18:17:03.9799600", found)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
