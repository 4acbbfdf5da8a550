"""The waiting queue against one that looks through all that waits, and what it takes with ten thousand in line."""

from __future__ import annotations

import collections
import random
import sys
from typing import Any

import pytest

from manylora.config.queueing import QueueConfig
from manylora.policy.queue import WaitingQueue
from manylora.policy.sequences import RequestState, Sequence
from manylora.protocol.events import Arrive
from manylora.types import Request, SamplingParams
from tests.policy.invariants import members
from tests.sampled import sampled

AGE_S = 0.5
VTC: dict[str, Any] = {"fairness": "vtc", "fair_weights": "1,2,1"}
PRIORITY: dict[str, Any] = {"scheduling_policy": "priority", "priority_floor": -2}
CONFIGS: list[dict[str, Any]] = [
    {}, VTC, {**VTC, "fair_by": "key", "fair_share": ("1=3", "2=0.5")}, PRIORITY,
    {**PRIORITY, "priority_age_s": AGE_S}, {**PRIORITY, **VTC, "priority_age_s": AGE_S},
]  # fmt: skip


def sequence_of(
    number: int, adapter: int, client: int = 0, priority: int = 0, arrived_s: float = 0.0, share: float = 1.0
) -> Sequence:
    params = SamplingParams(max_tokens=4, seed=0)
    prompt = tuple(range(1 + number % 7))
    request = Request(f"r{number}", adapter, prompt, params, priority=priority, client=client, share=share)
    return Sequence(number, RequestState(Arrive(request), number, 4, arrived_s), 0, list(prompt))


class Naive:
    """What waits, and the clients' counters in floats of a sixth: each question is a look at everything."""

    def __init__(self, config: QueueConfig) -> None:
        self.config = config
        self.waiting: dict[int, tuple[Sequence, bool]] = {}
        self.levels: dict[int, int] = {}
        self.counters = collections.defaultdict[int, float](float)
        self.left_last: int | None = None
        self.newest = False

    def client(self, sequence: Sequence) -> int:
        return sequence.state.request.client if self.config.fair_by == "key" else sequence.adapter

    def join(self, sequence: Sequence, is_new: bool) -> None:
        client, clients = self.client(sequence), {self.client(s) for s, _ in self.waiting.values()}
        if client not in clients:
            floor = min((self.counters[c] for c in clients), default=None)
            if floor is None:
                floor = 0.0 if self.left_last is None else self.counters[self.left_last]
            self.counters[client] = max(self.counters[client], floor)
        self.waiting[sequence.id] = sequence, is_new
        self.levels[sequence.id] = sequence.state.request.priority

    def leave(self, sequence: Sequence) -> None:
        del self.waiting[sequence.id]
        if self.client(sequence) not in {self.client(s) for s, _ in self.waiting.values()}:
            self.left_last = self.client(sequence)

    def charge(self, sequence: Sequence, service: float) -> None:
        self.counters[self.client(sequence)] += service / sequence.state.request.share

    def age(self, now: float) -> None:
        if self.config.priority_age_s is None:
            return
        for number, (sequence, _) in self.waiting.items():
            request = sequence.state.request
            gained = int((now - sequence.state.arrived_s) / self.config.priority_age_s)
            level = max(request.priority - gained, self.config.priority_floor)
            self.levels[number] = min(self.levels[number], level)

    def rank(self, number: int) -> tuple[Any, ...]:
        sequence, is_new = self.waiting[number]
        client = self.client(sequence) if is_new and self.config.is_fair else 0
        counter = round(self.counters[client] * 6) if is_new and self.config.is_fair else 0
        request, sample = sequence.order
        order = (-request, -sample) if is_new and self.newest else (request, sample)
        return self.levels[number], is_new, counter, client, order

    def first(self, adapter: int | None = None) -> Sequence | None:
        asked = [n for n, (s, _) in self.waiting.items() if adapter is None or s.adapter == adapter]
        return self.waiting[min(asked, key=self.rank)][0] if asked else None

    def leading(self, count: int) -> list[Sequence]:
        waiting, counters = dict(self.waiting), dict(self.counters)
        taken: list[Sequence] = []
        while len(taken) < count and (sequence := self.first()) is not None:
            taken.append(sequence)
            del self.waiting[sequence.id]
            if self.config.is_fair and not sequence.state.admitted:
                self.charge(sequence, sequence.num_prompt)
        self.waiting = waiting
        self.counters.update(counters)
        return taken


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 12))]
)
def test_like_a_queue_that_looks_through_all(config: dict[str, Any], seed: int) -> None:
    rng = random.Random(seed)
    naive = Naive(QueueConfig(**config))
    queue = WaitingQueue(naive.config)
    away: list[Sequence] = []  # admitted
    now = 0.0
    for number in range(700):
        now += rng.choice((0.0, 0.125, 0.25))
        draw = rng.random()
        members = [sequence for sequence, _ in naive.waiting.values()]
        if draw < 0.4:
            priority = rng.randint(-2, 4) if naive.config.has_priorities else 0
            client = rng.randint(0, 2)
            share = naive.config.shares.get(str(client), 1.0)
            sequence = sequence_of(number, rng.randint(0, 4), client, priority, now, share)
            queue.arrive(sequence)
            naive.join(sequence, True)
        elif draw < 0.6 and (first := queue.first()) is not None:
            is_first_time = not first.state.admitted
            queue.admit(first, num_cached=0)
            first.state.note_admission()
            naive.leave(first)
            away.append(first)
            if is_first_time and naive.config.is_fair:
                naive.charge(first, first.num_prompt)
        elif draw < 0.68 and members:
            gone = rng.choice(members)
            queue.remove(gone)
            naive.leave(gone)
        elif draw < 0.78 and away:
            back = away.pop(rng.randrange(len(away)))
            queue.put_back(back)
            naive.join(back, False)
        elif draw < 0.88 and away and queue.shares is not None:
            running = rng.choice(away)
            queue.shares.drew(running, 3)
            naive.charge(running, 6)
        elif draw < 0.93:
            queue.is_newest_first = naive.newest = not naive.newest
        queue.age(now)
        naive.age(now)
        check(queue, naive, rng.randint(0, 12))


