"""The router's own business: the queue, attempts, accounting, moves, drains, leases, hints."""

from __future__ import annotations

import dataclasses

import pytest

from manylora.config.cluster import ClusterOptions
from manylora.config.declaring import ConfigError
from manylora.config.routing import RouterConfig, split_setting
from manylora.protocol.commands import SetTimer, Status
from manylora.protocol.events import Timer
from manylora.protocol.routing import (
    Asked,
    AskReport,
    Assign,
    Cancelled,
    Drain,
    Ended,
    Fence,
    Held,
    Listed,
    MoveAsked,
    Progress,
    Refuse,
    ReplicaDown,
    ReplicaReport,
    ReplicaUp,
    Routed,
    ScaleHint,
    StepPlane,
    Unlisted,
    Withdraw,
    Withdrawn,
)
from manylora.router.queue import CLEARED_TOKENS
from manylora.router.replicas import ReplicaKind, ReplicaState
from manylora.router.requests import INNOCENT_DEATHS, LiveRequest, shape_of
from manylora.router.router import Router
from tests.router.rig import FACTS, Rig, config_of, of_kind, target_of

SMALL = dataclasses.replace(FACTS, num_pages=10)


def refusal(rig: Rig, name: str) -> int | None:
    found = [each for each in of_kind(rig.commands, Refuse) if each.request == name]
    return found[-1].error.status if found else None


# ---------------------------------------------------------------- requests


def test_a_request_waits_until_a_replica_is_up() -> None:
    rig = Rig(config_of("most-idle"))
    assert rig.ask("a") is None
    assert rig.ask("b") is None
    commands = rig.tell(ReplicaUp(3, 1, FACTS), at=1.0)
    assert of_kind(commands, Assign) == [Assign("a", 1, 3, 1), Assign("b", 1, 3, 2)]


def test_the_queue_goes_by_the_moment_at_which_a_request_first_came() -> None:
    rig = Rig(config_of("most-idle"))
    for name, waited_s in (("a", 0.0), ("b", 9.0), ("c", 2.0)):
        rig.tell(Asked(name, 0, 10, 10, waited_s=waited_s), at=10.0)
    assigned = of_kind(rig.tell(ReplicaUp(0, 1, FACTS)), Assign)
    assert [each.request for each in assigned] == ["b", "c", "a"]


def test_an_adapter_must_be_listed() -> None:
    rig = Rig(config_of("most-idle"))
    rig.up(FACTS)
    rig.ask("a", adapter=1)
    assert refusal(rig, "a") == 404
    rig.tell(Listed(1, 8, 4))
    assert rig.ask("b", adapter=1) == 0
    rig.tell(Unlisted(1))
    rig.ask("c", adapter=1)
    assert refusal(rig, "c") == 404
    rig.tell(ReplicaDown(0, 1))
    assert target_of(rig.tell(ReplicaUp(0, 2, FACTS)), "b") == 0, "what has come is served"


@pytest.mark.parametrize(
    ("asked", "fits"),
    [
        (Asked("a", 0, 4000, 96), True),
        (Asked("a", 0, 4000, 97), False),  # the context
        (Asked("a", 1, 1000, 100), True),
        (Asked("a", 2, 1000, 100), False),  # the pages that adapters may take
        (Asked("a", 1, 15903 - 4 * 16, 98), True),  # the last token needs no room
        (Asked("a", 1, 15903 - 4 * 16, 99), False),
    ],
)
def test_what_no_replica_can_ever_hold_is_refused(asked: Asked, fits: bool) -> None:
    rig = Rig(config_of("round-robin"))
    long = dataclasses.replace(FACTS, max_model_len=20_000, adapter_pages=4)
    rig.up(FACTS if asked.prompt_tokens == 4000 else long)
    rig.tell(Listed(1, 8, 4))
    rig.tell(Listed(2, 8, 5))
    assert (target_of(rig.tell(asked), "a") == 0) == fits
    assert refusal(rig, "a") == (None if fits else 400)


