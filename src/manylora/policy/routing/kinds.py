"""Kinds of replicas: those of which the same was told when they came up are believed to be equally fast.

Owns what the replicas of a kind have learnt of prompts, copies and reads, as one estimate of each. A replica's own
estimate follows its last few prompts, so what differs between prompts looks like a difference between replicas,
and the one that happens to look fast gets the next request.
"""

from __future__ import annotations

from typing import NamedTuple

from manylora.protocol import Status
from manylora.protocol.routing import ReplicaFacts, StepPlane

KindKey = tuple[str, tuple[StepPlane, ...], float, float, float]


class Learnt(NamedTuple):
    """Seconds that a replica has learnt, or 0 where it has not: of a prompt's token, of a page from the host, and
    of an adapter's page that is read."""

    token_s: float = 0.0
    page_in_s: float = 0.0
    page_read_s: float = 0.0


NOTHING = Learnt()


def learnt_of(status: Status) -> Learnt:
    return Learnt(status.token_s, status.page_in_s, status.page_read_s)


def kind_key(facts: ReplicaFacts) -> KindKey:
    """What replicas of one kind have in common: the device that they name, and the seconds."""
    return facts.numerics, facts.planes, facts.token_s, facts.page_in_s, facts.page_read_s


class ReplicaKind:
    """``planes``: of decode steps, one object for all. ``token_s``, ``page_in_s``, ``page_read_s``: means over the
    replicas of the kind that have learnt these; before any has, what the facts say."""

    __slots__ = ("_counts", "_sums", "_told", "page_in_s", "page_read_s", "planes", "token_s")

    def __init__(self, facts: ReplicaFacts) -> None:
        self.planes = facts.planes
        self._told = Learnt(facts.token_s, facts.page_in_s, facts.page_read_s)
        self._sums = [0.0, 0.0, 0.0]
        self._counts = [0, 0, 0]
        self.token_s, self.page_in_s, self.page_read_s = self._told

    def note(self, before: Learnt, now: Learnt) -> None:
        """A replica of the kind that had learnt one has learnt another; ``NOTHING`` where it comes or goes."""
        if before == now:
            return
        for place, (old, new) in enumerate(zip(before, now)):
            self._sums[place] += new - old
            self._counts[place] += (new > 0) - (old > 0)
        self.token_s, self.page_in_s, self.page_read_s = (
            total / count if count else told
            for total, count, told in zip(self._sums, self._counts, self._told)
        )
