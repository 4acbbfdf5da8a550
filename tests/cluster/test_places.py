"""Starts that fail or hang, and processes that are silent: each ends, and another is started later."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from manylora.cluster import local, messages
from manylora.cluster.children import Launch, Tasks
from manylora.cluster.local import LocalProcess, NotStarted, start_child
from manylora.cluster.slots import ProcessPlace
from manylora.config.cluster import ClusterOptions
from manylora.config.sections import EngineSettings, HttpSettings, ModelSettings
from manylora.engine.wire import frame
from tests.e2e.process import is_running

READY, PONG = frame(messages.ChildReady()), frame(messages.Pong())
LAUNCH = Launch(
    messages.ROUTER, 0, 1, EngineSettings(ModelSettings("none")), HttpSettings(), ClusterOptions(),
    folder="", secret=b"", router=("", 0), model="",
)  # fmt: skip
HANGS = "time.sleep(1000)"
ANSWERS = f"""
sock.settimeout(0.1)
until = time.monotonic() + float(sys.argv[2])
while time.monotonic() < until:
    try:
        sock.recv(10**6)
        sock.sendall({PONG!r})
    except TimeoutError:
        pass
sock.sendall({READY!r})
"""
COMPUTES = f"""
until = time.monotonic() + 2.0
while time.monotonic() < until:
    sum(range(10**5))
sock.sendall({READY!r})
"""

Child = Callable[[str, str], Coroutine[Any, Any, LocalProcess]]


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Child:
    """Starts this code as a process of this role."""

    async def started(code: str, role: str) -> LocalProcess:
        whole = f"import socket, sys, time\nsock = socket.socket(fileno=int(sys.argv[1]))\n{code}"
        monkeypatch.setattr(
            local, "command", lambda module, file: [sys.executable, "-S", "-c", whole, file, "2"]
        )
        return await start_child(msgspec.structs.replace(LAUNCH, role=role), {})

    for name in ("START_S", "LOAD_S"):
        monkeypatch.setattr(local, name, 1.0)
    monkeypatch.setattr(local, "PING_S", 0.25)
    return started


@pytest.mark.parametrize("role", [messages.ROUTER, messages.FRONTEND, messages.REPLICA])
def test_a_start_that_hangs_is_ended(child: Child, role: str) -> None:
    async def scenario() -> None:
        process = await child(HANGS, role)
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(NotStarted, match="not got on for 1 s"):
            await process.begun()
        assert not is_running(process.pid)

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize(("code", "role"), [(ANSWERS, messages.FRONTEND), (COMPUTES, messages.ROUTER)])
def test_a_start_that_gets_on_takes_its_time(child: Child, code: str, role: str) -> None:
    async def scenario() -> None:
        process = await child(code, role)
        assert isinstance(await process.begun(), messages.ChildReady)
        assert await process.live(60.0)
        assert await process.wait() == 0

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_what_is_silent_is_told_from_what_answers(child: Child) -> None:
    async def scenario() -> None:
        process = await child(f"sock.sendall({READY!r})\n{ANSWERS}\n{HANGS}", messages.FRONTEND)
        assert isinstance(await process.begun(), messages.ChildReady)
        began_s = asyncio.get_running_loop().time()
        assert not await process.live(0.75)
        assert asyncio.get_running_loop().time() - began_s > 2.0  # for so long it has answered
        process.kill()
        assert await process.wait() == -signal.SIGKILL

    asyncio.run(asyncio.wait_for(scenario(), 60))


class Refusing:
    """A launcher of a system that gives no process."""

    name = "refusing"
    most_replicas: int | None = None

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def start(self, launch: Launch, descriptors: object = ()) -> LocalProcess:
        raise self._error


@pytest.mark.parametrize(
    "error", [OSError(24, "Too many open files"), RuntimeError("can't start new thread")]
)
def test_a_start_that_is_refused_is_tried_again_later_each_time(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("manylora.cluster.slots.asyncio.sleep", sleep)

    async def scenario() -> None:
        tried = ProcessPlace("the router", Refusing(error), 1.0)
        for _ in range(8):
            with pytest.raises(NotStarted, match=r"the router cannot be started: (Too many|can't start)"):
                await tried.start(LAUNCH)
            assert tried.process is None
            await tried.pause()

    asyncio.run(scenario())
    assert slept == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]


def test_no_task_ends_unseen(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        raise ValueError("a bug")

    async def scenario() -> None:
        tasks = Tasks()
        await tasks.spawn(asyncio.sleep(0))
        tasks.spawn(asyncio.sleep(60)).cancel()
        await asyncio.sleep(0)
        assert not tasks.over.is_set()
        tasks.spawn(fails())
        await tasks.over.wait()
        assert len(tasks) == 0

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert "fails has failed" in caplog.text
    assert "a bug" in caplog.text
