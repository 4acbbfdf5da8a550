"""The loop's order of events, with a policy that says what a test wants it to say."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from manylora.engine.client import Delta, GenerationRequest
from manylora.engine.driver import Driver
from manylora.engine.journal import JournalWriter, read_journal
from manylora.protocol.commands import RunStep, SetTimer, SwapPages
from manylora.protocol.events import Arrive, CopyDone, Event, StepDone, Timer
from manylora.protocol.executor import StepResult
from manylora.types import SamplingParams
from tests.engine.fake_executor import FakeExecutor
from tests.engine.test_engine import CONFIG, INFO
from tests.policy.device_model import undisturbed

WAIT_S = 60.0
SWAP = SwapPages(1, True, ((3, 4),))


class Scripted:
    """A policy that notes its events and answers each with the next of its answers, if any is left."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.events: queue.Queue[tuple[Event, float]] = queue.Queue()

    def handle(self, event: Event, now: float) -> list[Any]:
        self.events.put((event, now))
        answer = self.answers.pop(0) if self.answers else []
        return answer(now) if callable(answer) else list(answer)

    def take(self, count: int) -> list[str]:
        """The next events by name."""
        return [type(self.events.get(timeout=WAIT_S)[0]).__name__ for _ in range(count)]


Start = Callable[..., Driver]


@pytest.fixture
def start() -> Iterator[Start]:
    drivers = []

    def started(policy: Scripted, executor: FakeExecutor | None = None, **options: Any) -> Driver:
        driver = Driver(CONFIG, executor or FakeExecutor(), INFO, **options)
        driver._machine = policy
        drivers.append(driver)
        driver.start(_ignore, _ignore)
        return driver

    yield started
    for driver in drivers:
        driver.close()


def _ignore(_: list[Delta] | str) -> None:
    pass


def test_a_timer_comes_after_the_inbox_and_before_the_step_that_ended(start: Start) -> None:
    driver: Driver

    class Executor(FakeExecutor):
        def run_step(self, command: RunStep) -> None:
            driver.abort("r", None, "abort")  # while the step runs
            super().run_step(command)

    policy = Scripted(lambda now: [SetTimer(now), RunStep(1, (), ())])
    driver = start(policy, Executor())
    driver.submit(GenerationRequest("r", (1,), SamplingParams()))
    assert policy.take(4) == ["Arrive", "Abort", "Timer", "StepDone"]


def test_those_who_come_together_are_told_of_together(start: Start) -> None:
    driver: Driver

    class Executor(FakeExecutor):
        def run_step(self, command: RunStep) -> None:
            for name in "bc":  # while the step runs
                driver.submit(GenerationRequest(name, (1,), SamplingParams()))
            driver.abort("b", None, "abort")
            driver.submit(GenerationRequest("d", (1,), SamplingParams()))
            driver.submit(GenerationRequest("e", (1,), SamplingParams(), adapter="that nobody knows"))
            super().run_step(command)

    policy = Scripted([RunStep(1, (), ())])
    driver = start(policy, Executor())
    driver.submit(GenerationRequest("a", (1,), SamplingParams()))
    told = [policy.events.get(timeout=WAIT_S)[0] for _ in range(6)]
    arrivals = [(event.request.id, event.more) for event in told if isinstance(event, Arrive)]
    assert arrivals == [("a", False), ("b", True), ("c", False), ("d", False)]
    assert [type(event).__name__ for event in told[4:]] == ["Arrive", "StepDone"]


def test_a_step_that_the_timer_starts_ends_after_what_comes_in_meanwhile(start: Start) -> None:
    driver: Driver

    class Executor(FakeExecutor):
        def run_step(self, command: RunStep) -> None:
            driver.abort("r", None, "abort")
            super().run_step(command)

    again = SetTimer(0.0)  # is always due, and still lets the step end
    policy = Scripted(lambda now: [SetTimer(now)], [RunStep(1, (), ()), again], [], [again])
    driver = start(policy, Executor())
    driver.abort("x", None, "abort")
    assert policy.take(6) == ["Abort", "Timer", "Abort", "Timer", "StepDone", "Timer"]


def test_a_later_timer_replaces_an_earlier_one(start: Start) -> None:
    now_s = [0.0]
    policy = Scripted([SetTimer(5.0), SetTimer(9.0)])
    driver = start(policy, clock=lambda: now_s[0])
    for at_s, expected in ((0.0, ["Abort"]), (6.0, ["Abort"]), (9.0, ["Abort", "Timer"]), (20.0, ["Abort"])):
        now_s[0] = at_s
        driver.abort("wakes the loop", None, "abort")
        assert policy.take(len(expected)) == expected
    assert policy.events.empty()


