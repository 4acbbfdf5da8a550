"""Which replica each policy chooses, by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from manylora_lab.baselines import ALL_ROUTERS

from manylora.config.routing import CaraServeParameters, read_parameters
from manylora.protocol.events import Timer
from manylora.protocol.routing import (
    Asked,
    Assign,
    Cancelled,
    Ended,
    Place,
    Progress,
    RankCosts,
    ReplicaDown,
    ReplicaReport,
    ReplicaUp,
    Solve,
    Solved,
    StepPlane,
    Unplace,
    Withdraw,
)
from manylora.router.fleet import Fleet
from manylora.router.policies.caraserve import CaraServe
from manylora.router.policies.cost import steps_until_even
from manylora.router.policies.manylora import CheapestReplica
from manylora.router.requests import LiveRequest
from tests.router.rig import FACTS, Rig, config_of, of_kind, target_of

LIVES: dict[str, Any] = {"lease_s": 1e6, "suspect_s": 1e6}
"""Replicas that need not report."""


def rig_of(policy: str, num_replicas: int = 3, settings: dict[str, Any] | None = None) -> Rig:
    rig = Rig(config_of(policy, settings, **LIVES))
    rig.up(*[FACTS] * num_replicas)
    return rig


def fill(rig: Rig, replica: int, count: int, **values: int) -> list[str]:
    """So many requests, which must come to this replica, and be there."""
    names = [f"{replica}-{number}" for number in range(count)]
    for name in names:
        assert rig.ask(name, **values) == replica
    rig.accept(*names)
    return names


# ---------------------------------------------------------------- the simple ones


def test_round_robin_goes_round_and_passes_what_cannot_hold_it() -> None:
    rig = rig_of("round-robin", 0)
    for replica, pages in ((2, 1000), (5, 20), (7, 1000)):
        rig.tell(ReplicaUp(replica, 1, dataclasses.replace(FACTS, num_pages=pages)))
    assert [rig.ask(name) for name in "abcd"] == [2, 5, 7, 2]
    assert [rig.ask(name, prompt_tokens=400) for name in "ef"] == [7, 2]


def test_random_is_a_hash_of_the_request() -> None:
    targets = [rig_of("random", 10).ask(f"r{number}") for number in range(200)]
    again = rig_of("random", 10)
    assert [again.ask(f"r{number}") for number in range(200)] == targets, "whatever is there"
    counts = [targets.count(replica) for replica in range(10)]
    assert min(counts) >= 8
    assert max(counts) <= 35


def test_most_idle_counts_sequences() -> None:
    rig = rig_of("most-idle")
    assert rig.ask("a", samples=3) == 0
    assert [rig.ask(name) for name in "bcdefg"] == [1, 2, 1, 2, 1, 2]
    assert rig.ask("h") == 0
    rig.tell(Ended("b", 1))
    assert rig.ask("i") == 1


def test_first_fit_takes_the_lowest_with_room() -> None:
    rig = rig_of("first-fit", settings={"max_batch": 2})
    assert [rig.ask(name) for name in "abcdefg"] == [0, 0, 1, 1, 2, 2, None]
    assert target_of(rig.tell(Ended("c", 1)), "g") == 1


# ---------------------------------------------------------------- Punica


def punica(first_fit: bool = False) -> Rig:
    """Replica 0 has 2 requests, 1 has 4 and 2 has 4: they come one after the other while the others are away."""
    rig = Rig(config_of("first-fit" if first_fit else "punica", {"max_batch": 5}, **LIVES))
    for replica, count in ((0, 2), (1, 4), (2, 4)):
        rig.tell(ReplicaUp(replica, 1, FACTS))
        for number in range(count):
            for other in range(replica):
                rig.report(other, free_pages=0)
            assert rig.ask(f"{replica}-{number}") == replica
    for replica in range(3):
        rig.report(replica, free_pages=900)
    return rig


def test_punica_routes_to_the_largest_working_set_and_of_equal_ones_to_the_highest_id() -> None:
    rig = punica()
    assert [rig.ask(name) for name in "abcdef"] == [2, 1, 0, 0, 0, None]


def test_punica_and_first_fit_differ() -> None:
    assert punica(first_fit=True).ask("a") == 0
    assert punica().ask("a") == 2


def test_punica_asks_for_memory_too() -> None:
    rig = punica()
    rig.report(2, free_pages=7)  # 100 tokens take 7 pages and one to grow
    assert rig.ask("a") == 1
    rig.report(2, free_pages=5, reclaimable_pages=3)
    assert rig.ask("b") == 2


def test_punica_s_queue_is_served_in_the_order_of_arrival() -> None:
    rig = rig_of("punica", 1, {"max_batch": 1})
    assert [rig.ask(name) for name in "abc"] == [0, None, None]
    assert target_of(rig.tell(Ended("a", 1)), "b") == 0
    assert target_of(rig.tell(Ended("b", 1)), "c") == 0


def test_punica_moves_the_newest_of_a_replica_without_pages_at_once() -> None:
    rig = rig_of("punica", 2)
    rig.report(0, free_pages=0)
    fill(rig, 1, 3)
    rig.tell(Progress("1-2", 0, 9))
    rig.report(0, free_pages=500)
    commands = rig.report(1, free_pages=0, is_exhausted=True)
    assert commands == [Withdraw("1-2", 1, 1), Assign("1-2", 2, 0, 1, (9,))]
    assert of_kind(rig.tell(Timer(), at=0.5), Withdraw) == [], "once a report"
    commands = rig.report(1, free_pages=0, is_exhausted=True)
    assert [each.request for each in of_kind(commands, Withdraw)] == ["1-1"]
    assert of_kind(rig.report(1, free_pages=0, is_exhausted=True), Withdraw) == [], "the last one stays"


def test_the_newest_of_a_replica_is_the_one_that_came_last_however_often_it_moved() -> None:
    rig = rig_of("punica", 1)
    rig.tell(Asked("old", 0, 100, 100), at=1.0)
    rig.tell(Asked("older", 0, 100, 100, waited_s=1.0), at=1.0)
    rig.accept("old", "older")
    commands = rig.report(0, free_pages=0, is_exhausted=True)
    assert of_kind(commands, Withdraw) == [Withdraw("old", 1, 0)]


def test_punica_consolidates_where_all_of_the_smallest_finds_room() -> None:
    def moved(free_pages: int, max_batch: int = 8) -> list[str]:
        rig = Rig(config_of("punica-consolidate", {"max_batch": max_batch}, **LIVES))
        rig.tell(ReplicaUp(0, 1, FACTS))
        fill(rig, 0, 2)
        rig.report(0, free_pages=0)
        rig.tell(ReplicaUp(1, 1, FACTS))
        fill(rig, 1, 4)
        rig.report(0, free_pages=900)
        rig.report(1, free_pages=free_pages)
        commands = rig.tell(Timer(), at=10.0)
        assert of_kind(rig.tell(Timer(), at=25.0), Withdraw) == [], "both sides rest"
        assert all(each.replica == 1 for each in of_kind(commands, Assign))
        return [each.request for each in of_kind(commands, Withdraw)]

    assert moved(16) == ["0-1", "0-0"]
    assert moved(15) == [], "one of the two finds no room"
    assert moved(16, max_batch=5) == []


# ---------------------------------------------------------------- CaraServe


def figure_5(kernel: str) -> int | None:
    """CaraServe's Figure 5: 24 requests of rank 32 at one server, 16 of rank 64 at the other, a new one of rank
    64 and an objective of 36 ms. The coefficients are two-point fits of the latencies that it prints."""
    slope_s, base_s = {"bgmv": (3.906e-6, 31.8e-3), "mbgmv": (2.344e-6, 33.5e-3)}[kernel]
    settings = {
        "kernel": kernel, "decode_slope_s": slope_s, "decode_base_s": base_s, "prefill_slope_s": 0.0,
        "prefill_base_s": 0.0, "slo_s": 0.036,
    }  # fmt: skip
    rig = Rig(config_of("caraserve", settings, **LIVES))
    rig.list_adapters(32, 64)
    for replica, (adapter, count) in enumerate(((1, 24), (2, 16))):
        rig.tell(ReplicaUp(replica, 1, FACTS))
        fill(rig, replica, count, adapter=adapter)
        rig.report(0, free_pages=0)
    rig.report(0, free_pages=900)
    rig.report(1, free_pages=900)
    return rig.ask("new", adapter=2)


def test_caraserve_s_figure_5() -> None:
    """bgmv: 38.05 ms and 36.05 ms, so the second server; mbgmv: 35.45 ms and 36.05 ms, so the first."""
    assert figure_5("bgmv") == 1
    assert figure_5("mbgmv") == 0


def test_caraserve_s_cost_by_hand() -> None:
    """A server with two requests of rank 8, and one more of rank 16. A mean reply has 128 tokens before the
    first."""
    config = config_of("caraserve", {"slo_s": 0.0301})
    policy = CaraServe(read_parameters("caraserve", CaraServeParameters, config.settings))
    fleet = Fleet(config)
    replica = fleet.add(0, 1, FACTS)
    request = LiveRequest(Asked("new", 1, 100, 10), 16, 4, 0.0, 9)
    assert policy.cost_s(fleet, replica, request) == 0.0, "an empty server costs nothing"
    for number in range(2):
        fleet.take(replica, LiveRequest(Asked(f"r{number}", 1, 100, 10), 8, 4, 0.0, number))
    # bgmv: 3 rows of rank 16 against 2 of rank 8, 4e-6 s each; a prompt of 100 tokens at 1e-4 s, and others wait.
    added_s = 4e-6 * (3 * 16 - 2 * 8)
    assert policy.cost_s(fleet, replica, request) == pytest.approx(2 * (0.01 / 128 + added_s + 1000.0))
    fleet.lengths.saw(1, 50)
    replica.receive(ReplicaReport(0, 1, 2, dataclasses.replace(replica.report, seq=1)), 0.0)
    # Nothing waits any more, so a prefill has its base, 0.01 s, too.
    assert policy.cost_s(fleet, replica, request) == pytest.approx(2 * (0.02 / 50 + added_s + 1000.0))


def test_caraserve_counts_with_each_replica_s_own_coefficients() -> None:
    def chosen(first: RankCosts | None, second: RankCosts | None) -> int | None:
        rig = Rig(config_of("caraserve"))
        rig.list_adapters(8)
        rig.up(*(dataclasses.replace(FACTS, rank_costs=costs) for costs in (first, second)))
        assert [rig.ask(name, adapter=1) for name in "ab"] == [0, 1], "an empty one costs nothing"
        return rig.ask("c", adapter=1)

    settings = RankCosts(4e-6, 0.03, 1e-4, 0.01)
    assert chosen(None, None) == 0
    assert chosen(None, settings._replace(decode_slope_s=3e-6)) == 1
    assert chosen(None, settings._replace(prefill_slope_s=9e-5)) == 1
    assert chosen(settings._replace(decode_base_s=0.05), settings) == 1, "which misses no objective"
    assert chosen(settings, None) == 0


def test_caraserve_waits_for_memory() -> None:
    rig = rig_of("caraserve", 4)
    for replica in range(4):
        rig.report(replica, free_pages=3)
    assert rig.ask("a") is None
    assert target_of(rig.report(3, free_pages=30), "a") == 3


@pytest.mark.parametrize("policy", sorted(ALL_ROUTERS))
def test_a_request_that_just_fits_an_empty_replica_does_not_wait_for_ever(policy: str) -> None:
    """With the page to grow into, which it never needs, it would take one page more than there are."""
    rig = Rig(config_of(policy))
    rig.up(dataclasses.replace(FACTS, num_pages=20))
    rig.list_adapters(8, num_pages=4)
    assert rig.ask("a", adapter=1, prompt_tokens=256, max_tokens=1) == 0
    rig.tell(Ended("a", 1))
    assert rig.ask("b", prompt_tokens=310, max_tokens=4, samples=2) == 0


# ---------------------------------------------------------------- cache-aware


def test_cache_aware_follows_the_prompt_unless_loads_are_unequal() -> None:
    rig = rig_of("cache-aware", 3, {"most_difference": 2})
    chat = tuple(range(100, 104))  # 256 tokens
    assert rig.ask("a") == 0
    assert rig.ask("b", prompt_tokens=260, prefix=chat) == 1
    assert rig.ask("c", prompt_tokens=600, prefix=(*chat, 1, 2)) == 1, "256 of 600 tokens"
    assert rig.ask("d", prompt_tokens=300, prefix=(*chat[:1], 7, 8)) == 2, "64 of 300 tokens are not 0.3"
    assert rig.ask("e", prompt_tokens=260, prefix=chat) == 1
    assert rig.ask("f", prompt_tokens=260, prefix=chat) == 1, "3 against 1 is a difference of 2"
    assert rig.ask("g", prompt_tokens=260, prefix=chat) == 0
    rig.report(1, evicted=chat)
    rig.tell(Ended("b", 1))
    rig.tell(Ended("c", 1))
    assert rig.ask("h", prompt_tokens=260, prefix=chat) == 0, "which got it last"


# ---------------------------------------------------------------- dLoRA


def test_dlora_goes_where_loading_and_queueing_take_least() -> None:
    rig = rig_of("dlora-proactive")
    rig.list_adapters(8, num_pages=100)  # 0.11 s to read and load
    rig.report(1, residency=((1, 2),), waiting_tokens=1000)  # 0.1 s of prompts
    assert rig.ask("a", adapter=1) == 1, "0.1 s against 0.11 s"
    rig.report(1, residency=((1, 2),), waiting_tokens=1200)
    assert rig.ask("b", adapter=1) == 0


def test_dlora_as_the_authors_count() -> None:
    rig = rig_of("dlora-authors")
    rig.list_adapters(8, 8)
    rig.report(2, residency=((1, 2),))
    targets = [rig.ask(f"r{number}", adapter=1) for number in range(32)]
    assert targets == [2] * 32, "only it has the adapter, and nothing queues below a batch"
    rig.report(1, residency=((1, 2), (2, 2)))
    assert rig.ask("more", adapter=1) == 1, "a full batch takes 0.6 s"


def test_dlora_rr_goes_round_the_holders() -> None:
    rig = rig_of("dlora-rr", 4)
    rig.list_adapters(8)
    rig.report(1, residency=((1, 2),))
    rig.report(3, residency=((1, 1),))
    assert [rig.ask(name, adapter=1) for name in "abc"] == [1, 3, 1]
    assert [rig.ask(name) for name in "defg"] == [2, 3, 0, 1], "the base is everywhere"


def test_dlora_places_copies_ahead_and_takes_them_back() -> None:
    settings = {"reserve": 0.004, "half_life_s": 10.0}  # 4 pages on each
    rig = rig_of("dlora-proactive", 2, settings)
    rig.list_adapters(8, 8, 8)
    for number in range(6):
        rig.ask(f"r{number}", adapter=1 + number % 3 // 2)
        rig.tell(Ended(f"r{number}", 5))
    placed = of_kind(rig.tell(Timer(), at=1.0), Place)
    assert placed == [Place(1, 0), Place(2, 1)], "the one of larger load first"
    rig.ask("new", adapter=3)
    rig.tell(Ended("new", 5))
    assert of_kind(rig.tell(Timer(), at=60.0), Place) == [], "a minute has not passed"
    assert of_kind(rig.tell(Timer(), at=61.0), Place) == [], "the reserve is used up"
    commands = rig.tell(Timer(), at=200.0)
    dropped = {(each.adapter, each.replica) for each in of_kind(commands, Unplace)}
    assert dropped == {(1, 0), (2, 1)}, "nothing asks for them any more"


def overloaded(settings: dict[str, Any] | None = None) -> tuple[Rig, Solve]:
    """Replica 0 has eight requests and a long queue, replica 1 nothing."""
    rig = Rig(config_of("dlora", settings, move_cooldown_s=1e-3, **LIVES))
    rig.tell(ReplicaUp(0, 1, FACTS))
    fill(rig, 0, 8, prompt_tokens=1000, max_tokens=3000)
    rig.tell(ReplicaUp(1, 1, FACTS))
    rig.report(0, waiting_tokens=60_000)
    (problem,) = of_kind(rig.tell(Timer(), at=20.0), Solve)
    assert [replica.replica for replica in problem.replicas] == [0, 1]
    assert len(problem.requests) == 8
    assert of_kind(rig.tell(Timer(), at=20.5), Solve) == []
    return rig, problem


def test_dlora_s_plan_moves_requests() -> None:
    rig, problem = overloaded()
    shares = tuple((0.5, 0.5) for _ in problem.requests)
    commands = rig.tell(Solved(problem.number, shares, 0.1))
    moved = of_kind(commands, Withdraw)
    assert len(moved) == 4, "and not all to the same"
    assert all(each.replica == 0 for each in moved)
    assert rig.tell(Solved(problem.number, shares, 0.1)) == [], "once"
    assert of_kind(rig.tell(Timer(), at=25.0), Solve) == [], "at most one in ten seconds"


def test_dlora_plans_by_itself_where_no_answer_comes() -> None:
    rig, _ = overloaded()
    assert of_kind(rig.tell(Timer(), at=21.9), Withdraw) == []
    assert len(of_kind(rig.tell(Timer(), at=22.0), Withdraw)) == 4
    rig, problem = overloaded()
    assert len(of_kind(rig.tell(Solved(problem.number)), Withdraw)) == 4, "nor where there is no solution"


def test_dlora_s_plan_is_held_against_the_world() -> None:
    rig, problem = overloaded()
    name = problem.requests[0].request
    rig.tell(Asked(name, 0, 1000, 3000, attempts=1))  # it has begun anew meanwhile
    shares = tuple((0.0, 1.0) for _ in problem.requests)
    moved = {each.request for each in of_kind(rig.tell(Solved(problem.number, shares)), Withdraw)}
    assert moved
    assert name not in moved


# ---------------------------------------------------------------- manylora


def test_manylora_weighs_prefix_adapter_and_queue() -> None:
    rig = rig_of("manylora")
    rig.list_adapters(8, num_pages=10)  # 11 ms to read and load
    chat = tuple(range(100, 110))
    first = rig.ask("a", prompt_tokens=700, prefix=chat)
    assert first is not None
    rig.report(first)
    assert rig.ask("b", prompt_tokens=700, prefix=chat) == first, "60 ms of prefill are saved there"
    rig.report(first, waiting_tokens=2000)  # 200 ms of others' prompts
    assert rig.ask("c", prompt_tokens=700, prefix=chat) != first
    rig = rig_of("manylora")
    rig.list_adapters(8, num_pages=10)
    rig.report(2, residency=((1, 2),))
    assert rig.ask("d", adapter=1) == 2
    rig.report(2, waiting_tokens=1000)
    assert rig.ask("e", adapter=1) != 2


def test_manylora_weighs_harm_and_pages() -> None:
    slow = dataclasses.replace(FACTS, planes=(StepPlane(0.02, 1e-3),))
    rig = Rig(config_of("manylora", **LIVES))
    rig.up(slow, FACTS)
    assert rig.ask("a") == 1, "the faster one"
    rig = rig_of("manylora", 2)
    rig.report(0, free_pages=0, reclaimable_pages=900, page_price_s=0.01)
    assert rig.ask("a") == 1, "it pushes nothing out there"
    rig.report(1, free_pages=1000, waiting_tokens=2000)
    assert rig.ask("b") == 0, "80 ms of others' pages against 200 ms of waiting"


def two_rows_and_none(plane: StepPlane, settings: dict[str, Any] | None = None) -> Rig:
    """Replica 0 has two requests that run, replica 1 none and waiting prompts of 20 ms."""
    rig = Rig(config_of("manylora", settings, **LIVES))
    facts = dataclasses.replace(FACTS, planes=(plane,))
    rig.list_adapters(8, 64, num_pages=0)
    rig.tell(ReplicaUp(0, 1, facts))
    fill(rig, 0, 2, prompt_tokens=10, max_tokens=100, adapter=1)
    rig.report(0)
    rig.tell(ReplicaUp(1, 1, facts))
    rig.report(1, waiting_tokens=200)
    return rig


def test_manylora_counts_what_those_that_run_wait_for_a_prompt() -> None:
    assert two_rows_and_none(StepPlane(0.01)).ask("a", prompt_tokens=90) == 0, (
        "each of two waits 9 ms, less than 20"
    )
    assert two_rows_and_none(StepPlane(0.01)).ask("a", prompt_tokens=110) == 1, "11 ms each"


def test_a_replica_s_load_counts_as_long_as_it_lasts() -> None:
    assert steps_until_even(100, 100, 0) == 50, "nobody evens it out: half of its life with those there now"
    assert steps_until_even(100, 100, 2) == 50, "after half a reply each replica has had one more"
    assert steps_until_even(100, 100, 8) == pytest.approx(math.sqrt(50 * 100 / 8)), "between 12.5 and 50"
    assert steps_until_even(1, 100, 8) == 0.5


def test_manylora_keeps_a_conversation_where_more_run() -> None:
    """Two more rows there cost half a second over 1,000 tokens, and its prompt elsewhere a third of one; but they
    will not be two more for so long."""
    rig = Rig(config_of("manylora", **LIVES))
    for replica, count in ((0, 6), (1, 4)):
        rig.tell(ReplicaUp(replica, 1, FACTS))
        fill(rig, replica, count, prompt_tokens=10, max_tokens=1000)
    rig.ask("long", prompt_tokens=10, max_tokens=1000)
    rig.tell(Ended("long", 1000))
    for replica in range(2):
        rig.report(replica)
    assert rig.ask("new", prompt_tokens=700, max_tokens=1000) == 1
    rig.tell(Cancelled("new"))
    chat = tuple(range(100, 110))
    rig.router.fleet.prefixes.add(chat, rig.router.fleet.up[0])
    assert rig.ask("turn", prompt_tokens=700, max_tokens=1000, prefix=chat) == 0


def test_replicas_of_one_kind_are_equally_fast() -> None:
    """What one of them has learnt from its last prompts is not what makes it another's better."""
    rig = rig_of("manylora", 2)
    rig.report(0, token_s=3e-4)
    rig.report(1, token_s=1e-4)
    assert [rig.router.fleet.up[replica].kind.token_s for replica in range(2)] == [pytest.approx(2e-4)] * 2
    assert rig.ask("a", prompt_tokens=1000) == 0, "of equal ones the lowest id"
    rig.tell(ReplicaDown(0, 1))
    assert rig.router.fleet.up[1].kind.token_s == pytest.approx(1e-4), "it counts as long as it is up"
    rig.tell(ReplicaUp(2, 1, FACTS))
    assert rig.router.fleet.up[2].kind.token_s == pytest.approx(1e-4), "a new one is known already"
    rig.tell(ReplicaUp(3, 1, dataclasses.replace(FACTS, numerics="float16 on another")))
    assert rig.router.fleet.up[3].kind.token_s == FACTS.token_s, "of another device nothing is known"