def test_a_request_that_no_replica_can_hold_now_stands_before_no_others() -> None:
    rig = Rig(config_of("most-idle", queue_timeout_s=4.0))
    rig.up(SMALL, FACTS)
    rig.tell(ReplicaDown(1, 1, is_crash=False))
    assert rig.ask("large", prompt_tokens=500) is None
    assert rig.ask("small", prompt_tokens=20, max_tokens=20) == 0
    rig.report(0)
    rig.tell(Timer(), at=3.0)
    assert refusal(rig, "large") is None
    rig.report(0)
    rig.tell(Timer(), at=4.0)
    assert refusal(rig, "large") == 503


def test_a_request_from_before_the_first_replica_is_judged_by_it() -> None:
    rig = Rig(config_of("most-idle"))
    assert rig.ask("large", prompt_tokens=500) is None
    assert rig.ask("small", prompt_tokens=20, max_tokens=20) is None
    commands = rig.tell(ReplicaUp(0, 1, SMALL))
    assert refusal(rig, "large") == 400
    assert target_of(commands, "small") == 0


def test_a_request_that_has_tokens_goes_on_with_the_same_numerics() -> None:
    first, second = (dataclasses.replace(FACTS, numerics=name) for name in "ab")
    rig = Rig(config_of("most-idle", queue_timeout_s=1.0))
    rig.up(first, second, first)
    assert [rig.ask(name) for name in "abc"] == [0, 1, 2]
    rig.tell(Progress("a", 0, 1))
    rig.tell(Ended("b", 1))
    assert target_of(rig.tell(ReplicaDown(0, 1)), "a") == 2
    assert target_of(rig.tell(ReplicaDown(2, 1)), "c") == 1, "which has no token yet"
    rig.report(1)
    rig.tell(Timer(), at=1.0)
    assert refusal(rig, "a") == 503


def test_an_end_is_final() -> None:
    rig = Rig(config_of("most-idle"))
    rig.up(FACTS, FACTS)
    rig.ask("a")
    rig.ask("b")
    rig.tell(Ended("a", 10))
    rig.tell(Cancelled("b"))
    assert rig.tell(ReplicaDown(0, 1)) == []
    assert rig.tell(Ended("a", 10)) == []


def test_what_has_ended_is_taken_off_reports_from_before() -> None:
    rig = Rig(config_of("most-idle"))
    rig.up(FACTS)
    replica = rig.router.fleet.up[0]
    for name in "ab":
        rig.ask(name, prompt_tokens=160)
    counted = {"running": 2, "free_pages": 980, "kv_tokens": 320}
    rig.report(0, **counted)
    assert (replica.free_pages, replica.kv_tokens) == (980, 320)
    rig.tell(Progress("a", 0, 32))
    rig.tell(Ended("a", 40))
    assert (replica.free_pages, replica.kv_tokens) == (992, 128), "192 of its tokens in 12 pages were known"
    rig.report(0, **counted)
    assert (replica.free_pages, replica.kv_tokens) == (992, 128), "this report was made before"
    rig.report(0, running=1, free_pages=990, reclaimable_pages=10, kv_tokens=160)
    assert (replica.free_pages, replica.spare_pages, replica.kv_tokens) == (1000, 990, 160), "this one after"
    rig.report(0, running=2, kv_tokens=400)
    assert replica.kv_tokens == 400, "what is more there is not the router's"


def test_what_was_never_seen_and_has_ended_is_not_taken_off() -> None:
    rig = Rig(config_of("most-idle"))
    rig.up(FACTS)
    replica = rig.router.fleet.up[0]
    rig.ask("a", prompt_tokens=160)
    assert (replica.kv_tokens, replica.waiting_tokens) == (160, 160)
    rig.tell(Ended("a", 1))
    assert (replica.free_pages, replica.kv_tokens, replica.waiting_tokens) == (1000, 0, 0)
    rig.report(0, running=1, kv_tokens=160, free_pages=990)
    assert (replica.free_pages, replica.kv_tokens) == (1001, 0), (
        "it had come by then; a page to grow into counts"
    )
    rig.report(0)
    assert (replica.free_pages, replica.kv_tokens) == (1000, 0)


