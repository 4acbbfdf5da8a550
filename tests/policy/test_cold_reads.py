"""Rows that begin while their adapter is being read: what may happen to the read, and when they may begin."""

from __future__ import annotations

from typing import Any

import pytest

from manylora.protocol import (
    Abort,
    AdapterFreed,
    AdapterRead,
    AdapterRemoved,
    ReadAdapter,
    RunStep,
    SwapPages,
)
from tests.policy.rig import Rig
from tests.policy.test_cold_starts import cold_rig, counters, finish


def begin(rig: Rig, *names: str, max_tokens: int = 2) -> RunStep:
    """Requests of adapter 1; the step that awaits its read."""
    for name in names:
        rig.ask(name, 1, [1, 2, 3, 4, 5], max_tokens)
    (step,) = [command for command in rig.commands if isinstance(command, RunStep)]
    assert step.awaits
    assert rig.device.reads
    return step


def commanded(rig: Rig, kind: type) -> list[Any]:
    return [command for command in rig.commands if isinstance(command, kind)]


@pytest.mark.parametrize("num_host_pages", [40, 0])
@pytest.mark.parametrize("from_store", [True, False])
@pytest.mark.parametrize("mode", ["layerwise", "auto"])
def test_a_request_that_is_alone_begins_with_the_read(
    mode: str, from_store: bool, num_host_pages: int
) -> None:
    rig = cold_rig(mode, follows=True, num_host_pages=num_host_pages)
    begin(rig, "a")
    (read,) = commanded(rig, ReadAdapter)
    copies = commanded(rig, SwapPages)
    if num_host_pages:
        assert (read.tier, read.groups, read.copy) == ("host", 8, 0)
        assert [(copy.follows_read, copy.groups) for copy in copies] == [(True, 8)]
    else:
        assert (read.tier, read.groups, read.copy) == ("device", 8, 1)
        assert not copies
    assert counters(rig).cold_starts == {}, "where it comes from is not known yet"
    rig.device.land(read, True)
    rig.feed(AdapterRead(1, True, "", 0.1, from_store=from_store))
    finish(rig)
    assert len(rig.tokens["a"]) == 2
    assert counters(rig).cold_starts == {f"layerwise/{'store' if from_store else 'files'}": 1}
    assert counters(rig).spoilt_rows == 0


@pytest.mark.parametrize("mode", ["wait", "block", "cpu"])
def test_other_modes_begin_when_it_lies_in_host_memory(mode: str) -> None:
    rig = cold_rig(mode, follows=True)
    rig.ask("a", 1, [1, 2, 3, 4, 5], 2)
    assert commanded(rig, ReadAdapter) == [ReadAdapter(1, (0, 1, 2), "host")]
    assert not commanded(rig, SwapPages)
    finish(rig)
    assert len(rig.tokens["a"]) == 2


def test_a_read_that_takes_long_is_not_awaited_but_followed() -> None:
    """Requests that come meanwhile would wait for it."""
    rig = cold_rig(follows=True)
    rig.replica._residency.rates.page_read_s = 1.0
    rig.ask("a", 1, [1, 2, 3, 4, 5], 2)
    assert not rig.device.steps
    assert commanded(rig, SwapPages)[0].follows_read
    rig.land_read()
    assert rig.device.steps[0].command.awaits, "the copy is about to land"
    finish(rig)
    assert len(rig.tokens["a"]) == 2
    assert counters(rig).cold_starts == {"layerwise/files": 1}


def test_others_are_not_held_up_by_a_read() -> None:
    rig = cold_rig(follows=True)
    rig.ask("warm", 0, [7, 7, 7], 20)
    rig.ask("a", 1, [1, 2, 3, 4, 5], 2)
    for _ in range(4):
        assert not rig.device.steps[0].command.awaits
        rig.feed(rig.device.finish_step(True))
    finish(rig)
    assert len(rig.tokens["a"]) == 2


def test_a_copy_follows_a_read_that_was_begun_ahead() -> None:
    """It went to the host, since the device had no room then."""
    rig = cold_rig(follows=True, num_pages=8, max_num_seqs=1)
    rig.ask("other", 2, [1] * 12, 3)
    finish_reads(rig)
    rig.ask("a", 1, [1, 2, 3], 2)
    finish(rig)
    assert len(rig.tokens["a"]) == 2
    assert len(rig.tokens["other"]) == 3


def finish_reads(rig: Rig) -> None:
    while rig.device.reads:
        rig.land_read()


@pytest.mark.parametrize("num_host_pages", [40, 0])
@pytest.mark.parametrize("copy_first", [True, False])
def test_a_read_that_fails_ends_its_requests_and_nobody_elses(num_host_pages: int, copy_first: bool) -> None:
    rig = cold_rig(follows=True, num_host_pages=num_host_pages)
    rig.sources_gone.add(1)
    begin(rig, "a")
    rig.land_read()
    assert rig.ends["a"].reason == "error"
    if copy_first and rig.device.copies:
        rig.land_copy()
    rig.sources_gone.clear()
    rig.ask("c", 1, [1, 2, 3], 2)
    rig.ask("d", 2, [1, 2, 3], 2)
    while rig.device.copies and not rig.device.reads:
        rig.land_copy()
    if not copy_first:
        finish_reads(rig)
        while rig.device.copies:
            rig.land_copy()
    finish(rig)
    assert len(rig.tokens["c"]) == len(rig.tokens["d"]) == 2


@pytest.mark.parametrize("num_host_pages", [40, 0])
@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("removes", [True, False])
def test_abort_and_removal_while_a_row_awaits_a_read(ok: bool, removes: bool, num_host_pages: int) -> None:
    rig = cold_rig(follows=True, num_host_pages=num_host_pages)
    begin(rig, "a")
    if removes:
        rig.feed(AdapterRemoved(1))
    rig.feed(Abort("a"))
    assert rig.ends["a"].reason == "abort"
    if not ok:
        rig.sources_gone.add(1)
    rig.land_read()
    while rig.device.copies:
        rig.land_copy()
    rig.feed(rig.device.finish_step(True))
    finish(rig)
    assert rig.tokens.get("a", []) == []
    assert any(isinstance(c, AdapterFreed) for c in rig.commands) is removes
    rig.ask("b", 2, [1, 2], 2)
    finish(rig)
    assert len(rig.tokens["b"]) == 2


def test_a_copy_that_fails_behind_a_read_that_went_well() -> None:
    rig = cold_rig(follows=True)
    begin(rig, "a")
    rig.land_read()
    rig.land_copy(ok=False)
    rig.feed(rig.device.finish_step(True))
    assert counters(rig).spoilt_rows == 1
    finish(rig)
    assert len(rig.tokens["a"]) == 2


def test_what_copies_take_is_not_learnt_from_those_that_follow_reads() -> None:
    rig = cold_rig(follows=True)
    before = rig.replica._residency.rates.page_in_s
    begin(rig, "a")
    rig.copy_page_s = 10.0
    finish(rig)
    assert rig.replica._residency.rates.page_in_s == before
