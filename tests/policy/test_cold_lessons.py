"""What is learnt of cold starts: forecasts that miss by the same each time stop missing, within bounds."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from manylora.config import CpuRates
from manylora.policy.cold_forecast import boundary_s
from manylora.policy.cold_lessons import ColdLessons

RATES = CpuRates(step_s=0.001, byte_s=1e-9, token_byte_s=1e-10, slice_tokens=4, token_s=1e-4)
seconds = st.floats(0, 10, allow_nan=False)


@given(st.floats(0.001, 1), st.floats(-0.5, 0.9))
@settings(deadline=None)
def test_a_miss_that_stays_is_learnt(expected_s: float, share: float) -> None:
    lessons, took_s = ColdLessons(RATES), expected_s * (1 + share)
    for _ in range(40):
        lessons.answered("cpu", expected_s + lessons.beyond_s("cpu"), took_s)
    assert expected_s + lessons.beyond_s("cpu") == pytest.approx(took_s, rel=1e-3)
    learnt_s = lessons.beyond_s("cpu")
    lessons.answered("wait", 0.01, 0.01)
    assert abs(lessons.beyond_s("cpu")) <= abs(learnt_s), "what is not tried is believed a little more"
    assert lessons.beyond_s("layerwise") == 0


@given(st.lists(st.tuples(st.sampled_from(["wait", "cpu", "layerwise"]), seconds, seconds), max_size=30))
@settings(deadline=None)
def test_one_miss_counts_no_more_than_what_was_expected(seen: list[tuple[str, float, float]]) -> None:
    lessons = ColdLessons(RATES)
    for mode, expected_s, took_s in seen:
        before_s = lessons.beyond_s(mode)
        lessons.answered(mode, expected_s, took_s)
        assert abs(lessons.beyond_s(mode) - before_s) <= expected_s


@given(st.integers(1, 512), st.floats(0.1, 10), st.floats(0, 1), st.floats(0.001, 0.1))
@settings(deadline=None)
def test_what_workers_take_is_learnt(num_tokens: int, times: float, beside: float, own_s: float) -> None:
    """Workers take ``times`` what their rates say, of which a step hides the share ``beside`` of itself."""
    lessons, size = ColdLessons(RATES), 10**6
    plain_s = RATES.busy_s(num_tokens, size, 2)
    for _ in range(60):
        expected_s = lessons.busy_s(num_tokens, size, 2)
        stall_s = RATES.besides_s(num_tokens) + times * plain_s - beside * own_s
        lessons.served(num_tokens, expected_s, times * plain_s, own_s, stall_s)
    assert lessons.busy_s(num_tokens, size, 2) == pytest.approx(times * plain_s, rel=0.01)
    assert lessons.beside == pytest.approx(beside, abs=0.01)


@given(st.integers(1, 512), st.floats(2, 50), st.floats(0, 1), st.floats(0.001, 0.1))
@settings(deadline=None)
def test_hand_overs_that_were_measured_beside_other_work_are_learnt(
    num_tokens: int, times: float, beside: float, own_s: float
) -> None:
    """The rates say ``times`` what hand-overs take, which is no less than a step's own time."""
    lessons, size = ColdLessons(RATES), 10**6
    busy_s = RATES.busy_s(num_tokens, size, 2)
    assert lessons.besides_s(num_tokens) == RATES.besides_s(num_tokens)
    took_s = RATES.besides_s(num_tokens) / times
    stall_s = max(0.0, took_s + busy_s - beside * own_s)
    for _ in range(60):
        lessons.served(num_tokens, busy_s, busy_s, own_s, stall_s)
    learnt_s = lessons.besides_s(num_tokens)
    most_s = max(stall_s + own_s - busy_s, RATES.besides_s(num_tokens) / 100)
    assert took_s - 1e-9 <= learnt_s <= min(most_s, RATES.besides_s(num_tokens)) * (1 + 1e-6)
    for _ in range(60):
        lessons.served(num_tokens, busy_s, busy_s, own_s, RATES.besides_s(num_tokens) + busy_s)
    assert lessons.besides_s(num_tokens) == pytest.approx(RATES.besides_s(num_tokens)), "and unlearnt"


@given(seconds, seconds, st.floats(0.001, 1))
def test_a_boundary_is_the_first_one_after(begin_s: float, ready_s: float, step_s: float) -> None:
    at_s = boundary_s(begin_s, ready_s, step_s)
    assert at_s >= max(begin_s, ready_s) - 1e-9
    assert at_s < max(begin_s, ready_s + step_s) + 1e-9
    assert boundary_s(begin_s, ready_s, 0.0) == max(begin_s, ready_s)


def test_nothing_is_learnt_of_nothing() -> None:
    lessons = ColdLessons(CpuRates(byte_s=0, token_byte_s=0))
    lessons.served(1, 0.0, 0.0, 0.0, 0.0)
    assert (lessons.busy_s(1, 10, 1), lessons.beside) == (0.0, ColdLessons(RATES).beside)