def rows_of_adapters(*adapters: tuple[int, ...]) -> Rig:
    """Replicas 0, 1, ... have a request of each of these adapters; steps take 1 ms more for each adapter."""
    rig = Rig(config_of("manylora", **LIVES))
    rig.list_adapters(8, 8, 8, num_pages=0)
    for replica, names in enumerate(adapters):
        rig.tell(ReplicaUp(replica, 1, dataclasses.replace(FACTS, planes=(StepPlane(0.01, adapter_s=1e-3),))))
        for number, adapter in enumerate(names):
            name = f"{replica}-{number}"
            assert rig.ask(name, adapter=adapter, prompt_tokens=1) == replica
            rig.accept(name)
        rig.report(replica, waiting_tokens=10**6)  # the next go elsewhere
    return rig


def test_an_adapter_that_runs_there_runs_for_half_of_a_request_s_life() -> None:
    """That saves 50 steps a millisecond, for the request and for the other."""
    for waiting_tokens, expected in ((900, 0), (1100, 1)):
        rig = rows_of_adapters((1,), (2,))
        rig.report(0, waiting_tokens=waiting_tokens)
        rig.report(1)
        assert rig.ask("a", adapter=1, prompt_tokens=1) == expected


def test_more_adapters_are_evened_out_like_more_rows() -> None:
    """One more is 50 ms over 50 steps, and after these replica 0 has no more than replica 1."""
    for waiting_tokens, expected in ((400, 1), (600, 0)):
        rig = rows_of_adapters((1, 2), (1, 1))
        rig.report(0)
        rig.report(1, waiting_tokens=waiting_tokens)
        assert rig.ask("a", adapter=3, prompt_tokens=1) == expected


