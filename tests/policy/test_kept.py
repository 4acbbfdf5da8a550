"""Copies of adapters that a router wants on the device: they come unasked, stay, give way where nothing runs."""

from __future__ import annotations

import dataclasses

import pytest

from manylora.policy.replica import Replica
from manylora.protocol.commands import AdapterFreed, EvictAdapter, ReadAdapter
from manylora.protocol.events import AdapterRemoved, Arrive, PinAdapter
from manylora.types import Request, SamplingParams
from tests.policy.rig import PAGE, Rig, prompt


def rig_of(policy: str = "lru", num_pages: int = 20, share: float = 0.5, num_adapters: int = 4) -> Rig:
    rig = Rig(policy, num_pages=num_pages, num_host_pages=0)
    rig.config = dataclasses.replace(rig.config, kept_share=share)
    rig.replica = Replica(rig.config)
    for adapter in range(1, num_adapters + 1):
        rig.add(adapter)
    return rig


def reads(rig: Rig, adapter: int) -> int:
    return sum(command.adapter == adapter for command in rig.of(ReadAdapter))


@pytest.mark.parametrize("policy", ["manylora", "fastlibra", "static-lru", "s-lora", "lru"])
def test_a_copy_comes_before_anybody_asks_and_stays(policy: str) -> None:
    rig = rig_of(policy)
    rig.feed(PinAdapter(1))
    rig.settle()
    assert reads(rig, 1) == 1
    for number in range(12):  # others fill the pool again and again
        rig.serve(f"r{number}", 2 + number % 3, prompt(number, 2), max_tokens=3)
    assert 1 not in {command.adapter for command in rig.of(EvictAdapter)}
    rig.serve("last", 1, prompt(99, 1))
    assert reads(rig, 1) == 1


def test_copies_stay_within_their_share() -> None:
    rig = rig_of(share=0.35)  # 7 of 20 pages, 3 each
    for adapter in (1, 2, 3):
        rig.feed(PinAdapter(adapter))
    rig.feed(PinAdapter(99))  # nobody knows it
    rig.settle()
    assert rig.replica._pinned.pinned == {1, 2}
    rig.feed(PinAdapter(1, False))
    rig.feed(PinAdapter(3))
    rig.settle()
    assert rig.replica._pinned.pinned == {2, 3}


def test_they_give_way_to_a_request_that_takes_the_whole_pool_and_come_back() -> None:
    rig = rig_of()
    for adapter in (1, 2):
        rig.feed(PinAdapter(adapter))
    rig.settle()
    rig.serve("large", 3, prompt(0, 0, extra=15 * PAGE), max_tokens=2 * PAGE)
    rig.settle()
    assert {1, 2} & {command.adapter for command in rig.of(EvictAdapter)}
    assert rig.replica._pinned.pinned == {1, 2}, "nothing waits any more"


def test_a_removed_adapter_is_freed() -> None:
    rig = rig_of()
    rig.feed(PinAdapter(1))
    rig.settle()
    rig.feed(AdapterRemoved(1))
    assert [command.adapter for command in rig.of(AdapterFreed)] == [1]
    assert len(rig.replica._pinned) == 0


def test_what_cannot_be_read_is_not_asked_for_again() -> None:
    rig = rig_of()
    rig.sources_gone.add(1)
    rig.feed(PinAdapter(1))
    rig.settle()
    rig.serve("other", 2, prompt(0, 1))
    assert reads(rig, 1) == 1
    rig.feed(Arrive(Request("wants", 1, (1, 2), SamplingParams(seed=0), ())))
    rig.settle()
    assert rig.ends["wants"].error.status in (400, 503)
