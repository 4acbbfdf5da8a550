"""Sequences with a row whose pages are still on their way: what may happen to them, and what they hold then."""

from __future__ import annotations

import dataclasses
from collections import Counter
from copy import deepcopy
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from manylora.config.cold_start import ColdStartConfig
from manylora.policy.replica import Replica
from manylora.protocol.commands import AdapterFreed, ReadAdapter, Ready, RunStep
from manylora.protocol.events import Abort, AdapterRemoved, StepDone
from tests.policy.rig import Rig

SEEN = Counter[str]()
"""Examples in which steps have stood still at others' cost."""


def cold_rig(mode: str = "layerwise", stall: float = 0.02, **settings: Any) -> Rig:
    """Adapters 1 and 2 are served, and were never read."""
    rig = Rig(**settings)
    cold_start = ColdStartConfig(mode, stall)
    rig.config = dataclasses.replace(rig.config, cold_start=cold_start)
    rig.replica = Replica(rig.config)
    rig.add(1)
    rig.add(2)
    return rig


def ask_cold(rig: Rig, *names: str, max_tokens: int = 2) -> RunStep:
    """Requests of adapter 1, whose read ends; the step that awaits its copy."""
    for name in names:
        rig.ask(name, 1, [1, 2, 3, 4, 5], max_tokens)
    rig.land_read()
    (step,) = [command for command in rig.commands if isinstance(command, RunStep)]
    assert step.awaits
    return step


def finish(rig: Rig) -> None:
    for _ in range(100):
        if rig.device.reads:
            rig.land_read()
        elif rig.device.copies:
            rig.land_copy()
        elif rig.device.steps:
            rig.feed(rig.device.finish_step(True))
        else:
            return


def counters(rig: Rig) -> Any:
    return rig.replica._residency.counters


def test_two_cold_requests_of_one_adapter_await_one_copy() -> None:
    rig = cold_rig()
    step = ask_cold(rig, "a", "b")
    assert [wanted.sequences for wanted in step.awaits] == [(1, 2)]
    assert [type(c) for c in rig.commands].count(Ready) == 2
    finish(rig)
    assert rig.tokens["a"] == rig.tokens["b"]
    assert len(rig.tokens["a"]) == 2
    assert counters(rig).cold_starts == {"layerwise/files": 2}
    assert [type(c) for c in rig.commands].count(Ready) == 2


@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("removes", [True, False])
def test_abort_and_removal_while_a_row_awaits(ok: bool, removes: bool) -> None:
    rig = cold_rig()
    ask_cold(rig, "a")
    if removes:
        rig.feed(AdapterRemoved(1))
    rig.feed(Abort("a"))
    assert rig.ends["a"].reason == "abort"
    rig.land_copy(ok=ok)
    rig.feed(rig.device.finish_step(True))
    finish(rig)
    assert rig.tokens.get("a", []) == []
    assert any(isinstance(c, AdapterFreed) for c in rig.commands) is removes
    rig.ask("b", 2, [1, 2], 2)
    finish(rig)
    assert len(rig.tokens["b"]) == 2


@pytest.mark.parametrize("kind", ["failed", "late"])
def test_invalid_rows_are_computed_again_by_waiting(kind: str) -> None:
    rig = cold_rig()
    rig.ask("warm", 0, [7, 7, 7], 6)
    rig.ask("a", 1, [1, 2, 3, 4, 5], 2)
    rig.feed(rig.device.finish_step(True))
    rig.land_read()
    rig.feed(Abort("warm"))
    finish_until_awaiting(rig)
    copies = tuple(wanted.copy for wanted in rig.device.steps[0].command.awaits)
    rig.land_copy(copies[0], ok=kind == "late")
    rig.feed(rig.device.finish_step(True, late=copies if kind == "late" else ()))
    assert counters(rig).spoilt_rows == 1
    assert "a" not in rig.tokens
    num_awaiting = rig.device.num_awaiting_steps
    finish(rig)
    assert len(rig.tokens["a"]) == 2
    assert rig.device.num_awaiting_steps == num_awaiting, "this time it waits"


