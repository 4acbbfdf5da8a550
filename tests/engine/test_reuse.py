"""Names and ids that are used again, at once or before their last use is over; ends that are asked for twice."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from manylora.engine.client import Delta, EngineDead, GenerationRequest
from manylora.engine.driver import Driver
from manylora.engine.outbox import Outbox
from manylora.protocol.commands import Emit, Finish, PromptScored
from manylora.protocol.executor import AdapterError
from manylora.types import BASE, Request, SamplingParams
from tests.engine.fake_executor import FakeExecutor, prompt_logprobs
from tests.engine.test_engine import CONFIG, INFO, drain, kinds, request, running
from tests.policy.device_model import undisturbed

WAIT_S = 60.0


class Started:
    """A driver whose deltas are kept."""

    def __init__(self, executor: FakeExecutor) -> None:
        self.deltas: queue.Queue[Delta] = queue.Queue()
        self.deaths: list[str] = []
        self.driver = Driver(CONFIG, executor, INFO)
        self.driver.start(self._keep, self.deaths.append)

    def _keep(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self.deltas.put(delta)

    def until_ended(self, num_ends: int) -> list[Delta]:
        """All deltas until so many samples have ended."""
        found: list[Delta] = []
        while sum(delta.finish_reason is not None for delta in found) < num_ends:
            found.append(self.deltas.get(timeout=WAIT_S))
        return found


@pytest.fixture
def impatient() -> Iterator[None]:
    """Threads take turns all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_loading_and_unloading_one_name_from_two_threads(impatient: None) -> None:
    executor = FakeExecutor()
    started = Started(executor)
    futures = []
    is_over = threading.Event()

    def repeat(action: Callable[[], object]) -> None:
        while not is_over.is_set():
            try:
                action()
            except AdapterError:
                pass  # there already, or gone already

    def unload() -> None:
        futures.append(started.driver.remove_adapter("x"))

    threads = [
        threading.Thread(target=repeat, args=(action,))
        for action in (lambda: started.driver.add_adapter("x", "1"), unload)
    ]
    for thread in threads:
        thread.start()
    for _ in range(100):
        if started.deaths:
            break
        started.driver.stats().result(WAIT_S)
        is_over.wait(0.03)
    is_over.set()
    for thread in threads:
        thread.join()
    assert started.deaths == []
    if started.driver.adapters():
        unload()
    assert futures
    for future in futures:
        future.result(WAIT_S)
    started.driver.submit(request("after"))
    assert sum((delta.tokens for delta in started.until_ended(1)), ()) == tuple(
        undisturbed(BASE, (1, 2, 3), SamplingParams(max_tokens=8), (), 0)
    )
    assert executor.known == {}
    assert started.driver.adapter_uses() == ()
    started.driver.close()


@kinds
def test_an_id_is_used_again_while_the_engine_still_speaks_of_the_last_one(kind: str) -> None:
    async def scenario() -> None:
        executor = FakeExecutor()
        async with running(kind, executor) as engine:
            for turn in range(20):
                executor.step_gate.clear()
                executor.is_held.clear()
                old = engine.generate(request("a", (turn, 1), max_tokens=40))
                await asyncio.to_thread(executor.is_held.wait, WAIT_S)
                await old.aclose()  # type: ignore[attr-defined]
                new = engine.generate(request("a", (turn, 2), n=2))
                executor.step_gate.set()
                tokens, reasons, _ = await asyncio.wait_for(drain(new), WAIT_S)
                assert reasons == {0: "length", 1: "length"}
                for sample in range(2):
                    assert tokens[sample] == undisturbed(
                        BASE, (turn, 2), SamplingParams(max_tokens=8), (), sample
                    )
            assert (await engine.stats()).num_running == 0

    asyncio.run(scenario())


def test_a_second_request_of_a_live_id_is_refused_and_the_first_goes_on() -> None:
    executor = FakeExecutor()
    executor.step_gate.clear()
    started = Started(executor)
    started.driver.submit(request("a", (1, 2, 3)))
    assert executor.is_held.wait(WAIT_S)
    started.driver.submit(request("a", (4, 5, 6)))
    started.driver.submit(request("a", (7, 8, 9), adapter="nobody"))
    executor.step_gate.set()
    found = started.until_ended(3)
    refused = [delta for delta in found if delta.error is not None]
    assert [(delta.error and delta.error.status, delta.finish_reason) for delta in refused] == [
        (400, "error")
    ] * 2
    assert sum((delta.tokens for delta in found), ()) == tuple(
        undisturbed(BASE, (1, 2, 3), SamplingParams(max_tokens=8), (), 0)
    )
    started.driver.close()
    assert started.deaths == []