def test_a_reply_s_blocks_are_cached_where_it_ended() -> None:
    rig = Rig(config_of("cache-aware"))
    rig.up(FACTS, FACTS)
    assert rig.ask("a", prompt_tokens=64, prefix=(1,)) == 0
    rig.ask("b")
    rig.tell(Ended("a", 130, (2, 3)))
    rig.tell(Ended("nothing", 130, (4,)))
    fleet = rig.router.fleet
    assert fleet.prefixes.match((1, 2, 3, 4), 2) == {fleet.up[0]: 3}


# ---------------------------------------------------------------- attempts


def test_a_lost_replica_s_requests_go_elsewhere_at_once_in_their_order() -> None:
    rig = Rig(config_of("round-robin"))
    rig.up(FACTS, FACTS)
    for name in "abcd":
        rig.ask(name)
    rig.accept("a", "b", "c", "d")
    rig.tell(Progress("c", 0, 7))
    assigned = of_kind(rig.tell(ReplicaDown(0, 1, "killed")), Assign)
    assert assigned == [Assign("a", 2, 1, 3, (), 1, 1), Assign("c", 2, 1, 4, (7,), 1, 1)]


def test_a_request_is_tried_three_times() -> None:
    rig = Rig(config_of("most-idle", poison_deaths=99))
    for epoch in (1, 2, 3):
        rig.tell(ReplicaUp(0, epoch, FACTS))
        if epoch == 1:
            rig.ask("a")
        assert refusal(rig, "a") is None
        rig.accept("a")
        rig.tell(ReplicaDown(0, epoch))
    assert refusal(rig, "a") == 503


@pytest.mark.parametrize("is_crash", [True, False])
def test_only_deaths_count(is_crash: bool) -> None:
    rig = Rig(config_of("most-idle", max_attempts=1, poison_deaths=99))
    rig.up(FACTS, FACTS)
    rig.ask("a")
    rig.accept("a")
    rig.tell(ReplicaDown(0, 1, is_crash=is_crash))
    assert (refusal(rig, "a") == 503) == is_crash


def marked_twice(rig: Rig, *names: str) -> None:
    """Replicas 0 and 1 die, and these are to blame."""
    for replica in (0, 1):
        rig.accept(*names)
        rig.tell(ReplicaDown(replica, 1, blamed=names))


def test_a_request_that_two_replicas_died_with_runs_alone() -> None:
    rig = Rig(config_of("first-fit", max_attempts=9))
    rig.up(FACTS, FACTS, FACTS)
    for name in "ab":
        assert rig.ask(name) == 0
    rig.accept("a", "b")
    rig.tell(ReplicaDown(0, 1, blamed=("a",)))
    rig.accept("a", "b")
    commands = rig.tell(ReplicaDown(1, 1, blamed=("a",)))
    assert target_of(commands, "a") == 2, "which was empty"
    assert target_of(commands, "b") is None
    assert rig.ask("c") is None, "others wait"
    rig.tell(ReplicaUp(1, 2, FACTS))
    assert target_of(rig.commands, "b") == target_of(rig.commands, "c") == 1
    rig.tell(Ended("a", 10))
    assert rig.ask("d") == 1
    rig.tell(Drain(1))
    assert rig.ask("e") == 2, "which is open again"


def test_a_request_that_dies_alone_is_refused() -> None:
    rig = Rig(config_of("first-fit", max_attempts=9))
    rig.up(FACTS, FACTS, FACTS)
    rig.ask("a")
    marked_twice(rig, "a")
    assert refusal(rig, "a") is None
    rig.accept("a")
    (refused,) = of_kind(rig.tell(ReplicaDown(2, 1, blamed=("a",))), Refuse)
    assert refused.error.status == 503
    assert "request a" in refused.error.message


