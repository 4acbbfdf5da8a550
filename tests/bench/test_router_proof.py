"""The bound beside our router's proof, and the verdicts."""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import random
import statistics
from typing import Any

import pytest
from manylora_lab.baselines import ALL_ROUTERS
from manylora_lab.benchmarks import router_proof
from manylora_lab.benchmarks.router_proof import (
    ROUTERS,
    ProofRun,
    all_cells,
    judged,
    measure,
    stream_of,
    summary,
)
from manylora_lab.reproduce.router_cells import CLAIRVOYANT, mean_flow_s

FILES = ("none", "none")


def on_machines(jobs: list[tuple[float, float]], count: int, draw: random.Random) -> float:
    """The mean flow time of some schedule: any order of those that have come, on the machine that is free
    first."""
    free = [0.0] * count
    waiting: list[tuple[float, float]] = []
    flows, arrivals = [], sorted(jobs)
    while arrivals or waiting:
        now = heapq.heappop(free)
        while arrivals and (not waiting or arrivals[0][0] <= now):
            waiting.append(arrivals.pop(0))
        arrival, work = waiting.pop(draw.randrange(len(waiting)))
        end = max(now, arrival) + work
        flows.append(end - arrival)
        heapq.heappush(free, end)
    return statistics.fmean(flows)


def test_no_schedule_on_several_machines_is_below_the_bound() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        count = draw.randint(1, 4)
        jobs = [(draw.uniform(0, 5), draw.choice([0.1, 0.5, 2.0])) for _ in range(draw.randint(1, 20))]
        bound = mean_flow_s([(arrival, work / count) for arrival, work in jobs])
        assert bound <= on_machines(jobs, count, draw) + 1e-9


def test_shortest_first_by_hand() -> None:
    """A long job of 3 is interrupted at 1 by one of 1: it ends at 4, the other at 2."""
    assert mean_flow_s([(0.0, 3.0), (1.0, 1.0)]) == pytest.approx((4.0 + 1.0) / 2)


def test_a_run_is_above_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(router_proof.DURATION_S, "chatbot", 4.0)
    for router in ("manylora", CLAIRVOYANT):
        row = measure(ProofRun("chatbot", 0.8, 0.05, 99, router, FILES))
        assert 0 < row["bound_ttft_ms"] < row["ttft_mean_ms"]
        assert 0 <= row["slo_attainment"] <= 1


def test_agents_for_longer() -> None:
    """The same rate for as long as asked, under a key of its own."""
    usual = ProofRun("agent", 0.01, 0.05, 99, "random", FILES)
    longer = dataclasses.replace(usual, agent_s=2 * usual.agent_s)
    chats = dataclasses.replace(longer, workload="chatbot")
    assert [each.duration_s for each in (usual, longer, chats)] == [12.0, 24.0, 120.0]
    assert (usual.key, longer.key) == ("agent 0.01 0.05 99 random", "agent 0.01 0.05 99 random 24 s")
    assert chats.key == "chatbot 0.01 0.05 99 random"
    few, more = (len(stream_of(run).requests) for run in (usual, longer))
    assert 1.2 * few < more < 3.5 * few


def row(router: str, ttft_ms: float, met: float, seed: int = 1) -> dict[str, Any]:
    return {
        "workload": "agent", "load": 0.5, "delay_s": 0.0, "seed": seed, "router": router, "ttft_mean_ms": ttft_ms,
        "slo_attainment": met, "bound_ttft_ms": 50.0,
    }  # fmt: skip


def test_verdicts() -> None:
    rows = [row("manylora", 90.0, 0.95), row("punica", 110.0, 1.0), row("random", 120.0, 0.2)]
    rows += [row("manylora", 500.0, 0.0, seed=2), row(CLAIRVOYANT, 1.0, 1.0)]
    (cell,) = judged(rows)
    assert cell["seeds"] == [1], "only seeds that all routers have"
    assert (cell["best_ttft"], cell["best_met"]) == ("punica", "punica")
    assert cell["is_ttft_kept"]
    assert cell["is_attainment_kept"]
    assert cell["is_better"]
    assert not cell["is_near_bound"]
    assert cell["clairvoyant_ttft_ms"] == 1.0
    assert summary([cell])["better_by_15_percent_of_these"] == 1
    (worse,) = judged([row("manylora", 116.0, 0.9), row("punica", 110.0, 1.0)])
    assert not any(worse[name] for name in ("is_ttft_kept", "is_attainment_kept", "is_better"))
    assert judged([row("punica", 1.0, 1.0)]) == []


def test_other_delays_may_have_fewer_routers_and_no_clairvoyant() -> None:
    args = argparse.Namespace(
        seeds=[7], loads=[0.5], delays=[0.2, 0.05], workloads=["agent"],
        routers=["manylora", "punica", "random"], delayed_routers=["manylora", "random"], agent_seconds=12.0,
    )  # fmt: skip
    runs = [(run.delay_s, run.router) for run in all_cells(FILES, args)]
    assert runs == [
        *((0.05, name) for name in ("manylora", "punica", "random", CLAIRVOYANT)),
        (0.2, "manylora"),
    ]


def test_what_reads_no_reports_counts_with_every_delay() -> None:
    rows = [
        {**row("random", 80.0, 0.5), "delay_s": 0.05},
        row("manylora", 90.0, 0.6),
        row("punica", 99.0, 0.6),
    ]
    (cell,) = judged(rows)
    assert (cell["delay_s"], cell["best_ttft"], cell["is_ttft_kept"]) == (0.0, "random", False)


def test_all_routers_are_judged() -> None:
    assert {*ROUTERS, "dlora-authors"} == set(ALL_ROUTERS)
