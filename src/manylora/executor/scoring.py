"""Log-probabilities of prompts' tokens: of logits, a few rows at a time, and as the host is to have them.

A prompt has a row of logits for each of its tokens, and all of them together would take gigabytes: the caller
computes ``LOGITS_AT_A_TIME``. Knows tensors; nothing of requests or models.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from manylora.types import PromptLogprobs, SequenceId

LOGITS_AT_A_TIME = 2**23
"""32 MiB of float32, and a few times as much on the way to log-probabilities: well within a step's workspace."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ScoredTokens:
    """The S tokens of a step whose logits tell how probable the next token of their prompt is.

    ``tokens`` int64 [2, S]: their places in the batch, and the tokens that follow them. ``runs``: the sequences in
    the order of their tokens, each with its number of tokens and of alternatives. ``width``: the largest number
    of alternatives.
    """

    tokens: np.ndarray
    runs: tuple[tuple[SequenceId, int, int], ...]

    @property
    def width(self) -> int:
        return max(num_top for _, _, num_top in self.runs)

    def read(self, scores: np.ndarray) -> dict[SequenceId, PromptLogprobs]:
        """What ``score`` gave, on the host, by sequence."""
        width, begin = scores.shape[1] // 2 - 1, 0
        found = {}
        for sequence, count, asked in self.runs:
            rows, num_top = scores[begin : begin + count], min(asked, width)
            begin += count
            parts = rows[:, : 2 + num_top], rows[:, 2 + width : 2 + width + num_top]
            found[sequence] = PromptLogprobs(num_top, np.concatenate(parts, axis=1).tobytes())
        return found


def score(logits: torch.Tensor, targets: torch.Tensor, width: int) -> torch.Tensor:
    """int32 [C, 2 + 2 * width]: of ``targets`` [C] in ``logits`` float32 [C, V], and of the ``width`` (at most V)
    most probable tokens, what ``PromptLogprobs`` packs, floats as their bits."""
    logprobs = logits.log_softmax(dim=-1)
    own = logprobs.gather(1, targets.unsqueeze(1))
    rank = (logprobs > own).sum(dim=-1, keepdim=True, dtype=torch.int32) + 1
    top = logprobs.topk(min(width, logprobs.shape[1]), dim=-1)
    parts = own.view(torch.int32), rank, top.values.view(torch.int32), top.indices.to(torch.int32)
    return torch.cat(parts, dim=1)
