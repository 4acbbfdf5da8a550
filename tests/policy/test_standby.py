"""History that has left and whose pages nobody has taken yet: it comes back for nothing."""

from __future__ import annotations

import array
import random

import pytest

from manylora.policy.pages import PageLedger
from manylora.policy.tree import Node, Residence, subtree
from manylora.protocol import Abort, Timer
from manylora.types import BASE, PageId
from tests.policy.reports import gauges
from tests.policy.rig import PAGE, Rig, prompt


def crowded(policy: str) -> Rig:
    """A conversation of 6 pages, then others until it has left the device, half of which is kept free."""
    rig = Rig(policy, num_pages=20, num_host_pages=80, high_mark=0.5, low_mark=0.1)
    rig.serve("first", BASE, prompt(1, 6))
    rig.settle(rings=1)
    rig.serve("second", BASE, prompt(2, 8))
    rig.settle(rings=1)
    return rig


def states(rig: Rig, seed: int) -> set[Residence]:
    """Of the pages of a prompt that was served, under the base."""
    key = array.array("q", prompt(seed, 6)[:PAGE]).tobytes()
    return {node.residence for node in subtree(rig.replica._residency.tree.base.children[key])}


@pytest.mark.parametrize("policy", ["manylora", "fastlibra"])
def test_history_comes_back_without_a_copy(policy: str) -> None:
    """Under manylora; fastlibra copies it."""
    rig = crowded(policy)
    has_left = Residence.STANDBY if policy == "manylora" else Residence.ABSENT
    assert has_left in states(rig, 1)
    computed, copied = rig.computed_tokens(), rig.swaps(to_device=True)
    rig.serve("again", BASE, prompt(1, 6))
    assert rig.computed_tokens() - computed == 1
    assert (rig.swaps(to_device=True) == copied) == (policy == "manylora")


def test_pages_of_what_has_left_are_free() -> None:
    """Whoever needs them takes them, and what they held is copied when it is asked for."""
    rig = crowded("manylora")
    snapshot = gauges(rig.replica)
    assert snapshot.pages_free >= 10
    assert snapshot.pages_free + snapshot.pages_history + snapshot.pages_running == 20
    rig.ask("large", BASE, prompt(3, 15), max_tokens=6)
    rig.settle()
    rig.check_answer("large")
    assert Residence.ABSENT in states(rig, 1)
    copied = rig.swaps(to_device=True)
    rig.serve("again", BASE, prompt(1, 6))
    assert rig.swaps(to_device=True) > copied


def test_an_adapter_that_leaves_takes_what_stands_by_along() -> None:
    """It could not come back without it."""
    rig = Rig("manylora", num_pages=24, num_host_pages=80, high_mark=0.5, low_mark=0.1)
    rig.add(1, 4)
    rig.serve("first", 1, prompt(1, 4))
    residency = rig.replica._residency
    residency.shrink(rig.now, 4, "busy")
    rig.feed(Timer())
    rig.settle_copies()
    root = residency.tree.node(1)
    assert root.num_standing == 1
    residency.shrink(rig.now, 0, "busy")
    assert root.residence is Residence.ABSENT
    assert residency.tree.standing_pages == root.num_standing == 0
    rig.replica.check()
    rig.serve("again", 1, prompt(1, 4))


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_a_busy_time_keeps_answers_right(pipeline_depth: int) -> None:
    """Whatever happens meanwhile; the rig checks the policy's invariants after every event."""
    num_recalled = sum(num_recalled_in_a_busy_time(seed, pipeline_depth) for seed in range(4))
    assert num_recalled > 8, "it came to that"


def num_recalled_in_a_busy_time(seed: int, pipeline_depth: int) -> int:
    """Nodes that came back from standing by, during 120 turns of a few conversations."""
    rng = random.Random(seed)
    rig = Rig(
        num_pages=rng.choice((20, 26, 32)), num_host_pages=rng.choice((12, 30, 80)), low_mark=0.1,
        high_mark=rng.choice((0.5, 0.7, 0.9)), pipeline_depth=pipeline_depth,
    )  # fmt: skip
    for adapter in range(1, 4):
        rig.add(adapter, rng.choice((1, 2, 3)))
    device, num_recalled = rig.replica._residency.device, 0
    call_back = device.call_back

    def counted(page: PageId) -> None:
        nonlocal num_recalled
        num_recalled += 1
        call_back(page)

    device.call_back = counted  # type: ignore[method-assign]
    for turn in range(120):
        rig.now += rng.choice((0.01, 0.5, 3.0))
        adapter = rng.randrange(4)
        rig.ask(f"r{turn}", adapter, prompt(10 * adapter + rng.randrange(2), rng.randrange(1, 8)), 6)
        for _ in range(rng.randrange(8)):
            rig.now += 0.01
            if rig.device.reads and rng.random() < 0.4:
                rig.land_read()
            elif rig.device.copies and rng.random() < 0.5:
                rig.land_copy(ok=rng.random() > 0.05)
            elif rig.timer is not None and rng.random() < 0.2:
                rig.ring()
            elif rig.device.steps:
                rig.end_step()
        if rng.random() < 0.1:
            rig.feed(Abort(f"r{turn}"))
        if rng.random() < 0.3:
            rig.settle(rings=1)
    rig.settle()
    assert rig.check_answers() > 80
    return num_recalled


def test_a_ledger_with_pages_that_stand_by() -> None:
    """They are taken last and in their order, not before the steps that were in flight have ended, unless called
    back."""
    ledger = PageLedger(6)
    pages = ledger.take(5)
    nodes = {page: Node(BASE, None, b"", 1) for page in pages}
    for page in pages[:3]:
        ledger.stand_by(page, nodes[page])
    assert (ledger.num_free, ledger.num_deferred, ledger.num_used) == (4, 0, 2)
    ledger.call_back(pages[1])
    ledger.step_started(1)
    ledger.stand_by(pages[3], nodes[pages[3]])
    ledger.stand_by(pages[1], nodes[pages[1]])
    assert (ledger.num_free, ledger.num_deferred, ledger.num_used) == (3, 2, 1)
    assert ledger.num_short(3) == 2
    for page in (pages[0], pages[2]):
        assert ledger.longest_standing() is nodes[page]
        ledger.stand_down(page)
    assert ledger.take(3) == (pages[2], pages[0], 5)
    with pytest.raises(AssertionError, match="0 are free"):
        ledger.take(1)
    ledger.call_back(pages[3])
    ledger.stand_by(pages[3], nodes[pages[3]])
    ledger.step_started(2)
    ledger.step_ended(1)
    assert (ledger.num_free, ledger.num_deferred) == (2, 0)
    ledger.stand_down(pages[3])
    assert ledger.take(1) == (pages[3],)
    assert ledger.standing() == [pages[1]]
    ledger.call_back(pages[1])
    ledger.step_ended(2)
    assert (ledger.num_free, ledger.num_used) == (0, 6)
