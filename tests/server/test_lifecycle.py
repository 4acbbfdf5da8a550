"""Disconnects, draining, the engine's death: on real sockets, signals in a real process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from manylora.main import Ending, run_loop
from manylora.server.lifecycle import Disconnected, Lifecycle
from manylora.text.tokenizer import Tokenizer
from tests.server.conftest import BASE, RunningServer, make_app
from tests.server.fakes import FakeEngine

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
SLOW = {"model": BASE, "prompt": [5], "max_tokens": 200}


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "did not come true in time"
        time.sleep(0.01)


def send_raw(url: str, body: dict[str, object]) -> socket.socket:
    host, port = url.removeprefix("http://").rstrip("/").split(":")
    connection = socket.create_connection((host, int(port)))
    raw = json.dumps(body).encode()
    connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(raw) + raw)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [[5], [[5], [6], [7]]])
def test_disconnect_aborts(
    running: RunningServer,
    engine: FakeEngine,
    stream: bool,
    prompt: list[object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "manylora.server.access")
    engine.is_held = True
    connection = send_raw(running.url, SLOW | {"prompt": prompt, "stream": stream})
    until(lambda: len(engine.running) == len(prompt))
    if stream:
        assert connection.recv(10) == b"HTTP/1.1 2"
    connection.close()
    until(lambda: not engine.running)
    assert len(engine.aborts) == len(prompt)
    until(lambda: "duration" in caplog.text)
    assert "status=499" in caplog.text
    metrics = httpx.get(f"{running.url}/metrics", timeout=60).text
    aborted = f'vllm:request_success_total{{finished_reason="abort",model_name="{BASE}"}} {len(prompt)}.0'
    assert aborted in metrics


def test_disconnect_while_uploading(
    running: RunningServer, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "manylora.server.access")
    host, port = running.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(POST + b"Content-Length: 99\r\n\r\n{")
    time.sleep(0.05)
    connection.close()
    until(lambda: "status=499" in caplog.text)
    assert "Traceback" not in caplog.text


def test_log_line(running: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "manylora.server.access")
    headers = {"x-request-id": "abc"}
    httpx.post(f"{running.url}/v1/completions", json=SLOW | {"max_tokens": 1}, headers=headers, timeout=60)
    httpx.get(f"{running.url}/v1/models/a%0Ab", timeout=60)
    until(lambda: caplog.text.count("duration") == 2)
    lines = [record.getMessage() for record in caplog.records if "duration" in record.getMessage()]
    assert re.match(rf"id=abc model='{BASE}' status=200 duration=\d+\.", lines[0])
    assert lines[0].endswith("POST '/v1/completions'")
    assert "\n" not in lines[1]


@pytest.mark.parametrize("silently", [False, True])
def test_death(tokenizer: Tokenizer, silently: bool) -> None:
    engine = FakeEngine()
    engine.is_held = True
    with (
        RunningServer(make_app(engine, tokenizer), engine) as running,
        httpx.Client(base_url=running.url, timeout=60) as client,
    ):
        with client.stream("POST", "/v1/completions", json=SLOW | {"stream": True}) as open_stream:
            lines = open_stream.iter_lines()
            assert next(lines).startswith("data: ")
            # One more that has not had its first byte.
            waiting = send_raw(running.url, SLOW)
            until(lambda: len(engine.running) == 2)
            running.call(engine.die, "killed by signal 9", silently)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        error = json.loads(rest[-2].removeprefix("data: "))["error"]
        assert (error["code"], error["type"]) == (503, "ServiceUnavailableError")
        answer = b"".join(iter(lambda: waiting.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"the engine has died: killed by signal 9" in answer
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/health")):
            assert client.request(method, path).status_code == 503
        assert client.get("/healthz").status_code == 200
        metrics = client.get("/metrics")
        assert metrics.status_code == 200
        assert f'manylora:engine_up{{model_name="{BASE}"}} 0.0' in metrics.text
        assert running.wait() == 1


SCRIPT = """
import asyncio, signal, socket, sys, uvloop
from tests.server.conftest import make_app
from tests.server.fakes import FakeEngine
from manylora.server.lifecycle import serve

async def main():
    engine = FakeEngine()
    engine.is_held = True
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, setattr, engine, "is_held", False)
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    print(sock.getsockname()[1], flush=True)
    code = await serve(make_app(engine, None), sock, engine, float(sys.argv[1]))
    assert not engine.running, engine.running
    return code

