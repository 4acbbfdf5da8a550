"""Servers in which something hangs (the engine, clients): they end all the same."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from manylora.engine.journal import read_journal
from manylora.protocol.events import StepDone
from tests.e2e.process import (
    RUNNING,
    TIMEOUT_S,
    Json,
    Server,
    assert_error,
    completion,
    environment,
    events,
    get,
    wait_until,
)

LONG = {"max_tokens": 900, "ignore_eos": True, "n": 8}
"""Runs for seconds."""
STEP_TIMEOUT_S = 1.0
ENDED_S = 20.0
"""Twice what ``docker stop`` waits for before it kills: a machine may be busy."""


def error_of(event: Json | str) -> Json:
    assert isinstance(event, dict), event
    error: Json = event["error"]
    return error


def test_an_engine_that_stands_still_ends_the_server() -> None:
    args = ("--device-pool", "32MiB", "--step-timeout", str(STEP_TIMEOUT_S))
    with Server(*args) as server, ThreadPoolExecutor(2) as threads:
        server.wait_ready()
        time.sleep(2 * STEP_TIMEOUT_S)  # with nothing to do
        assert server.complete().status_code == 200
        engine = server.engine_pid
        with server.http.stream("POST", "/v1/completions", json=completion(stream=True, **LONG)) as stream:
            chunks = events(stream)
            next(chunks)
            os.kill(engine, signal.SIGSTOP)
            stopped_s = time.monotonic()
            waiting = threads.submit(server.complete, **LONG)
            asking = threads.submit(server.http.get, "/v1/models")
            *_, error, last = chunks
        assert last == "[DONE]"
        assert error_of(error)["code"] == 503
        assert f"said nothing for {STEP_TIMEOUT_S:g} s" in error_of(error)["message"]
        assert_error(waiting.result(), 503, "said nothing")
        assert_error(asking.result(), 503, "said nothing")
        with contextlib.suppress(httpx.TransportError):  # it says so for two seconds
            assert server.http.get("/health").status_code == 503
            assert_error(server.complete(), 503, "engine")
        assert server.wait_exit() == 1
        assert time.monotonic() - stopped_s < 10 * (STEP_TIMEOUT_S + 5)
        server.assert_all_gone()
        assert "Traceback" not in server.log


def test_an_engine_that_stands_still_for_a_moment_goes_on(server: Server) -> None:
    body = completion(max_tokens=300, ignore_eos=True, stream=True)
    with server.http.stream("POST", "/v1/completions", json=body) as stream:
        chunks = events(stream)
        next(chunks)
        with server.held():
            time.sleep(1)
            assert get(f"{server.url}/health").status_code == 200
        *rest, last = chunks
    assert last == "[DONE]"
    assert not any("error" in chunk for chunk in rest)


def test_sigterm_while_the_engine_stands_still() -> None:
    with Server("--device-pool", "32MiB") as server:
        server.wait_ready()
        with server.http.stream("POST", "/v1/completions", json=completion(stream=True, **LONG)) as stream:
            chunks = events(stream)
            next(chunks)
            os.kill(server.engine_pid, signal.SIGSTOP)
            server.process.send_signal(signal.SIGTERM)
            told_s = time.monotonic()
            *_, error, last = chunks
        assert last == "[DONE]"
        assert error_of(error)["code"] == 503
        assert server.wait_exit() == 0
        assert time.monotonic() - told_s < ENDED_S
        server.assert_all_gone()
        assert "Traceback" not in server.log


SLOW_TO_FREE = """
import sys
if "manylora.main" in sys.orig_argv:
    import time
    from manylora.devices.device import Device
    Device.copies_from_pinned = True
    Device.unpin = lambda self, memory: time.sleep(3600)
"""
"""Run as the engine's process starts: pinned memory that is given back in an hour."""


