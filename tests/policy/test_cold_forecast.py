"""When steps with cold rows are expected to end, and which way is chosen: what holds for any numbers."""

from __future__ import annotations

import dataclasses
import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from manylora.policy.cold_forecast import GAIN, Beginning, CpuShare, Landing, choose, end_s

TINY = 1e-9
seconds = st.floats(0, 10, allow_nan=False)
landings = st.builds(lambda begin, length: Landing(begin, begin + length), seconds, seconds)
shares = st.builds(CpuShare, seconds, st.floats(0, 1))
GROUPS = 8


@given(seconds, seconds, st.lists(landings, max_size=3), st.lists(landings, max_size=3), shares)
@settings(max_examples=300, deadline=None)
def test_a_step_is_never_sooner_than_its_own_work_nor_later_than_all_together(
    begin_s: float, step_s: float, histories: list[Landing], adapters: list[Landing], cpu: CpuShare
) -> None:
    end = end_s(begin_s, step_s, GROUPS, histories, adapters, cpu)
    last = max((landing.end_s for landing in (*histories, *adapters)), default=0.0)
    assert end >= begin_s + step_s - TINY
    assert end <= max(begin_s, last) + step_s + cpu.seconds + TINY


@given(seconds, seconds, landings, shares, seconds)
@settings(max_examples=300, deadline=None)
def test_what_comes_later_ends_no_step_sooner(
    begin_s: float, step_s: float, adapter: Landing, cpu: CpuShare, more_s: float
) -> None:
    def end(landing: Landing = adapter, share: CpuShare = cpu) -> float:
        return end_s(begin_s, step_s, GROUPS, (), (landing,), share)

    assert end(dataclasses.replace(adapter, end_s=adapter.end_s + more_s)) >= end() - TINY
    assert end(share=cpu._replace(seconds=cpu.seconds + more_s)) >= end() - TINY
    assert end(share=cpu._replace(beside=0.0)) >= end() - TINY


@given(landings, seconds)
def test_what_is_late_is_expected_to_come_later_still(landing: Landing, now: float) -> None:
    expected = landing.as_of(now)
    assert expected.end_s >= landing.end_s
    assert (expected == landing) == (now <= landing.end_s)


ways = st.lists(
    st.builds(Beginning, st.sampled_from(["layerwise", "cpu"]), st.floats(1, 10), seconds),
    max_size=4,
)


@given(st.floats(1, 10), ways, seconds)
@settings(max_examples=300, deadline=None)
def test_a_choice_stands_still_for_no_longer_than_allowed_and_gains_by_it(
    wait_s: float, others: list[Beginning], allowed_s: float
) -> None:
    wait = Beginning("wait", wait_s, 0.0)
    chosen = choose([wait, *others], 0.0, allowed_s)
    assert chosen in [wait, *others]
    assert chosen is wait or chosen.stall_s <= allowed_s
    assert chosen is wait or chosen.answer_s < wait_s * (1 - GAIN)
    allowed = [way.answer_s for way in others if way.stall_s <= allowed_s]
    assert chosen.answer_s <= min([wait_s, *allowed]) + 2 * GAIN * wait_s


@pytest.mark.parametrize(
    ("link", "rank", "tokens"), list(itertools.product((4, 8, 16, 52), (16, 64, 256), (16, 64, 512)))
)
def test_the_choice_is_within_two_hundredths_of_the_best(link: int, rank: int, tokens: int) -> None:
    """Over link, rank and prompt, by Llama-2-7B's bytes: each way alone, and the choice among them."""
    num_bytes, step_s = 5.0e6 * rank, 0.004 + 22e-6 * tokens
    landing = Landing(0.0, num_bytes / (link * 1e9))
    cpu_s = 0.0025 + num_bytes * (2e-11 + tokens / 16 * 2e-11)
    served = end_s(0.0, step_s, GROUPS, (), (), CpuShare(cpu_s, 0.5))
    gated = end_s(0.0, step_s, GROUPS, (), (landing,))
    found = [
        Beginning("wait", landing.end_s + step_s, 0.0),
        Beginning("layerwise", gated, gated - step_s),
        Beginning("cpu", served, served - step_s),
    ]
    best = min(way.answer_s for way in found)
    assert choose(found, 0.0, float("inf")).answer_s <= 1.02 * best