sys.exit(uvloop.run(main()))
"""


@contextlib.contextmanager
def process(drain_timeout_s: float) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A server whose streams give their first token, and the others after SIGUSR1; and a client of it."""
    arguments = [sys.executable, "-c", SCRIPT, str(drain_timeout_s)]
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": f"{root}/src:{root}"}
    child = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=root, env=env)
    try:
        assert child.stdout is not None
        url = f"http://127.0.0.1:{int(child.stdout.readline())}"
        with httpx.Client(base_url=url, timeout=60) as client:
            yield child, client
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def test_drain_lets_running_requests_end() -> None:
    body = SLOW | {"max_tokens": 50, "stream": True}
    with (
        process(drain_timeout_s=60) as (child, client),
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        child.send_signal(signal.SIGTERM)
        until(lambda: client.get("/health").status_code == 503)
        refused = client.post("/v1/completions", json=body)
        assert refused.status_code == 503
        assert refused.json()["error"]["type"] == "ServiceUnavailableError"
        child.send_signal(signal.SIGUSR1)
        rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert len(rest) == 50
        assert child.wait(60) == 0


@pytest.mark.parametrize("signals", [1, 2])
def test_drain_ends_at_its_timeout_or_second_signal(signals: int) -> None:
    with process(drain_timeout_s=0.5 if signals == 1 else 3600) as (child, client):
        waiting = send_raw(str(client.base_url), SLOW)
        with client.stream("POST", "/v1/completions", json=SLOW | {"stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            child.send_signal(signal.SIGINT)
            if signals == 2:
                until(lambda: client.get("/health").status_code == 503)
                child.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert "shutting down" in rest[-2]
        assert waiting.recv(65536).startswith(b"HTTP/1.1 503 ")
        assert child.wait(60) == 0


def test_idle_server_stops_at_once() -> None:
    with process(drain_timeout_s=3600) as (child, client):
        # A kept-alive connection must not hold it up.
        assert client.get("/health").status_code == 200
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0


def test_interruptible_passes_foreign_cancellation_on() -> None:
    async def scenario() -> None:
        lifecycle = Lifecycle()

        async def block() -> None:
            async with lifecycle.interruptible():
                await asyncio.sleep(3600)

        task = asyncio.create_task(block())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())


def test_interruptible_ends_when_the_client_goes() -> None:
    async def scenario() -> None:
        gone = asyncio.Event()

        async def receive() -> dict[str, str]:
            await gone.wait()
            return {"type": "http.disconnect"}

        asyncio.get_running_loop().call_later(0.01, gone.set)
        with pytest.raises(Disconnected):
            async with Lifecycle().interruptible(receive):
                await asyncio.sleep(3600)
        # The task itself is not cancelled any more.
        await asyncio.sleep(0)

    asyncio.run(scenario())


def test_a_missing_module_is_named_when_the_server_runs() -> None:
    async def serve() -> int:
        raise ModuleNotFoundError("No module named 'opentelemetry'")

    with pytest.raises(ModuleNotFoundError, match="opentelemetry"):
        run_loop(serve())


class Child:
    """An engine's process that outlasts every wait with a limit: it hangs, or has ended and holds memory yet."""

    def __init__(self, has_ended: bool) -> None:
        self.has_ended = has_ended
        self.events: list[object] = []

    def kill(self) -> None:
        self.events.append("kill")

    def wait(self, timeout: float | None = None) -> int:
        if timeout is not None:
            self.events.append(round(timeout))
            raise subprocess.TimeoutExpired("engine", timeout)
        return 0 if self.has_ended else -signal.SIGKILL


@pytest.mark.parametrize("has_ended", [True, False])
def test_an_engine_that_has_ended_is_waited_for_and_not_called_killed(
    has_ended: bool, caplog: pytest.LogCaptureFixture
) -> None:
    child = Child(has_ended)
    Ending(child, socket.socket()).reap()  # type: ignore[arg-type]
    assert child.events[1:] == ["kill"]
    assert ("it was killed" in caplog.text) is not has_ended


def test_the_system_has_time_to_take_an_engines_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    child, left = Child(has_ended=True), threading.Event()

    def leave(code: int) -> None:
        child.events.append(f"exit {code}")
        left.set()

    monkeypatch.setattr(os, "_exit", leave)
    Ending(child, socket.socket()).begin(within_s=0.0, code=0, release_s=32.0)  # type: ignore[arg-type]
    assert left.wait(60)
    assert child.events == ["kill", 32, "exit 0"]
