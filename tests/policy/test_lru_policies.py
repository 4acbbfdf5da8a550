"""The policies of one LRU that differ in when KV is written to the host: when it leaves, when it is computed, or
never."""

from __future__ import annotations

import pytest

from manylora.protocol.commands import Decided, SwapPages
from manylora.types import BASE
from tests.policy.reports import counters, gauges
from tests.policy.rig import PAGE, Rig, prompt


def written(rig: Rig) -> list[int]:
    """The device pages that were copied to the host, in order."""
    return [page for swap in rig.of(SwapPages) if not swap.to_device for page, _ in swap.pairs]


def test_lru_ahead_writes_a_page_once_and_when_it_is_full() -> None:
    rig = Rig("lru-ahead", num_pages=40)
    rig.serve("a", BASE, prompt(1, 3), max_tokens=2 * PAGE)
    assert len(written(rig)) == 5, (
        "three of the prompt, two of the reply, with room for all of it on the device"
    )
    rig.serve("again", BASE, prompt(1, 3), max_tokens=2 * PAGE)
    assert len(written(rig)) == 5, "the same pages have their copies"
    rig.serve("on", BASE, [*prompt(1, 3), *rig.tokens["again"], 7, 8, 9, 10])
    assert len(written(rig)) == 6


def test_what_is_being_written_is_used_meanwhile() -> None:
    rig = Rig("lru-ahead", num_pages=40)
    rig.ask("a", BASE, prompt(1, 3))
    while rig.device.steps:
        rig.end_step()
    assert rig.device.copies
    rig.ask("b", BASE, prompt(1, 3))
    assert rig.device.steps, "it waits for no copy"
    while rig.device.steps:
        rig.end_step()
    assert rig.check_answers() == 2
    assert counters(rig.replica).kv_hit_tokens_device == 3 * PAGE


@pytest.mark.parametrize(("policy", "copies"), [("lru-ahead", 0), ("lru", 5)])
def test_lru_ahead_has_its_copies_before_the_room_is_asked_for(policy: str, copies: int) -> None:
    """Where ``lru`` has to write first, the pages of ``lru-ahead`` are free at once."""
    rig = Rig(policy, num_pages=8, trace=True)
    rig.serve("a", BASE, prompt(1, 6))
    num_written = len(written(rig))
    rig.ask("b", BASE, prompt(2, 6))
    assert len(written(rig)) - num_written == copies
    assert bool(rig.device.steps) is (policy == "lru-ahead")
    rig.settle()
    assert rig.check_answers() == 2


def test_lru_ahead_keeps_room() -> None:
    rig = Rig("lru-ahead", num_pages=20, num_host_pages=200, high_mark=0.7)
    for number in range(6):
        rig.serve(f"r{number}", BASE, prompt(number, 4))
        now = gauges(rig.replica)
        assert now.pages_total - now.pages_free <= 14
    assert counters(rig.replica).history_drops == 0
    rig.settle(rings=5)
    assert rig.swaps(to_device=True) == 0, "nothing comes back unasked"


def test_a_write_that_fails_is_made_up_for_when_the_page_leaves() -> None:
    rig = Rig("lru-ahead", num_pages=8, trace=True)
    rig.ask("a", BASE, prompt(1, 6))
    while rig.device.steps:
        rig.end_step()
    while rig.device.copies:
        rig.land_copy(ok=False)
    num_written = len(written(rig))
    rig.serve("b", BASE, prompt(2, 6))
    reasons = [decided.reason for decided in rig.of(Decided) if decided.action == "save"]
    assert reasons.count("written through") == 12
    assert len(written(rig)) > num_written + 6
    assert rig.check_answers() == 2


def test_a_full_host_gives_up_what_was_used_longest_ago() -> None:
    rig = Rig("lru-ahead", num_pages=40, num_host_pages=6)
    for number in (1, 2, 3):
        rig.serve(f"r{number}", BASE, prompt(number, 3))
    assert len(written(rig)) == 9
    assert counters(rig.replica).host_evictions == 3
    assert counters(rig.replica).history_drops == 0, "the device still has them"


def test_lru_drop_writes_nothing_and_computes_again() -> None:
    rig = Rig("lru-drop", num_pages=10)
    rig.add(1, 2)
    for name, seed in (("a", 1), ("b", 2), ("again", 1)):
        rig.serve(name, 1, prompt(seed, 6))
    assert not written(rig)
    assert all(swap.adapter == 1 for swap in rig.of(SwapPages)), "the adapter comes from the host"
    found = counters(rig.replica)
    assert (found.kv_hit_tokens_host, found.kv_hit_tokens_device) == (0, PAGE), "the first page was left"
    assert found.history_drops > 0
    assert rig.check_answers() == 3


def test_lru_drop_keeps_what_there_is_room_for() -> None:
    rig = Rig("lru-drop", num_pages=20)
    rig.serve("a", BASE, prompt(1, 6))
    rig.serve("again", BASE, prompt(1, 6))
    assert counters(rig.replica).kv_hit_tokens_device == 6 * PAGE
