"""Few adapters at once: which sequence goes first, for how long others are overtaken, what it does to steps."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
from manylora_lab.pricing.costs import DeviceCosts
from manylora_lab.sim.replay import Replay
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest

from manylora.config.policy import PolicyConfig
from manylora.config.queueing import QueueConfig
from manylora.policy.batching import OVERTAKEN_S, Clusters
from manylora.policy.queue import WaitingQueue
from manylora.policy.sequences import Sequence
from manylora.protocol.commands import Command, EndSequence, RunStep
from manylora.types import BASE
from tests.policy.invariants import members
from tests.policy.test_queue import sequence_of


class Line:
    """A queue, and sequences that were admitted from it."""

    def __init__(self, limit: int, is_hard: bool = False, **queue: Any) -> None:
        self.waiting = WaitingQueue(QueueConfig(**queue))
        self.clusters = Clusters(limit, is_hard, self.waiting)
        self.admitted: list[Sequence] = []
        self.num_come = 0
        self.num_overtaken = 0

    def come(self, *adapters: int, priority: int = 0, client: int = 0) -> None:
        for adapter in adapters:
            self.num_come += 1
            self.waiting.arrive(sequence_of(self.num_come, adapter, client, priority))

    def admit(self, now: float = 0.0) -> int | None:
        """The adapter of what is admitted; None where nothing is."""
        candidates = self.clusters.candidates(self.admitted, now)
        if not candidates:
            return None
        self.waiting.admit(candidates[0], 0)
        candidates[0].state.note_admission()
        self.admitted.append(candidates[0])
        self.num_overtaken += self.clusters.overtakes(candidates[0], now)
        return candidates[0].adapter

    def end(self, adapter: int) -> None:
        self.admitted = [sequence for sequence in self.admitted if sequence.adapter != adapter]


def test_below_the_limit_the_first_in_line_is_next() -> None:
    line = Line(3)
    line.come(1, 2, 1, 3, 4)
    assert [line.admit() for _ in range(4)] == [1, 2, 1, 3]
    assert line.num_overtaken == 0


@pytest.mark.parametrize("is_hard", [False, True])
def test_at_the_limit_those_of_running_adapters_and_of_the_base_go_first(is_hard: bool) -> None:
    """Each admission counts at once: the third adapter is one too many."""
    line = Line(2, is_hard)
    line.come(1, 2, 3, 4, 2, BASE, 1)
    assert [line.admit() for _ in range(5)] == [1, 2, 2, BASE, 1]
    assert line.num_overtaken == 3


def test_where_none_is_left_soft_takes_the_first_and_hard_waits_until_fewer_run() -> None:
    soft, hard = Line(1), Line(1, is_hard=True)
    for line in (soft, hard):
        line.come(1, 2, 3)
        line.admit()
    assert [soft.admit(), soft.admit()] == [2, 3]
    assert hard.admit() is None
    hard.end(1)
    assert [hard.admit(), hard.admit()] == [2, None]


@pytest.mark.parametrize("is_hard", [False, True])
def test_the_first_in_line_is_overtaken_for_so_long_only(is_hard: bool) -> None:
    line = Line(1, is_hard)
    line.come(1, 2, 1, 1, 1)
    assert [line.admit(now) for now in (0.0, 10.0, 10.0 + OVERTAKEN_S / 2)] == [1, 1, 1]
    late_s = 10.0 + OVERTAKEN_S
    if is_hard:
        assert line.admit(late_s) is None, "others would keep the adapter running"
        line.end(1)
    assert line.admit(late_s) == 2


def test_a_soft_limit_overtakes_equals_only() -> None:
    line = Line(1, scheduling_policy="priority")
    line.come(1)
    line.admit()
    line.come(1, 1, priority=2)
    line.come(2, priority=1)
    assert [line.admit() for _ in range(3)] == [2, 1, 1]
    fair = Line(1, fairness="vtc", fair_by="key")
    fair.come(1, client=0)
    fair.admit()
    fair.come(1, client=0)
    fair.come(2, 1, client=1)
    assert [fair.admit() for _ in range(3)] == [1, 1, 2], "of the client whose turn it is, those that fit"


def test_under_a_hard_limit_what_can_run_goes_before_what_cannot() -> None:
    line = Line(1, is_hard=True, scheduling_policy="priority")
    line.come(1)
    line.admit()
    line.come(1, priority=2)
    line.come(2, priority=1)
    assert [line.admit(), line.admit()] == [1, None]


def test_those_that_return_come_before_all_others() -> None:
    line = Line(1)
    line.come(1, 1, 2)
    line.admit()
    back = members(line.waiting)[1]
    line.waiting.admit(back, 0)
    back.state.note_admission()
    line.waiting.put_back(back)
    assert line.clusters.candidates(line.admitted, 0.0)[0] is back


# ---------------------------------------------------------------- in virtual time


@functools.cache
def replayed(limit: str | None, admission: str = "fcfs") -> tuple[Replay, list[int]]:
    """Eight adapters, one of which has half of the requests, at more than the device serves; and how many adapters
    each step had."""
    rng = random.Random(0)
    requests = [
        StreamRequest(0.02 * n, rng.choice((0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7)), n, 0, (Piece(n, 8),), 8)
        for n in range(600)
    ]
    config = PolicyConfig(
        4000, 4, 100, 6, 64, admission=admission, slo_ttft_s=6.0 if admission == "early-abort" else None,
        queue=QueueConfig(adapter_batch_limit=limit),
    )  # fmt: skip
    adapters: dict[int, int] = {}
    num_adapters: list[int] = []

    def watch(now: float, command: Command) -> None:
        if isinstance(command, RunStep):
            adapters.update({start.sequence: start.adapter for start in command.starts})
            num_adapters.append(len({adapters[row.sequence] for row in command.rows}))
        elif isinstance(command, EndSequence):
            del adapters[command.sequence]

    stream = Stream("skewed", tuple(requests), (8,) * 8)
    replay = Replay(stream, config, DeviceCosts(0.05, 0.0, 0.0, 0.0), [1] * 8, watch=watch)
    replay.run()
    return replay, num_adapters[1:]


@pytest.mark.parametrize("admission", ["fcfs", "lcfs", "early-abort"])
@pytest.mark.parametrize("limit", ["2", "2:hard"])
def test_steps_have_fewer_adapters(limit: str, admission: str) -> None:
    replay, limited = replayed(limit, admission)
    _, usual = replayed(None, admission)
    assert sum(limited) / len(limited) < 0.75 * sum(usual) / len(usual)
    if limit.endswith("hard"):
        assert max(limited) <= 2
    assert replay.report().counters.adapter_limit_overtaken > 10
    assert replay.report().gauges.num_waiting == 0


def test_no_request_starves() -> None:
    """A rare adapter's requests wait longer than without a limit, by less than what bounds it."""
    usual, limited = replayed(None)[0], replayed("2:hard")[0]
    waits = [
        max(o.queue_s for o in replay.outcomes if o.request.adapter in (1, 2, 3, 4, 5, 6, 7))
        for replay in (usual, limited)
    ]
    assert waits[1] < waits[0] + 7 * (OVERTAKEN_S + 8 * 0.05) + 5.0


def test_without_need_nothing_is_overtaken() -> None:
    replay, _ = replayed("8:hard")
    assert replay.report().counters.adapter_limit_overtaken == 0
    assert [o.end_s for o in replay.outcomes] == [o.end_s for o in replayed(None)[0].outcomes]
