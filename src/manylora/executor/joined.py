"""What the parts of a step drew, joined in the order of the step. Knows no device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from manylora.executor.sampler import Results
from manylora.types import SequenceId, TokenLogprobs


class Drawn(NamedTuple):
    """As StepDone and StepResult have it."""

    tokens: tuple[tuple[SequenceId, tuple[int, ...]], ...]
    logprobs: dict[tuple[SequenceId, int], TokenLogprobs]
    unsound: tuple[SequenceId, ...]


def joined(results: Sequence[Results], rows: Sequence[np.ndarray], sequences: Sequence[SequenceId]) -> Drawn:
    """``rows``: of each part the places of its rows among the step's; ``sequences``: of the step's rows that
    drew."""
    # Parts are in the order of their batches: from there into the step's.
    order = np.argsort(np.concatenate(rows)).tolist()
    ids = [row for result in results for row in result.tokens]
    tokens = tuple(zip(sequences, (tuple(ids[place]) for place in order)))
    logprobs: dict[tuple[SequenceId, int], TokenLogprobs] = {}
    if any(result.logprobs is not None for result in results):
        told = [row for result in results for row in (result.logprobs or [()] * len(result.tokens))]
        for sequence, place in zip(sequences, order):
            logprobs |= {(sequence, i): item for i, item in enumerate(told[place]) if item is not None}
    unsound: tuple[SequenceId, ...] = ()
    if any(result.unsound for result in results):
        begins = np.cumsum([0, *(len(result.tokens) for result in results)])
        places = {begin + row for begin, result in zip(begins, results) for row in result.unsound}
        unsound = tuple(sequence for sequence, place in zip(sequences, order) if place in places)
    return Drawn(tokens, logprobs, unsound)
