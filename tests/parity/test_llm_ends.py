"""What an ``LLM`` refuses, how many prompts it submits, and ends of its process that are not orderly."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from manylora import LLM
from manylora.engine.client import Delta, EngineDead
from manylora.engine.driver import Driver
from manylora.engine.local import LocalEngine
from manylora.executor.worker import Worker
from manylora.protocol.commands import DeviceCommand, RunStep, StepRow
from manylora.text.generate import GenerationFailed
from manylora.types import InvalidRequest
from tests.parity.engines import Bench, greedy, random_tokens

HANG_S = 60.0
DEMO = str(Path(__file__).resolve().parents[2] / "demo" / "model")


@pytest.fixture(scope="module")
def demo() -> Any:
    with LLM(DEMO, device="cpu", device_pool="16MiB", host_pool=0) as llm:
        yield llm


@pytest.mark.parametrize(
    "prompts",
    [
        b"bytes", bytearray(b"x"), pytest.param(memoryview(b"x"), id="memoryview"), {"a": 1}, {1: 2}, [b"bytes"],
        ["fine", b"bytes"], ["fine", {"a": 1}], "", [""], ["fine", ""], "half \ud800", ["fine", "\udfff"], 5, None,
        [None], [[]], [{1, 2}],
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_prompt_is_refused_before_anything_runs(demo: LLM, prompts: Any) -> None:
    before = demo.stats().prompt_tokens
    with pytest.raises(InvalidRequest):
        demo.generate(prompts, greedy(1))
    assert demo.stats().prompt_tokens == before


def test_half_a_character_in_a_chat_is_refused(demo: LLM) -> None:
    with pytest.raises(InvalidRequest, match="half a character"):
        demo.chat([{"role": "user", "content": "x\ud800"}], greedy(1))


# ---------------------------------------------------------------- more prompts than are submitted at a time


def test_more_prompts_than_are_submitted_at_a_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Order of the results, tokens, streaming and what comes after are as ever."""
    submitted: list[str] = []
    ended: list[str] = []
    most = [0]
    submit, deliver = Driver.submit, LocalEngine._deliver

    def watched(driver: Driver, request: Any) -> None:
        submitted.append(request.id)
        most[0] = max(most[0], len(submitted) - len(ended))
        submit(driver, request)

    def delivered(engine: LocalEngine, deltas: list[Delta]) -> None:
        ended.extend(delta.request for delta in deltas if delta.finish_reason)
        deliver(engine, deltas)

    monkeypatch.setattr(Driver, "submit", watched)
    monkeypatch.setattr(LocalEngine, "_deliver", delivered)
    prompts = [random_tokens(i, 3 + i % 7, bench.checkpoint.vocab_size) for i in range(25)]
    names = [bench.names[i % 3] for i in range(25)]
    lengths = [1 + (7 * i) % 11 for i in range(25)]
    with bench.llm(max_waiting=3) as engine:
        outputs = engine.generate(prompts, [greedy(length) for length in lengths], names)
        assert [output.prompt_token_ids for output in outputs] == [list(prompt) for prompt in prompts]
        for output, length in zip(outputs, lengths):
            bench.check([output], length)
        assert submitted == [output.request_id for output in outputs]
        assert most[0] == 3
        # From several threads too there are no more.
        threads = [threading.Thread(target=engine.generate, args=(prompts, greedy(2))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_S)
        assert most[0] <= 3
        assert len(submitted) == 4 * 25
        assert engine.stats().num_waiting == 0


def test_a_failure_among_many_ends_the_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = iter([False] * 3 + [True])
    obey = Worker.obey

    def failing(worker: Worker, command: DeviceCommand) -> None:
        if isinstance(command, RunStep) and next(fails, False):
            command = RunStep(command.step, command.starts, (StepRow(10**9, 0, 1, 1),))  # an unknown sequence
        obey(worker, command)

    monkeypatch.setattr(Worker, "obey", failing)
    prompts = [[1 + i % 5, 2, 3] for i in range(40)]
    with bench.llm(max_waiting=2) as engine:
        with pytest.raises(GenerationFailed):
            engine.generate(prompts, greedy(4))
        bench.check(engine.generate(prompts, greedy(4)), 4)
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.pages_running) == (0, 0, 0)


