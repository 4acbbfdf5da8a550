"""The clairvoyant cache policy, ``manylora`` taken apart, and adapters that arrive over time."""

from __future__ import annotations

import dataclasses
import math
from random import Random

import pytest
from manylora_lab.reproduce.cells import (
    BELADY,
    BELADY_SEEN,
    Cell,
    cell_adapter_pages,
    cell_replay,
    cell_stream,
    run_cell,
)
from manylora_lab.reproduce.fastlibra_table_store import decisions
from manylora_lab.sim.ablation import ABLATIONS, FEATURES, ablation, composed
from manylora_lab.sim.belady import ForeseenReplay, Foresight
from manylora_lab.workloads.newcomers import renewed
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest

from manylora.config.declaring import ConfigError
from manylora.policy.cache_policies import find_cache
from manylora.policy.tree import Node
from tests.policy.invariants import all_nodes, check

CELL = Cell("chatbot", BELADY, 3.0, 12, 30.0)


def stream_of(*requests: tuple[float, int, int, int, str]) -> Stream:
    """Arrival, adapter, conversation, turn, and what is said."""
    return Stream(
        "by hand",
        tuple(
            StreamRequest(at, adapter, conversation, turn, (Piece(said, 16),), 4)
            for at, adapter, conversation, turn, said in requests
        ),
        (8, 8, 8),
    )


def test_foresight_knows_the_next_request_that_was_not_admitted() -> None:
    stream = stream_of(
        (1.0, 0, 0, 0, "a"), (2.0, 1, 1, 0, "shared"), (3.0, 0, 0, 1, "b"), (5.0, 1, 2, 0, "shared"),
        (9.0, 0, 0, 2, "c"),
    )  # fmt: skip
    foresight = Foresight(stream)
    foresight.began_s = 100.0
    first, second, third = (Node(adapter, None, b"", 4) for adapter in (1, 2, 3))
    assert [foresight.next_need_s(node) for node in (first, second, third)] == [101.0, 102.0, math.inf]
    foresight.admitted("0-0")
    foresight.admitted("warm-1")
    assert foresight.next_need_s(first) == 103.0
    foresight.admitted("0-1")
    foresight.admitted("1-0")
    assert (foresight.next_need_s(first), foresight.next_need_s(second)) == (109.0, 105.0)
    assert foresight._next_of(("piece", "a")) == 109.0, "history is needed by later turns"
    assert foresight._next_of(("piece", "shared")) == 105.0
    foresight.admitted("2-0")
    assert foresight._next_of(("piece", "shared")) == math.inf


def test_of_adapters_that_nobody_asked_for_only_their_being_there_can_be_known() -> None:
    stream = stream_of((1.0, 0, 0, 0, "a"), (2.0, 1, 1, 0, "b"), (4.0, 0, 0, 1, "c"))
    foresight = Foresight(stream, of_unseen=False)
    first, second, third = (Node(adapter, None, b"", 4) for adapter in (1, 2, 3))
    unknown_s = foresight.next_need_s(third)
    assert 4.0 < unknown_s < math.inf, "after what is known to be needed, before what is known not to be"
    assert foresight.next_need_s(first) == foresight.next_need_s(second) == unknown_s
    foresight.admitted("warm-2")
    assert foresight.next_need_s(second) == unknown_s, "warming is not asking"
    foresight.admitted("0-0")
    assert foresight.next_need_s(first) == 4.0
    foresight.admitted("0-1")
    assert foresight.next_need_s(first) == math.inf
    assert foresight._next_of(("piece", "b")) == 2.0, "of what conversations say all is known"


