"""A simulated cluster: replicas as they are alone, one router, one heap."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from manylora_lab.baselines import ALL_CACHE_POLICIES, ALL_ROUTERS
from manylora_lab.pricing.costs import DeviceCosts
from manylora_lab.sim.cluster import EAGER_ADAPTERS, MOST_REPORT_DELAY_S, Member, VirtualCluster
from manylora_lab.sim.cluster_summary import summarize_cluster
from manylora_lab.sim.conformance import replay_difference
from manylora_lab.sim.replay import Outcome
from manylora_lab.sim.summary import summarize, ttft_parts_ms
from manylora_lab.workloads.stream import Stream

from manylora.config.declaring import ConfigError
from manylora.config.policy import PolicyConfig
from manylora.engine.journal import fingerprint
from manylora.policy.replica import Replica
from manylora.protocol.events import PinAdapter
from manylora.protocol.routing import Place, Solve, Solved
from manylora.router.router import Router
from manylora.solving import solve
from tests.policy.invariants import check
from tests.router.rig import config_of as router_of
from tests.router.world import IMPATIENT, RESTLESS
from tests.sim.test_replay import COSTS, chat, config_of, replay_of, request, stream_of

ROOT = Path(__file__).parents[2]
LOAD_AWARE = [
    name
    for name in ALL_ROUTERS
    if name not in ("round-robin", "random", "first-fit", "punica", "punica-consolidate")
    and name not in ("dlora-rr", "dlora-authors")
]
SLOW = dataclasses.replace(COSTS, step_base_s=0.02)
DIGEST = """
from manylora_lab.baselines import ALL_ROUTERS
from tests.sim.test_cluster import cluster_of, digest

for name in ALL_ROUTERS:
    print(name, digest(cluster_of(name)))
"""


def member_of(config: PolicyConfig | None = None, costs: DeviceCosts = COSTS, adapters: int = 5) -> Member:
    return Member(config or config_of(), costs, [4] * adapters)


def cluster_of(
    router: str | None,
    count: int = 3,
    stream: Stream | None = None,
    members: Sequence[Member] = (),
    **kwargs: Any,
) -> VirtualCluster:
    """A cluster that has run."""
    given = None if router is None else router_of(router, kwargs.pop("settings", None))
    cluster = VirtualCluster(stream or chat(20, 3, 0.01), members or [member_of()] * count, given, **kwargs)
    cluster.run()
    return cluster


def in_order(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return sorted(outcomes, key=lambda outcome: (outcome.request.conversation, outcome.request.turn))


def digest(cluster: VirtualCluster) -> str:
    return fingerprint(
        [dataclasses.replace(outcome, request=None) for outcome in in_order(cluster.front.outcomes)]  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("router", [None, *ALL_ROUTERS])
def test_a_replica_alone_decides_as_without_a_router(router: str | None) -> None:
    alone = replay_of("manylora", chat())
    alone.run()
    cluster = cluster_of(router, 1, chat())
    assert in_order(cluster.front.outcomes) == in_order(alone.outcomes)
    assert cluster.loops[0].report().counters == alone.report().counters
    assert cluster.counters_at_start == [alone.counters_at_start]


@pytest.mark.parametrize("policy", ALL_CACHE_POLICIES)
def test_so_it_does_under_every_cache_policy(policy: str) -> None:
    alone = replay_of(policy, chat())
    alone.run()
    cluster = cluster_of("manylora", 1, chat(), [member_of(config_of(policy))])
    assert in_order(cluster.front.outcomes) == in_order(alone.outcomes)
    found = summarize_cluster(cluster)
    for name, value in {**summarize(alone), **ttft_parts_ms(alone.outcomes)}.items():
        assert found[name] == pytest.approx(value, abs=1e-3), name
    assert found["replicas"][0]["requests"] == len(alone.outcomes)


@pytest.mark.parametrize("router", ALL_ROUTERS)
def test_every_request_ends_once_and_has_all_its_tokens(router: str) -> None:
    cluster = cluster_of(router)
    outcomes = cluster.front.outcomes
    assert len(outcomes) == len(cluster.stream.requests)
    for outcome in outcomes:
        assert outcome.num_tokens == outcome.request.output_tokens
        assert 0 <= outcome.handed_s < outcome.first_s <= outcome.end_s
    assert sum(map(len, cluster.front.served.values())) == len(outcomes)
    assert not any(loop.held for loop in cluster.loops)
    for loop in cluster.loops:
        assert isinstance(loop.machine, Replica)
        check(loop.machine)


def test_what_the_replicas_say_is_what_the_simulated_device_counts() -> None:
    """A turn's prompt has the reply before it, whichever replicas the turns were on."""
    cluster = cluster_of("random", 4)
    prompts: dict[int, int] = {}
    for outcome in in_order(cluster.front.outcomes):
        before = prompts.get(outcome.request.conversation, 0)
        assert outcome.prompt_tokens == before + outcome.request.new_tokens
        prompts[outcome.request.conversation] = outcome.prompt_tokens + outcome.request.output_tokens


