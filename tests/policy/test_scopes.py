"""Cache scopes: KV is shared within one, and what one scope asks changes nothing for another."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_lab.baselines import ALL_CACHE_POLICIES

from manylora.config.policy import CacheConfig, PolicyConfig
from manylora.policy.replica import Replica
from manylora.protocol.commands import Admitted, Command, Emit, RunStep, SetTimer
from manylora.protocol.events import AdapterAdded, AdapterRead, Arrive, CopyDone, Timer
from manylora.types import Request, SamplingParams
from tests.policy.device_model import DeviceModel, next_token
from tests.policy.invariants import check
from tests.policy.reports import counters, gauges
from tests.policy.rig import PAGE, Rig, prompt

SHIFT = 1000
SCOPES = ("", "a", "b", "ab")
KINDS = ("read", "copy", "step")


def cached(rig: Rig, name: str) -> int:
    (admitted,) = [command for command in rig.of(Admitted) if command.request == name]
    return int(admitted.num_cached)


def test_a_prompt_is_found_again_in_its_own_scope_only() -> None:
    rig = Rig(num_pages=60)
    rig.add(1)
    for adapter in (0, 1):
        for turn, found in (("first", 0), ("second", 3 * PAGE)):
            for scope in SCOPES:
                name = f"{turn}-{adapter}-{scope}"
                rig.serve(name, adapter, prompt(1, 3), 2, scope)
                assert cached(rig, name) == found


@pytest.mark.parametrize("scope", SCOPES)
def test_scopes_that_run_together_compute_pages_of_their_own(scope: str) -> None:
    rig = Rig(num_pages=60, max_num_seqs=8)
    for other in SCOPES:
        rig.ask(f"before-{other}", 0, prompt(1, 3), 6, other)
    rig.ask("asked", 0, prompt(1, 3), 6, scope)
    rig.settle()
    assert rig.check_answers() == len(SCOPES) + 1
    assert gauges(rig.replica).pages_history == len(SCOPES) * (3 + 6 // PAGE)


def test_history_on_the_host_comes_back_for_its_own_scope_only() -> None:
    rig = Rig("fastlibra", num_pages=8, num_host_pages=40)
    rig.serve("mine", 0, prompt(1, 4), 1, "a")
    for seed in range(2, 6):
        rig.serve(f"filler-{seed}", 0, prompt(seed, 4), 1, "c")
    rig.serve("theirs", 0, prompt(1, 4), 1, "b")
    assert counters(rig.replica).kv_hit_tokens_host == 0
    rig.serve("mine-again", 0, prompt(1, 4), 1, "a")
    assert counters(rig.replica).kv_hit_tokens_host > 0
    assert (cached(rig, "theirs"), cached(rig, "mine-again")) == (0, 4 * PAGE)


def test_a_request_written_without_a_scope_has_none() -> None:
    """As in journals that know no scopes."""
    request = Request("r", 0, (1, 2), SamplingParams(seed=0))
    fields = msgspec.to_builtins(Arrive(request))
    del fields["request"]["cache_scope"]
    assert msgspec.convert(fields, Arrive) == Arrive(request)


# ------------------------------------------------------------ what others may learn


class ShiftedModel(DeviceModel):
    """A model for which a sequence of shifted tokens goes on as the unshifted one does, shifted."""

    def draw(self, adapter: int, tokens: tuple[int, ...], sample: int) -> int:
        shift = tokens[0] // SHIFT * SHIFT
        return shift + next_token(adapter, tuple(token - shift for token in tokens), sample)


class Run:
    """A replica, its device and a clock; ``shifts``: what is added to a scope's tokens."""

    def __init__(self, config: PolicyConfig, shifts: dict[str, int]) -> None:
        self.replica = Replica(config)
        self.device = ShiftedModel(config.page_tokens, config.pipeline_depth)
        self.shifts = shifts
        self.now = 0.0
        self.timer_is_set = False
        self.num_requests = 0

    def feed(self, event: Any) -> list[Command]:
        """The commands, without the shifts."""
        self.now += 0.25
        commands = self.replica.handle(event, self.now)
        for command in commands:
            self.timer_is_set |= isinstance(command, SetTimer)
            self.device.obey(command)
        check(self.replica)
        return [_unshifted(command) for command in commands]

    def do(self, action: Any) -> list[Command]:
        """One thing that happens, if it can."""
        match action:
            case (scope, adapter, tokens, max_tokens, n):
                self.num_requests += 1
                shifted = tuple(token + self.shifts.get(scope, 0) for token in tokens)
                params = SamplingParams(n=n, max_tokens=max_tokens, seed=0)
                return self.feed(
                    Arrive(Request(f"r{self.num_requests}", adapter, shifted, params, (), scope))
                )
            case "step" if self.device.steps:
                return self.feed(self.device.finish_step(ok=True))
            case "read" if self.device.reads:
                read = self.device.reads[0]
                self.device.land(read, True)
                return self.feed(AdapterRead(read.adapter, True))
            case "copy" if self.device.copies:
                copy = min(self.device.copies)
                self.device.end_copy(copy, True)
                return self.feed(CopyDone(copy, True, 1e-5))
            case "timer" if self.timer_is_set:
                self.timer_is_set = False
                return self.feed(Timer())
            case "settle":
                return [command for _ in range(20) for kind in KINDS for command in self.do(kind)]
        return []


def _unshifted(command: Command) -> Command:
    match command:
        case Emit():
            return command._replace(token=command.token % SHIFT)
        case RunStep():
            starts = [
                dataclasses.replace(start, tokens=tuple(token % SHIFT for token in start.tokens))
                for start in command.starts
            ]
            return dataclasses.replace(command, starts=tuple(starts))
    return command


asks = st.tuples(
    st.sampled_from(["a", "b"]),
    st.sampled_from([0, 1]),
    st.builds(lambda token, length: [token] * length, st.integers(0, 1), st.integers(1, 12)),
    st.integers(1, 6),
    st.sampled_from([1, 1, 1, 2]),
)
happenings = st.sampled_from(["step", "step", "read", "copy", "timer", "settle", "settle"])


@pytest.mark.parametrize("policy", ALL_CACHE_POLICIES)
@settings(max_examples=40, deadline=None)
@given(
    actions=st.lists(asks | happenings, max_size=60),
    num_pages=st.integers(6, 20),
    num_host_pages=st.sampled_from([0, 5, 30]),
    page_tokens=st.sampled_from([1, 2, 4]),
    pipeline_depth=st.sampled_from([1, 2]),
)
def test_nothing_of_one_scope_tells_what_another_asked(
    policy: str,
    actions: list[Any],
    num_pages: int,
    num_host_pages: int,
    page_tokens: int,
    pipeline_depth: int,
) -> None:
    """Every command is the same, at the same event, whether the others ask one's own tokens or quite others."""
    cache = CacheConfig(policy, adapter_share=0.5)
    config = PolicyConfig(
        num_pages, page_tokens, 40, 4, 12, num_host_pages, 1000, cache, pipeline_depth=pipeline_depth
    )
    same, different = Run(config, {}), Run(config, {"b": SHIFT})
    for run in (same, different):
        run.feed(AdapterAdded(1, 2))
    for action in actions:
        assert same.do(action) == different.do(action)