def test_an_idle_loop_sleeps_until_its_timer(start: Start) -> None:
    readings = []

    def clock() -> float:
        readings.append(time.monotonic())
        return readings[-1]

    policy = Scripted(lambda now: [SetTimer(now + 0.2)])
    driver = start(policy, clock=clock)
    driver.abort("x", None, "abort")
    set_at_s = policy.events.get(timeout=WAIT_S)[1]
    event, now = policy.events.get(timeout=WAIT_S)
    assert event == Timer()
    assert now >= set_at_s + 0.2
    assert len(readings) < 12  # waiting by looking would read it thousands of times


def test_copies_are_started_and_their_answers_told_and_recorded(start: Start, tmp_path: Path) -> None:
    executor = FakeExecutor()
    executor.failing_swaps = 1
    out = SwapPages(2, False, ((4, 3),))
    policy = Scripted([SWAP, out], lambda now: [SetTimer(now)])
    path = tmp_path / "journal"
    driver = start(policy, executor, journal=JournalWriter(path, CONFIG))
    driver.abort("x", None, "abort")
    names = policy.take(4)
    assert (names[0], sorted(names[1:])) == ("Abort", ["CopyDone", "CopyDone", "Timer"])
    assert executor.swaps == [SWAP, out]
    driver.close()
    events = [event for _, event in read_journal(path)[1]]
    failed, landed = [event for event in events if isinstance(event, CopyDone)]
    assert (failed.copy, failed.ok, failed.error) == (1, False, "made to fail")
    assert (landed.copy, landed.ok, landed.copy_s) == (2, True, 0.001)
    assert Timer() in events


def test_closing_does_not_wait_for_answers_and_ignores_them(start: Start) -> None:
    executor = FakeExecutor()
    executor.swap_gate.clear()
    policy = Scripted([SWAP])
    driver = start(policy, executor)
    driver.abort("x", None, "abort")
    assert policy.take(1) == ["Abort"]
    driver.close()
    executor.swap_gate.set()
    executor.wait_for_copies()
    assert policy.events.empty()
    assert executor.closed == 1


class Strict(FakeExecutor):
    """Steps that are listed cannot be issued, nor can those that rely on them; the real executor is as strict."""

    def __init__(self, *broken: int) -> None:
        super().__init__()
        self.broken = broken
        self.lost_rows: list[int] = []

    def run_step(self, command: RunStep) -> None:
        starting = {start.sequence for start in command.starts}
        known = {name: len(tokens) for name, (_, tokens) in self.sequences.items()}
        relies = any(
            row.start + row.num_tokens > known.get(row.sequence, 0)
            for row in command.rows
            if row.sequence not in starting
        )
        if relies or command.step in self.broken:
            self.lost_rows.append(len(command.rows))
            self.tell(StepResult(StepDone(command.step, False, error="made to fail"), {}))
        else:
            super().run_step(command)


@pytest.mark.parametrize("broken", [(1,), (4,), (4, 9, 14, 19)])
def test_a_step_that_cannot_be_issued_pulls_no_other_requests_along(broken: tuple[int, ...]) -> None:
    """Two steps in flight, and requests that come and go with each of them: who was not in the step, or in the one
    commanded together with it, lives. However often that happens, the engine does."""
    config = dataclasses.replace(CONFIG, max_num_seqs=4, pipeline_depth=2)
    asked = [
        GenerationRequest(f"r{i}", (i, 2, 3), SamplingParams(max_tokens=2 + i % 3, ignore_eos=True))
        for i in range(40)
    ]
    tokens: dict[str, list[int]] = {request.id: [] for request in asked}
    reasons: dict[str, str] = {}
    ended = threading.Event()

    def deliver(deltas: list[Delta]) -> None:
        for delta in deltas:
            tokens[delta.request] += delta.tokens
            if delta.finish_reason:
                reasons[delta.request] = delta.finish_reason
        if len(reasons) == len(asked):
            ended.set()

    executor = Strict(*broken)
    driver = Driver(config, executor, INFO)
    for request in asked:
        driver.submit(request)
    driver.start(deliver, lambda _: ended.set())
    assert ended.wait(WAIT_S)
    driver.close()
    assert list(reasons.values()).count("error") == sum(executor.lost_rows[: len(broken)])
    for request in asked:
        if reasons[request.id] != "error":
            expected = undisturbed(0, request.prompt, request.params, (), 0)
            assert (reasons[request.id], tokens[request.id]) == ("length", expected)


def test_a_bug_in_the_loop_ends_it_with_its_reason() -> None:
    driver = Driver(CONFIG, FakeExecutor(), INFO)
    driver._machine = Scripted(lambda now: 1 / 0)
    deaths: queue.Queue[str] = queue.Queue()
    driver.start(_ignore, deaths.put)
    driver.submit(GenerationRequest("r", (1,), SamplingParams()))
    assert deaths.get(timeout=WAIT_S) == driver.end == "the engine failed: division by zero"
    driver.close()