def test_a_request_that_has_computed_some_tokens_alone_gets_company() -> None:
    rig = Rig(config_of("first-fit", max_attempts=9))
    rig.up(FACTS, FACTS, FACTS)
    rig.ask("a")
    rig.tell(Progress("a", 0, 50))  # of attempts before, which say nothing
    marked_twice(rig, "a")
    assert rig.ask("b") is None
    assert of_kind(rig.tell(Progress("a", 0, 50 + CLEARED_TOKENS - 1)), Assign) == []
    assert target_of(rig.tell(Progress("a", 0, 50 + CLEARED_TOKENS)), "b") == 2
    rig.accept("a", "b")
    (refused,) = of_kind(rig.tell(ReplicaDown(2, 1, blamed=("a",))), Refuse)
    assert refused.request == "a", "what it was marked for stays"


def test_deaths_that_others_are_to_blame_for_count_a_third() -> None:
    rig = Rig(config_of("first-fit", max_attempts=2))
    rig.up(FACTS)
    rig.ask("a")
    for epoch in range(1, 2 * INNOCENT_DEATHS + 1):
        assert refusal(rig, "a") is None
        rig.accept("a")
        rig.tell(ReplicaDown(0, epoch, blamed=()))
        rig.tell(ReplicaUp(0, epoch + 1, FACTS))
    assert refusal(rig, "a") == 503


def test_a_replica_is_emptied_for_a_request_that_runs_alone() -> None:
    rig = Rig(config_of("first-fit", max_attempts=9))
    rig.up(FACTS, FACTS, FACTS)
    rig.ask("a")
    marked_twice(rig, "a")
    for name in "bc":
        rig.tell(Asked(name, 0, 100, 100))  # they wait: "a" is alone on 2
    rig.tell(Cancelled("a"))
    rig.tell(ReplicaUp(0, 2, FACTS))
    rig.tell(ReplicaUp(1, 2, FACTS))
    rig.tell(Asked("d", 0, 100, 100, deaths=2))
    assert target_of(rig.commands, "d") in (0, 1)
    rig.tell(Cancelled("d"))
    for replica in (0, 1):
        rig.tell(ReplicaDown(replica, 2, is_crash=False))
    assert of_kind(rig.tell(Asked("e", 0, 100, 100, deaths=2)), Assign) == [], "2 has others"
    assert rig.ask("f") is None, "and gets no more"
    rig.tell(Ended("b", 10))
    commands = rig.tell(Ended("c", 10))
    assert target_of(commands, "e") == 2
    assert target_of(rig.tell(Ended("e", 10)), "f") == 2


# ---------------------------------------------------------------- another router


def test_a_new_router_keeps_requests_where_they_are() -> None:
    rig = Rig(config_of("most-idle"))
    rig.up(FACTS, FACTS)
    held = Asked("a", 0, 100, 100, attempts=4, generated=(7,), failures=1)
    assert of_kind(rig.tell(Held(held, 1, 1)), Assign) == []
    assert rig.ask("b") == 0
    (again,) = of_kind(rig.tell(ReplicaDown(1, 1)), Assign)
    assert (again.request, again.attempt, again.resume, again.failures) == ("a", 5, (7,), 2)


def test_what_a_replica_holds_that_is_gone_goes_elsewhere() -> None:
    rig = Rig(config_of("most-idle"))
    rig.up(FACTS)
    (assigned,) = of_kind(rig.tell(Held(Asked("a", 0, 100, 100, attempts=4), 0, 9)), Assign)
    assert (assigned.attempt, assigned.failures) == (5, 0)


