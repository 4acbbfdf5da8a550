"""Engines that hang: who notices, when, and what those who wait are told."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.config.sections import EngineSettings, ModelSettings
from manylora.engine import remote, service, wire
from manylora.engine.client import EngineDead, EngineSilent
from manylora.engine.driver import Driver
from manylora.engine.local import LocalEngine
from manylora.engine.remote import RemoteEngine
from manylora.engine.watchdog import Judge, Pulse, tick_s
from tests.engine.fake_executor import FakeExecutor
from tests.engine.test_engine import CONFIG, INFO, drain, request

LIMIT_S = 0.8
HANG_S = 60.0
"""For what must not hang: far more than a slow machine needs."""


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Looks:
    """A judge that looks every tick."""

    def __init__(self, limit_s: float = 8.0) -> None:
        self.clock = Clock()
        self.tick_s = tick_s(limit_s)
        self.judge = Judge(limit_s, self.clock)

    def look(self, pulse: Pulse | None, after_s: float | None = None) -> str | None:
        self.clock.now_s += self.tick_s if after_s is None else after_s
        return self.judge.look(pulse)

    def until_lost(self, pulse: Pulse | None, most: int = 1000) -> float | None:
        """Seconds until this pulse, again and again, is taken for a hang; None: it is not."""
        began_s = self.clock.now_s
        for _ in range(most):
            if self.look(pulse):
                return self.clock.now_s - began_s
        return None


def test_a_piece_of_work_that_does_not_end_is_a_hang_soon_after_the_limit() -> None:
    lost_s = Looks().until_lost(Pulse(7, 0.0))
    assert lost_s is not None
    assert 8.0 <= lost_s <= 8.0 + 3 * tick_s(8.0)


def test_silence_is_a_hang_soon_after_the_limit() -> None:
    looks = Looks()
    looks.look(Pulse(0, 0.0))
    lost_s = looks.until_lost(None)
    assert lost_s is not None
    assert 8.0 <= lost_s <= 8.0 + 2 * tick_s(8.0)


def test_an_idle_engine_is_neither_busy_nor_silent() -> None:
    assert Looks().until_lost(Pulse(0, 0.0)) is None


def test_work_that_goes_on_is_no_hang() -> None:
    looks = Looks()
    for work in range(1, 1000):
        assert looks.look(Pulse(work, 0.0)) is None


def test_what_is_spent_on_compiling_does_not_count() -> None:
    looks = Looks()
    prepared_s = 0.0
    for _ in range(1000):
        prepared_s += looks.tick_s
        assert looks.look(Pulse(7, prepared_s)) is None
    assert looks.until_lost(Pulse(7, prepared_s)) is not None


def test_what_the_judge_sleeps_through_does_not_count() -> None:
    """As where a terminal stops all processes, and lets them go on."""
    looks = Looks()
    assert looks.look(Pulse(7, 0.0)) is None
    assert looks.look(Pulse(7, 0.0), after_s=10_000) is None
    assert looks.look(None, after_s=10_000) is None


@given(
    pulses=st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), max_size=200),
    limit_s=st.floats(0.1, 10),
)
def test_no_more_is_counted_than_has_passed(pulses: list[tuple[int, bool, bool]], limit_s: float) -> None:
    """Whatever comes in whatever order: no hang before the limit, and none while anything changes."""
    looks = Looks(limit_s)
    same_since_s, heard_s, before = 0.0, 0.0, None
    prepared_s = 0.0
    for work, is_heard, is_preparing in pulses:
        prepared_s += looks.tick_s if is_preparing else 0.0
        reason = looks.look(Pulse(work, prepared_s) if is_heard else None)
        now_s = looks.clock.now_s
        if is_heard:
            if work != before or work == 0:
                same_since_s, before = now_s, work
            heard_s = now_s
        if reason:
            longest_s = max(now_s - same_since_s, now_s - heard_s) if is_heard else now_s - heard_s
            assert longest_s >= limit_s - 1e-6
            return


@contextlib.contextmanager
def hanging() -> Iterator[FakeExecutor]:
    """An executor whose steps do not end before the block does."""
    executor = FakeExecutor()
    executor.step_gate.clear()
    try:
        yield executor
    finally:
        executor.step_gate.set()


def test_a_local_engine_whose_step_hangs_fails_every_call_and_can_be_closed() -> None:
    async def scenario(executor: FakeExecutor) -> None:
        driver = Driver(CONFIG, executor, INFO, step_timeout_s=LIMIT_S)
        engine = LocalEngine(driver)
        card = await engine.add_adapter("first", "3")
        waits: list[Awaitable[object]] = [drain(engine.generate(request(f"r{i}"))) for i in range(3)]
        waits += [engine.stats(), engine.remove_adapter(card.name)]
        for found in await asyncio.gather(*waits, return_exceptions=True):
            assert isinstance(found, EngineDead)
            assert "a step has not ended" in str(found)
        assert "a step has not ended" in await engine.wait_dead()
        with pytest.raises(EngineDead):
            engine.generate(request("late"))
        with pytest.raises(EngineDead):
            await engine.stats()
        began = time.monotonic()
        await engine.close()
        assert time.monotonic() - began < 60  # the step does not end before the test
        assert executor.closed == 0  # it may still be at work

    with hanging() as executor:
        asyncio.run(asyncio.wait_for(scenario(executor), HANG_S))
    # The step ended after all: what it left behind is freed.
    end = time.monotonic() + HANG_S
    while not executor.closed:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert executor.closed == 1


def test_close_does_not_wait_for_a_step_that_nobody_has_given_up_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("manylora.engine.driver.CLOSE_S", 0.2)

    async def scenario(executor: FakeExecutor) -> None:
        engine = LocalEngine(Driver(CONFIG, executor, INFO, step_timeout_s=3600))
        waiting = asyncio.create_task(drain(engine.generate(request("r"))))
        assert await asyncio.to_thread(executor.is_held.wait, HANG_S)
        await engine.close()
        with pytest.raises(EngineDead):
            await waiting

    with hanging() as executor:
        asyncio.run(asyncio.wait_for(scenario(executor), HANG_S))


def test_everybody_who_closes_waits_for_the_end() -> None:
    executor = FakeExecutor()
    executor.step_gate.clear()
    driver = Driver(CONFIG, executor, INFO)
    driver.start(lambda _: None, lambda _: None)
    driver.submit(request("r"))
    assert executor.is_held.wait(HANG_S)
    seen: list[int] = []

    def close() -> None:
        driver.close()
        seen.append(executor.closed)

    threads = [threading.Thread(target=close) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    assert not seen
    executor.step_gate.set()
    for thread in threads:
        thread.join(HANG_S)
    assert seen == [1, 1, 1]


def test_idle_and_compiling_engines_live() -> None:
    async def scenario() -> None:
        executor = FakeExecutor()
        engine = LocalEngine(Driver(CONFIG, executor, INFO, step_timeout_s=LIMIT_S))
        await asyncio.sleep(2 * LIMIT_S)
        await drain(engine.generate(request("after idling")))
        executor.step_gate.clear()
        waiting = asyncio.create_task(drain(engine.generate(request("compiling"))))
        began = time.monotonic()
        while time.monotonic() < began + 2 * LIMIT_S:
            executor.preparation_s = time.monotonic() - began
            await asyncio.sleep(0.01)
        executor.step_gate.set()
        tokens, _, _ = await waiting
        assert len(tokens[0]) == 8
        await engine.close()

    asyncio.run(asyncio.wait_for(scenario(), HANG_S))


@contextlib.asynccontextmanager
async def across_a_wire(driver: Driver, limit_s: float) -> AsyncIterator[RemoteEngine]:
    ours, theirs = socket.socketpair()

    def child() -> None:
        assert isinstance(wire.read_from_server(theirs), wire.Start)
        service.serve(theirs, service.Sender(theirs), driver)
        theirs.close()

    thread = threading.Thread(target=child, daemon=True)
    thread.start()
    engine = await RemoteEngine.connect(ours, EngineSettings(ModelSettings("fake"), step_timeout_s=limit_s))
    yield engine
    await engine.close()
    await asyncio.to_thread(thread.join, HANG_S)
    assert not thread.is_alive()


def test_a_remote_engine_whose_step_hangs_is_dead_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process lives, and says so: that alone is not enough."""
    monkeypatch.setattr("manylora.engine.driver.CLOSE_S", 0.2)

    async def scenario(executor: FakeExecutor) -> None:
        driver = Driver(CONFIG, executor, INFO, step_timeout_s=LIMIT_S)
        async with across_a_wire(driver, LIMIT_S) as engine:
            await asyncio.sleep(2 * LIMIT_S)  # idle
            assert await engine.adapters() == ()
            with pytest.raises(EngineDead, match="a step has not ended"):
                await drain(engine.generate(request("r")))
            with pytest.raises(EngineDead):
                await engine.adapters()

    with hanging() as executor:
        asyncio.run(asyncio.wait_for(scenario(executor), HANG_S))