def test_streams_and_cancelled_calls_give_their_room_back(bench: Bench) -> None:
    prompts = [[1 + i, 2, 3] for i in range(9)]

    async def scenario() -> None:
        async with bench.async_llm(max_waiting=2) as engine:
            for _ in range(3):
                cancelled = asyncio.ensure_future(engine.generate(prompts, greedy(60))._all())
                await asyncio.sleep(0.02)
                cancelled.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await cancelled
                async for _ in engine.generate(prompts, greedy(60)):
                    break
            tokens: dict[int, list[int]] = {}
            async for news in engine.generate(prompts, greedy(5)):
                tokens.setdefault(news.prompt_index, []).extend(news.token_ids)
            outputs = await engine.generate(prompts, greedy(5))
            bench.check(outputs, 5)
            assert [tokens[i] for i in range(9)] == [output.outputs[0].token_ids for output in outputs]

    asyncio.run(asyncio.wait_for(scenario(), HANG_S))


# ---------------------------------------------------------------- hanging, forked, exiting


def test_a_step_that_hangs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every open call raises, close returns, and the process lives on."""
    gate = threading.Event()
    is_held = threading.Event()
    obey = Worker.obey

    def hanging(worker: Worker, command: DeviceCommand) -> None:
        if isinstance(command, RunStep):
            is_held.set()
            gate.wait()
        obey(worker, command)

    with bench.llm(step_timeout=1) as engine:
        bench.check(engine.generate([[1, 2, 3]], greedy(4)), 4)
        monkeypatch.setattr(Worker, "obey", hanging)
        failures: list[BaseException] = []

        def call() -> None:
            try:
                engine.generate([[1, 2, 3]] * 3, greedy(4))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_S)
        assert [type(error) for error in failures] == [EngineDead] * 3
        with pytest.raises(EngineDead, match="has not ended within 1 s"):
            engine.stats()
        began = time.monotonic()
        engine.close()
        assert time.monotonic() - began < 60  # the step does not end before the test
    gate.set()


def run_script(script: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": f"{root}/src:{root}", "CUDA_VISIBLE_DEVICES": ""}
    opened = (
        f'from manylora import LLM, SamplingParams\nllm = LLM({DEMO!r}, device="cpu", device_pool="16MiB")\n'
    )
    return subprocess.run(
        [sys.executable, "-c", opened + script], capture_output=True, text=True, env=env, timeout=timeout_s
    )


def test_after_a_fork_the_child_is_told_and_the_parent_goes_on() -> None:
    script = """
import gc, os, sys, asyncio
from manylora.engine.client import EngineDead
llm.generate("Once", SamplingParams(max_tokens=2))
child = os.fork()
if child == 0:
    message = {"role": "user", "content": "x"}
    for call in (lambda: llm.generate("x"), llm.stats, llm.adapters, lambda: llm.chat([message])):
        try:
            call()
        except EngineDead as error:
            assert "another process" in str(error)
        else:
            os._exit(3)
    llm.close()
    del llm
    gc.collect()
    sys.exit(7)  # finalizers and atexit functions run
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
assert len(llm.generate("Once", SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3
llm.close()
"""
    done = run_script(script)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("is_used_again", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_daemon_thread_that_generates_at_exit_says_nothing(is_used_again: bool) -> None:
    tokens = 2 if is_used_again else 900
    script = f"""
import threading, time
def work():
    while True:
        llm.generate(["Once upon a time"] * 8, SamplingParams(max_tokens={tokens}, ignore_eos=True))
threading.Thread(target=work, daemon=True).start()
threading.Thread(target=work, daemon=True).start()
while not llm.stats().generated_tokens:
    time.sleep(0.01)
"""
    done = run_script(script)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "pending" not in done.stderr


def test_a_thread_goes_on_when_the_main_thread_has_ended() -> None:
    script = """
import threading, time
def work():
    time.sleep(0.5)  # the main thread has ended
    for _ in range(3):
        outputs = llm.generate(["Once upon a time"] * 8, SamplingParams(max_tokens=9, ignore_eos=True))
        assert all(len(output.outputs[0].token_ids) == 9 for output in outputs)
    print("done")
llm.generate("Once", SamplingParams(max_tokens=2))
threading.Thread(target=work).start()
"""
    done = run_script(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
    assert "Traceback" not in done.stderr


def test_exit_without_close_and_with_a_hung_step() -> None:
    script = """
import threading, time
from manylora.executor.worker import Worker
from manylora.protocol.commands import RunStep
obey = Worker.obey
Worker.obey = lambda worker, command: (isinstance(command, RunStep) and time.sleep(3600)) or obey(worker, command)
threading.Thread(target=llm.generate, args=("Once",), daemon=True).start()
time.sleep(1)
"""
    done = run_script(script)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
