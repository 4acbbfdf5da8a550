"""The indexes by which replicas are found, each against looking at all of them."""

from __future__ import annotations

import random

import pytest
from manylora_lab.baselines.routers import hash_text

from manylora.protocol.hashing import BLOCK_BYTES, hash_number, prefix_hashes, reply_hashes
from manylora.router.fleet import Fleet, LoadIndex, OutputLengths
from manylora.router.policies.dlora_plan import AdapterRates
from manylora.router.policies.manylora import HomeRing
from manylora.router.prefixes import Prefixes
from manylora.router.replicas import ReplicaKind, ReplicaState
from manylora.router.requests import shape_of
from tests.router.rig import FACTS, config_of


def test_loads_are_in_order() -> None:
    draw, index = random.Random(1), LoadIndex()
    loads: dict[int, int] = {}
    for _ in range(2000):
        replica = draw.randrange(30)
        if replica in loads:
            index.remove(loads.pop(replica), replica)
        if draw.random() < 0.7:
            loads[replica] = draw.randrange(6)
            index.add(loads[replica], replica)
        ordered = sorted(loads, key=lambda each: (loads[each], each))
        assert list(index.ascending()) == ordered
        assert index.least(5) == ordered[:5]
        assert list(index.descending(4)) == [each for each in reversed(ordered) if loads[each] < 4]
        if loads:
            assert (index.loads[0], index.loads[-1]) == (min(loads.values()), max(loads.values()))


def state(replica: int) -> ReplicaState:
    found = ReplicaState(replica, 1, FACTS, shape_of(FACTS), ReplicaKind(FACTS), 0.0)
    found.is_open = True
    return found


def test_prefixes_find_the_longest_and_forget_evictions() -> None:
    prefixes, first, second, third = Prefixes(1000), state(0), state(1), state(2)
    assert prefixes.add((1, 2, 3, 4), first) == 0
    assert prefixes.add((1, 2), second) == 0
    assert prefixes.add((1, 9), third) == 0
    assert list(prefixes.match((1, 2, 3, 4, 5), 4).items()) == [(first, 4), (second, 2), (third, 1)]
    assert list(prefixes.match((1, 2, 3, 4, 5), 2).items()) == [(first, 4), (second, 2)]
    assert list(prefixes.match((7, 2), 4).items()) == []
    assert prefixes.cached_blocks((1, 2, 3, 8), first) == 3
    prefixes.evict((4, 3, 77), first)
    assert list(prefixes.match((1, 2, 3, 4), 4).items()) == [(second, 2), (first, 2), (third, 1)]
    first.is_open = second.is_open = False
    first.end()
    assert list(prefixes.match((1, 2, 3, 4), 4).items()) == [(third, 1)]
    assert prefixes.add((1, 2), third) == 1, "what it has of the prompt's beginning"
    second.is_open = True
    assert list(prefixes.match((1, 2), 4).items()) == [(third, 2), (second, 2)], "what is down is forgotten"


def test_a_prefix_has_four_holders_at_most_the_latest() -> None:
    prefixes, states = Prefixes(1000), [state(replica) for replica in range(6)]
    for each in states:
        prefixes.add((1,), each)
    assert [holder.id for holder, _ in prefixes.match((1,), 9).items()] == [5, 4, 3, 2]


def test_prefixes_are_bounded_and_keep_what_is_used() -> None:
    prefixes, replica = Prefixes(100), state(0)
    for number in range(1000):
        prefixes.add((1, 2), replica)
        prefixes.add((1000 + number,), replica)
        assert len(prefixes) <= 104
    assert list(prefixes.match((1, 2), 1).items()) == [(replica, 2)]
    assert list(prefixes.match((1000,), 1).items()) == []


def test_lengths() -> None:
    lengths = OutputLengths()
    assert (lengths.mean, lengths.expected(1)) == (128.0, 128.0)
    lengths.saw(1, 10)
    lengths.saw(2, 30)
    assert lengths.mean == 20.0
    assert (lengths.expected(1), lengths.expected(2), lengths.expected(3)) == (10.0, 30.0, 20.0)
    lengths.saw(1, 20)
    assert lengths.expected(1) == pytest.approx(11.0)
    assert lengths.remaining(2, 10, 100) == 20.0
    assert lengths.remaining(2, 10, 15) == 5.0
    assert lengths.remaining(2, 99, 100) == 1.0
    lengths.forget(1)
    assert lengths.expected(1) == lengths.mean


def test_rates_halve() -> None:
    rates = AdapterRates(10.0)
    for number in range(1001):
        rates.saw(1, number * 0.1)
    assert rates.rates(100.0)[1] == pytest.approx(10.0, rel=0.05)
    assert rates.rates(110.0)[1] == pytest.approx(5.0, rel=0.05)
    assert rates.rates(400.0) == {}
    assert AdapterRates(10.0).rates(0.0) == {}


def test_homes_stay_when_others_come_and_go() -> None:
    fleet = Fleet(config_of("manylora"))
    for replica in range(20):
        fleet.add(replica, 1, FACTS)
    ring = HomeRing()
    before = {adapter: ring.homes(fleet, adapter, 1)[0] for adapter in range(1, 2001)}
    counts = [list(before.values()).count(replica) for replica in range(20)]
    assert min(counts) >= 30
    assert max(counts) <= 220
    fleet.remove(fleet.up[7])
    after = {adapter: ring.homes(fleet, adapter, 1)[0] for adapter in before}
    assert all(after[each] == before[each] for each in before if before[each] != 7)
    fleet.suspect(fleet.up[3])
    homes = ring.homes(fleet, 5, 99)
    assert sorted(homes) == [each for each in range(20) if each not in (3, 7)]
    assert ring.homes(fleet, 5, 2) == homes[:2]


def test_hashes_are_the_same_everywhere() -> None:
    assert hash_text("r1") == hash_text("r1") != hash_text("r1", 1)
    assert hash_number(0) == 0xE220A8397B1DCDAF, "splitmix64's first number"
    assert len({hash_number(number) % 1000 for number in range(1000)}) > 600


def test_prompts_share_hashes_as_far_as_they_are_equal() -> None:
    """Whole blocks only, of one adapter and one scope."""
    size = BLOCK_BYTES // 8
    tokens = [*range(3 * size + 1)]
    hashes = prefix_hashes(1, "", tokens)
    assert len(hashes) == len(set(hashes)) == 3
    assert prefix_hashes(1, "", tokens[: 2 * size]) == hashes[:2]
    other = prefix_hashes(1, "", [*tokens[: 2 * size - 1], -1, *tokens[2 * size :]])
    assert other[0] == hashes[0]
    assert not set(other[1:]) & set(hashes)
    for length in (1, size - 1, size, size + 1, 2 * size):
        prompt, reply = tokens[:length], tokens[length:]
        further = reply_hashes(1, "", prompt, reply)
        assert prefix_hashes(1, "", prompt) + further == hashes, "but for the last token"
        assert prefix_hashes(1, "", prompt) + reply_hashes(1, "", prompt, reply[:-1]) == hashes[:2]
    for adapter, scope in ((2, ""), (1, "a")):
        assert not set(prefix_hashes(adapter, scope, tokens)) & set(hashes)
