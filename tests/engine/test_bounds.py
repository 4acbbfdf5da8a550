"""Between two processes nothing grows without end: one that does not read holds the other up, or is refused."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest

from manylora.config.sections import EngineSettings, ModelSettings
from manylora.engine import remote, service, wire
from manylora.engine.client import Delta, EngineBusy, EngineDead, GenerationRequest
from manylora.engine.driver import Driver
from manylora.engine.remote import RemoteEngine
from manylora.protocol.commands import DeviceCommand, InspectAdapter
from manylora.protocol.executor import AdapterError
from manylora.types import SamplingParams
from tests.engine.fake_executor import FakeExecutor
from tests.engine.test_engine import CONFIG, INFO, drain, request, running

WAIT_S = 60.0


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def count_sent(sender: service.Sender, messages: int) -> tuple[list[int], threading.Thread]:
    """Send numbered messages on a thread; the list grows by each that ``send`` took."""
    sent: list[int] = []

    def send() -> None:
        for number in range(messages):
            sender.send(wire.Failed(f"{number} " + "x" * 1000))
            sent.append(number)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return sent, thread


def test_a_server_that_does_not_read_holds_the_sender_up_and_loses_nothing() -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(WAIT_S)
    sender = service.Sender(theirs)
    num_messages = 4 * service.MAX_UNSENT
    sent, thread = count_sent(sender, num_messages)
    with ours, theirs:
        until(lambda: len(sent) >= service.MAX_UNSENT)
        time.sleep(0.2)
        assert len(sent) < num_messages - service.MAX_UNSENT  # those, and what the system's buffers hold
        with ours.makefile("rb") as received:
            for number in range(num_messages):
                expected = wire.frame(wire.Failed(f"{number} " + "x" * 1000))
                assert received.read(len(expected)) == expected
        thread.join(WAIT_S)
        assert not thread.is_alive()
        sender.close()


def test_a_server_that_goes_away_lets_the_sender_go_on() -> None:
    ours, theirs = socket.socketpair()
    sender = service.Sender(theirs)
    sent, thread = count_sent(sender, 4 * service.MAX_UNSENT)
    until(lambda: len(sent) >= service.MAX_UNSENT)
    ours.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    sender.close()
    theirs.close()


def test_a_loop_that_does_not_look_holds_the_reading_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a step runs, requests wait in the socket: of them all the inbox holds few, and all are answered."""
    monkeypatch.setattr(service, "MAX_BACKLOG", 20)
    executor = FakeExecutor()
    driver = Driver(CONFIG, executor, INFO)

    async def scenario() -> None:
        ours, theirs = socket.socketpair()

        def child() -> None:
            wire.read_from_server(theirs)
            service.serve(theirs, service.Sender(theirs), driver)
            theirs.close()

        thread = threading.Thread(target=child)
        thread.start()
        engine = await RemoteEngine.connect(ours, EngineSettings(ModelSettings("fake")))
        executor.step_gate.clear()
        streams = [engine.generate(request("r0"))]
        await asyncio.to_thread(executor.is_held.wait)
        streams += [engine.generate(request(f"r{number}")) for number in range(1, 200)]
        await asyncio.to_thread(until, lambda: driver.inbox.qsize() >= 20)
        await asyncio.sleep(0.2)
        assert driver.inbox.qsize() == 20
        executor.step_gate.set()
        ends = await asyncio.gather(*map(drain, streams))
        assert all(reasons == {0: "length"} for _, reasons, _ in ends)
        await engine.close()
        await asyncio.to_thread(thread.join)

    asyncio.run(asyncio.wait_for(scenario(), WAIT_S))


