"""Priorities by hand: which request is admitted next, and how waiting raises it."""

from __future__ import annotations

from typing import Any

import pytest

from manylora.config.policy import PolicyConfig
from manylora.config.queueing import QueueConfig
from manylora.policy.replica import Replica
from manylora.protocol.commands import Admitted, Command, RunStep
from manylora.protocol.events import Arrive, StepDone
from manylora.types import BASE, Request, SamplingParams
from tests.policy.invariants import check


class Server:
    """One request at a time, one step each."""

    def __init__(self, admission: str = "fcfs", slo_ttft_s: float | None = None, **queue: Any) -> None:
        order = QueueConfig(scheduling_policy="priority", **queue)
        self.replica = Replica(
            PolicyConfig(200, 4, 400, 1, 64, admission=admission, slo_ttft_s=slo_ttft_s, queue=order)
        )
        self.admitted: list[str] = []
        self.step: RunStep | None = None

    def note(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Admitted):
                self.admitted.append(command.request)
            elif isinstance(command, RunStep):
                self.step = command
        check(self.replica)

    def ask(self, name: str, priority: int, now: float = 0.0) -> None:
        params = SamplingParams(max_tokens=1, seed=0)
        request = Request(name, BASE, (1, 2, 3), params, priority=priority)
        self.note(self.replica.handle(Arrive(request), now))

    def end_step(self, now: float = 0.0) -> None:
        assert self.step is not None
        step, self.step = self.step, None
        tokens = tuple((row.sequence, (0,)) for row in step.rows)
        self.note(self.replica.handle(StepDone(step.step, True, tokens, 0.1), now))

    def order(self, *moments: float) -> str:
        for now in moments:
            self.end_step(now)
        return "".join(self.admitted)


@pytest.mark.parametrize(("admission", "order"), [("fcfs", "xcabed"), ("lcfs", "xcbaed")])
def test_lower_first_then_as_admission_says(admission: str, order: str) -> None:
    server = Server(admission, priority_floor=-5)
    for name, priority in (("x", 9), ("a", 1), ("b", 1), ("c", -5), ("d", 2**31 - 1), ("e", 7)):
        server.ask(name, priority)
    assert server.order(0, 0, 0, 0, 0) == order


def test_early_abort_drops_by_time_whatever_the_priority() -> None:
    server = Server("early-abort", 3.0)
    server.ask("x", 0, 0.0)
    server.ask("a", 0, 0.5)
    server.ask("b", 5, 1.5)
    server.ask("c", 1, 1.6)
    assert server.order(3.2, 3.3) == "xcb", "a has waited too long"


def test_each_interval_of_waiting_raises_a_request_by_one() -> None:
    server = Server(priority_age_s=10.0)
    server.ask("x", 0)
    server.ask("a", 2, 0.0)
    server.ask("b", 1, 15.0)
    server.ask("c", 0, 19.0)
    server.ask("d", 1, 19.0)
    # At 19 s a has gone up to 1, where it is the oldest; c is above. At 21 s it is where c was.
    assert server.order(19.5, 19.6) == "xca"
    assert server.order(19.7, 19.8) == "xcabd"


def test_no_request_rises_above_the_floor() -> None:
    server = Server(priority_age_s=1.0)
    server.ask("x", 0)
    server.ask("a", 5, 0.0)
    server.ask("b", 0, 50.0)
    server.ask("c", 0, 99.0)
    assert server.order(100.0, 100.0, 100.0) == "xabc", "at the floor it is one of the oldest"


def test_without_ageing_a_low_one_waits_for_all_others() -> None:
    server = Server()
    server.ask("x", 0)
    server.ask("a", 1, 0.0)
    server.ask("b", 0, 1000.0)
    assert server.order(2000.0, 2001.0) == "xba"


def test_nothing_that_runs_is_preempted_for_its_priority_alone() -> None:
    server = Server()
    server.ask("low", 9)
    server.ask("high", 0)
    assert server.admitted == ["low"]
