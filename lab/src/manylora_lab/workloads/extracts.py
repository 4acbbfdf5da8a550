"""The small extracts of public data that come with manylora (data/README.md: sources, licences, cuts)."""

from __future__ import annotations

import csv
import dataclasses
import functools
import gzip
import itertools
from collections.abc import Sequence
from pathlib import Path

_FOLDER = Path(__file__).parent / "data"


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """One call of the model within a conversation: what is new in its prompt, and what it generates.

    In tokens, or in characters where a function says so. ``by_tool``: a tool's result brought it, not a person.
    """

    new: int
    generated: int
    by_tool: bool = False


def sharegpt_conversations() -> list[tuple[Round, ...]]:
    """2,000 conversations of ShareGPT, in Llama-2 tokens."""
    rows = _numbers("sharegpt_conversations.csv.gz")
    grouped = itertools.groupby(rows, key=lambda row: row[0])
    return [tuple(Round(user, reply) for _, user, reply in group) for _, group in grouped]


def azure_chat_gaps_s() -> list[float]:
    """Seconds between the requests of one hour of Azure's chat service in 2023, in order."""
    return [gap_ms / 1000 for (gap_ms,) in _numbers("azure_conv_2023_gaps.csv.gz")]


def azure_functions() -> list[tuple[int, ...]]:
    """Calls in each minute of a day in 2019, of the 100 functions called most, most first."""
    return _numbers("maf2019_top100_minutes.csv.gz")


def sentence_bytes() -> dict[str, tuple[int, ...]]:
    """The UTF-8 bytes of the same 250 sentences, by NTREX language code."""
    rows = _rows("ntrex128_bytes.csv.gz")
    return {column[0]: tuple(map(int, column[1:])) for column in zip(*rows)}


def taskmaster_dialogs() -> dict[str, list[tuple[Round, ...]]]:
    """Each agent's dialogs, in characters: 'films' (Taskmaster TM-3, with tools) and 'coffee' (TM-4)."""
    rows = _rows("taskmaster_dialogs.csv.gz")[1:]
    dialogs: dict[str, list[tuple[Round, ...]]] = {}
    for (agent, _), group in itertools.groupby(rows, key=lambda row: (row[0], row[1])):
        rounds = tuple(Round(int(new), int(said), tool == "1") for _, _, tool, new, said in group)
        dialogs.setdefault(agent, []).append(rounds)
    return dialogs


@functools.cache
def _rows(name: str) -> list[list[str]]:
    with gzip.open(_FOLDER / name, "rt", encoding="utf-8") as file:
        return list(csv.reader(file))


def _numbers(name: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, row)) for row in _rows(name)[1:]]


def fitting(rounds: Sequence[Round], max_tokens: int) -> tuple[Round, ...]:
    """The first rounds that together stay within ``max_tokens``: what a model of that context can hold."""
    totals = itertools.accumulate(round.new + round.generated for round in rounds)
    return tuple(round for round, total in zip(rounds, totals) if total <= max_tokens)