def test_of_what_is_held_a_router_knows_each_once_and_places_what_the_replica_cannot_hold() -> None:
    rig = Rig(config_of("most-idle"))
    rig.up(SMALL, FACTS)
    held = Held(Asked("a", 0, 100, 20, attempts=2), 1, 1)
    for _ in range(2):
        assert of_kind(rig.tell(held), Assign) == []
    large, endless = Asked("large", 0, 500, 100, attempts=1), Asked("endless", 0, 10**6, 100, attempts=1)
    (assigned,) = of_kind(rig.tell(Held(large, 0, 1)), Assign)
    assert (assigned.request, assigned.replica, assigned.attempt) == ("large", 1, 2)
    rig.tell(Held(endless, 0, 1))
    assert refusal(rig, "endless") == 400
    assert list(rig.router.requests) == ["a", "large"]
    assert sorted(rig.router.fleet.up) == [0, 1]


def test_a_request_moves_where_somebody_wants_it() -> None:
    rig = Rig(config_of("most-idle"))
    rig.up(FACTS, FACTS)
    assert rig.ask("a") == 0
    assert rig.tell(MoveAsked("a", 1)) == [], "its replica is not known to have it"
    assert not rig.router.requests["a"].can_leave
    assert "b" not in rig.router.requests
    rig.accept("a")
    assert rig.router.requests["a"].can_leave
    assert rig.tell(MoveAsked("a", 0)) == rig.tell(MoveAsked("a", 7)) == rig.tell(MoveAsked("b", 1)) == []
    assert rig.tell(MoveAsked("a", 1)) == [Withdraw("a", 1, 0)]
    assert not rig.router.requests["a"].can_leave, "it was told to already"
    assert target_of(rig.tell(Withdrawn("a", 1, (3,))), "a") == 1


def test_a_front_end_may_give_an_attempt_up() -> None:
    rig = Rig(config_of("round-robin"))
    rig.up(FACTS, FACTS)
    asked = Asked("a", 0, 100, 100)
    assert target_of(rig.tell(asked), "a") == 0
    assert rig.tell(asked) == [], "a repetition, of before the attempt"
    again = dataclasses.replace(asked, attempts=1, generated=(3,))
    assert rig.tell(again) == [Assign("a", 2, 1, 1, (3,), 1)]
    assert rig.tell(again) == [], "which is known by now"
    third = dataclasses.replace(asked, attempts=2)
    assert target_of(rig.tell(third), "a") == 0
    rig.tell(dataclasses.replace(asked, attempts=3))
    assert refusal(rig, "a") == 503


def test_attempts_that_another_router_made_count() -> None:
    rig = Rig(config_of("most-idle"))
    rig.up(FACTS)
    commands = rig.tell(Asked("a", 0, 10, 10, attempts=5, generated=(4,), failures=2))
    assert of_kind(commands, Assign) == [Assign("a", 6, 0, 1, (4,), 2)]
    rig.accept("a")
    rig.tell(ReplicaDown(0, 1))
    assert refusal(rig, "a") == 503


# ---------------------------------------------------------------- accounting


def test_what_a_report_has_not_seen_counts_on_top_of_it() -> None:
    rig = Rig(config_of("first-fit"))
    rig.up(dataclasses.replace(FACTS, num_pages=20), dataclasses.replace(FACTS, num_pages=20))
    # 100 tokens take 7 pages, and one to grow.
    assert [rig.ask(name, max_tokens=20) for name in "abcde"] == [0, 0, 1, 1, None]
    seen_a = ReplicaReport(0, 1, 1, Status(1, running=1, waiting=0, free_pages=13))
    assert rig.tell(seen_a) == [], "13 free, 8 of them for b"
    assert rig.tell(ReplicaReport(0, 1, 2, Status(2, running=2, waiting=0, free_pages=6))) == []
    commands = rig.tell(ReplicaReport(0, 1, 2, Status(3, 1, 0, free_pages=6, reclaimable_pages=2)))
    assert target_of(commands, "e") == 0


