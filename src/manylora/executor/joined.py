"""What the parts of a step drew, joined in the order of the step. Knows no device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from manylora.executor.sampler import Results
from manylora.executor.scoring import ScoredTokens
from manylora.types import PromptLogprobs, SequenceId, TokenLogprobs


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Sampled:
    """Rows of a step, by their places in it, and how to learn what they drew. ``scores``: and, of a batch with
    tokens that are ``scored``, what these say of prompts. Both functions wait for the device."""

    rows: np.ndarray
    read: Callable[[], Results]
    scored: ScoredTokens | None = None
    scores: Callable[[], np.ndarray] | None = None


class Drawn(NamedTuple):
    """As StepDone and StepResult have it."""

    tokens: tuple[tuple[SequenceId, tuple[int, ...]], ...]
    logprobs: dict[tuple[SequenceId, int], TokenLogprobs]
    unsound: tuple[SequenceId, ...]
    prompt_logprobs: dict[SequenceId, PromptLogprobs]


def joined(parts: Sequence[Sampled], sequences: Sequence[SequenceId]) -> Drawn:
    """Waits for the device. ``sequences``: of the step's rows that drew."""
    results = [part.read() for part in parts]
    # Parts are in the order of their batches: from there into the step's.
    order = np.argsort(np.concatenate([part.rows for part in parts])).tolist()
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
    prompts: dict[SequenceId, PromptLogprobs] = {}
    for part in parts:
        if part.scored is not None and part.scores is not None:
            prompts |= part.scored.read(part.scores())
    return Drawn(tokens, logprobs, unsound, prompts)