@pytest.mark.parametrize("router", LOAD_AWARE)
def test_a_burst_within_one_reports_delay_spreads_over_idle_replicas(router: str) -> None:
    num = 10
    burst = stream_of(*(request(1.0 + 1e-6 * place, place, 0, place % 5, 20, 8) for place in range(100)))
    config = dataclasses.replace(config_of(num_pages=400), max_num_seqs=32, max_batch_tokens=256)
    cluster = cluster_of(router, num, burst, [member_of(config, SLOW)] * num, report_delay_s=5e-2)
    counts = [len(cluster.front.served.get(place, ())) for place in range(num)]
    assert sum(counts) == 100
    assert max(counts) <= 20, counts
    assert min(counts) >= 5, counts


@pytest.mark.parametrize("router", ALL_ROUTERS)
def test_journals_of_the_router_and_of_each_replica_replay(router: str) -> None:
    told: dict[int | None, list[tuple[float, Any, str]]] = collections.defaultdict(list)

    def note(machine: int | None, now: float, event: object, commands: Sequence[object]) -> None:
        told[machine].append((now, event, fingerprint(commands)))

    cluster = cluster_of(router, journal=note)
    assert set(told) == {None, 0, 1, 2}
    assert replay_difference(router_of(router), told.pop(None), fingerprint, Router) is None
    for place, entries in told.items():
        config = cluster.members[place or 0].config
        assert replay_difference(config, entries, fingerprint) is None


def test_what_a_solver_says_is_an_event_and_a_replay_solves_nothing() -> None:
    keen = {"check_s": 0.05, "solve_interval_s": 0.1, "least_delay_s": 0.0, "most_delay_ratio": 1.0}
    config = router_of("dlora", keen, trace=True, move_cooldown_s=0.1)
    told: list[tuple[float, Any, str]] = []
    problems: list[Solve] = []

    def note(machine: int | None, now: float, event: object, commands: Sequence[object]) -> None:
        if machine is None:
            told.append((now, event, fingerprint(commands)))

    def solved(problem: Solve) -> Solved:
        problems.append(problem)
        return solve(problem)

    small = dataclasses.replace(config_of(num_pages=60), max_num_seqs=6)
    long = stream_of(*(request(0.02 * place, place, 0, place % 5, 20, 60) for place in range(40)))
    members = [member_of(small, SLOW), member_of(small), member_of(small)]
    cluster = VirtualCluster(long, members, config, solve=solved, journal=note)
    cluster.run()
    assert len(problems) == cluster.num_solves > 0
    num_answers = sum(isinstance(event, Solved) for _, event, _ in told)
    assert num_answers in (len(problems), len(problems) - 1), "the last one may be due after the end"
    asked = len(problems)
    assert replay_difference(config, told, fingerprint, Router) is None
    assert len(problems) == asked
    assert cluster.plans
    assert all(0 < plan.bound_s <= plan.value_s + 1e-5 for plan in cluster.plans)


def test_reports_are_late_by_the_delay_and_only_by_that() -> None:
    made: list[tuple[float, Any]] = []
    heard: list[float] = []

    def note(machine: int | None, now: float, event: object, commands: Sequence[object]) -> None:
        name = type(event).__name__
        if name == "ReplicaReport":
            heard.append(now)
        elif name == "StatusDue":
            made.append((now, machine))

    cluster_of("manylora", 2, report_delay_s=0.03, journal=note)
    assert heard == pytest.approx(sorted(now + 0.03 for now, _ in made)[: len(heard)])
    for place in (0, 1):
        moments = [now for now, machine in made if machine == place]
        assert len(moments) > 10
        assert all(later - before >= 0.03 - 1e-9 for before, later in itertools.pairwise(moments))


def test_replicas_of_several_kinds() -> None:
    fast, slow = DeviceCosts(), DeviceCosts(step_base_s=0.1)
    config = dataclasses.replace(config_of(num_pages=400), max_num_seqs=32)
    cluster = cluster_of("manylora", 0, None, [member_of(config, fast), member_of(config, slow)])
    served = [len(cluster.front.served.get(place, ())) for place in (0, 1)]
    assert served[0] > 2 * served[1]


def test_many_adapters_are_learnt_as_they_come() -> None:
    count = EAGER_ADAPTERS + 1
    requests = [request(0.01 * place, place, 0, 37 * place % count, 6, 3) for place in range(40)]
    stream = Stream("many", tuple(requests), (8,) * count)
    cluster = cluster_of("most-idle", 2, stream, [member_of(adapters=count)] * 2)
    assert sum(len(loop.report("all").gauges.adapters) for loop in cluster.loops) <= 2 + len(requests)
    assert all(outcome.num_tokens == 3 for outcome in cluster.front.outcomes)


