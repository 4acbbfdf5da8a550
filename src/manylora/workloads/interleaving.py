"""Conversations laid upon given arrivals: every arrival is some conversation's next turn, or begins one."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import NamedTuple

from manylora.workloads.extracts import Round
from manylora.workloads.stream import Piece, StreamRequest


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
    """One request for each arrival, in the arrivals' order; the moments stay exactly as they are.

    An arrival is the next turn of that conversation which has waited longest, among those whose ``gap_s`` since
    their last arrival is over; if there is none, it is the first turn of a new one, which ``begin`` makes (handed
    the arrival's adapter). What is left of conversations when arrivals end is not had. ``source``: part of the
    prompts' identity; no two prompts are equal.
    """
    scripts: list[Script] = []
    waiting: dict[int | None, list[tuple[float, int, int]]] = {}
    requests = []
    for arrival in arrivals:
        ready = waiting.setdefault(arrival.adapter, [])
        if ready and ready[0][0] <= arrival.at_s:
            _, number, turn = heapq.heappop(ready)
        else:
            number, turn = len(scripts), 0
            scripts.append(begin(arrival.adapter))
        adapter, rounds = scripts[number]
        prompt = (Piece((source, number, turn), rounds[turn].new),)
        requests.append(StreamRequest(arrival.at_s, adapter, number, turn, prompt, rounds[turn].generated))
        if turn + 1 < len(rounds):
            heapq.heappush(ready, (arrival.at_s + gap_s(rounds[turn + 1]), number, turn + 1))
    return requests