def test_a_burst_within_one_report_s_delay_does_not_all_go_to_the_idle_replica() -> None:
    rig = Rig(config_of("most-idle"))
    rig.up(*[FACTS] * 10)
    for replica in range(10):
        rig.report(replica, running=0)
    targets = [rig.ask(f"r{number}") for number in range(100)]
    assert [targets.count(replica) for replica in range(10)] == [10] * 10


def test_reports_that_come_late_twice_or_in_another_order_change_nothing() -> None:
    rig = Rig(config_of("first-fit"))
    rig.up(FACTS, FACTS)
    for seq, free_pages in ((1, 0), (2, 0), (1, 1000), (2, 1000)):
        rig.tell(ReplicaReport(0, 1, 0, Status(seq, 5, 5, free_pages)))
    assert rig.ask("a") == 1


def test_a_report_that_was_lost_is_asked_for_once() -> None:
    rig = Rig(config_of("most-idle"))
    rig.up(FACTS)
    tiers = ((1, 2), (2, 1))

    def tell(seq: int, is_full: bool, residency: tuple[tuple[int, int], ...] = tiers) -> object:
        return rig.tell(ReplicaReport(0, 1, 0, Status(seq, 0, 0, 1000, is_full=is_full, residency=residency)))

    assert tell(1, True) == []
    assert tell(3, False) == [AskReport(0)]
    assert tell(4, False) == []
    assert tell(6, True, ()) == [], "a full one repairs it"
    assert tell(7, False) == []


def test_a_report_of_what_is_no_adapter_or_no_tier_changes_nothing() -> None:
    rig = Rig(config_of("dlora-rr"))
    rig.up(FACTS, FACTS)
    rig.list_adapters(8)
    rig.report(1, residency=((0, 2), (1, 3), (1, -1)))
    assert [rig.ask(name, adapter=1) for name in "ab"] == [0, 0], "none had it before the first request"


def test_a_step_takes_the_longest_of_its_planes() -> None:
    planes = (StepPlane(0.02, 1e-4), StepPlane(0.01, 1e-3, 1e-6, 1e-3, 1e-4))
    facts = dataclasses.replace(FACTS, planes=planes)
    replica = ReplicaState(0, 1, facts, shape_of(facts), ReplicaKind(facts), 0.0)
    assert replica.present_step()[1] is planes[0]
    assert replica.step_s == pytest.approx(0.0201)
    for number in range(9):
        replica.take(LiveRequest(Asked(f"r{number}", number % 2, 100, 10), 8, 4, 0.0, number), 0)
    by_hand = 0.01 + 9 * 1e-3 + 900 * 1e-6 + 1e-3 + 4 * 1e-4
    assert replica.present_step()[1] is planes[1]
    assert replica.step_s == pytest.approx(by_hand)


# ---------------------------------------------------------------- moves and drains


def test_a_request_moves_when_its_replica_has_let_it_go() -> None:
    rig = Rig(config_of("round-robin"))
    rig.up(FACTS, FACTS)
    rig.ask("a")
    rig.accept("a")
    assert rig.tell(Drain(0, migrate=True)) == [Withdraw("a", 1, 0)]
    assert rig.tell(Withdrawn("a", 0, (5,))) == [], "of another attempt"
    assert rig.tell(Withdrawn("a", 1, (5,))) == [Assign("a", 2, 1, 1, (5,))]
    assert rig.tell(Withdrawn("a", 1, (5,))) == []


def test_a_request_moves_at_once_where_the_late_token_is_dropped() -> None:
    """Punica's way, in a served cluster too."""
    rig = Rig(ClusterOptions(replicas=2, router="punica").router_config())
    rig.up(FACTS, FACTS)
    assert rig.ask("a") == 1
    rig.accept("a")
    moved = [command for command in rig.tell(Drain(1, migrate=True)) if not isinstance(command, Routed)]
    assert moved == [Withdraw("a", 1, 1), Assign("a", 2, 0, 1)]
    assert rig.tell(Withdrawn("a", 1, (5,))) == []


