"""BurstGPT: CSV with Timestamp (s), Model, Request tokens, Response tokens, Total tokens, Log Type.

Sources and licences: docs/workloads.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from manylora.workloads.assembly import Adapters, lone_request
from manylora.workloads.stream import Stream, StreamRequest, in_order
from manylora.workloads.text_file import BadLine, TextFile, decimal, string, whole

COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")
LOG_TYPES = ("Conversation log", "API log")


def load(
    path: Path | str,
    *,
    adapters: Adapters | None = None,
    log_type: str | None = None,
    start_s: float = 0.0,
    duration_s: float | None = None,
    limit: int | None = None,
    skip_bad_lines: bool = False,
) -> Stream:
    """The requests of ``duration_s`` seconds from ``start_s`` after the file's first, at most ``limit``.

    Arrivals count from ``start_s``. The file counts from the first of all its days, so that a later part of it
    begins late. ``log_type``: only "Conversation log" or "API log". Failed requests, which
    have no response tokens, and empty ones are left out and counted in the notes. Key of a request: its model,
    so ``ChatGPT`` or ``GPT-4``. Raises ConfigError for a malformed line.
    """
    file = TextFile(path, skip_bad_lines)
    adapters = adapters or Adapters()
    end_s = float("inf") if duration_s is None else start_s + duration_s
    requests: list[StreamRequest] = []
    failed = 0
    first_s: float | None = None

    def row(cells: Mapping[str, str]) -> _Row:
        nonlocal first_s
        found = _row(cells)
        first_s = found.at_s if first_s is None else first_s
        if found.at_s < first_s:
            raise BadLine(f"Timestamp, not before the first line's {first_s:g}", cells["Timestamp"])
        return found._replace(at_s=found.at_s - first_s)

    for number, (after_s, model, input_tokens, output_tokens, kind) in enumerate(file.rows(COLUMNS, row)):
        if len(requests) == limit:
            break
        if not start_s <= after_s < end_s or (log_type is not None and kind != log_type):
            continue
        if input_tokens == 0 or output_tokens == 0:
            failed += 1
            continue
        adapter = adapters.choose(model)
        requests.append(
            lone_request(after_s - start_s, number, input_tokens, output_tokens, adapter, "burstgpt")
        )
    notes = ["BurstGPT trace: real arrivals, lengths and models"]
    if failed:
        notes.append(f"{failed} failed requests (no tokens) left out")
    return in_order("burstgpt", requests, adapters.ranks, (*notes, *file.notes))


class _Row(NamedTuple):
    at_s: float
    model: str
    input_tokens: int
    output_tokens: int
    kind: str


def _row(row: Mapping[str, str]) -> _Row:
    input_tokens, output_tokens = whole(row, "Request tokens"), whole(row, "Response tokens")
    if whole(row, "Total tokens") != input_tokens + output_tokens:
        raise BadLine(f"Total tokens, {input_tokens} + {output_tokens}", row["Total tokens"])
    kind = string(row, "Log Type")
    if kind not in LOG_TYPES:
        raise BadLine(f"Log Type, {' or '.join(LOG_TYPES)}", kind)
    return _Row(decimal(row, "Timestamp"), string(row, "Model"), input_tokens, output_tokens, kind)
