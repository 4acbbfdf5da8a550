"""Two steps in flight: decided before the tokens of the first are known, and undone where those say otherwise."""

from __future__ import annotations

import dataclasses

import pytest

from manylora.config.declaring import ConfigError
from manylora.config.policy import CacheConfig, PolicyConfig
from manylora.policy.replica import Replica
from manylora.protocol.commands import Command, Emit, EndSequence, Finish, Released, RunStep
from manylora.protocol.events import Arrive, Event, Release
from manylora.types import BASE, Request, SamplingParams
from tests.policy.device_model import DeviceModel, next_token, undisturbed
from tests.policy.invariants import check
from tests.policy.reports import counters
from tests.policy.rig import Rig

PAGE = 4


class Pipeline:
    """A replica two steps deep on the dictionary device."""

    def __init__(self, num_pages: int = 20, max_num_seqs: int = 4) -> None:
        config = PolicyConfig(
            num_pages, PAGE, 100, max_num_seqs, 64, 0, 2**21, CacheConfig("lru"), pipeline_depth=2
        )
        self.replica = Replica(config)
        self.device = DeviceModel(PAGE, 2)
        self.commands: list[Command] = []
        self.now = 0.0

    def feed(self, event: Event) -> list[Command]:
        self.now += 1.0
        commands = self.replica.handle(event, self.now)
        for command in commands:
            self.device.obey(command)
        check(self.replica)
        self.commands += commands
        return commands

    def ask(
        self, prompt: tuple[int, ...], max_tokens: int, stop_ids: tuple[int, ...] = (), n: int = 1
    ) -> None:
        params = SamplingParams(max_tokens=max_tokens, n=n, seed=0)
        self.feed(Arrive(Request(f"r{len(self.commands)}", BASE, prompt, params, stop_ids)))

    def end_step(self) -> list[Command]:
        return self.feed(self.device.finish_step(ok=True))

    def end_all(self) -> None:
        while self.device.steps:
            self.end_step()

    def steps(self) -> list[RunStep]:
        return [command for command in self.commands if isinstance(command, RunStep)]

    def emitted(self, sample: int = 0) -> list[int]:
        return [c.token for c in self.commands if isinstance(c, Emit) and c.sample == sample]


def test_the_second_step_computes_the_token_that_the_first_one_draws() -> None:
    rig = Pipeline()
    rig.ask((1, 2, 3), max_tokens=5)
    first, second = rig.steps()
    assert [(row.start, row.num_tokens, row.num_samples) for row in first.rows] == [(0, 3, 1)]
    assert [(row.start, row.num_tokens, row.num_samples) for row in second.rows] == [(3, 1, 1)]
    assert not rig.emitted(), "nothing is known yet"
    rig.end_all()
    assert rig.emitted() == undisturbed(BASE, (1, 2, 3), SamplingParams(max_tokens=5), (), 0)


def test_those_who_come_together_start_together() -> None:
    rig = Pipeline()
    requests = [Request(f"r{n}", BASE, (n, 2, 3), SamplingParams(max_tokens=2, seed=0), ()) for n in range(3)]
    for request in requests:
        commands = rig.feed(Arrive(request, more=request is not requests[-1]))
    assert [len(step.rows) for step in rig.steps()] == [3, 3]
    assert [command for command in commands if isinstance(command, RunStep)] == rig.steps()


def test_nothing_is_computed_past_the_last_token_asked_for() -> None:
    rig = Pipeline()
    rig.ask((1, 2, 3), max_tokens=2)
    assert len(rig.steps()) == 2
    rig.end_all()
    assert len(rig.steps()) == 2
    assert len(rig.emitted()) == 2


def test_an_end_learnt_a_step_late_is_undone() -> None:
    stop = next_token(BASE, (1, 2, 3), 0)
    rig = Pipeline(num_pages=2)
    rig.ask((1, 2, 3), max_tokens=5, stop_ids=(stop,))
    ended = rig.end_step()
    assert any(isinstance(c, Finish) and c.reason == "stop" for c in ended)
    assert any(isinstance(c, EndSequence) for c in ended)
    # The second step still writes into the page: somebody who needs both pages has to wait for it.
    rig.ask((4, 5, 6, 1, 2), max_tokens=1)
    assert len(rig.device.steps) == 1
    rig.end_step()
    assert len(rig.device.steps) == 1
    rig.end_all()
    assert rig.emitted() == [stop, next_token(BASE, (4, 5, 6, 1, 2), 0)]


def test_samples_fork_when_the_first_tokens_are_known() -> None:
    rig = Pipeline()
    rig.ask((1, 2, 3), max_tokens=3, n=2)
    assert len(rig.steps()) == 1, "who forks must know its token first"
    rig.end_all()
    for sample in (0, 1):
        expected = undisturbed(BASE, (1, 2, 3), SamplingParams(max_tokens=3), (), sample)
        assert rig.emitted(sample) == expected


def test_one_preempted_while_its_row_runs_keeps_the_token() -> None:
    rig = Pipeline(num_pages=4, max_num_seqs=2)
    prompts = ((1, 2, 3, 4, 5), (3, 3, 3, 3, 2))
    for prompt in prompts:
        rig.ask(prompt, max_tokens=8)
    rig.end_all()
    assert counters(rig.replica).preemptions > 0
    requests = {c.request for c in rig.commands if isinstance(c, Emit)}
    answers = [
        [c.token for c in rig.commands if isinstance(c, Emit) and c.request == r] for r in sorted(requests)
    ]
    assert sorted(answers) == sorted(
        undisturbed(BASE, prompt, SamplingParams(max_tokens=8), (), 0) for prompt in prompts
    )


def test_no_step_is_started_between_two_ends_that_come_together() -> None:
    rig = Pipeline(max_num_seqs=2)
    for prompt in ((1, 2, 3), (4, 5, 6), (3, 2, 1)):
        rig.ask(prompt, max_tokens=3)
    assert len(rig.steps()) == 2
    rig.feed(dataclasses.replace(rig.device.finish_step(ok=True), more=True))
    assert len(rig.steps()) == 2
    rig.feed(rig.device.finish_step(ok=False))
    survivors = [row.sequence for step in rig.steps()[2:] for row in step.rows]
    assert survivors
    assert not {row.sequence for row in rig.steps()[1].rows} & set(survivors)


def test_deeper_than_two_is_refused() -> None:
    with pytest.raises(ConfigError, match="pipeline_depth must be 1 or 2, got 3"):
        PolicyConfig(4, PAGE, 100, 1, 64, pipeline_depth=3)


def test_a_request_that_leaves_takes_no_token_along_after_one_that_is_missing() -> None:
    rig = Rig(pipeline_depth=2)
    rig.ask("r", 0, [1, 2, 3], max_tokens=8)
    rig.end_step()
    assert len(rig.device.steps) == 2
    rig.feed(Release("r"))
    rig.feed(rig.device.finish_step(ok=False))
    assert rig.of(Released) == [Released("r", 0, (1,))]
    rig.end_step()
    assert len(rig.tokens["r"]) == 1
    assert "r" not in rig.ends