def test_sigterm_leaves_memory_to_the_system(tmp_path: Path) -> None:
    """Of a host pool of some ten GiB to unpin takes longer than a server has."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_TO_FREE)
    path = os.pathsep.join((str(tmp_path), environment()["PYTHONPATH"]))
    journal = tmp_path / "journal"
    args = ("--device-pool", "32MiB", "--host-pool", "64MiB", "--journal", str(journal))
    with Server(*args, env={"PYTHONPATH": path}) as server:
        server.wait_ready()
        wait_until(lambda: "pinned the host pool" in server.log, "pinned memory")
        assert server.complete().status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        server.assert_all_gone()
        assert "does not end" not in server.log
    assert any(isinstance(event, StepDone) for _, event in read_journal(journal)[1])


def half_sent(url: httpx.URL) -> socket.socket:
    """A connection with a request whose body does not come to its end."""
    connection = socket.create_connection((url.host, url.port or 80), timeout=TIMEOUT_S)
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
    connection.sendall(head + b"{")
    return connection


def test_sigterm_closes_connections_that_wait_for_a_body() -> None:
    """At once, and not when the others have drained."""
    with Server("--device-pool", "32MiB", "--drain-timeout", "3600") as server:
        server.wait_ready()
        url = httpx.URL(server.url)
        connections = [half_sent(url) for _ in range(200)]
        half_a_head = socket.create_connection((url.host, url.port or 80), timeout=TIMEOUT_S)
        half_a_head.sendall(b"POST /v1/completions HT")
        body = completion(max_tokens=300, ignore_eos=True, stream=True)
        with server.http.stream("POST", "/v1/completions", json=body) as stream:
            chunks = events(stream)
            next(chunks)
            with server.held():
                server.process.send_signal(signal.SIGTERM)
                for connection in connections:
                    answer = b"".join(iter(lambda: connection.recv(65536), b""))  # noqa: B023
                    assert answer.startswith(b"HTTP/1.1 503 ")
                    assert b"shutting down" in answer
                    connection.close()
            *rest, last = chunks
        assert last == "[DONE]"
        assert not any("error" in chunk for chunk in rest)
        assert server.wait_exit() == 0
        half_a_head.close()
        server.assert_all_gone()
        assert "Traceback" not in server.log
        assert "CancelledError" not in server.log


def test_clients_that_read_nothing_do_not_hold_up_the_end() -> None:
    with Server("--device-pool", "64MiB", "--drain-timeout", "0.5") as server:
        server.wait_ready()
        url = httpx.URL(server.url)
        raw = json.dumps(completion(stream=True, temperature=1, logprobs=5, **LONG)).encode()
        connections = []
        for _ in range(4):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((url.host, url.port or 80))
            head = "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
            connections.append(connection)
        wait_until(lambda: server.gauge(RUNNING) >= 4, "streams that run")
        time.sleep(2)
        server.process.send_signal(signal.SIGTERM)
        told_s = time.monotonic()
        assert server.wait_exit() == 0
        assert time.monotonic() - told_s < ENDED_S
        server.assert_all_gone()
        assert "Traceback" not in server.log
        for connection in connections:
            connection.close()


@pytest.mark.parametrize("is_ignored", [False, True])
def test_sighup_drains_unless_it_is_ignored(is_ignored: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    try:
        server = Server("--device-pool", "32MiB", "--drain-timeout", "60")
    finally:
        signal.signal(signal.SIGHUP, before)
    with server:
        server.wait_ready()
        body = completion(max_tokens=200, ignore_eos=True, stream=True)
        with server.http.stream("POST", "/v1/completions", json=body) as stream:
            chunks = events(stream)
            next(chunks)
            os.killpg(server.process.pid, signal.SIGHUP)  # as a terminal does
            *rest, last = chunks
        assert last == "[DONE]"
        assert not any("error" in chunk for chunk in rest)
        if is_ignored:
            assert server.complete().status_code == 200
            assert "SIGHUP" not in server.log
            return
        assert server.wait_exit() == 0
        server.assert_all_gone()
        assert "SIGHUP: the server ends" in server.log
        assert "Traceback" not in server.log