def test_equal_results_under_different_hash_seeds() -> None:
    found = set()
    for seed in ("0", "7"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": "src:lab/src:.", "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            [sys.executable, "-c", DIGEST],
            cwd=ROOT,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        found.add(done.stdout)
    assert len(found) == 1
    assert len(found.pop().splitlines()) == len(ALL_ROUTERS)


def test_no_replica_is_given_up_for_reports_as_old_as_they_may_be() -> None:
    cluster = cluster_of("manylora", 2, chat(20, 3, 1.0), report_delay_s=MOST_REPORT_DELAY_S)
    assert not any(outcome.is_dropped for outcome in cluster.front.outcomes)


def test_what_makes_no_cluster() -> None:
    with pytest.raises(ConfigError, match="at least 1 replica, got 0"):
        VirtualCluster(chat(), [], router_of("manylora"))
    with pytest.raises(ConfigError, match="several replicas need a router"):
        VirtualCluster(chat(), [member_of()] * 2, None)
    with pytest.raises(ConfigError, match="report_delay_s must be a number from 0"):
        VirtualCluster(chat(), [member_of()], None, report_delay_s=-1.0)
    with pytest.raises(ConfigError, match="report_delay_s must be a number from 0 to 4, got 5"):
        VirtualCluster(chat(), [member_of()], None, report_delay_s=5.0)
    with pytest.raises(ConfigError, match="has 5 adapters, not 4"):
        VirtualCluster(chat(), [member_of(adapters=4)], None)
    too_long = stream_of(request(0.0, 0, 0, 0, 500, 5))
    with pytest.raises(ConfigError, match="the workload does not fit"):
        cluster_of("manylora", 2, too_long)


@pytest.mark.parametrize("router", [RESTLESS, IMPATIENT, "punica", "manylora", "dlora"])
def test_what_moves_goes_on_where_it_was(router: str) -> None:
    """A simulated device counts on from the last token, so a reply without gaps is one that lost nothing."""
    long = stream_of(*(request(0.02 * place, place, 0, place % 5, 20, 60) for place in range(40)))
    config = dataclasses.replace(config_of(num_pages=60), max_num_seqs=6)
    events = collections.Counter[str]()

    def note(machine: int | None, now: float, event: object, commands: Sequence[object]) -> None:
        if machine is None:
            events.update(type(command).__name__ for command in commands)
        else:
            events[type(event).__name__] += 1

    given = router_of(router, None, move_cooldown_s=0.1)
    cluster = VirtualCluster(long, [member_of(config)] * 3, given, journal=note)
    cluster.run()
    for outcome in cluster.front.outcomes:
        assert outcome.num_tokens == 60
        assert outcome.handed_s < outcome.first_s < outcome.end_s
    for loop in cluster.loops:
        assert isinstance(loop.machine, Replica)
        check(loop.machine)
        assert not loop.held
    found = summarize_cluster(cluster)
    assert events["Release"] == events["Withdraw"]
    assert events["Assign"] == 40 + found["moves"]
    if router in ("punica", RESTLESS, IMPATIENT):
        assert found["moves"] > 0
        assert found["recomputed_tokens"] > 0
    assert sum(each["moves"] for each in found["replicas"]) == found["moves"]


def test_what_a_router_places_is_loaded_and_kept() -> None:
    """dlora-rr's copies are there before requests, in the reserved share, and replay."""
    quick = router_of("dlora-rr", {"replan_s": 0.2})
    stream = stream_of(*(request(0.05 * place, place, 0, place % 5, 12, 8) for place in range(60)))
    told: dict[int | None, list[tuple[float, object]]] = {None: [], 0: [], 1: []}

    def note(machine: int | None, now: float, event: object, commands: Sequence[object]) -> None:
        told[machine].append((now, event))
        told[None] += [(now, command) for command in commands if isinstance(command, Place)]

    config = dataclasses.replace(config_of(num_pages=80), kept_share=0.1)
    cluster = VirtualCluster(stream, [member_of(config)] * 2, quick, journal=note, is_warm=False)
    cluster.run()
    placed = {(each.adapter, each.replica) for _, each in told[None] if isinstance(each, Place)}
    kept = {(each.adapter, n) for n in (0, 1) for _, each in told[n] if isinstance(each, PinAdapter)}
    assert placed == kept != set()
    for loop in cluster.loops:
        assert isinstance(loop.machine, Replica)
        pinned = loop.machine._pinned.pinned
        assert len(pinned) == len([adapter for adapter, n in kept if n == loop.place])
        assert 4 * len(pinned) <= 8
