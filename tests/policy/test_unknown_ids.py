"""Events that tell of what the policy does not know: each is answered, none ends it, nobody else notices."""

from __future__ import annotations

import itertools
from typing import TypeVar

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from manylora_lab.baselines import ALL_CACHE_POLICIES

from manylora.config.policy import CacheConfig, PolicyConfig
from manylora.policy.replica import Replica
from manylora.protocol.commands import AdapterFreed, Command, Finish, Reject
from manylora.protocol.events import (
    Abort,
    AdapterAdded,
    AdapterRead,
    AdapterRemoved,
    Arrive,
    CopyDone,
    Event,
    StepDone,
    Timer,
)
from manylora.types import BASE, Request, SamplingParams
from tests.policy.device_model import DeviceModel, undisturbed
from tests.policy.invariants import check
from tests.policy.reports import gauges
from tests.policy.rig import Rig

UNKNOWN = 999
Sought = TypeVar("Sought")


def of(commands: list[Command], kind: type[Sought]) -> list[Sought]:
    return [command for command in commands if isinstance(command, kind)]


@pytest.mark.parametrize(
    "event",
    [
        Abort("nobody"), Abort("nobody", 3), StepDone(UNKNOWN, True), StepDone(0, False, error="late"),
        StepDone(-1, True), AdapterRead(UNKNOWN, True), AdapterRead(BASE, False, "late"), CopyDone(UNKNOWN, True),
        CopyDone(UNKNOWN, False), AdapterAdded(BASE, 3), Timer(),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_busy", [False, True])
def test_what_tells_of_nothing_known_changes_nothing(event: Event, is_busy: bool) -> None:
    rig = Rig()
    rig.add(1)
    if is_busy:
        rig.ask("busy", BASE, [1, 2, 3], 3)
    assert of(rig.feed(event), Finish) == []
    if is_busy:
        rig.settle()
        assert rig.tokens["busy"] == undisturbed(BASE, (1, 2, 3), rig.requests["busy"].params, (), 0)
    rig.serve("after", 1, [1, 2, 3])


@pytest.mark.parametrize("adapter", [UNKNOWN, BASE])
def test_what_cannot_be_removed_is_freed_at_once(adapter: int) -> None:
    rig = Rig()
    assert of(rig.feed(AdapterRemoved(adapter)), AdapterFreed) == [AdapterFreed(adapter)]
    rig.serve("after", BASE, [1, 2, 3])


def test_an_adapter_is_freed_once_however_often_it_is_removed() -> None:
    rig = Rig()
    rig.add(1)
    rig.ask("busy", 1, [1, 2, 3], 3)
    assert of(rig.feed(AdapterRemoved(1)) + rig.feed(AdapterRemoved(1)), AdapterFreed) == []
    rig.settle()
    assert of(rig.commands, AdapterFreed) == [AdapterFreed(1)]
    assert of(rig.feed(AdapterRemoved(1)), AdapterFreed) == [AdapterFreed(1)]  # it is as unknown as any other


def test_an_adapter_that_is_added_again_stays_as_it_is() -> None:
    rig = Rig()
    rig.add(1, 3)
    rig.serve("before", 1, [1, 2, 3])
    rig.add(1, 7)
    rig.serve("after", 1, [1, 2, 3])
    assert gauges(rig.replica).pages_adapters == 3


def test_a_second_request_of_a_live_id_is_refused_and_the_first_goes_on() -> None:
    rig = Rig()
    rig.ask("twice", BASE, [1, 2, 3], 4)
    (refused,) = of(rig.feed(Arrive(Request("twice", BASE, (4,), SamplingParams()))), Reject)
    assert isinstance(refused, Reject)
    assert refused.error.status == 400
    rig.settle()
    assert rig.tokens["twice"] == undisturbed(BASE, (1, 2, 3), rig.requests["twice"].params, (), 0)


@pytest.mark.parametrize("drawn", [None, (), (3,), (3, 3, 3)])
def test_a_row_whose_tokens_are_not_told_ends_its_request_alone(drawn: tuple[int, ...] | None) -> None:
    """Of a request with two samples, whose prompt is computed; another one decodes in the same step."""
    rig = Rig()
    rig.ask("first", BASE, [7], 9)
    rig.feed(Arrive(Request("lost", BASE, (1, 2), SamplingParams(n=2, max_tokens=3, seed=0))))
    rig.end_step()
    ended = rig.device.finish_step(ok=True)
    told = [
        row if len(row[1]) == 1 else (row[0] if drawn is not None else UNKNOWN, drawn or ())
        for row in ended.tokens
    ]
    ends = [end for end in rig.feed(StepDone(ended.step, True, tuple(told))) if isinstance(end, Finish)]
    assert [(end.request, end.sample, end.error and end.error.status) for end in ends] == [
        ("lost", 0, 500), ("lost", 1, 500),
    ]  # fmt: skip
    rig.settle()
    assert rig.tokens["first"] == undisturbed(BASE, (7,), rig.requests["first"].params, (), 0)


def test_a_steps_end_tells_that_those_before_it_have_ended() -> None:
    rig = Rig(pipeline_depth=2, max_num_seqs=1)
    rig.ask("first", BASE, [1], 5)
    assert len(rig.device.steps) == 2
    rig.device.finish_step(ok=True)
    ends = of(rig.feed(rig.device.finish_step(ok=True)), Finish)
    assert [(end.request, end.error and end.error.status) for end in ends] == [("first", 500)]
    rig.serve("after", BASE, [1, 2, 3])


# ---------------------------------------------------------------- all of it at once


class Strangers(RuleBasedStateMachine):
    """A replica on the dictionary device that is told of unknown ids, old ids, and the same twice, in between."""

    @initialize(
        policy=st.sampled_from(ALL_CACHE_POLICIES),
        depth=st.sampled_from([1, 2]),
        host=st.sampled_from([0, 9, 40]),
    )
    def start(self, policy: str, depth: int, host: int) -> None:
        cache = CacheConfig(policy, adapter_share=0.5)
        self.config = PolicyConfig(12, 2, 40, 3, 8, host, 1000, cache, pipeline_depth=depth)
        self.replica = Replica(self.config)
        self.device = DeviceModel(2, depth)
        self.now = 0.0
        self.added: dict[int, bool] = {}  # with whether it was removed
        self.freed: set[int] = set()
        self.seen: list[Event] = []  # answers of the device
        self.requests: dict[tuple[str, int], Request] = {}  # by id and how often it was used
        self.uses: dict[str, int] = {}
        self.tokens: dict[tuple[str, int, int], list[int]] = {}
        self.ends: dict[tuple[str, int, int], str] = {}
        self.ids = itertools.count(1)

    def feed(self, event: Event) -> list[Command]:
        self.now += 0.25
        commands = self.replica.handle(event, self.now)
        for command in commands:
            self.device.obey(command)
        check(self.replica)
        return commands

    def note(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Finish):
                key = (command.request, self.uses[command.request], command.sample)
                assert key not in self.ends, "one end"
                self.ends[key] = command.reason
            elif type(command).__name__ == "Emit":
                key = (command.request, self.uses[command.request], command.sample)  # type: ignore[union-attr]
                assert key not in self.ends, "nothing follows the end"
                self.tokens.setdefault(key, []).append(command.token)  # type: ignore[union-attr]
            elif isinstance(command, AdapterFreed):
                assert command.adapter not in self.freed, "freed once"
                assert self.added[command.adapter], "nothing is freed that was not removed"
                self.freed.add(command.adapter)

    def tell(self, event: Event) -> None:
        self.note(self.feed(event))

    def is_live(self, name: str) -> bool:
        use = self.uses.get(name, 0)
        request = self.requests.get((name, use))
        return request is not None and any((name, use, s) not in self.ends for s in range(request.params.n))

    # ------------------------------------------------------------ what is known

    @rule(num_pages=st.integers(1, 3))
    def add(self, num_pages: int) -> None:
        adapter = next(self.ids)
        self.added[adapter] = False
        self.tell(AdapterAdded(adapter, num_pages))

    @precondition(lambda self: not all(self.added.values()))
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        adapter = data.draw(st.sampled_from([a for a, is_removed in self.added.items() if not is_removed]))
        self.added[adapter] = True
        self.tell(AdapterRemoved(adapter))

    @rule(
        data=st.data(),
        name=st.sampled_from("abcde"),
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=6),
        n=st.sampled_from([1, 1, 2]),
        max_tokens=st.integers(1, 5),
    )
    def arrive(self, data: st.DataObject, name: str, prompt: list[int], n: int, max_tokens: int) -> None:
        """Ids are used again, those of live requests too; adapters may be unknown or gone."""
        adapter = data.draw(st.sampled_from([BASE, *self.added, UNKNOWN]))
        request = Request(name, adapter, tuple(prompt), SamplingParams(n=n, max_tokens=max_tokens, seed=0))
        is_refused = self.is_live(name) or (adapter != BASE and self.added.get(adapter, True))
        if not is_refused:
            self.uses[name] = self.uses.get(name, 0) + 1
            self.requests[name, self.uses[name]] = request
        commands = self.feed(Arrive(request))
        assert [command.request for command in of(commands, Reject)] == [name] * is_refused
        self.note(commands)

    @rule(name=st.sampled_from("abcde"), sample=st.sampled_from([None, 0, 1, 7]))
    def abort(self, name: str, sample: int | None) -> None:
        self.tell(Abort(name, sample))

    def answer(self, event: Event) -> None:
        self.seen.append(event)
        self.tell(event)

    @precondition(lambda self: self.device.steps)
    @rule(ok=st.sampled_from([True] * 9 + [False]))
    def end_step(self, ok: bool) -> None:
        self.answer(self.device.finish_step(ok))

    @precondition(lambda self: self.device.reads)
    @rule(ok=st.sampled_from([True, True, False]))
    def land_read(self, ok: bool) -> None:
        read = self.device.reads[0]
        self.device.land(read, ok)
        self.answer(AdapterRead(read.adapter, ok, "" if ok else "made to fail"))

    @precondition(lambda self: self.device.copies)
    @rule(ok=st.sampled_from([True, True, False]))
    def end_copy(self, ok: bool) -> None:
        copy = min(self.device.copies)
        self.device.end_copy(copy, ok)
        self.answer(CopyDone(copy, ok, 0.01, "" if ok else "made to fail"))

    # ------------------------------------------------------------ what is not

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def say_again(self, data: st.DataObject) -> None:
        """An answer that was given before. A read's has no number: while another runs it would be that one's."""
        event = data.draw(st.sampled_from(self.seen))
        if isinstance(event, AdapterRead) and any(
            read.adapter == event.adapter for read in self.device.reads
        ):
            return
        self.tell(event)

    @rule(
        event=st.one_of(
            st.builds(Abort, st.sampled_from(["nobody", "else"]), st.sampled_from([None, 0, 9])),
            st.builds(StepDone, st.sampled_from([-1, 0, 10**6]), st.booleans()),
            st.builds(AdapterRead, st.sampled_from([BASE, UNKNOWN]), st.booleans()),
            st.builds(CopyDone, st.sampled_from([-1, 0, 10**6]), st.booleans()),
            st.builds(AdapterAdded, st.just(BASE), st.integers(1, 3)),
        )
    )
    def say_something_unheard_of(self, event: Event) -> None:
        self.tell(event)

    @rule(data=st.data())
    def remove_a_stranger(self, data: st.DataObject) -> None:
        """Or again what was removed: it is freed at once unless that is still to come."""
        removed = [adapter for adapter, is_removed in self.added.items() if is_removed]
        adapter = data.draw(st.sampled_from([BASE, UNKNOWN, *removed]))
        is_leaving = adapter in removed and adapter not in self.freed
        commands = self.feed(AdapterRemoved(adapter))
        assert len(of(commands, AdapterFreed)) == (not is_leaving)

    @rule(num_pages=st.integers(1, 3), data=st.data())
    def add_again(self, num_pages: int, data: st.DataObject) -> None:
        served = [adapter for adapter, is_removed in self.added.items() if not is_removed]
        self.tell(AdapterAdded(data.draw(st.sampled_from([BASE, *served])), num_pages))

    # ------------------------------------------------------------ what must hold

    @invariant()
    def a_live_request_keeps_something_going(self) -> None:
        if hasattr(self, "device") and any(map(self.is_live, "abcde")):
            assert self.device.steps or self.device.reads or self.device.copies

    def teardown(self) -> None:
        if not hasattr(self, "device"):
            return
        for _ in range(10_000):
            if self.device.reads:
                self.land_read(ok=True)
            elif self.device.copies:
                self.end_copy(ok=True)
            elif self.device.steps:
                self.end_step(ok=True)
            else:
                break
        for (name, use), request in self.requests.items():
            for sample in range(request.params.n):
                key = (name, use, sample)
                assert key in self.ends, "each sample of each request has an end"
                if self.ends[key] == "length":
                    expected = undisturbed(request.adapter, request.prompt, request.params, (), sample)
                    assert self.tokens[key] == expected, "nobody's tokens change"
        assert self.freed == {adapter for adapter, is_removed in self.added.items() if is_removed}


Strangers.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestStrangers = Strangers.TestCase
