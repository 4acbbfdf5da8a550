"""Traces of lone requests with their moments and lengths, and what may be asked of any file.

A format is a row type and a few names: ``AZURE_LLM``, ``BURSTGPT``. Sources and licences: docs/workloads.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from manylora_lab.workloads.assembly import Adapters, lone_request
from manylora_lab.workloads.rows import Count, Number, Positive, RowType
from manylora_lab.workloads.stream import Encode, Stream, StreamRequest, in_order
from manylora_lab.workloads.text_file import BadLine, TextFile


@dataclasses.dataclass(frozen=True, slots=True)
class ReadOptions:
    """How a file is read. Which of these a format heeds depends on what it has.

    ``adapters``: which serve the file's keys. ``encode``: the tokenizer for texts; None: lengths are estimated.
    ``limit``: so many requests, dialogs or records at most. ``only``: those with this label, a kind of log or a
    language. ``start_s`` and ``duration_s``: a part of a file with times, in seconds after its first request, and
    arrivals count from there. ``seed``: of what is drawn. ``skip_bad_lines``: malformed lines are left out and
    counted in the stream's notes instead of refused.
    """

    adapters: Adapters = dataclasses.field(default_factory=Adapters)
    encode: Encode | None = None
    limit: int | None = None
    only: str | None = None
    start_s: float = 0.0
    duration_s: float | None = None
    seed: int = 0
    skip_bad_lines: bool = False


WHOLE = ReadOptions()
"""The whole file as it is; all requests are the base model's."""


class TimedRow(Protocol):
    """A request; its moment is a date or a number of seconds."""

    @property
    def at(self) -> Any: ...
    @property
    def input_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...

    def key(self, number: int) -> str:
        """The request's key; ``number`` is its place in the file, from 0."""

    def label(self) -> str | None:
        """The text that ``ReadOptions.only`` is compared with."""


@dataclasses.dataclass(frozen=True, slots=True)
class TimedTrace:
    """A format with a request a row of a table. ``about`` the data, for a stream's notes. ``row``:
    one with the fields of ``TimedRow``, of which the first is its moment."""

    name: str
    about: str
    row: RowType[Any]

    def load(self, path: Path | str, options: ReadOptions = WHOLE) -> Stream:
        """The requests of a part of the file, at most ``options.limit``; requests without input or output, which
        failed, are left out and counted in the notes.

        Raises ConfigError for a malformed line and for a request before the file's first, which would be before
        the start.
        """
        file = TextFile(path, options.skip_bad_lines)
        end_s = math.inf if options.duration_s is None else options.start_s + options.duration_s
        requests: list[StreamRequest] = []
        num_failed = 0
        for number, (after_s, row) in enumerate(self._rows(file)):
            if len(requests) == options.limit:
                break
            if not options.start_s <= after_s < end_s or options.only not in (None, row.label()):
                continue
            if not row.input_tokens or not row.output_tokens:
                num_failed += 1
                continue
            adapter, arrival_s = options.adapters.choose(row.key(number)), after_s - options.start_s
            requests.append(
                lone_request(arrival_s, number, row.input_tokens, row.output_tokens, adapter, self.name)
            )
        failed = (f"{num_failed} failed requests (no tokens) left out",) if num_failed else ()
        return in_order(self.name, requests, options.adapters.ranks, (self.about, *failed, *file.notes))

    def _rows(self, file: TextFile) -> Iterator[tuple[float, TimedRow]]:
        """Each row, and how many seconds after the first it comes."""
        first: Any = None
        time_column = self.row.columns[0]

        def parse(cells: Mapping[str, str]) -> tuple[float, TimedRow]:
            nonlocal first
            row: TimedRow = self.row(cells)
            first = row.at if first is None else first
            if row.at < first:
                earliest = first if isinstance(first, datetime) else f"{first:g}"
                raise BadLine(f"{time_column}, not before the first line's {earliest}", cells[time_column])
            after = row.at - first
            return after.total_seconds() if isinstance(after, timedelta) else after, row

        return file.rows(self.row.columns, parse)


class _AzureLlmRow(msgspec.Struct, frozen=True):
    at: datetime = msgspec.field(name="TIMESTAMP")
    input_tokens: Positive = msgspec.field(name="ContextTokens")
    output_tokens: Positive = msgspec.field(name="GeneratedTokens")

    def key(self, number: int) -> str:
        return str(number)

    def label(self) -> str | None:
        return None


AZURE_LLM = TimedTrace(
    "azure-llm",
    "Azure LLM inference trace, CC BY 4.0: real arrivals and lengths, no adapters",
    RowType(_AzureLlmRow),
)
"""Azure LLM inference traces of 2023 and 2024. Timestamps are spelled ``2023-11-16 18:17:03.9799600`` (2023; no
zone: UTC) or ``2024-05-10 00:00:00.009930+00:00``, fraction perhaps left out (2024); beyond the microsecond they
are cut. Key of a request: its number in the file, from 0."""


class _BurstGptRow(msgspec.Struct, frozen=True):
    at: Number = msgspec.field(name="Timestamp")
    model: str = msgspec.field(name="Model")
    input_tokens: Count = msgspec.field(name="Request tokens")
    output_tokens: Count = msgspec.field(name="Response tokens")
    total_tokens: Count = msgspec.field(name="Total tokens")
    log_type: Literal["Conversation log", "API log"] = msgspec.field(name="Log Type")

    def __post_init__(self) -> None:
        if self.total_tokens != self.input_tokens + self.output_tokens:
            raise BadLine(f"Total tokens, {self.input_tokens} + {self.output_tokens}", self.total_tokens)

    def key(self, number: int) -> str:
        return self.model

    def label(self) -> str | None:
        return self.log_type


BURSTGPT = TimedTrace("burstgpt", "BurstGPT trace: real arrivals, lengths and models", RowType(_BurstGptRow))
"""BurstGPT. The file counts from the first of all its days, so that a later part of it begins late; its label is
"Conversation log" or "API log". Key of a request: its model, so ``ChatGPT`` or ``GPT-4``."""
