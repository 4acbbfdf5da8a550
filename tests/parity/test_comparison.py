"""The comparison itself can fail, and lets pass what is rounding (``reference.py``) and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.parity.reference import assert_greedy

VOCAB_SIZE = 8


class Counting:
    """Says the last token plus one; where that is 4, token 0 comes second, ``gap`` behind."""

    def __init__(self, gap: float) -> None:
        self._gap = gap

    def greedy(self, prompt: Sequence[int], adapter: str | None, num_tokens: int) -> list[int]:
        return [(prompt[-1] + 1 + i) % VOCAB_SIZE for i in range(num_tokens)]

    def next_logits(self, tokens: Sequence[int], adapter: str | None) -> torch.Tensor:
        best = (tokens[-1] + 1) % VOCAB_SIZE
        logits = torch.zeros(VOCAB_SIZE)
        logits[best] = 5.0
        if best == 4:
            logits[0] = 5.0 - self._gap
        return logits


def test_equal_tokens_pass() -> None:
    assert_greedy(Counting(1.0), [1], None, [2, 3, 4, 5])


@pytest.mark.parametrize("tokens", [[2, 3, 5, 6], [2, 3, 4, 6], [1, 3, 4, 5], [2, 3, 0, 1]])
def test_a_wrong_token_fails(tokens: list[int]) -> None:
    with pytest.raises(AssertionError, match="the reference says"):
        assert_greedy(Counting(1e-3), [1], None, tokens)


def test_a_close_second_passes_and_what_follows_is_compared() -> None:
    assert_greedy(Counting(1e-4), [1], None, [2, 3, 0, 1, 2])
    with pytest.raises(AssertionError, match="token 4"):
        assert_greedy(Counting(1e-4), [1], None, [2, 3, 0, 1, 3])
    with pytest.raises(AssertionError, match="token 2"):
        assert_greedy(Counting(1e-4), [1], None, [2, 3, 6, 1, 3])
