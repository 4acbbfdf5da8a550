"""Popularity: weights against closed forms, draws against weights, dLoRA's mapping by hand, ranks."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from random import Random

import pytest
from manylora_lab.workloads.popularity import Popularity, mapped_functions, parse_ranks

from manylora.config.declaring import ConfigError

ALL = ["zipf(1)", "geometric(1.5)", "power(0.1)", "gaussian(0.1)", "uniform", "round-robin", "identical"]


def weights(text: str, count: int) -> tuple[float, ...]:
    return Popularity.parse(text).weights(count)


@pytest.mark.parametrize("text", ALL)
@pytest.mark.parametrize("count", [1, 2, 7, 2000])
def test_weights_are_shares(text: str, count: int) -> None:
    found = weights(text, count)
    assert len(found) == count
    assert math.fsum(found) == pytest.approx(1.0, abs=1e-12)
    assert min(found) >= 0
    assert str(Popularity.parse(text)) == text


def test_closed_forms() -> None:
    assert weights("zipf(1)", 3) == pytest.approx([6 / 11, 3 / 11, 2 / 11])
    assert weights("zipf(2)", 2) == pytest.approx([4 / 5, 1 / 5])
    # Punica's Skewed: 1 + 2/3 + 4/9 = 19/9, and each 1.5 times the next.
    assert weights("geometric(1.5)", 3) == pytest.approx([9 / 19, 6 / 19, 4 / 19])
    for more, less in itertools.pairwise(weights("geometric(1.5)", 100)):
        assert more / less == pytest.approx(1.5)
    # S-LoRA: P(index < k) = P(x < k / n) = (k / n)^a.
    for alpha in (0.1, 0.6, 1.0, 3.0):
        bounds = itertools.accumulate(weights(f"power({alpha})", 8))
        assert list(bounds) == pytest.approx([(k / 8) ** alpha for k in range(1, 9)])
    assert weights("power(1)", 5) == pytest.approx(weights("uniform", 5))
    assert weights("identical", 3) == (1.0, 0.0, 0.0)
    # Middle 2; one neighbour is 1 away, sigma 0.2 * 5 = 1.
    found = weights("gaussian(0.2)", 5)
    assert found == pytest.approx(found[::-1])
    assert found[3] / found[2] == pytest.approx(math.exp(-1 / 2))
    assert found[4] / found[2] == pytest.approx(math.exp(-4 / 2))
    # Narrower than one adapter: all on the middle, or on the two there.
    assert weights("gaussian(0.000001)", 3) == (0.0, 1.0, 0.0)
    assert weights("gaussian(0.000001)", 4) == (0.0, 0.5, 0.5, 0.0)


@pytest.mark.parametrize("text", ALL)
def test_draws_follow_the_weights(text: str) -> None:
    popularity = Popularity.parse(text)
    draws = list(itertools.islice(popularity.draws(20, Random(1)), 40_000))
    assert draws == list(itertools.islice(popularity.draws(20, Random(1)), 40_000))
    counts = Counter(draws)
    for number, share in enumerate(popularity.weights(20)):
        expected = 40_000 * share
        assert abs(counts[number] - expected) <= 4 * math.sqrt(expected * (1 - share)) + 1e-9


def test_power_is_what_s_lora_draws() -> None:
    """Index floor(n * x) for x = u^(1/a), the inverse of the distribution with density a * x^(a - 1)."""
    dice = Random(2)
    drawn = Counter(int(10 * dice.random() ** (1 / 0.3)) for _ in range(50_000))
    for number, share in enumerate(weights("power(0.3)", 10)):
        assert abs(drawn[number] - 50_000 * share) < 4 * math.sqrt(50_000 * share)


def test_round_robin_and_identical_are_exact() -> None:
    assert list(itertools.islice(Popularity.parse("round-robin").draws(3, Random(0)), 7)) == [
        0,
        1,
        2,
        0,
        1,
        2,
        0,
    ]
    assert set(itertools.islice(Popularity.parse("identical").draws(3, Random(0)), 50)) == {0}


def test_dlora_maps_functions_round_and_round_by_frequency() -> None:
    # Sorted: 90 (4), 70 (1), 50 (0 before 5), 20 (2), 10 (3).
    calls = [50, 70, 20, 10, 90, 50]
    assert mapped_functions(calls, 2, 1) == (0, 1, 0, 1, 0, 1)
    assert mapped_functions(calls, 2, 2) == (1, 0, 0, 0, 0, 1)
    assert mapped_functions(calls, 2, 3) == (0, 0, 1, 1, 0, 1)
    assert mapped_functions(calls, 3, 10) == (0,) * 6
    with pytest.raises(ConfigError, match="skewness must be at least 1"):
        mapped_functions(calls, 2, 0)


def test_ranks() -> None:
    assert parse_ranks("16", 3, Random(0)) == (16, 16, 16)
    assert parse_ranks("cycle(64,32,16,8)", 6, Random(0)) == (64, 32, 16, 8, 64, 32)
    drawn = parse_ranks("random(32,64)", 1000, Random(0))
    assert drawn == parse_ranks("random(32,64)", 1000, Random(0))
    assert set(drawn) == {32, 64}
    assert abs(drawn.count(32) - 500) < 4 * 16


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("zipff(1)", "did you mean zipf"),
        ("zipf", r"write zipf\(s\)"),
        ("zipf(-1)", "s must be a number from 0 to 1000"),
        ("geometric(0.5)", "ratio must be a number from 1"),
        ("power(0)", "a must be a number"),
        ("gaussian(inf)", "sigma must be a number"),
        ("round-robin(2)", "write round-robin"),
        ("uniform)", "not a popularity"),
    ],
)
def test_popularities_that_are_none(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Popularity.parse(text)


@pytest.mark.parametrize("text", ["0", "cycle()", "random", "random(8,0)", "cycle(8.5)", "8,16", "-8"])
def test_ranks_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_ranks(text, 3, Random(0))


@pytest.mark.parametrize("count", [0, -1, 2_000_000])
def test_numbers_of_adapters_that_are_none(count: int) -> None:
    for make in (
        lambda: Popularity.parse("uniform").weights(count),
        lambda: Popularity.parse("round-robin").draws(count, Random(0)),
        lambda: parse_ranks("8", count, Random(0)),
    ):
        with pytest.raises(ConfigError, match="number of adapters"):
            make()
