"""Kernels of several ranks compiled ahead: they are the same for the most part, so the first rank's come first.

Rehearsals make no exchange: which steps a rank rehearses depends on what its cache lacks, so another may not be
there. Owns whose turn it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from manylora.devices.peers import Peers
from manylora.executor.graphs import Rehearse


def in_turn(rehearse: Rehearse | None, peers: Peers) -> Rehearse | None:
    """``rehearse`` of one of several ranks, all of which call it: the first rank's kernels are compiled, then what
    others lack besides. The ranks meet in between."""
    if rehearse is None:
        return None

    def rehearsed(steps: Sequence[Callable[[], object]], num_telling: int) -> bool:
        with peers.leaving_out():
            is_new = peers.rank == 0 and rehearse(steps, num_telling)
        peers.gather(torch.zeros(1, dtype=torch.int64), "start")[0].item()
        if peers.rank == 0:
            return is_new
        with peers.leaving_out():
            return rehearse(steps, num_telling)

    return rehearsed
