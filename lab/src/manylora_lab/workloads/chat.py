"""Multi-turn chat traces: how much users say to which adapter, and when.

Owns the file format (JSON lines, perhaps gzipped; the README.md beside the traces) and its checks. A trace holds
lengths, no text; the replay makes up the tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from manylora.config.declaring import ConfigError
from manylora_lab.workloads.popularity import MOST_ADAPTERS, MOST_RANK
from manylora_lab.workloads.rows import Count, Number, Positive, RowType
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest, in_order
from manylora_lab.workloads.text_file import TextFile

TRACES = Path(__file__).parent / "chats"
"""Multi-turn chats that ship with the laboratory, by requests a second."""


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation. ``arrival_s`` counts from the start of the trace; lengths in tokens.

    The prompt is the conversation so far (``history_tokens``) and ``user_tokens`` new ones.
    """

    arrival_s: Number
    conversation: Count
    turn: Count
    adapter: Annotated[int, msgspec.Meta(ge=0, le=MOST_ADAPTERS - 1)]
    rank: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANK)]
    history_tokens: Count
    user_tokens: Positive
    reply_tokens: Positive

    @property
    def prompt_tokens(self) -> int:
        """Length of the whole prompt."""
        return self.history_tokens + self.user_tokens


def read_turns(path: Path, limit: int | None = None) -> tuple[Turn, ...]:
    """The first ``limit`` turns (None: all) in order of arrival; raises ConfigError, in one line."""
    if limit is not None and limit < 1:
        raise ConfigError(f"the limit must be at least 1, got {limit}")
    file, row_type = TextFile(path), RowType(Turn)
    numbered = sorted(
        file.records(lambda row: (row_type(row), file.line)), key=lambda pair: pair[0].arrival_s
    )
    if not numbered:
        raise ConfigError(f"the trace {path} is empty")
    # A prefix of the arrivals holds whole conversations' beginnings, so it is a trace as well.
    kept = numbered[:limit]
    _check_together(path, kept)
    return tuple(turn for turn, _ in kept)


def conversations(turns: Iterable[Turn]) -> dict[int, tuple[Turn, ...]]:
    """The turns of each conversation, in order."""
    found: dict[int, list[Turn]] = {}
    for turn in turns:
        found.setdefault(turn.conversation, []).append(turn)
    return {number: tuple(turns) for number, turns in found.items()}


def prefix_bound(turns: Sequence[Turn]) -> float:
    """The share of prompt tokens that an endless cache would have computed before: the history's."""
    return sum(turn.history_tokens for turn in turns) / sum(turn.prompt_tokens for turn in turns)


def shrunk(turns: Sequence[Turn], divisor: int) -> tuple[Turn, ...]:
    """The same conversations with lengths divided, at least 1 token each: for models of short contexts."""
    history: dict[int, int] = {}
    small = []
    for turn in turns:
        before = history.get(turn.conversation, 0)
        user, reply = max(1, turn.user_tokens // divisor), max(1, turn.reply_tokens // divisor)
        small.append(dataclasses.replace(turn, history_tokens=before, user_tokens=user, reply_tokens=reply))
        history[turn.conversation] = before + user + reply
    return tuple(small)


def to_stream(turns: Iterable[Turn], name: str = "chat", ranks: Sequence[int] | None = None) -> Stream:
    """The turns as a stream; no two prompts share anything but their own conversation's history.

    ``ranks``: of all adapters served. None: of those that the trace names, and for numbers between them that it
    does not name the lowest of these ranks. Raises ConfigError for ranks that are not the trace's.
    """
    turns = tuple(turns)
    named = {turn.adapter: turn.rank for turn in turns}
    if ranks is None:
        lowest = min(named.values(), default=0)
        ranks = [named.get(adapter, lowest) for adapter in range(max(named, default=-1) + 1)]
    for turn in turns:
        if turn.adapter >= len(ranks) or ranks[turn.adapter] != turn.rank:
            given = ranks[turn.adapter] if turn.adapter < len(ranks) else "none"
            raise ConfigError(
                f"{name}: adapter {turn.adapter} has rank {turn.rank} in the trace, {given} given"
            )
    requests = [
        StreamRequest(
            turn.arrival_s,
            turn.adapter,
            turn.conversation,
            turn.turn,
            (Piece((turn.conversation, turn.turn), turn.user_tokens),),
            turn.reply_tokens,
        )
        for turn in turns
    ]
    return in_order(name, requests, ranks, ("chat trace generated for this project: lengths, no text",))


def _check_together(path: Path, numbered: Iterable[tuple[Turn, int]]) -> None:
    """``numbered``: turns in order of arrival, each with its line in the file."""
    before: dict[int, Turn] = {}
    ranks: dict[int, int] = {}
    for turn, line in numbered:
        where = f"{path}, line {line}: conversation {turn.conversation}"
        last = before.get(turn.conversation)
        index = 0 if last is None else last.turn + 1
        if turn.turn != index:
            raise ConfigError(f"{where} has turn {turn.turn} where turn {index} should come")
        if last is not None and turn.adapter != last.adapter:
            raise ConfigError(f"{where} changes its adapter from {last.adapter} to {turn.adapter}")
        history = 0 if last is None else last.prompt_tokens + last.reply_tokens
        if turn.history_tokens != history:
            raise ConfigError(
                f"{where}, turn {index}: expected history_tokens {history}, as the turns before it hold, "
                f"found {turn.history_tokens}"
            )
        if ranks.setdefault(turn.adapter, turn.rank) != turn.rank:
            raise ConfigError(
                f"{where}: expected rank {ranks[turn.adapter]} for adapter {turn.adapter}, as before, "
                f"found {turn.rank}"
            )
        before[turn.conversation] = turn
