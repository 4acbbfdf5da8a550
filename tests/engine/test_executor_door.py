"""The door to executors: what goes through it, that all of it can be sent, and what each side does with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, get_args

import pytest
from manylora_lab.sim.device import SimulatedDevice

from manylora.engine.driver import Driver
from manylora.engine.local import LocalEngine
from manylora.executor.worker import Worker
from manylora.protocol.commands import (
    CLIENT_COMMANDS,
    DEVICE_COMMANDS,
    ENGINE_COMMANDS,
    Command,
    CopyPages,
    Emit,
    EndSequence,
    EvictAdapter,
    ForgetAdapter,
    InspectAdapter,
    ReadAdapter,
    ReportState,
    RunStep,
    SequenceStart,
    SetMerged,
    SetTimer,
    StepRow,
    SwapPages,
    VerifyAdapter,
    ask_of,
    handlers,
)
from manylora.protocol.events import AdapterRead, CopyDone, StepDone, SwitchDone, Timer
from manylora.protocol.executor import (
    AdapterChecked,
    AdapterError,
    DeviceEvent,
    ExecutorLost,
    ExecutorState,
    StepResult,
)
from manylora.types import RankTraffic, SamplingParams, TokenLogprobs
from tests.engine.executor_process import COMMANDS, EVENTS, RemoteExecutor, packed, unpacked
from tests.engine.fake_executor import FakeExecutor
from tests.engine.test_engine import CONFIG, INFO, drain, request
from tests.policy.device_model import undisturbed

BIASED = SamplingParams(max_tokens=9, seed=2**63 - 1, logit_bias=((5, -1.5),))
START = SequenceStart(7, 0, 3, (1, 2, 3), 3, 0, (4, 5), BIASED, (2,))
EXAMPLES: list[Any] = [
    RunStep(1, (START,), (StepRow(7, 0, 3, 1, ((0, 4), (1, 5))), StepRow(8, 9, 1, 0))),
    EndSequence(7), CopyPages(((1, 2), (3, 4))), SwapPages(5, True, ((1, 2),), 3), SwapPages(6, False, ((2, 1),)),
    ReadAdapter(3, (8, 9), "host"), EvictAdapter(3), InspectAdapter(3, "a folder"), VerifyAdapter(3),
    ForgetAdapter(3), ReportState(), SetMerged(4, 3), SwitchDone(4, False, 0.25, "no room"),
    RunStep(2, (), (StepRow(8, 9, 1, 0),), 3),
    StepResult(
        StepDone(1, True, ((7, (11, 12)), (8, (13,))), 0.25, unsound=(8,)),
        {(7, 0): TokenLogprobs(11, -0.5, ((11, -0.5), (4, -1.0))), (7, 1): TokenLogprobs(12, -1.5)},
    ),
    StepResult(StepDone(2, False, error="the device is gone", more=True), {}),
    CopyDone(5, True, 0.125), AdapterRead(3, False, "no such file", 0.5, True),
    AdapterChecked(3, True, 4, 16), AdapterChecked(3, False, error="too large", status=400),
    ExecutorState(12, 0.75, traffic=(RankTraffic(1, 64), RankTraffic(1, 64))), ExecutorLost("rank 1 has died"),
]  # fmt: skip
ASKED = [
    (RunStep(4, (), ()), StepDone(4, True)), (SwapPages(4, True, ()), CopyDone(4, True)),
    (ReadAdapter(4, ()), AdapterRead(4, True)), (SetTimer(4.0), Timer()),
    (SetMerged(4, 3), SwitchDone(4, True)),
]  # fmt: skip


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_everything_comes_out_of_bytes_as_it_went_in(message: Any) -> None:
    came = unpacked(packed(message), COMMANDS | EVENTS)
    assert came == message
    assert type(came) is type(message)


def test_there_is_an_example_of_everything() -> None:
    assert {type(message) for message in EXAMPLES} == DEVICE_COMMANDS | set(get_args(DeviceEvent))


def test_every_command_of_a_replica_has_one_that_carries_it_out() -> None:
    kinds = [DEVICE_COMMANDS, CLIENT_COMMANDS, ENGINE_COMMANDS]
    assert sum(map(len, kinds)) == len(frozenset().union(*kinds))
    assert frozenset().union(*kinds) >= set(get_args(Command))


@pytest.mark.parametrize("executor", [Worker, FakeExecutor])
def test_executors_have_a_method_for_every_command(executor: type) -> None:
    assert set(handlers(executor, DEVICE_COMMANDS)) == DEVICE_COMMANDS


def test_a_command_that_a_port_does_not_carry_out_is_named() -> None:
    with pytest.raises(TypeError, match="FakeExecutor does not carry out Emit, SetTimer"):
        handlers(FakeExecutor(), [RunStep, SetTimer, Emit])


@pytest.mark.parametrize(("command", "answer"), ASKED)
def test_an_answer_finds_its_command(command: Any, answer: Any) -> None:
    assert ask_of(command) == ask_of(answer)
    assert ask_of(command) is not None


def test_what_a_simulated_device_takes_no_time_for_needs_no_code_there() -> None:
    device = SimulatedDevice.__new__(SimulatedDevice)
    assert device.obey(CopyPages(((1, 2),)), 0.0) is None


# ---------------------------------------------------------------- an executor in another process


@contextlib.asynccontextmanager
async def engine_elsewhere() -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(Driver(CONFIG, RemoteExecutor(), INFO))
    try:
        yield engine
    finally:
        await engine.close()


def test_an_executor_in_another_process_gives_the_same_tokens() -> None:
    async def scenario() -> None:
        async with engine_elsewhere() as engine:
            assert (await engine.add_adapter("x", "3")).num_pages == 3
            with pytest.raises(AdapterError, match="no good"):
                await engine.add_adapter("y", "bad")
            streams = [
                drain(engine.generate(request(f"r{number}", adapter="x" if number % 2 else None)))
                for number in range(6)
            ]
            asked = request("r")
            for number, (tokens, reasons, _) in enumerate(await asyncio.gather(*streams)):
                assert tokens == {0: undisturbed(number % 2, asked.prompt, asked.params, (), 0)}
                assert reasons == {0: "length"}
            stats = await engine.stats()
            assert stats.adapter_reads == 1
            await engine.remove_adapter("x")

    asyncio.run(asyncio.wait_for(scenario(), 60))
