"""Virtual token counters in virtual time: what clients are served beside each other, and that nothing is lost."""

from __future__ import annotations

import collections
import functools
from typing import Any

import pytest
from manylora_lab.pricing.costs import DeviceCosts
from manylora_lab.sim.replay import Replay
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest

from manylora.config.policy import PolicyConfig
from manylora.config.queueing import QueueConfig
from manylora.policy.replica import Replica
from manylora.protocol.commands import AdapterFreed, Admitted, Command, Emit, RunStep
from manylora.protocol.events import Abort, AdapterRemoved, Arrive, StepDone
from manylora.types import BASE, Request, SamplingParams
from tests.policy.invariants import check
from tests.policy.reports import counters, gauges
from tests.policy.rig import PAGE, Rig

PROMPT, REPLY, SEQS = 24, 16, 8
INPUT, OUTPUT = 1, 2
"""The usual weights."""
BOUND = 2 * max(INPUT * PROMPT, OUTPUT * SEQS * REPLY)
"""Of the paper's theorem 4.4, with what a batch generates at most as M."""
WINDOW_S = 60.0


@functools.cache
def replayed(
    rates: tuple[float, ...], queue: tuple[tuple[str, Any], ...], duration_s: float = 160.0
) -> Replay:
    """Clients that ask at these rates a second of a device that serves two and a half requests a second."""
    requests = [
        StreamRequest(
            number / rate, client, 1000 * client + number, 0, (Piece((client, number), PROMPT),), REPLY
        )
        for client, rate in enumerate(rates)
        for number in range(int(duration_s * rate))
    ]
    requests.sort(key=lambda request: request.arrival_s)
    requests = [
        StreamRequest(r.arrival_s, r.adapter, number, 0, r.prompt, r.output_tokens)
        for number, r in enumerate(requests)
    ]
    config = PolicyConfig(4000, 4, 100, SEQS, 64, queue=QueueConfig(**dict(queue)))
    costs = DeviceCosts(0.2, 0.0, 0.0, 0.0)
    watched: list[tuple[float, Command]] = []
    stream = Stream("clients", tuple(requests), (8,) * len(rates))
    replay = Replay(
        stream, config, costs, [1] * len(rates), watch=lambda now, command: watched.append((now, command))
    )
    replay.run()
    replay.watched = watched  # type: ignore[attr-defined]
    return replay


def service(replay: Replay, until_s: float = 160.0) -> list[tuple[float, int, int]]:
    """Moment, client and weighted tokens of all that was served while requests came."""
    adapters = {f"{r.conversation}-0": r.adapter or 0 for r in replay.stream.requests}
    found: list[tuple[float, int, int]] = []
    for now, command in replay.watched:  # type: ignore[attr-defined]
        if isinstance(command, Admitted | Emit) and command.request in adapters and now < until_s:
            weight = INPUT * PROMPT if isinstance(command, Admitted) else OUTPUT
            found.append((now, adapters[command.request], weight))
    return found