def test_manylora_knows_kernels_that_pad() -> None:
    """A request of rank 64 makes two rows of rank 8 as slow as its own; one that is added up does not."""
    padded, added = StepPlane(0.01, padded_rank_s=1e-5), StepPlane(0.01, rank_s=1e-6)
    assert two_rows_and_none(padded).ask("a", adapter=2, prompt_tokens=10, max_tokens=100) == 1
    assert two_rows_and_none(padded).ask("a", adapter=1, prompt_tokens=10, max_tokens=1) == 0
    assert two_rows_and_none(added).ask("a", adapter=2, prompt_tokens=10, max_tokens=10) == 0


def test_manylora_gives_a_hot_adapter_more_homes_and_a_cold_one_few() -> None:
    rig = rig_of("manylora", 16)
    rig.list_adapters(8, 8, num_pages=300)
    targets = []
    for number in range(300):
        targets.append(rig.ask(f"r{number}", adapter=1, prompt_tokens=1000))
    hot = len(set(targets))
    assert policy_of(rig).num_homes(rig.now, 1) >= 5
    assert policy_of(rig).num_homes(rig.now + 60.0, 1) < policy_of(rig).num_homes(rig.now, 1)
    assert policy_of(rig).num_homes(rig.now + 600.0, 1) == 1
    cold = {rig.ask(f"c{number}", adapter=2, prompt_tokens=10, max_tokens=1) for number in range(3)}
    assert hot >= 5
    assert len(cold) == 1