@pytest.mark.parametrize("stall_s", [0.0, 0.5, 2.0])
def test_what_an_awaited_copy_took_while_its_step_went_on_is_hidden(stall_s: float) -> None:
    rig = cold_rig()
    rig.copy_page_s = 0.25
    step = ask_cold(rig, "a")
    took_s = rig.copy_page_s * len(rig.device.copies[step.awaits[0].copy][0].pairs)
    assert 0.5 < took_s < 2.0
    rig.land_copy()
    done = rig.device.finish_step(True)
    done.stall_s = stall_s
    rig.feed(done)
    seen = counters(rig)
    assert (seen.cold_start_stall_s, seen.cold_start_hidden_s) == (stall_s, max(0.0, took_s - stall_s))


def finish_until_awaiting(rig: Rig) -> None:
    for _ in range(10):
        if rig.device.steps and rig.device.steps[0].command.awaits:
            return
        rig.feed(rig.device.finish_step(True))
    raise AssertionError("no step awaits")


def test_a_step_that_fails_before_its_copies_have_landed() -> None:
    rig = cold_rig()
    ask_cold(rig, "a")
    rig.device.steps.clear()
    rig.feed(StepDone(1, False, error="made to fail"))
    assert rig.ends["a"].reason == "error"
    rig.land_copy()
    rig.ask("b", 1, [1, 2], 2)
    finish(rig)
    assert len(rig.tokens["b"]) == 2


def test_others_go_on_where_the_copy_would_hold_them_up_for_too_long() -> None:
    rig = cold_rig()
    rig.ask("warm", 0, [7, 7, 7], 20)
    rig.ask("a", 1, [1, 2, 3, 4, 5], 2)
    rig.replica._residency.rates.page_in_s = 1.0
    rig.land_read()
    for _ in range(5):
        assert not rig.device.steps[0].command.awaits
        rig.feed(rig.device.finish_step(True))
    assert len(rig.tokens["warm"]) == 5
    finish(rig)
    assert len(rig.tokens["a"]) == 2
    assert counters(rig).cold_starts == {"wait/host": 1}


