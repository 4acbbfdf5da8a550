"""History on the host whose adapter is in neither tier: it stays, since the adapter can be read again."""

import random

import pytest

from manylora.protocol.commands import AdapterFreed, ReadAdapter
from manylora.protocol.events import AdapterRemoved
from manylora.types import BASE
from tests.policy.rig import PAGE, Rig, prompt


def served_without_host_copy(policy: str) -> Rig:
    """Adapter 1 has served 5 pages of history; only the device has it."""
    rig = Rig(policy, num_pages=16, low_mark=0.1)
    rig.add(1, 3)
    rig.serve("a", 1, prompt(1, 5))
    residency = rig.replica._residency
    residency.leave_host(residency.tree.node(1))  # as when the host is full
    return rig


@pytest.mark.parametrize(("policy", "keeps"), [("manylora", True), ("fastlibra", False), ("lru", False)])
def test_history_outlives_an_adapter_that_can_be_read_again(policy: str, keeps: bool) -> None:
    rig = served_without_host_copy(policy)
    rig.serve("b", BASE, prompt(2, 14))
    assert not rig.replica._residency.tree.node(1).pages, "it had to leave the device too"
    before = rig.computed_tokens()
    rig.serve("again", 1, prompt(1, 5))
    assert len(rig.of(ReadAdapter)) == 2
    assert rig.computed_tokens() - before == (1 if keeps else 5 * PAGE + 1)


@pytest.mark.parametrize("moment", ["while it is saved", "when it is alone", "after a failed read"])
def test_unloading_frees_history_that_is_there_without_its_adapter(moment: str) -> None:
    rig = served_without_host_copy("manylora")
    tree = rig.replica._residency.tree
    rig.ask("b", BASE, prompt(2, 14))
    assert rig.device.copies
    if moment != "while it is saved":
        rig.settle()
        assert tree.node(1).is_ghost
        assert tree.node(1).children
    if moment == "after a failed read":
        rig.sources_gone.add(1)
        rig.ask("gone", 1, prompt(1, 5))
        rig.settle()
        assert rig.ends["gone"].error.status == 503
    rig.feed(AdapterRemoved(1))
    rig.settle()
    assert rig.of(AdapterFreed)
    assert [*tree.adapters()] == []
    rig.check_answer("b")


def test_a_host_too_small_for_all_keeps_answers_right() -> None:
    """Whatever happens meanwhile; the rig checks the policy's invariants after every event."""
    assert sum(num_orphaned_in_a_busy_time(seed) for seed in range(8)), "it came to that"


def num_orphaned_in_a_busy_time(seed: int) -> int:
    """How often after one of 150 requests an adapter was in neither tier while its history was."""
    rng = random.Random(seed)
    rig = Rig(num_pages=rng.choice((16, 20, 24)), num_host_pages=rng.choice((14, 20)), low_mark=0.1)
    for adapter in range(1, 5):
        rig.add(adapter, rng.choice((2, 3)))
    tree = rig.replica._residency.tree
    adapters = [tree.node(adapter) for adapter in tree.adapters()]
    num_orphaned = 0
    for turn in range(150):
        rig.now += rng.choice((0.01, 0.5, 3.0, 16.0))
        rig.sources_gone = {rng.randrange(1, 5)} if rng.random() < 0.05 else set()
        adapter, num_pages = rng.randrange(1, 5), rng.randrange(1, 7)
        rig.ask(
            f"r{turn}", adapter, prompt(10 * adapter + rng.randrange(3), num_pages), rng.choice((1, 1, 6))
        )
        for _ in range(rng.randrange(6)):
            rig.now += 0.01
            if rig.device.reads and rng.random() < 0.4:
                rig.land_read()
            elif rig.device.copies and rng.random() < 0.5:
                rig.land_copy(ok=rng.random() > 0.05)
            elif rig.device.steps:
                rig.end_step()
        if rng.random() < 0.4:
            rig.settle()
        num_orphaned += sum(node.is_ghost and bool(node.children) for node in adapters)
    rig.settle()
    assert rig.check_answers() > 100
    return num_orphaned
