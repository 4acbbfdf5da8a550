"""Punica's popularities and lengths, by hand."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from manylora_lab.bench.kernels.settings import POPULARITIES, model_counts
from manylora_lab.reproduce.punica_workload import MOST_TOKENS, text_requests


@pytest.mark.parametrize(
    ("popularity", "requests", "counts"),
    [
        ("distinct", 4, (1, 1, 1, 1)),
        ("identical", 4, (4,)),
        ("uniform", 1, (1,)),
        ("uniform", 10, (3, 3, 2, 2)),  # the ceiling of sqrt(10) models
        ("uniform", 1000, (32,) * 8 + (31,) * 24),
        ("skewed", 1, (1,)),
        ("skewed", 3, (2, 1)),  # shares 1.8 and 1.2; a third model would get 0.6 of a request
        ("skewed", 5, (2, 2, 1)),  # 2.37, 1.58, 1.05: the largest remainder is the second's
    ],
)
def test_counts_by_hand(popularity: str, requests: int, counts: tuple[int, ...]) -> None:
    assert model_counts(popularity, requests) == counts


def test_each_skewed_model_has_one_and_a_half_times_the_next_ones_requests() -> None:
    counts = model_counts("skewed", 1000)
    assert sum(counts) == 1000
    assert counts[-1] >= 1
    assert all(a == pytest.approx(1.5 * b, abs=1.3) for a, b in itertools.pairwise(counts))


@pytest.mark.parametrize("popularity", POPULARITIES)
def test_requests_have_the_same_lengths_and_their_own_models(popularity: str) -> None:
    found = text_requests(popularity, 200, seed=1)
    lengths = [(one.prompt_tokens, one.output_tokens) for one in found]
    assert lengths == [(o.prompt_tokens, o.output_tokens) for o in text_requests("distinct", 200, seed=1)]
    assert max(sum(pair) for pair in lengths) <= MOST_TOKENS
    assert sorted(Counter(one.model for one in found).values(), reverse=True) == list(
        model_counts(popularity, 200)
    )
    assert found == text_requests(popularity, 200, seed=1)
    assert found != text_requests(popularity, 200, seed=2)


def test_lengths_are_divided() -> None:
    whole, parts = text_requests("uniform", 50, 0), text_requests("uniform", 50, 0, divisor=8)
    for long, short in zip(whole, parts):
        assert short.model == long.model
        assert short.prompt_tokens == max(1, long.prompt_tokens // 8)
        assert short.output_tokens == max(1, long.output_tokens // 8)
