"""When steps with cold rows are expected to end, and what is learnt of that: what holds for any numbers."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from manylora.policy.cold_start import Landing, Misses, boundary_s, end_s

TINY = 1e-9
seconds = st.floats(0, 10, allow_nan=False)
landings = st.builds(lambda begin, length: Landing(begin, begin + length), seconds, seconds)
GROUPS = 8


@given(seconds, seconds, st.lists(landings, max_size=3))
@settings(max_examples=300, deadline=None)
def test_a_step_is_never_sooner_than_its_own_work_nor_later_than_all_together(
    begin_s: float, step_s: float, coming: list[Landing]
) -> None:
    end = end_s(begin_s, step_s, GROUPS, coming)
    last = max((landing.end_s for landing in coming), default=0.0)
    assert end >= begin_s + step_s - TINY
    assert end <= max(begin_s, last) + step_s + TINY


@given(seconds, seconds, landings, seconds)
@settings(max_examples=300, deadline=None)
def test_what_comes_later_ends_no_step_sooner(
    begin_s: float, step_s: float, landing: Landing, more_s: float
) -> None:
    later = dataclasses.replace(landing, end_s=landing.end_s + more_s)
    end = end_s(begin_s, step_s, GROUPS, (landing,))
    assert end_s(begin_s, step_s, GROUPS, (later,)) >= end - TINY
    assert end_s(begin_s, step_s, 1, (landing,)) >= end - TINY, "one group is the whole copy"


@given(landings, seconds)
def test_what_is_late_is_expected_to_come_later_still(landing: Landing, now: float) -> None:
    expected = landing.as_of(now)
    assert expected.end_s >= landing.end_s
    assert (expected == landing) == (now <= landing.end_s)


@given(seconds, seconds, st.floats(0.001, 1))
def test_a_boundary_is_the_first_one_after(begin_s: float, ready_s: float, step_s: float) -> None:
    at_s = boundary_s(begin_s, ready_s, step_s)
    assert at_s >= max(begin_s, ready_s) - TINY
    assert at_s < max(begin_s, ready_s + step_s) + TINY
    assert boundary_s(begin_s, ready_s, 0.0) == max(begin_s, ready_s)


@given(st.floats(0.001, 1), st.floats(-0.5, 0.9))
@settings(deadline=None)
def test_a_miss_that_stays_is_learnt(expected_s: float, share: float) -> None:
    misses, took_s = Misses(), expected_s * (1 + share)
    for _ in range(40):
        misses.answered("layerwise", expected_s + misses.late_s["layerwise"], took_s)
    assert expected_s + misses.late_s["layerwise"] == pytest.approx(took_s, rel=1e-3)
    learnt_s = misses.late_s["layerwise"]
    misses.answered("wait", 0.01, 0.01)
    assert abs(misses.late_s["layerwise"]) <= abs(learnt_s), "what is not tried is believed a little more"
    assert misses.late_s["block"] == 0


@given(st.lists(st.tuples(st.sampled_from(["wait", "layerwise"]), seconds, seconds), max_size=30))
@settings(deadline=None)
def test_one_miss_counts_no_more_than_what_was_expected(seen: list[tuple[str, float, float]]) -> None:
    misses = Misses()
    for mode, expected_s, took_s in seen:
        before_s = misses.late_s[mode]
        misses.answered(mode, expected_s, took_s)
        assert abs(misses.late_s[mode] - before_s) <= expected_s