def test_an_engine_that_does_not_read_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been asked keeps its end; new questions are refused, and taken again once it reads."""
    monkeypatch.setattr(remote, "MAX_UNSENT_BYTES", 100_000)

    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        theirs.sendall(wire.frame(wire.EngineReady(INFO)))
        engine = await RemoteEngine.connect(ours, EngineSettings(ModelSettings("fake")))
        asked: list[AsyncIterator[Delta]] = []
        with contextlib.suppress(EngineBusy):
            while len(asked) < 1000:
                asked.append(engine.generate(request(f"r{len(asked)}", prompt=(1,) * 5000)))
        assert len(asked) < 1000
        with pytest.raises(EngineBusy):
            await engine.adapters()
        await asked.pop(0).aclose()  # type: ignore[attr-defined]  # an end is told, however full it is

        def read() -> list[str]:
            assert isinstance(wire.read_from_server(theirs), wire.Start)
            names = []
            while True:
                match wire.read_from_server(theirs):
                    case wire.Submit(submitted):
                        names.append(submitted.id)
                    case wire.Cancel(cancelled):
                        assert cancelled == "r0"
                        return names

        assert await asyncio.to_thread(read) == [f"r{number}" for number in range(len(asked) + 1)]
        engine.generate(request("another"))
        theirs.close()
        for stream in asked:
            with contextlib.suppress(EngineDead):
                await drain(stream)
        await engine.close()

    asyncio.run(asyncio.wait_for(scenario(), WAIT_S))


def test_however_many_ask_for_figures_one_question_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scrapes that were given up during a long step leave nothing behind them."""

    async def scenario() -> None:
        executor = FakeExecutor()
        async with running("remote", executor) as engine:
            assert isinstance(engine, RemoteEngine)
            executor.step_gate.clear()
            stream = engine.generate(request("a"))
            await asyncio.to_thread(executor.is_held.wait)
            for _ in range(20):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(engine.stats(), 0.01)
            asked: list[wire.ToEngine] = []
            send = engine._send

            def noted(message: wire.ToEngine) -> None:
                asked.append(message)
                send(message)

            monkeypatch.setattr(engine, "_send", noted)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(engine.stats(), 0.01)
            assert asked == []
            executor.step_gate.set()
            await drain(stream)
            await engine.stats()
            assert (await engine.stats()).num_running == 0

    asyncio.run(asyncio.wait_for(scenario(), WAIT_S))


def test_loads_wait_in_a_bounded_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_LOADS", 3)
    executor = FakeExecutor()
    gate = threading.Event()
    obey = executor.obey

    def slow(command: DeviceCommand) -> None:
        if isinstance(command, InspectAdapter):
            gate.wait(WAIT_S)
        obey(command)

    executor.obey = slow  # type: ignore[method-assign]

    async def scenario() -> None:
        async with running("remote", executor) as engine:
            loads = [asyncio.create_task(engine.add_adapter(f"a{number}", "1")) for number in range(5)]
            while len([load for load in loads if load.done()]) < 2:
                await asyncio.sleep(0.01)
            gate.set()
            ends = await asyncio.gather(*loads, return_exceptions=True)
            refused = [end for end in ends if isinstance(end, AdapterError)]
            assert [error.status for error in refused] == [429, 429]
            assert (await engine.add_adapter("later", "1")).name == "later"

    asyncio.run(asyncio.wait_for(scenario(), WAIT_S))


def test_requests_of_one_body_are_admitted_or_refused_before_one_of_them_runs() -> None:
    """However late the last of them comes."""
    news: list[Delta] = []
    driver = Driver(dataclasses.replace(CONFIG, max_waiting=2), FakeExecutor(), INFO)
    driver.start(news.extend, lambda reason: None)
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    for name in "abc":
        driver.submit(GenerationRequest(name, (1, 2), params, more=name != "c"))
        time.sleep(0.1)
        assert name == "c" or news == []
    until(lambda: len(news) == 3)
    refused, *served = news
    assert (refused.request, refused.error and refused.error.status) == ("c", 429)
    assert [(delta.request, delta.finish_reason) for delta in served] == [("a", "length"), ("b", "length")]
    # Where the last never comes, the end of the others is told all the same.
    driver.submit(GenerationRequest("d", (1, 2), params, more=True))
    driver.abort("d", None, "abort")
    until(lambda: len(news) == 4)
    assert news[-1].finish_reason == "abort"
    driver.close()