def check(queue: WaitingQueue, naive: Naive, count: int) -> None:
    assert len(queue) == len(naive.waiting)
    assert queue.leading(count) == naive.leading(count)
    assert queue.first() is naive.first()
    for adapter in range(5):
        assert queue.first_of(adapter) is naive.first(adapter)
    new = [sequence for sequence, is_new in naive.waiting.values() if is_new]
    assert queue.num_arrived == len(new)
    moment = new[len(new) // 2].state.arrived_s if new else 0.0
    assert queue.arrived_until(moment) == [s for s in new if s.state.arrived_s <= moment]
    assert members(queue)[len(naive.waiting) - len(new) :] == new
    if (first := queue.first()) is not None:
        assert min(members(queue), key=queue.rank) is first


def test_who_leads_is_asked_without_a_trace_at_levels_that_the_answer_looks_into() -> None:
    """Client 1 would be charged for its urgent request before its other one is compared with client 2's."""
    queue = WaitingQueue(QueueConfig(**PRIORITY, **VTC))
    urgent, other, of_2 = sequence_of(6, 1, priority=-1), sequence_of(1, 1), sequence_of(0, 2)
    for sequence in (of_2, other, urgent):
        queue.arrive(sequence)
    assert queue.shares is not None
    queue.shares.drew(of_2, 1)
    assert queue.leading(2) == [urgent, of_2]
    queue.remove(urgent)
    assert queue.first() is other


# ---------------------------------------------------------------- ten thousand in line


def calls_of(config: dict[str, Any], num_waiting: int, num_admitted: int = 200) -> float:
    """Calls of Python and of C for an admission and an arrival, with so many in line."""
    rng = random.Random(0)
    queue = WaitingQueue(QueueConfig(**config))
    has_priorities = queue.first() is None and config.get("scheduling_policy") == "priority"

    def arrive(number: int) -> None:
        priority = rng.randint(0, 10**6) if has_priorities else 0
        queue.arrive(sequence_of(number, number % 997, number % 313, priority, number * 1e-3))

    for number in range(num_waiting):
        arrive(number)
    num_calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for number in range(num_admitted):
            queue.age((num_waiting + number) * 1e-3)
            first = queue.first()
            assert first is not None
            queue.admit(first, 0)
            arrive(num_waiting + number)
    finally:
        sys.setprofile(None)
    return num_calls / num_admitted


@pytest.mark.parametrize("config", sampled(((each,) for each in reversed(CONFIGS)), 2), ids=str)
def test_what_an_admission_takes_hardly_grows_with_the_queue(config: dict[str, Any]) -> None:
    if "priority_age_s" in config:
        config = {**config, "priority_age_s": 60.0}  # so that few are due at each admission
    few, many = calls_of(config, 100), calls_of(config, 10_000)
    assert many < 2.5 * few
    assert many < 1500


def test_what_has_left_is_not_kept() -> None:
    """Heaps forget what left their middle: of a queue that never empties too."""
    queue = WaitingQueue(QueueConfig(**PRIORITY, **VTC))
    standing = [sequence_of(number, 0) for number in range(3)]
    for sequence in standing:
        queue.arrive(sequence)
    for number in range(3, 5000):
        sequence = sequence_of(number, number % 5, priority=number % 3)
        queue.arrive(sequence)
        queue.remove(sequence)
    heaps = [queue._all._levels, *queue._all._clients.values()]
    assert max(len(ranking._heap) for ranking in heaps) < 50
    assert queue.leading(9) == standing
