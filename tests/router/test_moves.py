"""Which of the moves that a policy wishes for are made."""

from __future__ import annotations

import dataclasses

import pytest

from manylora.protocol.commands import Status
from manylora.protocol.events import Timer
from manylora.protocol.routing import (
    Asked,
    Assign,
    Drain,
    ReplicaDown,
    ReplicaReport,
    Withdraw,
    Withdrawn,
)
from manylora.router.policies.policy import Relocation
from tests.router.restless import Scripted
from tests.router.rig import FACTS, Rig, config_of, of_kind, target_of

MOVE = Relocation("a", 1, 0, 1, "test", gain_s=1.0, cost_s=0.5)


def rig_with() -> Rig:
    """Request ``a`` is on replica 0."""
    rig = Rig(config_of("tests.router.restless:Scripted", lease_s=1e6, suspect_s=1e6, move_cooldown_s=10.0))
    rig.up(FACTS, FACTS, dataclasses.replace(FACTS, num_pages=10))
    assert rig.ask("a") == 0
    rig.accept("a")
    return rig


def moved(rig: Rig, *moves: Relocation, at: float) -> list[str]:
    """The requests that are told to leave when the policy wishes for this."""
    policy = rig.router._policy
    assert isinstance(policy, Scripted)
    policy.wishes = list(moves)
    return [each.request for each in of_kind(rig.tell(Timer(), at=at), Withdraw)]


def release(rig: Rig, attempt: int) -> int | None:
    """Where the request goes then."""
    target = target_of(rig.tell(Withdrawn("a", attempt)), "a")
    rig.accept("a")
    return target


def test_a_move_is_made_once() -> None:
    rig = rig_with()
    assert moved(rig, MOVE, MOVE, at=1.0) == ["a"]
    assert moved(rig, MOVE, at=20.0) == [], "it has been told"
    assert release(rig, 1) == 1
    assert moved(rig, MOVE, at=40.0) == [], "it is elsewhere now"


@pytest.mark.parametrize(
    "change",
    [
        {"gain_s": 0.5}, {"attempt": 0}, {"attempt": 2}, {"source": 1}, {"request": "b"}, {"target": 2},
        {"target": 9},
    ],
)  # fmt: skip
def test_a_move_must_gain_and_fit_the_world(change: dict[str, object]) -> None:
    """Replica 2 can never hold the request, and there is no replica 9."""
    rig = rig_with()
    assert moved(rig, dataclasses.replace(MOVE, **change), at=1.0) == []  # type: ignore[arg-type]
    assert moved(rig, MOVE, at=1.0) == ["a"]


def test_a_move_to_what_drains_or_is_down_is_not_made() -> None:
    rig = rig_with()
    rig.tell(Drain(1))
    assert moved(rig, MOVE, at=1.0) == []
    rig.tell(ReplicaDown(1, 1))
    assert moved(rig, MOVE, at=2.0) == []


def test_each_later_move_must_gain_twice_as_much_and_take_its_time() -> None:
    rig = rig_with()
    assert moved(rig, MOVE, at=1.0) == ["a"]
    assert release(rig, 1) == 1
    back = Relocation("a", 2, 1, 0, "test", gain_s=1.0, cost_s=0.5)
    assert moved(rig, back, at=20.0) == [], "1 s is not more than twice 0.5 s"
    back = dataclasses.replace(back, gain_s=1.01)
    assert moved(rig, back, at=10.9) == [], "10 s have not passed"
    assert moved(rig, back, at=11.0) == ["a"]
    assert release(rig, 2) == 0
    again = Relocation("a", 3, 0, 1, "test", gain_s=2.0, cost_s=0.5)
    assert moved(rig, again, at=30.0) == []
    assert moved(rig, dataclasses.replace(again, gain_s=0.0, is_forced=True), at=30.0) == ["a"]


def test_a_target_that_has_filled_meanwhile_is_chosen_anew() -> None:
    rig = rig_with()
    assert moved(rig, MOVE, at=1.0) == ["a"]
    rig.report(1, free_pages=3)
    assert release(rig, 1) == 0
    rig = rig_with()
    assert moved(rig, MOVE, at=1.0) == ["a"]
    rig.tell(ReplicaDown(1, 1))
    assert release(rig, 1) == 0


def test_a_request_that_begins_anew_is_not_moved_by_the_old_wish() -> None:
    rig = rig_with()
    assert moved(rig, MOVE, at=1.0) == ["a"]
    assert of_kind(rig.tell(Asked("a", 0, 100, 100, attempts=1)), Assign) == [Assign("a", 2, 0, 2, (), 1)]
    assert rig.tell(Withdrawn("a", 1)) == []


def test_a_full_report_says_all_that_is_there() -> None:
    rig = Rig(config_of("dlora-rr"))
    rig.up(FACTS, FACTS)
    rig.list_adapters(8)
    report = ReplicaReport(1, 1, 0, Status(1, 0, 0, 1000, is_full=True, residency=((1, 2),)))
    rig.tell(report)
    assert [rig.ask(name, adapter=1) for name in "ab"] == [1, 1]
    rig = Rig(config_of("dlora-rr"))
    rig.up(FACTS, FACTS)
    rig.list_adapters(8)
    rig.tell(report)
    rig.tell(ReplicaReport(1, 1, 0, Status(2, 0, 0, 1000, is_full=True)))
    assert rig.ask("c", adapter=1) == 0
