"""Conversations laid upon given arrivals: every arrival is some conversation's next turn, or begins one."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from manylora_lab.workloads.extracts import Round
from manylora_lab.workloads.stream import Piece, StreamRequest


class Arrival(NamedTuple):
    """``at_s`` in seconds. ``adapter``: where the source of arrivals knows it, so that only its conversations
    can take this arrival; None: any conversation."""

    at_s: float
    adapter: int | None = None


class Script(NamedTuple):
    """A conversation to be had: with which adapter, and its rounds in tokens."""

    adapter: int
    rounds: tuple[Round, ...]


def interleave(
    source: str,
    arrivals: Iterable[Arrival],
    begin: Callable[[int | None], Script],
    gap_s: Callable[[Round], float],
) -> list[StreamRequest]:
    """One request for each arrival, in the arrivals' order; the moments stay exactly as they are (``next_turns``).

    ``begin`` makes a new conversation, handed the arrival's adapter; ``gap_s``: before the round that it is
    handed. What is left of conversations when arrivals end is not had. ``source``: part of the prompts'
    identity; no two prompts are equal.
    """
    scripts: list[Script] = []

    def opened(adapter: int | None) -> int:
        scripts.append(begin(adapter))
        return len(scripts[-1].rounds)

    requests = []
    turns = next_turns(arrivals, opened, lambda number, turn: gap_s(scripts[number].rounds[turn]))
    for at_s, number, turn in turns:
        adapter, rounds = scripts[number]
        prompt = (Piece((source, number, turn), rounds[turn].new),)
        requests.append(StreamRequest(at_s, adapter, number, turn, prompt, rounds[turn].generated))
    return requests


def next_turns(
    arrivals: Iterable[Arrival], begin: Callable[[int | None], int], gap_s: Callable[[int, int], float]
) -> Iterator[tuple[float, int, int]]:
    """Each arrival's moment, and whose turn it is: a conversation's number, from 0, and the turn's.

    An arrival is the next turn of that conversation which has waited longest, among those whose ``gap_s`` (of a
    conversation's turn, from the turn before it) is over; if there is none, the first turn of a new one, of as
    many turns as ``begin`` says. Where ``begin`` has no more (0), it is the turn that is due next, though before
    its time, and where no conversation waits arrivals are over.
    """
    waiting: dict[int | None, list[tuple[float, int, int]]] = {}
    lengths: list[int] = []
    for at_s, adapter in arrivals:
        ready = waiting.setdefault(adapter, [])
        if ready and ready[0][0] <= at_s:
            _, number, turn = heapq.heappop(ready)
        elif length := begin(adapter):
            number, turn = len(lengths), 0
            lengths.append(length)
        elif ready:
            _, number, turn = heapq.heappop(ready)
        else:
            return
        yield at_s, number, turn
        if turn + 1 < lengths[number]:
            heapq.heappush(ready, (at_s + gap_s(number, turn + 1), number, turn + 1))
