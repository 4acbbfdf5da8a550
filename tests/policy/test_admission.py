"""Who is admitted next, and who is told that it is too late: averages and orders by hand."""

from __future__ import annotations

import pytest
from manylora_lab.pricing.costs import DeviceCosts
from manylora_lab.sim.replay import Outcome, Replay
from manylora_lab.sim.summary import summarize
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest

from manylora.config.declaring import ConfigError
from manylora.config.policy import PolicyConfig
from manylora.config.sections import SchedulerSettings
from manylora.flags import build_settings
from manylora.policy.batching import Admission
from manylora.policy.queue import WaitingQueue
from manylora.policy.replica import Replica
from manylora.policy.sequences import RequestState, Sequence, Stage
from manylora.protocol.commands import Admitted, Command, Finish, Reject, RunStep
from manylora.protocol.events import Abort, Arrive, StepDone
from manylora.types import BASE, Request, SamplingParams
from tests.policy.invariants import check, members
from tests.policy.reports import gauges


def config(
    admission: str, slo_ttft_s: float | None = None, max_num_seqs: int = 1, max_waiting: int | None = None
) -> PolicyConfig:
    return PolicyConfig(
        200, 4, 400, max_num_seqs, 64, admission=admission, slo_ttft_s=slo_ttft_s, max_waiting=max_waiting
    )


def waiting(queue: WaitingQueue, number: int, arrived_s: float) -> Sequence:
    request = Request(f"r{number}", BASE, (1, 2, 3), SamplingParams(max_tokens=1, seed=0))
    sequence = Sequence(number, RequestState(Arrive(request), number, 1, arrived_s), 0, [1, 2, 3])
    queue.arrive(sequence)
    return sequence