def test_all_of_the_future_saves_reads_of_adapters_that_nobody_asked_for() -> None:
    """Where the host holds a part of the adapters, and the device few."""
    reads = {}
    for name in (BELADY, BELADY_SEEN):
        cell = Cell("chatbot", name, 0.5, 60, 60.0)
        own = cell_replay(cell).replica._config
        pages = sum(cell_adapter_pages(cell, cell_stream(cell)))
        num_pages = 3 * own.max_model_len // own.page_tokens + pages // 8
        replay = cell_replay(
            cell, config=dataclasses.replace(own, num_pages=num_pages, num_host_pages=pages // 8)
        )
        replay.run()
        reads[name] = replay.report().counters.adapter_reads - len(cell_stream(cell).ranks)
    assert 0 <= reads[BELADY] < reads[BELADY_SEEN], reads


def test_it_keeps_every_invariant_and_drops_nothing_that_is_needed_before_what_is_not() -> None:
    replay = scarce()
    replica, foresight = replay.replica, replay._foresight
    num_checked = 0
    for number in range(100_000):
        if not replay.advance():
            break
        if number % 40:
            continue
        residency = replica._residency
        check(replica)
        if residency.turns.kept or replay.since_start_s is None:
            continue
        leaving = residency.candidates.leaving
        residency.candidates.begin(leaving, replay.now)
        chosen = leaving.pop()
        leaving.end()
        if chosen is None:
            continue
        residency.candidates.offer(chosen[0])
        idle = [n for n in all_nodes(residency.tree) if residency.tree.may_leave(n)]
        unneeded = [node for node in idle if foresight.next_need_s(node) == math.inf]
        assert not unneeded or foresight.next_need_s(chosen[0]) == math.inf
        num_checked += 1
    replay.run()
    assert num_checked > 20


def scarce() -> ForeseenReplay:
    """With so little memory that much leaves."""
    own = cell_replay(CELL)
    config = own.replica._config
    size = config.max_model_len // config.page_tokens
    small = dataclasses.replace(config, num_pages=3 * size + 100, num_host_pages=size + 300)
    replay = cell_replay(CELL, config=small)
    assert isinstance(replay, ForeseenReplay)
    return replay


def test_it_finds_more_than_policies_that_do_not_know_the_future() -> None:
    """Where memory is short; the counts are of the small replay that stands for a policy's code."""
    cached = {
        policy: sum(moments[0] for moments in decisions(dataclasses.replace(CELL, policy=policy))[0])
        for policy in (BELADY, "lru", "lru-drop", "s-lora")
    }
    assert cached[BELADY] > max(cached["lru"], cached["lru-drop"], cached["s-lora"])


def test_a_stream_of_texts_is_refused() -> None:
    texts = Stream("texts", (StreamRequest(0.0, None, 0, 0, (Piece("a", 2, (1, 2)),), 3),))
    with pytest.raises(ConfigError, match="belady knows made-up prompts alone, and texts has texts"):
        Foresight(texts)


# ---------------------------------------------------------------- manylora taken apart


def same(one: str, other: str) -> bool:
    cells = (dataclasses.replace(CELL, policy=policy) for policy in (one, other))
    return decisions(next(cells)) == decisions(next(cells))


def test_all_features_together_are_manylora_and_none_is_lru() -> None:
    whole, nothing = composed("all", set(FEATURES)), composed("none", set())
    for made, name in ((whole, "manylora"), (nothing, "lru")):
        named = find_cache(name)
        for question in (
            "keeps_dependencies", "keeps_prefixes", "keeps_turns", "keeps_orphans", "prefetches", "writes_through",
            "prices_pages", "counts_visits",
        ):  # fmt: skip
            assert getattr(made, question) == getattr(named, question)
        for question in ("device_value", "host_value", "offload", "marks", "adapter_pages"):
            assert getattr(type(made), question) is getattr(type(named), question)


def test_each_feature_is_on_and_off() -> None:
    assert len(ABLATIONS) == 12
    assert ablation("lru+orphans").keeps_orphans
    assert not ablation("lru+orphans").prefetches
    assert ablation("manylora-orphans").prefetches
    assert not ablation("manylora-orphans").keeps_orphans
    assert not same("manylora", "manylora-value")
    assert not same("lru", "lru+room")
    with pytest.raises(ConfigError, match="there is no ablation 'manylora-luck'"):
        ablation("manylora-luck")


# ---------------------------------------------------------------- adapters that arrive


def test_newcomers_take_the_place_of_the_oldest() -> None:
    rng = Random(3)
    before = Stream(
        "s",
        tuple(
            StreamRequest(float(second), rng.randrange(3), second // 2, second % 2, (Piece(second, 4),), 2)
            for second in range(0, 61)
            if second % 2 == 0
        ),
        (8, 16, 32),
    )
    after = renewed(before, 6)
    assert after.ranks == (8, 16, 32) * 3
    for old, new in zip(before.requests, after.requests):
        oldest = int(6 * old.arrival_s / 60)
        assert new.adapter is not None
        assert oldest <= new.adapter < oldest + 3
        assert new.adapter % 3 == old.adapter, "as popular, and of the same rank"
    assert max(request.adapter or 0 for request in after.requests) >= 6


def test_a_cell_can_have_whole_adapters_newcomers_and_a_time_that_does_not_count() -> None:
    cell = Cell(
        "chatbot", "lru-ahead", 2.0, 10, 40.0, ranks="random(64,128)", is_whole=True, newcomers=10, is_warm=False,
        settle_s=20.0,
    )  # fmt: skip
    assert len(cell_stream(cell).ranks) == 20
    assert run_cell(cell) == run_cell(cell)
    assert run_cell(cell)["adapter_miss"] < run_cell(dataclasses.replace(cell, settle_s=0.0))["adapter_miss"]
    plain = dataclasses.replace(cell, is_whole=False)
    assert sum(cell_adapter_pages(cell, cell_stream(cell))) > 2 * sum(
        cell_adapter_pages(plain, cell_stream(cell))
    )