def test_a_replica_that_drains_gets_nothing_and_is_emptied_in_time() -> None:
    rig = Rig(config_of("most-idle", drain_timeout_s=2.0, lease_s=100.0, suspect_s=100.0))
    rig.up(FACTS, FACTS)
    rig.ask("a")
    rig.accept("a")
    assert rig.tell(Drain(0)) == []
    assert rig.ask("b") == 1
    assert rig.ask("c") == 1
    assert of_kind(rig.tell(Timer(), at=1.9), Withdraw) == []
    assert of_kind(rig.tell(Timer(), at=2.0), Withdraw) == [Withdraw("a", 1, 0)]
    assert of_kind(rig.tell(Timer(), at=2.5), Withdraw) == [], "told once"


def test_what_a_replica_has_not_got_yet_is_withdrawn_when_it_has() -> None:
    rig = Rig(config_of("most-idle"))
    rig.up(FACTS, FACTS)
    rig.ask("a")
    assert rig.tell(Drain(0, migrate=True)) == []
    rig.report(0)  # which has seen it
    assert of_kind(rig.tell(Timer(), at=0.5), Withdraw) == [Withdraw("a", 1, 0)]


def test_a_request_that_is_to_move_is_not_lost_with_its_replica() -> None:
    rig = Rig(config_of("most-idle"))
    rig.up(FACTS, FACTS)
    rig.ask("a")
    rig.accept("a")
    rig.tell(Drain(0, migrate=True))
    assert rig.tell(ReplicaDown(0, 1)) == [Assign("a", 2, 1, 1, (), 1, 1)]


# ---------------------------------------------------------------- who is alive


def test_a_silent_replica_is_suspect_and_then_down_and_fenced() -> None:
    rig = Rig(config_of("first-fit"))
    rig.up(FACTS, FACTS)
    assert rig.ask("a") == 0
    rig.tell(ReplicaReport(1, 1, 0, Status(1, 0, 0, 1000)), at=3.0)
    rig.tell(Timer(), at=3.0)
    assert rig.ask("b") == 0, "3 s old is not older than 3 s"
    rig.tell(Timer(), at=3.5)
    assert rig.ask("c") == 1, "a suspect gets no new work"
    rig.tell(ReplicaReport(0, 1, 2, Status(1, 0, 0, 1000)), at=4.0)
    assert rig.ask("d") == 0, "it reports again"
    rig.tell(ReplicaReport(1, 1, 0, Status(2, 0, 0, 1000)), at=9.0)
    commands = rig.tell(Timer(), at=9.5)
    assert commands[0] == Fence(0, 1)
    assert {each.request for each in of_kind(commands, Assign)} == {"a", "b", "d"}
    assert rig.tell(ReplicaReport(0, 1, 3, Status(2, 0, 0, 1000))) == [Fence(0, 1)], (
        "it is not dead after all"
    )
    assert rig.tell(ReplicaUp(0, 1, FACTS)) == [Fence(0, 1)]
    assert rig.tell(ReplicaUp(0, 2, FACTS)) == []


def test_a_new_epoch_ends_the_one_before() -> None:
    rig = Rig(config_of("first-fit"))
    rig.up(FACTS, FACTS)
    rig.ask("a")
    assert rig.tell(ReplicaUp(0, 2, FACTS)) == [Assign("a", 2, 0, 1)]
    assert rig.tell(ReplicaUp(0, 2, FACTS)) == [], "a repetition"
    assert rig.tell(ReplicaDown(0, 1)) == [], "of the epoch before"


def test_the_timer_rings_while_there_is_anything_to_watch() -> None:
    router = Router(config_of("most-idle", tick_s=0.25))
    assert router.handle(Listed(1, 8, 4), 1.0) == []
    assert router.handle(ReplicaUp(0, 1, FACTS), 1.0) == [SetTimer(1.25)]
    assert router.handle(Timer(), 1.25) == [SetTimer(1.5)]
    assert router.handle(ReplicaDown(0, 1), 1.3) == []
    assert router.handle(Timer(), 1.5) == []


