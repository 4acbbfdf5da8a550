"""What each of N ranks has of a dimension. No tensors here.

A rank (of an engine; an adapter's rank is another thing) is one of N equal processes, each with a part of every
matrix. Owns the one rule by which a length is cut. Does not know what the dimension means.
"""

from __future__ import annotations

from typing import NamedTuple

MOST_RANKS = 16
"""More processes of one host exchange more than they compute."""


class RankPlace(NamedTuple):
    """Which of how many ranks."""

    rank: int = 0
    num_ranks: int = 1

    def cut(self, length: int, unit: int = 1) -> range:
        """This rank's part of ``length`` elements: whole units, the first ranks having one more where they do not
        come out even. Units are halved until every rank has one."""
        while unit > 1 and length < unit * self.num_ranks:
            unit //= 2
        units = -(-length // unit)
        size, over = divmod(units, self.num_ranks)
        begin = self.rank * size + min(self.rank, over)
        end = begin + size + (self.rank < over)
        return range(min(begin * unit, length), min(end * unit, length))

    def heads(self, heads: int) -> range:
        """This rank's part of ``heads``; of fewer heads than ranks the one that it shares with its neighbours."""
        if heads >= self.num_ranks:
            return self.cut(heads)
        first = self.rank * heads // self.num_ranks
        return range(first, first + 1)


def possible_counts(heads: int, kv_heads: int, most: int) -> list[int]:
    """The numbers of ranks, up to ``most``, among which the heads can be shared out: equal parts of the query
    heads, and equal parts of the KV heads or equal numbers of ranks to each."""
    return [
        count
        for count in range(1, most + 1)
        if heads % count == 0 and (kv_heads % count == 0 or count % kv_heads == 0)
    ]