def test_calls_to_an_engine_that_says_nothing_fail_long_before_it_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "ANSWER_S", 0.3)

    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        theirs.sendall(wire.frame(wire.EngineReady(INFO)))
        settings = EngineSettings(ModelSettings("fake"), step_timeout_s=300)
        engine = await RemoteEngine.connect(ours, settings)
        for _ in range(2):
            with pytest.raises(EngineSilent, match="said nothing"):
                await engine.adapters()
        waiting = engine.generate(request("r"))  # it may yet be answered
        theirs.sendall(wire.frame(wire.Failed("a bug")))
        theirs.close()
        with pytest.raises(EngineDead, match="a bug"):
            await drain(waiting)
        await engine.close()

    asyncio.run(asyncio.wait_for(scenario(), HANG_S))


@pytest.mark.parametrize("computes", [True, False])
def test_an_engine_is_unready_that_gives_no_sign_at_all(
    computes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that holds its interpreter while it compiles says nothing, either."""
    monkeypatch.setattr("manylora.engine.client.SILENT_S", 1.0)
    monkeypatch.setattr(remote, "tick_s", lambda limit_s: 0.1)

    async def scenario(pid: int) -> None:
        ours, theirs = socket.socketpair()
        theirs.sendall(wire.frame(wire.EngineReady(INFO, pid)))
        settings = EngineSettings(ModelSettings("fake"), step_timeout_s=300)
        engine = await RemoteEngine.connect(ours, settings)
        for _ in range(10):
            theirs.sendall(wire.frame(wire.Beat(Pulse(1, 0.0))))
            await asyncio.sleep(0.2)
            assert engine.why_unready() is None
        if computes:
            for _ in range(10):
                await asyncio.sleep(0.2)
                assert engine.why_unready() is None
        else:
            while engine.why_unready() is None:
                await asyncio.sleep(0.05)
            theirs.sendall(wire.frame(wire.Beat(Pulse(1, 0.0))))
            while engine.why_unready() is not None:
                await asyncio.sleep(0.05)
        theirs.close()
        await engine.wait_dead()
        assert "died" in str(engine.why_unready())
        await engine.close()

    code = "while True: pass" if computes else "import time; time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-S", "-c", code]) as process:
        try:
            asyncio.run(asyncio.wait_for(scenario(process.pid), HANG_S))
        finally:
            process.kill()


def test_an_engine_that_does_not_read_does_not_hold_up_the_end() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        theirs.sendall(wire.frame(wire.EngineReady(INFO)))
        engine = await RemoteEngine.connect(ours, EngineSettings(ModelSettings("fake"), step_timeout_s=0.5))
        big = tuple(range(200_000))
        with pytest.raises(EngineDead, match="said nothing"):
            await drain(engine.generate(request("r", prompt=big)))
        await engine.close()
        theirs.close()

    asyncio.run(asyncio.wait_for(scenario(), HANG_S))