def test_an_id_is_free_once_its_request_has_ended_collected_or_not() -> None:
    outbox = Outbox(lambda: 0.0)
    params = SamplingParams(max_tokens=9)
    for serial, token in ((1, 5), (2, 6)):
        asked = GenerationRequest("a", (1,), params, serial=serial)
        assert outbox.may_open(asked)
        outbox.open(Request("a", BASE, (1,), params), asked)
        outbox.emit(Emit("a", 0, 0, token, (1, 0)), 0.0)
        outbox.finish(Finish("a", 0, "length" if serial == 2 else "abort"), 0.0)
    assert [(delta.serial, delta.tokens, delta.finish_reason) for delta in outbox.collect()] == [
        (1, (5,), "abort"), (2, (6,), "length"),
    ]  # fmt: skip
    assert outbox.collect() == []


# ---------------------------------------------------------------- ends


def test_every_closer_waits_for_the_end() -> None:
    executor = FakeExecutor()
    executor.step_gate.clear()
    started = Started(executor)
    started.driver.submit(request("a"))
    assert executor.is_held.wait(WAIT_S)
    closers = [threading.Thread(target=started.driver.close) for _ in range(3)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(0.2)
        assert closer.is_alive(), "the step in flight has not ended"
    executor.step_gate.set()
    for closer in closers:
        closer.join(WAIT_S)
        assert not closer.is_alive()
    assert executor.closed == 1
    with pytest.raises(EngineDead):
        started.driver.stats().result(WAIT_S)


def test_the_loops_own_thread_may_close() -> None:
    """As where the garbage collector comes by there."""
    executor = FakeExecutor()
    driver = Driver(CONFIG, executor, INFO)
    driver.start(lambda _: driver.close(), lambda _: None)
    driver.submit(request("a"))
    assert driver._thread is not None
    driver._thread.join(WAIT_S)
    assert not driver._thread.is_alive()
    driver.close()
    assert executor.closed == 1


def test_every_closer_of_a_client_waits_for_the_end() -> None:
    async def scenario() -> None:
        executor = FakeExecutor()
        async with running("local", executor) as engine:
            executor.step_gate.clear()
            stream = engine.generate(request("a"))
            await asyncio.to_thread(executor.is_held.wait, WAIT_S)
            closing = [asyncio.create_task(engine.close()) for _ in range(3)]
            done, _ = await asyncio.wait(closing, timeout=0.2)
            executor.step_gate.set()
            assert not done, "the step in flight had not ended"
            closing.pop().cancel()  # one of them gives up, the others do not
            await asyncio.wait_for(asyncio.gather(*closing), WAIT_S)
            assert executor.closed == 1
            with pytest.raises(EngineDead):
                await drain(stream)

    asyncio.run(scenario())


def test_a_closer_that_gives_up_takes_no_other_along() -> None:
    async def scenario() -> None:
        async with running("remote", FakeExecutor()) as engine:
            closing = [asyncio.create_task(engine.close()) for _ in range(3)]
            await asyncio.sleep(0)
            closing.pop().cancel()
            await asyncio.wait_for(asyncio.gather(*closing), WAIT_S)

    asyncio.run(scenario())


def test_what_an_earlier_attempt_says_of_a_prompt_is_not_joined_to_the_next_ones() -> None:
    """Unless it is what comes next, which is the same whoever says it."""
    prompt, params = (5, 6, 7, 8, 9), SamplingParams(max_tokens=1, prompt_logprobs=0)
    outbox = Outbox(lambda: 0.0)

    def scored(start: int, *tokens: int) -> None:
        outbox.prompt_logprobs = {1: prompt_logprobs(tokens)}
        outbox.prompt_scored(PromptScored("r", 1, start), 0.0)

    for attempt in (0, 1):
        outbox.open(
            Request("r", BASE, prompt, params), GenerationRequest("r", prompt, params, attempt=attempt)
        )
        scored(0, 6, 7)
    scored(3, 9)
    scored(0, 6)
    scored(2, 8)
    outbox.finish(Finish("r", 0, "abort"), 0.0)
    (released, ended) = outbox.collect()
    assert (released.prompt_logprobs, ended.prompt_logprobs) == (None, None), "not before all of it is known"
    outbox.open(Request("r", BASE, prompt, params), GenerationRequest("r", prompt, params))
    for start, token in enumerate(prompt[1:]):
        scored(start, token)
        scored(start, token)
    outbox.finish(Finish("r", 0, "length"), 0.0)
    (delta,) = outbox.collect()
    assert delta.prompt_logprobs == prompt_logprobs(prompt[1:])