class Server:
    """A replica with room for one sequence, and a device that does as it is told when it is told."""

    def __init__(self, admission: str, slo_ttft_s: float | None = None) -> None:
        self.replica = Replica(config(admission, slo_ttft_s))
        self.admitted: list[str] = []
        self.dropped: dict[str, str] = {}
        self.step: RunStep | None = None

    def _note(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case RunStep():
                    self.step = command
                case Admitted():
                    self.admitted.append(command.request)
                case Finish() if command.error is not None:
                    assert (command.reason, command.error.status) == ("error", 503)
                    self.dropped[command.request] = command.error.message
        check(self.replica)

    def ask(self, name: str, now: float) -> None:
        request = Request(name, BASE, (1, 2, 3), SamplingParams(max_tokens=1, seed=0))
        self._note(self.replica.handle(Arrive(request), now))

    def end_step(self, now: float) -> None:
        step, self.step = self.step, None
        assert step is not None
        tokens = tuple((row.sequence, (0,)) for row in step.rows)
        self._note(self.replica.handle(StepDone(step.step, True, tokens, 0.1), now))

    def ask_four(self) -> None:
        """The first is admitted at once, the others wait for its end."""
        for number, name in enumerate("abcd"):
            self.ask(name, float(number))


def test_oldest_first_by_default() -> None:
    server = Server("fcfs")
    server.ask_four()
    for now in (4.0, 5.0, 6.0, 7.0):
        server.end_step(now)
    assert server.admitted == ["a", "b", "c", "d"]


def test_newest_first() -> None:
    server = Server("lcfs")
    server.ask_four()
    server.end_step(4.0)
    server.ask("e", 4.5)
    for now in (5.0, 6.0, 7.0, 8.0):
        server.end_step(now)
    assert server.admitted == ["a", "d", "e", "c", "b"]


def test_too_late_half_a_second_before_the_objective() -> None:
    """At 3.5, b has waited 2.5 s: with half a second for its step it would come just at 3 s. c can still come."""
    server = Server("early-abort", 3.0)
    for number, name in enumerate("abc"):
        server.ask(name, float(number))
    server.end_step(3.5)
    assert list(server.dropped) == ["b"]
    assert server.dropped["b"] == "after 2.5 s in the queue, no first token can come within 3 s"
    assert server.admitted == ["a", "c"]
    server.end_step(4.0)
    assert gauges(server.replica).num_waiting == 0


def test_whoever_began_is_not_dropped() -> None:
    server = Server("early-abort", 3.0)
    server.ask("a", 0.0)
    server.end_step(60.0)
    assert (server.admitted, server.dropped) == (["a"], {})


def test_the_queue_is_bounded() -> None:
    """One runs and two may wait, each with three samples; once one is gone or admitted there is room."""
    replica = Replica(config("fcfs", max_num_seqs=3, max_waiting=2))

    def ask(name: str, now: float, more: bool = False) -> list[Command]:
        request = Request(name, BASE, (1, 2, 3), SamplingParams(n=3, max_tokens=9, seed=0))
        return replica.handle(Arrive(request, more), now)

    (step,) = [c for c in ask("a", 0.0) if isinstance(c, RunStep)]
    assert not any(isinstance(c, Reject) for name in "bc" for c in ask(name, 1.0))
    (refused,) = ask("d", 2.0)
    assert isinstance(refused, Reject)
    assert (refused.request, refused.error.status) == ("d", 429)
    assert "2 requests wait" in refused.error.message
    assert replica.handle(Abort("d"), 2.5) == []  # nothing of it is kept
    replica.handle(Abort("b"), 3.0)
    assert not any(isinstance(c, Reject) for c in ask("e", 4.0))
    assert isinstance(ask("f", 4.0)[0], Reject)
    replica.handle(Abort("a"), 5.0)
    replica.handle(
        StepDone(step.step, True, ((step.rows[0].sequence, (0, 0, 0)),), 0.1), 6.0
    )  # c is admitted
    assert not any(isinstance(c, Reject) for c in ask("g", 7.0))
    check(replica)


def test_the_bound_holds_for_requests_that_come_together() -> None:
    """They are told of one after the other, and none is admitted before the last is known."""
    replica = Replica(config("fcfs", max_num_seqs=64, max_waiting=2))
    refused = []
    for number in range(4):
        request = Request(f"r{number}", BASE, (1, 2), SamplingParams(max_tokens=1, seed=0))
        commands = replica.handle(Arrive(request, more=number < 3), 0.0)
        refused += [c.request for c in commands if isinstance(c, Reject)]
    assert refused == ["r2", "r3"]


def test_without_a_bound_any_number_waits() -> None:
    replica = Replica(config("fcfs"))
    for number in range(20_000):
        request = Request(f"r{number}", BASE, (1, 2), SamplingParams(max_tokens=1, seed=0))
        assert not any(isinstance(c, Reject) for c in replica.handle(Arrive(request, more=True), 0.0))
    assert gauges(replica).num_waiting == 20_000


@pytest.mark.parametrize("wrong", [0, -1])
def test_a_bound_must_be_at_least_one(wrong: int) -> None:
    with pytest.raises(ConfigError, match="max_waiting"):
        config("fcfs", max_waiting=wrong)
    with pytest.raises(ConfigError, match="max_waiting"):
        SchedulerSettings(max_waiting=wrong)
    with pytest.raises(ConfigError, match="--max-waiting must be at least 1"):
        build_settings({"model": "m", "max_waiting": wrong})


def test_moving_averages() -> None:
    """Both begin at 1, keep 0.7 of themselves, and the queue is as it was after the last admission."""
    queue = WaitingQueue()
    admission = Admission(config("early-abort", 100.0), queue)
    sequences = [waiting(queue, number, 0.0) for number in range(4)]
    assert admission.begin_round(1.0) == []
    assert admission.growth == pytest.approx(0.7 * 1 + 0.3 * 4)
    assert queue.is_newest_first  # 1.9 >= 1
    assert queue.first() is sequences[3]
    queue.remove(sequences[3])
    queue.remove(sequences[2])
    admission.end_round(2)
    assert admission.admitted == pytest.approx(0.7 * 1 + 0.3 * 2)

    admission.begin_round(2.0)  # nobody came: 0.7 * 1.9
    assert admission.growth == pytest.approx(1.33)
    assert queue.is_newest_first  # 1.33 >= 1.3
    admission.end_round(0)  # nobody was admitted: that average stays
    assert admission.admitted == pytest.approx(1.3)

    admission.begin_round(3.0)
    assert admission.growth == pytest.approx(0.931)
    assert not queue.is_newest_first
    assert queue.first() is sequences[0]


def test_the_queue_skips_whoever_left_it() -> None:
    queue = WaitingQueue()
    one, two, three, four = (waiting(queue, number, float(number)) for number in range(4))
    queue.remove(two)
    two.stage = Stage.ENDED
    assert queue.arrived_until(2.0) == [one, three]
    queue.is_newest_first = True
    assert queue.leading(2) == [four, three]
    for newest in (four, three):
        assert queue.first() is newest
        queue.remove(newest)
        newest.stage = Stage.RUNNING
    assert queue.first() is one
    assert (len(queue), members(queue)) == (1, [one])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"admission": "newest"}, "--admission must be one of fcfs, lcfs, early-abort, got 'newest'"),
        (
            {"admission": "early-abort"},
            "admission early-abort needs slo_ttft, the objective for the first token",
        ),
        ({"slo_ttft": 0.5}, "--slo-ttft must be more than 0.5 seconds, got 0.5"),
        ({"slo_ttft": "soon"}, "--slo-ttft must be a number, got 'soon'"),
        ({"slo_ttft": float("nan")}, "--slo-ttft must be more than 0.5 seconds, got nan"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_settings({"model": "m", **settings})
    assert str(error.value) == said


def test_settings_reach_their_section() -> None:
    engine, _ = build_settings({"model": "m", "admission": "early-abort", "slo_ttft": 6})
    assert engine.scheduler == SchedulerSettings(None, None, "early-abort", 6.0)
    assert build_settings({"model": "m"})[0].scheduler == SchedulerSettings()


# ---------------------------------------------------------------- in the simulator


def replayed(admission: str, slo_ttft_s: float | None, num_adapters: int = 0) -> Replay:
    """Twenty requests at once on a device that takes one of them a second: a batch of one, 1 s a step."""
    requests = [StreamRequest(0.0, None, n, 0, (Piece(n, 10),), 1) for n in range(20)]
    costs = DeviceCosts(1.0, 0.0, 0.0, 0.0, reads_at_once=1, read_base_s=2.0)
    pages = [1] * num_adapters
    replay = Replay(
        Stream("burst", tuple(requests), (8,) * num_adapters), config(admission, slo_ttft_s), costs, pages
    )
    while replay.advance():
        check(replay.replica)
    replay.run()
    return replay


def in_time(outcomes: list[Outcome], objective_s: float) -> int:
    return sum(not outcome.is_dropped and outcome.ttft_s <= objective_s for outcome in outcomes)


def test_a_burst_in_the_simulator() -> None:
    """One second each. The policy hears of all but the first when the first step ends, at 1 s; so those that still
    wait at 7 s have waited 6 s for it, and at 6 s they had waited 5: 7 are served, the last of them late.
    """
    fcfs, early = replayed("fcfs", None), replayed("early-abort", 6.0)
    assert [outcome.ttft_s for outcome in fcfs.outcomes] == pytest.approx(range(1, 21))
    assert in_time(fcfs.outcomes, 6.0) == in_time(early.outcomes, 6.0) == 6
    dropped = [outcome for outcome in early.outcomes if outcome.is_dropped]
    assert len(dropped) == 13
    assert {outcome.end_s for outcome in dropped} == {7.0}
    assert summarize(early)["ttft_mean_ms"] == pytest.approx(4000)  # of 1 to 7
    assert summarize(early)["done_per_s"] == pytest.approx(1)


def test_warming_goes_on_where_it_is_dropped() -> None:
    """Eight adapters are read one after the other, 2 s each: together longer than the objective."""
    replay = replayed("early-abort", 6.0, num_adapters=8)
    assert replay.report().counters.adapter_reads >= 8
    assert in_time(replay.outcomes, 6.0) == 6