def policy_of(rig: Rig) -> CheapestReplica:
    policy = rig.router._policy
    assert isinstance(policy, CheapestReplica)
    return policy


def test_manylora_moves_what_waits_to_an_idle_replica() -> None:
    rig = Rig(config_of("manylora", **LIVES))
    rig.tell(ReplicaUp(0, 1, FACTS))
    names = fill(rig, 0, 10, prompt_tokens=1000)
    rig.report(0, waiting_tokens=10_000)
    rig.tell(ReplicaUp(1, 1, FACTS))
    commands = rig.tell(Timer(), at=1.0)
    moved = [each.request for each in of_kind(commands, Withdraw)]
    assert moved == names[:5:-1], "the newest, four at a time: each gains a second and costs a tenth"
    rig.report(1, waiting_tokens=9_000)
    assert of_kind(rig.tell(Timer(), at=2.0), Withdraw) == [], "a gain of 0.1 s is not three times the cost"


# ---------------------------------------------------------------- all of them


FILLERS = ("dlora-authors", "first-fit", "punica", "punica-consolidate")
"""Their authors have them fill one replica before the next."""


@pytest.mark.parametrize("policy", [policy for policy in ALL_ROUTERS if policy not in FILLERS])
@pytest.mark.parametrize("adapters", [0, 1, 20])
def test_a_burst_within_one_report_s_delay_spreads_over_idle_replicas(policy: str, adapters: int) -> None:
    rig = rig_of(policy, 10)
    rig.list_adapters(*[8] * adapters)
    for replica in range(10):
        rig.report(replica, residency=tuple((adapter + 1, 2) for adapter in range(adapters)))
    targets = [rig.ask(f"r{number}", number % adapters + 1 if adapters else 0) for number in range(100)]
    counts = [targets.count(replica) for replica in range(10)]
    most = 20 if policy == "random" else 16
    assert max(counts) <= most, counts
    assert min(counts) >= 2, counts


@pytest.mark.parametrize("policy", FILLERS)
def test_a_burst_fills_no_replica_beyond_its_batch(policy: str) -> None:
    rig = rig_of(policy, 4)
    targets = [rig.ask(f"r{number}") for number in range(100)]
    assert sorted(targets.count(replica) for replica in range(4)) == [4, 32, 32, 32]


@pytest.mark.parametrize("policy", ALL_ROUTERS)
def test_a_policy_with_no_open_replica_has_requests_wait(policy: str) -> None:
    rig = Rig(config_of(policy))
    rig.up(FACTS)
    rig.tell(Timer(), at=4.0)  # it has not reported for 4 s
    assert rig.ask("a") is None
    assert target_of(rig.report(0), "a") == 0