@given(
    mode=st.sampled_from(["layerwise", "auto"]),
    share=st.sampled_from([0.1, 0.5]),
    times=st.lists(
        st.tuples(
            st.sampled_from([0.002, 0.01, 0.05]),
            st.sampled_from([0.5, 1.0, 1.5, 20.0]),
            st.sampled_from([1e-4, 5e-3, 0.02]),
        ),
        min_size=20,
        max_size=40,
    ),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_step_begins_that_holds_others_up_only_where_all_of_them_stay_within_the_share(
    mode: str, share: float, times: list[tuple[float, float, float]]
) -> None:
    """Beside one decoding row, one request after another with an adapter of its own. ``times``: what a step takes,
    what it stands still over what was expected, and what a page of a copy is expected to take."""
    rig = cold_rig(mode, stall=share, num_pages=200, num_host_pages=200)
    cold = rig.replica._cold
    assert cold is not None
    earned_s = stood_s = 0.0
    has_passed = False

    def end_step(step_s: float, stall_s: float) -> None:
        nonlocal earned_s, stood_s
        done = rig.device.finish_step(True)
        done.stall_s, done.device_s = stall_s, step_s + stall_s
        earned_s += share * step_s
        stood_s += stall_s
        rig.now += done.device_s
        rig.feed(done)

    rig.ask("warm", 0, [7, 7, 7], 150)
    for number, (step_s, over, page_s) in enumerate(times, start=3):
        rig.add(number)
        rig.ask(f"cold-{number}", number, [1, 2, 3], 1)
        rig.land_read()
        rig.replica._residency.rates.page_in_s = page_s
        end_step(step_s, 0.0)
        step = rig.device.steps[0].command
        expected_s = cold._in_flight[step.step].stall_s if step.awaits else 0.0
        assert expected_s == 0 or stood_s + expected_s <= earned_s + 1e-9
        for copy in list(rig.device.copies):
            rig.land_copy(copy)
        if step.awaits:
            end_step(step_s, expected_s * over)
            has_passed |= stood_s > earned_s
    SEEN["held up"] += stood_s > 1e-3
    SEEN["for longer than their share"] += has_passed


def test_the_examples_have_held_others_up() -> None:
    """Runs after them."""
    assert not SEEN or (len(SEEN) == 2 and min(SEEN.values()) > 0), SEEN


def test_where_an_adapter_came_from_is_counted_for_its_own_requests() -> None:
    rig = cold_rig("wait")
    rig.ask("a", 1, [1, 2, 3], 2)
    rig.ask("b", 2, [1, 2, 3], 2)
    finish(rig)
    assert counters(rig).cold_starts == {"wait/files": 2}


def test_block_takes_it_whatever_that_costs_the_others() -> None:
    rig = cold_rig("block")
    rig.ask("warm", 0, [7, 7, 7], 20)
    rig.ask("a", 1, [1, 2, 3, 4, 5], 2)
    rig.replica._residency.rates.page_in_s = 1.0
    rig.land_read()
    rig.feed(rig.device.finish_step(True))
    assert rig.device.steps[0].command.awaits
    assert len(rig.device.steps[0].command.rows) == 2
    finish(rig)
    assert counters(rig).cold_starts == {"block/host": 1}


def test_a_cold_row_with_one_token_left_and_history_on_its_way() -> None:
    """All of its prompt but one token is cached, on the host like its adapter."""
    rig = cold_rig(num_pages=8)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    rig.ask("a", 1, prompt)
    finish(rig)
    rig.ask("other", 2, [1] * 17)  # which needs the pages
    finish(rig)
    before = rig.device.num_awaited_kv
    rig.ask("b", 1, prompt)
    for copy in [copy for copy, (command, _) in rig.device.copies.items() if not command.to_device]:
        rig.land_copy(copy)  # which makes the room
    step = rig.device.steps[0].command
    assert [row.num_tokens for row in step.rows] == [1]
    assert step.awaits
    finish(rig)
    assert rig.device.num_awaited_kv > before
    assert rig.tokens["b"] == rig.tokens["a"]


def served_rig() -> Rig:
    """A step is in flight for request "a" of adapter 3, whose rows the CPU serves."""
    rig = cold_rig("cpu")
    cold_start = ColdStartConfig("cpu", num_workers=2)
    rig.config = dataclasses.replace(rig.config, cold_start=cold_start)
    rig.replica = Replica(rig.config)
    rig.add(3)
    rig.ask("a", 3, [1, 2, 3, 4, 5], 2)
    rig.land_read()
    assert rig.of(RunStep)[0].cpu
    return rig


def test_a_copy_beside_which_the_cpu_serves_is_hidden() -> None:
    rig = served_rig()
    rig.copy_page_s = 0.25
    (step,) = rig.of(RunStep)
    took_s = rig.copy_page_s * len(rig.device.copies[step.cpu[0].copy][0].pairs)
    rig.land_copy()
    done = rig.device.finish_step(True)
    done.stall_s, done.cpu_s = 0.125, 0.0625
    rig.feed(done)
    seen = counters(rig)
    assert (seen.cold_start_hidden_s, seen.cpu_lora_s) == (took_s, 0.0625)


def test_nothing_is_learnt_of_a_served_step_that_fails() -> None:
    rig = served_rig()
    cold = rig.replica._cold
    assert cold is not None
    before = deepcopy(vars(cold._misses)), cold._num_workers
    rig.feed(rig.device.finish_step(False))
    assert (vars(cold._misses), cold._num_workers) == before
    finish(rig)


def test_host_pages_that_the_cpu_reads_stay_until_its_step_has_ended() -> None:
    rig = served_rig()
    host = rig.replica._residency.host
    rig.feed(Abort("a"))
    rig.feed(AdapterRemoved(3))
    rig.land_copy()
    assert rig.of(AdapterFreed)
    assert (host.num_used, host.num_deferred) == (0, 3)
    rig.end_step()
    assert host.num_deferred == 0


def test_a_request_whose_copy_fails_while_the_cpu_serves_it_waits_for_another() -> None:
    rig = served_rig()
    rig.land_copy(ok=False)
    finish(rig)
    rig.check_answers()
    assert len(rig.tokens["a"]) == 2


@pytest.mark.parametrize("mode", ["block", "layerwise", "cpu", "auto"])
@pytest.mark.parametrize("num_host_pages", [40, 0])
def test_a_request_waits_for_its_read(mode: str, num_host_pages: int) -> None:
    """No step begins before it, whether the adapter goes to the host or straight to the device."""
    rig = cold_rig(mode, num_host_pages=num_host_pages)
    rig.ask("a", 1, [1, 2, 3, 4, 5], 2)
    (read,) = rig.of(ReadAdapter)
    assert read.tier == ("host" if num_host_pages else "device")
    assert not rig.of(RunStep)
    finish(rig)
    assert len(rig.tokens["a"]) == 2
