"""Arrival processes: exact moments where they are, statistics of long draws with fixed seeds where not."""

from __future__ import annotations

import itertools
import statistics
from random import Random

import pytest
from manylora_lab.workloads.arrivals import (
    at_once,
    even,
    from_gaps,
    gamma,
    parse_process,
    poisson,
    ramp,
)

from manylora.config.declaring import ConfigError

LONG_S = 20_000.0


def cv(moments: list[float]) -> float:
    gaps = [after - before for before, after in itertools.pairwise(moments)]
    return statistics.pstdev(gaps) / statistics.fmean(gaps)


def test_poisson_has_its_rate_and_a_cv_of_1() -> None:
    moments = poisson(5.0, LONG_S, Random(1))
    # 100,000 expected; the standard deviation of the count is 316, of the CV some 0.003.
    assert abs(len(moments) - 100_000) < 4 * 316
    assert cv(moments) == pytest.approx(1.0, abs=0.015)
    assert all(0 <= moment < LONG_S for moment in moments)
    assert moments == sorted(moments)


@pytest.mark.parametrize("asked", [0.25, 1.0, 4.0])
def test_gamma_has_its_rate_and_its_cv(asked: float) -> None:
    moments = gamma(5.0, asked, LONG_S, Random(2))
    assert len(moments) == pytest.approx(100_000, rel=4 * asked * 0.00316)
    assert cv(moments) == pytest.approx(asked, rel=0.04)


def test_even_and_at_once_are_exact() -> None:
    assert even(2.0, 2.0) == [0.0, 0.5, 1.0, 1.5]
    assert even(2.0, 2.1) == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert at_once(2.0, 2.0) == [0.0] * 4


def test_a_ramp_has_the_area_under_its_rate() -> None:
    """From 2 to 10 requests a second and back in 8,000 s: quarters of 16,000, 8,000 * (2 + 6) / 4, and so on."""
    moments = ramp(2.0, 10.0, 8_000.0, Random(3))
    assert moments == sorted(moments)
    quarters = [0] * 4
    for moment in moments:
        quarters[int(moment // 2_000)] += 1
    for found, expected in zip(quarters, (8_000, 16_000, 16_000, 8_000)):
        assert abs(found - expected) < 4 * expected**0.5


def test_a_ramp_without_slope_is_poisson() -> None:
    assert ramp(3.0, 3.0, 100.0, Random(4)) == pytest.approx(
        [moment / 3 for moment in poisson(1.0, 300.0, Random(4))], abs=1e-9
    )


def test_recorded_gaps_are_stretched_to_the_rate_exactly() -> None:
    # From the second gap on: 2, 3, 1, 2 and their sum of 8 fill 4 s.
    assert from_gaps([1.0, 2.0, 3.0], 1.0, 4.0, 1) == [0.0, 1.0, 2.5, 3.0]
    assert len(from_gaps([1.0, 2.0, 3.0], 7.3, 100.0, 0)) == 730
    with pytest.raises(ConfigError, match="are all 0"):
        from_gaps([0.0, 0.0], 1.0, 4.0, 0)


@pytest.mark.parametrize("text", ["poisson", "gamma(2)", "even", "at-once", "ramp"])
def test_named_processes_have_the_rate_and_a_seed_repeats_them(text: str) -> None:
    process = parse_process(text)
    moments = process(4.0, 5_000.0, Random(6))
    assert len(moments) == pytest.approx(20_000, rel=0.06)
    assert moments == process(4.0, 5_000.0, Random(6))
    if text in ("poisson", "gamma(2)", "ramp"):
        assert moments != process(4.0, 5_000.0, Random(7))


def test_the_first_moments_are_the_same_everywhere() -> None:
    """Numbers written down once: another machine or Python that gives others would change every experiment."""
    expected = [0.37382218316810956, 0.9019970815015012, 1.52368795261888, 2.095893660644517]
    assert poisson(1.0, 3.0, Random("0 arrivals")) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("poison", "not an arrival process; .* did you mean poisson"),
        ("gamma", r"write gamma\(cv\)"),
        ("gamma()", r"write gamma\(cv\)"),
        ("gamma(1,2)", r"write gamma\(cv\)"),
        ("gamma(x)", "write numbers"),
        ("gamma(0)", "cv must be a number from 0.01 to 100, got 0"),
        ("gamma(nan)", "cv must be a number"),
        ("poisson(3)", "write poisson"),
        ("", "not an arrival process"),
    ],
)
def test_processes_that_are_none(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_process(text)


@pytest.mark.parametrize(
    ("rate", "duration_s", "words"),
    [
        (0.0, 1.0, "rate must be"),
        (-1.0, 1.0, "rate must be"),
        (float("nan"), 1.0, "rate must be"),
        (float("inf"), 1.0, "rate must be"),
        (1.0, 0.0, "duration must be"),
        (1e6, 1e6, "more than 20,000,000 requests"),
    ],
)
def test_loads_that_are_none(rate: float, duration_s: float, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_process("poisson")(rate, duration_s, Random(0))


def test_even_arrivals_end_before_the_duration() -> None:
    moments = even(2.2, 85.0)  # the product is a little more than 187
    assert len(moments) == 187
    assert moments[-1] < 85