# ---------------------------------------------------------------- hints


def test_scale_hints_take_their_time() -> None:
    facts = dataclasses.replace(FACTS, max_seqs=2)
    rig = Rig(config_of("first-fit", {"max_batch": 2}, lease_s=1e3, suspect_s=1e3))
    rig.up(facts, facts)
    for name in "abcd":
        rig.ask(name)
    rig.accept("a", "b", "c", "d")

    def hints(at: float) -> list[ScaleHint]:
        return of_kind(rig.tell(Timer(), at=at), ScaleHint)

    assert hints(10.0) == []
    assert hints(14.9) == []
    assert [hint.delta for hint in hints(15.0)] == [1]
    assert hints(21.0) == [], "not again at once"
    assert [hint.delta for hint in hints(45.0)] == [1]
    for name in "abcd":
        rig.tell(Ended(name, 5))
    assert hints(46.0) == []
    assert hints(75.9) == []
    (hint,) = hints(76.0)
    assert (hint.delta, hint.replica) == (-1, 1)


def test_decisions_are_told_where_they_are_asked_for() -> None:
    rig = Rig(config_of("most-idle", trace=True))
    rig.ask("a")
    commands = rig.tell(ReplicaUp(0, 1, FACTS), at=2.0)
    assert of_kind(commands, Routed) == [Routed("a", 1, 0, "new", 2.0)]
    rig.tell(ReplicaUp(1, 1, FACTS))
    rig.accept("a")
    commands = rig.tell(ReplicaDown(0, 1), at=3.0)
    assert of_kind(commands, Routed) == [Routed("a", 2, 1, "lost", 3.0, 0)]


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("policy", "settings", "says"),
    [
        ("punica", {"max_bach": 3}, "punica has no setting 'max_bach': it has max_batch"),
        ("punica", {"max_batch": "x"}, "punica.max_batch must be a whole number, got 'x'"),
        ("punica", {"max_batch": 0}, "router punica: max_batch must be at least 1, got 0"),
        ("round-robin", {"a": 1}, "round-robin has no setting 'a': it has none"),
        ("cache-aware", {"least_share": "nan"}, "least_share must be between 0 and 1"),
        ("no_such_module:Class", {}, "cannot be imported"),
        ("manylora.types:Request", {}, "is no subclass"),
        ("manylora.router.policies.policy:RoutingPolicy", {}, "has no method choose"),
    ],
)
def test_settings_that_cannot_work(policy: str, settings: dict[str, object], says: str) -> None:
    pairs = tuple((key, str(value)) for key, value in settings.items())
    with pytest.raises(ConfigError, match=says):
        Router(RouterConfig(policy, pairs))


@pytest.mark.parametrize("left_out", ["slo_s", "decode_slope_s", "prefill_base_s"])
def test_caraserve_invents_no_coefficients(left_out: str) -> None:
    pairs = tuple(pair for pair in config_of("caraserve").settings if pair[0] != left_out)
    with pytest.raises(ConfigError, match=f"router caraserve: {left_out} must be given"):
        Router(RouterConfig("caraserve", pairs))


def test_a_setting_names_its_router() -> None:
    assert split_setting("punica.max_batch=8") == ("punica", "max_batch", "8")
    assert split_setting("a.b:C.key=x=y.z") == ("a.b:C", "key", "x=y.z"), "whose name may have dots"


@pytest.mark.parametrize("text", ["", "punica", "punica.max_batch", "max_batch=8", ".a=1", "punica.=1"])
def test_a_setting_without_its_router_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected ROUTER\.KEY=VALUE"):
        split_setting(text)


def test_bad_router_settings() -> None:
    with pytest.raises(ConfigError, match="--router must be one of"):
        RouterConfig("nearest")
    with pytest.raises(ConfigError, match="suspect_s must not exceed lease_s"):
        RouterConfig("random", suspect_s=6.0)
