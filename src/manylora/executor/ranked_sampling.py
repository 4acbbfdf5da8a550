"""Tokens of a model whose vocabulary is cut among ranks: every rank gets the same ones.

Of a greedy step each rank says its most likely token and that logit, and all reduce these alike; of others
the first rank draws from all logits and tells the rest. So ranks agree by construction, whatever their
arithmetic. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from manylora.devices.peers import Peers
from manylora.executor.best import Best, greedy
from manylora.executor.sampler import Draws, Results, SampledRow, draw
from manylora.executor.scoring import score


class RankedSampling:
    """``vocabs``: each rank's token ids, in order."""

    def __init__(self, peers: Peers, vocabs: Sequence[range]) -> None:
        self._peers = peers
        self._vocabs = vocabs

    def greedy(self, logits: torch.Tensor) -> Best:
        """``best.greedy`` of all ranks' logits, given this one's ``[M, own]``; of equals the lowest id."""
        own = greedy(logits)
        if len(logits) == 0:
            return own
        own.tokens.add_(self._vocabs[self._peers.rank].start)
        found = [Best.within(packed) for packed in self._peers.gather(own.packed, "sampling")]
        values = torch.stack([best.values for best in found])
        # The first of the largest; NaN is larger than any number.
        which = torch.where(values.isnan(), torch.inf, values)
        first = _first_largest(which)[None]
        best = Best.within(torch.empty_like(own.packed))
        best.tokens.copy_(torch.stack([one.tokens for one in found]).gather(0, first)[0])
        best.values.copy_(values.gather(0, first)[0])
        return best

    def draw(self, logits: torch.Tensor, rows: Sequence[SampledRow], best: Best, last: torch.Tensor) -> Draws:
        """``sampler.draw`` from all ranks' logits. Only the first rank's results hold more than first draws."""
        whole = self._whole(logits)
        if self._peers.rank == 0:
            draws = draw(whole, rows, best, last)
            first = draws.first[: len(rows)].clone()
            self._peers.broadcast(first, "sampling")
            return draws
        first = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        self._peers.broadcast(first, "sampling")
        return Draws(first, first, _first_draws)

    def score(self, logits: torch.Tensor, targets: torch.Tensor, width: int) -> torch.Tensor:
        """``scoring.score`` from all ranks' logits; only the first rank has any rows of it."""
        whole = self._whole(logits)
        count = len(whole) if self._peers.rank == 0 else 0
        return score(whole[:count], targets[:count], width)

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        widest = len(self._vocabs[0])
        own = logits.new_full((len(logits), widest), -torch.inf)
        own[:, : logits.shape[1]] = logits
        parts = self._peers.gather(own, "sampling")
        return torch.cat([part[:, : len(vocab)] for part, vocab in zip(parts, self._vocabs)], dim=1)


def _first_largest(values: torch.Tensor) -> torch.Tensor:
    """int64 [M]: of values [N, M] the first place of the largest."""
    largest = values == values.amax(0)
    return largest.to(torch.uint8).argmax(0)


def _first_draws(packed: np.ndarray) -> Results:
    return Results([(token,) for token in packed.tolist()], None, [])
