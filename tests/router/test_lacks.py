"""Replicas that are without adapters which are listed: what the router gives them, and what waits for others."""

from __future__ import annotations

import dataclasses

import pytest
from manylora_lab.baselines import ALL_ROUTERS

from manylora.protocol.events import Timer
from manylora.protocol.routing import (
    Asked,
    Assign,
    Drain,
    Held,
    Lacks,
    MoveAsked,
    Refuse,
    ReplicaDown,
    ReplicaUp,
    Unlisted,
)
from manylora.router.policies.dlora_plan import plan_copies
from tests.router.rig import FACTS, Rig, config_of, of_kind, target_of


def lacking_rig(policy: str, *lacks: tuple[int, ...]) -> Rig:
    """Replicas 0, 1, ..., each without these adapters of two."""
    rig = Rig(config_of(policy, queue_timeout_s=6.0))
    rig.list_adapters(8, 8)
    for replica, each in enumerate(lacks):
        rig.tell(ReplicaUp(replica, 1, FACTS, each))
    return rig


@pytest.mark.parametrize("policy", ALL_ROUTERS)
def test_its_requests_go_to_others(policy: str) -> None:
    rig = lacking_rig(policy, (1,), (), (1,))
    assert {rig.ask(f"a{number}", 1) for number in range(8)} == {1}
    assert None not in {rig.ask(f"b{number}", 2) for number in range(8)}
    rig.accept("a0")
    rig.tell(MoveAsked("a0", 0))
    rig.tell(Drain(1, migrate=True))
    assert target_of(rig.commands, "a0") == 1, "nowhere else"
    assert rig.router.requests


def test_what_no_replica_has_waits_and_stands_before_no_others() -> None:
    rig = lacking_rig("most-idle", (1,))
    assert rig.ask("a", 1) is None
    assert rig.ask("base") == 0
    for at in (3.0, 5.9, 6.0):
        assert not of_kind(rig.commands, Refuse)
        rig.report(0)
        rig.tell(Timer(), at=at)
    (refusal,) = of_kind(rig.commands, Refuse)
    assert (refusal.request, refusal.error.status) == ("a", 503)
    assert "has its adapter" in refusal.error.message


def test_it_serves_what_waits_as_soon_as_it_has_the_adapter() -> None:
    rig = lacking_rig("most-idle", (1, 2))
    assert rig.ask("a", 1) is None
    assert rig.ask("b", 2) is None
    assert of_kind(rig.tell(Lacks(0, 1, (2,))), Assign) == [Assign("a", 1, 0, 1)]
    assert rig.tell(Lacks(0, 0)) == [], "of an epoch that is over"
    assert of_kind(rig.tell(Lacks(0, 1)), Assign) == [Assign("b", 1, 0, 2)]


def test_what_is_on_one_that_loses_the_adapter_goes_on_elsewhere() -> None:
    rig = lacking_rig("round-robin", (), (2,))
    assert [rig.ask(name, 1) for name in "ab"] == [0, 1]
    assert of_kind(rig.tell(Lacks(0, 1, (1,))), Assign) == [Assign("a", 2, 1, 2)]
    assert rig.tell(Lacks(1, 1, (1, 2))) == []
    assert rig.router.num_waiting == 2
    commands = rig.tell(ReplicaUp(2, 1, FACTS))
    assert [(each.request, each.attempt) for each in of_kind(commands, Assign)] == [("a", 3), ("b", 2)]
    assert all(not each.failures for each in of_kind(commands, Assign)), "it is no failure of theirs"


def test_a_life_is_forgotten_with_its_end() -> None:
    rig = lacking_rig("most-idle", (1,))
    assert rig.ask("a", 1) is None
    rig.tell(ReplicaDown(0, 1, is_crash=False))
    assert target_of(rig.tell(ReplicaUp(0, 2, FACTS)), "a") == 0
    assert rig.router.fleet.lacking(1) == frozenset()


def test_another_router_does_not_believe_that_it_holds_one() -> None:
    rig = lacking_rig("most-idle", (1,), ())
    held = Asked("a", 1, 100, 100, attempts=3, generated=(5,))
    (assign,) = of_kind(rig.tell(Held(held, 0, 1)), Assign)
    assert (assign.replica, assign.attempt) == (1, 4)


def test_one_that_runs_alone_goes_where_its_adapter_is() -> None:
    rig = lacking_rig("most-idle", (1,), (), ())
    for _ in range(2):
        rig.tell(Asked("a", 1, 100, 100, deaths=2))
    assert target_of(rig.commands, "a") in (1, 2)
    rig.tell(ReplicaDown(1, 1, is_crash=False))
    rig.tell(ReplicaDown(2, 1, is_crash=False))
    assert rig.router.num_waiting == 1


def test_requests_of_one_that_is_unlisted_are_judged_alike() -> None:
    rig = lacking_rig("most-idle", (1,))
    assert rig.ask("a", 1) is None
    rig.tell(Unlisted(1))
    assert target_of(rig.tell(Lacks(0, 1)), "a") == 0


def test_no_copy_is_placed_there() -> None:
    sizes, loads = {1: 10}, {1: 1.0}
    assert plan_copies([100, 50], [100, 50], {}, sizes, loads, 10.0) == [(1, 0), (1, 1)]
    assert plan_copies([100, 50], [100, 50], {}, sizes, loads, 10.0, {1: {0}}) == [(1, 1)]
    assert plan_copies([100, 50], [100, 50], {}, sizes, loads, 10.0, {1: {0, 1}}) == []


def test_a_replica_that_is_too_small_is_no_help() -> None:
    rig = lacking_rig("most-idle", (1,))
    rig.tell(ReplicaUp(1, 1, dataclasses.replace(FACTS, max_model_len=100)))
    assert rig.ask("a", 1, prompt_tokens=99) is None
    assert rig.ask("b", 1, prompt_tokens=10, max_tokens=10) == 1
    assert not of_kind(rig.commands, Refuse), "the large one may yet have the adapter"