def by_window(replay: Replay) -> list[collections.Counter[int]]:
    """What each client was served in each whole window; the first half minute is left out."""
    windows = [collections.Counter[int]() for _ in range(2)]
    for now, client, weight in service(replay):
        window = int((now - 30.0) // WINDOW_S)
        if 0 <= window < len(windows):
            windows[window][client] += weight
    return windows


VTC = (("fairness", "vtc"),)
SATURATING = (15.0, 1.5)


def test_two_clients_at_ten_to_one_are_served_alike() -> None:
    for window in by_window(replayed(SATURATING, VTC)):
        assert 0.9 < window[0] / window[1] < 1.1


def test_in_arrival_order_the_one_that_asks_more_gets_more() -> None:
    for window in by_window(replayed(SATURATING, ())):
        assert window[0] / window[1] > 5


def test_shares() -> None:
    for window in by_window(replayed(SATURATING, (*VTC, ("fair_share", ("adapter-0=3",))))):
        assert 0.9 < window[0] / (3 * window[1]) < 1.1


def test_the_difference_stays_within_the_proven_bound() -> None:
    """Over each interval in which both have requests waiting; each interval's end is a moment of service."""
    ahead, least, most = 0, 0, 0
    for now, client, weight in service(replayed(SATURATING, VTC)):
        if now > 1.0:
            ahead += weight if client == 0 else -weight
            least, most = min(least, ahead), max(most, ahead)
            assert max(ahead - least, most - ahead) <= BOUND


def test_alone_a_client_has_all() -> None:
    alone, unfair = replayed((50.0,), VTC, 10.0), replayed((50.0,), (), 10.0)
    assert [o.end_s for o in alone.outcomes] == [o.end_s for o in unfair.outcomes]


def test_nothing_idles_for_fairness() -> None:
    ends = [max(o.end_s for o in replayed(SATURATING, queue).outcomes) for queue in (VTC, ())]
    assert ends[0] == pytest.approx(ends[1], rel=0.01)


def test_the_simulator_tells_the_difference() -> None:
    fair, unfair = (replayed(SATURATING, queue).service_difference() for queue in (VTC, ()))
    assert fair is not None
    assert unfair is not None
    assert fair["pairs"] == 2, "the windows in which both wait: the second and the third"
    assert fair["max"] <= BOUND < unfair["mean"]


# ---------------------------------------------------------------- by hand


class Server:
    """One sequence at a time; a step ends when it is told to."""

    def __init__(self, max_num_seqs: int = 1, **queue: Any) -> None:
        order = QueueConfig(fairness="vtc", fair_by="key", **queue)
        config = PolicyConfig(200, 4, 400, max_num_seqs, 64, queue=order)
        self.replica = Replica(config)
        self.admitted: list[str] = []
        self.steps: list[RunStep] = []
        self.first = 0

    def note(self, commands: list[Command]) -> None:
        self.admitted += [command.request for command in commands if isinstance(command, Admitted)]
        self.steps += [command for command in commands if isinstance(command, RunStep)]
        check(self.replica)

    def ask(self, name: str, client: int, num_prompt: int = 3, max_tokens: int = 1, **more: Any) -> None:
        params = SamplingParams(max_tokens=max_tokens, seed=0, n=more.pop("n", 1))
        prompt = (
            tuple(range(num_prompt)) if name == "again" else tuple(range(self.first, self.first + num_prompt))
        )
        self.first += num_prompt
        request = Request(name, BASE, prompt, params, client=client, **more)
        self.note(self.replica.handle(Arrive(request), 0.0))

    def end_step(self) -> None:
        step = self.steps.pop(0)
        tokens = tuple((row.sequence, (0,) * row.num_samples) for row in step.rows if row.num_samples)
        self.note(self.replica.handle(StepDone(step.step, True, tokens, 0.1), 0.0))

    def end_steps(self) -> None:
        while self.steps:
            self.end_step()

    def counter(self, client: int) -> float:
        return {use.client: use.counter for use in gauges(self.replica).clients}[client]

    def service(self, client: int) -> int:
        return {use.client: use.service for use in gauges(self.replica).clients}[client]


def test_input_is_charged_at_admission_and_output_as_it_comes() -> None:
    server = Server()
    server.ask("a", 1, num_prompt=10, max_tokens=4)
    assert server.service(1) == 10
    server.end_step()
    assert server.service(1) == 12
    server.end_steps()
    assert server.service(1) == 18


def test_each_sample_is_charged() -> None:
    server = Server(max_num_seqs=3)
    server.ask("a", 1, num_prompt=10, max_tokens=4, n=3)
    server.end_steps()
    assert server.service(1) == 10 + 3 * 4 * 2


@pytest.mark.parametrize(("weights", "again"), [("1,2,0", 2 + 1 * 2), ("3,1,1", 3 * 2 + 8 + 1)])
def test_what_is_cached_has_a_weight_of_its_own(weights: str, again: int) -> None:
    server = Server(fair_weights=weights)
    server.ask("a", 1, num_prompt=10)
    server.end_steps()
    before = server.service(1)
    server.ask("again", 1, num_prompt=10)
    server.end_steps()
    assert server.service(1) - before == again, "two pages of four tokens come from the cache"


def test_what_is_aborted_stays_charged() -> None:
    server = Server()
    server.ask("a", 1, num_prompt=10, max_tokens=9)
    server.note(server.replica.handle(Abort("a"), 0.0))
    assert server.service(1) == 10


def test_a_client_that_comes_back_gains_nothing_by_having_been_away() -> None:
    """Client 2 was served little long ago. When it comes, it stands beside client 1, not before it for as long as
    that was served alone."""
    server = Server()
    server.ask("early", 2)
    server.end_steps()
    for number in range(20):
        server.ask(f"a{number}", 1, num_prompt=10)
    for _ in range(10):
        server.end_step()
    assert server.counter(1) > 100
    for number in range(6):
        server.ask(f"b{number}", 2, num_prompt=10)
    assert server.counter(2) >= server.counter(1) - 12, "lifted to the least of those that wait, as it was"
    server.admitted.clear()
    for _ in range(8):
        server.end_step()
    assert {name[0] for name in server.admitted[:3]} == {"a", "b"}
    assert sum(name[0] == "b" for name in server.admitted) in (4, 5)


def test_nor_where_the_queue_is_empty() -> None:
    """As the last that left it, though that has been served since."""
    server = Server(max_num_seqs=2)
    server.ask("a", 1, num_prompt=10, max_tokens=8)
    for _ in range(6):
        server.end_step()
    server.ask("b", 2)
    assert server.counter(1) == 10 + 6 * 2
    assert server.counter(2) == 22


def test_by_adapter_what_is_gone_is_forgotten_and_its_counter_is_not_inherited() -> None:
    rig = FairRig(40, fairness="vtc")
    rig.add(1, 2)
    rig.add(2, 2)
    rig.serve("a", 1, list(range(10)))
    rig.feed(AdapterRemoved(1))
    assert rig.of(AdapterFreed) == [AdapterFreed(1)]
    assert gauges(rig.replica).clients == ()
    rig.serve("b", 2, [1, 2, 3])
    (use,) = gauges(rig.replica).clients
    assert (use.client, use.service, use.counter) == (2, 3 + 2, 12 + 3 + 2), "what left the queue last had 12"


def test_what_is_gone_leaves_the_floor_to_what_left_the_queue_after_it() -> None:
    rig = FairRig(40, fairness="vtc")
    rig.add(1, 2)
    rig.add(2, 2)
    rig.serve("a", 1, list(range(10)))
    rig.serve("b", 2, [1, 2, 3])
    rig.feed(AdapterRemoved(1))
    assert [(use.client, use.counter) for use in gauges(rig.replica).clients] == [(2, 12 + 3 + 2)]
    rig.add(3, 2)
    rig.serve("c", 3, [1])
    assert gauges(rig.replica).clients[-1].counter == 17 + 1 + 2, "what left the queue last had 17"


def test_clients_take_turns() -> None:
    server = Server()
    server.ask("running", 7)
    for number in range(6):
        server.ask(f"a{number}", 0, num_prompt=10)
    for number in range(3):
        server.ask(f"b{number}", 1, num_prompt=10)
    server.admitted.clear()
    for _ in range(6):
        server.end_step()
    assert [name[0] for name in server.admitted] == ["a", "b", "a", "b", "a", "b"]
    assert {use.client for use in gauges(server.replica).clients} == {0, 1, 7}


def test_counters_are_whole_numbers_of_their_unit() -> None:
    """A thousand thirds are a whole number: nothing drifts."""
    server = Server(fair_share=("1=3", "2=0.7"))
    for number in range(30):
        server.ask(f"a{number}", 1, num_prompt=1, share=3.0)
        server.ask(f"b{number}", 2, num_prompt=7, share=0.7)
    server.end_steps()
    shares = server.replica._waiting.shares
    assert shares is not None
    assert shares._scale == 21
    assert shares.counters[1] == server.service(1) * 7
    assert shares.counters[2] == server.service(2) * 30 + 7, (
        "lifted to the other, when that had read one token"
    )


class FairRig(Rig):
    """A pool that holds little, on the device that checks what it is told."""

    def __init__(self, num_pages: int, **queue: Any) -> None:
        super().__init__(num_pages=num_pages, num_host_pages=0)
        self.config = PolicyConfig(num_pages, PAGE, 200, 4, 64, 0, 2**21, queue=QueueConfig(**queue))
        self.replica = Replica(self.config)

    def preempted(
        self,
        clients: tuple[int, int] = (0, 0),
        priorities: tuple[int, int] = (0, 0),
        shares: tuple[float, float] = (1.0, 1.0),
    ) -> str:
        """Of two requests that do not fit together, of these clients, the one that is preempted."""
        for number in range(2):
            params = SamplingParams(max_tokens=20, seed=0)
            prompt = tuple(100 * number + i for i in range(6))
            request = Request(
                f"r{number}",
                BASE,
                prompt,
                params,
                priority=priorities[number],
                client=clients[number],
                share=shares[number],
            )
            self.requests[request.id] = request
            self.feed(Arrive(request, more=number == 0))
        while not counters(self.replica).preemptions:
            self.now += 0.001
            self.end_step()
        (running,) = [s.state.id for s in self.replica._held.admitted]
        self.settle()
        assert self.check_answers() == len(self.requests)
        return {"r0": "r1", "r1": "r0"}[running]


@pytest.mark.parametrize(("served", "preempted"), [(1, "r0"), (2, "r1")])
def test_of_the_client_that_was_served_most_one_is_preempted(served: int, preempted: str) -> None:
    """The other has the larger share, so that each token counts less."""
    rig = FairRig(9, fairness="vtc", fair_by="key", fair_share=("1=3", "2=3"))
    assert rig.preempted((1, 2), shares=(1.0, 3.0) if served == 1 else (3.0, 1.0)) == preempted


@pytest.mark.parametrize(("priorities", "preempted"), [((3, 1), "r0"), ((1, 3), "r1"), ((1, 1), "r1")])
def test_the_largest_priority_is_preempted_then_the_newest(
    priorities: tuple[int, int], preempted: str
) -> None:
    rig = FairRig(9, scheduling_policy="priority")
    assert rig.preempted(priorities=priorities) == preempted


def test_being_preempted_costs_nothing_and_counts_once() -> None:
    rig = FairRig(9, fairness="vtc", fair_by="key")
    rig.preempted((1, 2))
    assert {use.client: use.service for use in gauges(rig.replica).clients} == {
        1: 6 + 2 * 20, 2: 6 + 2 * 20
    }  # fmt: skip
