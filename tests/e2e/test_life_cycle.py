"""How servers start, drain and die: signals, kill -9 of either process, clients that leave."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.process import (
    RUNNING,
    TIMEOUT_S,
    Json,
    Server,
    assert_error,
    children_of,
    completion,
    events,
    get,
    handles,
    is_running,
    post,
    wait_until,
)

LONG = {"max_tokens": 900, "ignore_eos": True}
LONGER = {**LONG, "n": 8}
"""Runs for seconds: as long as it takes to see several of them run, and to do something to all."""


def as_json(event: Json | str) -> Json:
    assert isinstance(event, dict), event
    return event


def test_sigterm_lets_a_stream_end_and_refuses_new_requests() -> None:
    with Server("--device-pool", "32MiB", "--drain-timeout", "60") as server:
        server.wait_ready()
        body = completion(max_tokens=400, ignore_eos=True, stream=True)
        with server.http.stream("POST", "/v1/completions", json=body) as stream:
            chunks = events(stream)
            next(chunks)
            with server.held():
                server.process.send_signal(signal.SIGTERM)
                wait_until(lambda: get(f"{server.url}/health").status_code == 503, "503 from /health")
                for path in ("/v1/completions", "/v1/chat/completions", "/v1/load_lora_adapter"):
                    assert_error(post(f"{server.url}{path}", json=completion()), 503, "shutting down")
            *rest, last = chunks
        assert last == "[DONE]"
        assert as_json(rest[-1])["choices"][0]["finish_reason"] == "length"
        assert all("error" not in as_json(chunk) for chunk in rest)
        assert server.wait_exit() == 0
        server.assert_all_gone()
        assert "Traceback" not in server.log


def test_sigint_and_a_drain_timeout_shorter_than_the_stream() -> None:
    with Server("--device-pool", "32MiB", "--drain-timeout", "0.5") as server:
        server.wait_ready()
        with (
            ThreadPoolExecutor(1) as thread,
            server.http.stream("POST", "/v1/completions", json=completion(stream=True, **LONGER)) as stream,
        ):
            waiting = thread.submit(server.complete, **LONGER)
            chunks = events(stream)
            next(chunks)
            wait_until(lambda: server.gauge(RUNNING) == 2 * 8, "both running")
            with server.held():
                # A terminal signals the whole group; the engine must not care.
                os.killpg(server.process.pid, signal.SIGINT)
                *_, error, last = chunks
                assert last == "[DONE]"
                assert as_json(error)["error"]["code"] == 503
                assert_error(waiting.result(), 503, "shutting down")
        # Whoever asks again and again must not make a kill of it.
        while server.process.poll() is None:
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.001)  # without a pause signals alone take all of a process's time
        assert server.wait_exit() == 0
        server.assert_all_gone()
        assert "Traceback" not in server.log


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_start_up_ends_it_at_once(is_early: bool, number: signal.Signals) -> None:
    """Early, while modules are imported, and later, while the engine starts."""
    with Server() as server:
        pid = server.process.pid
        if is_early:
            wait_until(lambda: handles(pid, signal.SIGTERM) and handles(pid, signal.SIGINT), "handlers")
        else:
            wait_until(lambda: children_of(pid), "the engine's process")
        os.killpg(pid, number)
        assert server.wait_exit() == 0
        assert "serving" not in server.log
        assert "Traceback" not in server.log
        wait_until(lambda: not _group(server.process.pid), "processes gone")


def _group(leader: int) -> list[int]:
    """Processes of a group that still run."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if is_running(pid) and _group_of(pid) == leader]


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def test_kill_of_the_server_while_it_starts_leaves_no_engine() -> None:
    with Server() as server:
        wait_until(lambda: children_of(server.process.pid), "the engine's process")
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        wait_until(lambda: not _group(server.process.pid), "processes gone")


def test_kill_of_the_engine() -> None:
    with Server("--device-pool", "32MiB") as server, ThreadPoolExecutor(4) as threads:
        server.wait_ready()
        waiting = [threads.submit(server.complete, **LONGER) for _ in range(2)]
        waiting.append(
            threads.submit(
                server.post,
                "/v1/chat/completions",
                {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], **LONGER},
            )
        )
        with server.http.stream("POST", "/v1/completions", json=completion(stream=True, **LONGER)) as stream:
            chunks = events(stream)
            next(chunks)
            wait_until(lambda: server.gauge(RUNNING) == 4 * 8, "all running")
            os.kill(server.engine_pid, signal.SIGKILL)
            *_, error, last = chunks
        assert last == "[DONE]"
        assert as_json(error)["error"]["code"] == 503
        for answer in waiting:
            assert_error(answer.result(), 503, "engine")
        with contextlib.suppress(httpx.TransportError):  # it answers for two seconds only
            assert server.http.get("/health").status_code == 503
            assert_error(server.complete(), 503, "engine")
            assert_error(server.complete(stream=True), 503, "engine")
            assert server.http.get("/metrics").status_code == 200
        assert server.wait_exit() == 1
        server.assert_all_gone()
        assert "Traceback" not in server.log


def test_kill_of_the_engine_while_it_starts() -> None:
    with Server() as server:
        wait_until(lambda: children_of(server.process.pid), "the engine's process")
        os.kill(server.engine_pid, signal.SIGKILL)
        assert server.wait_exit() == 1
        assert "Traceback" not in server.log


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    """Without --adapter-dir, weights or room for its journal; the last test of the module kills it."""
    args = ("--load-format", "dummy", "--dtype", "bfloat16", "--journal", "/dev/full")
    with Server("--device-pool", "32MiB", *args) as server:
        yield server.wait_ready()


def test_without_an_adapter_dir_loading_is_off(plain: Server) -> None:
    for body in ({"lora_name": "x", "lora_path": "/tmp"}, {"lora_name": "x", "lora_path": "x"}, {}):
        assert_error(plain.post("/v1/load_lora_adapter", body), 403, "--adapter-dir")
    assert_error(plain.unload("x"), 404)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_cancels_its_request(plain: Server, stream: bool, n: int) -> None:
    with httpx.Client(base_url=plain.url, timeout=TIMEOUT_S) as http:
        body = completion(stream=stream, n=n, temperature=1, **LONG)
        if stream:
            with http.stream("POST", "/v1/completions", json=body) as response:
                next(events(response))
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post("/v1/completions", json=body, timeout=httpx.Timeout(TIMEOUT_S, read=0.3))
    plain.wait_quiet()
    assert plain.gauge('vllm:request_success_total{finished_reason="length",model_name="demo"}') == 0
    assert plain.gauge('vllm:request_success_total{finished_reason="abort",model_name="demo"}') > 0


def test_a_journal_that_cannot_be_written_ends_alone(plain: Server) -> None:
    def has_ended() -> bool:
        assert plain.complete(prompt=[5] * 500).status_code == 200
        return "the journal ends here" in plain.log

    wait_until(has_ended, "the end of the journal")
    assert plain.complete().status_code == 200
    assert plain.log.count("the journal ends here") == 1


def test_kill_of_the_server_takes_the_engine_along(plain: Server) -> None:
    engine = plain.engine_pid
    with plain.http.stream("POST", "/v1/completions", json=completion(stream=True, **LONG)) as stream:
        next(events(stream))
        os.kill(engine, signal.SIGSTOP)  # not even one that hangs stays
        os.kill(plain.process.pid, signal.SIGKILL)
        plain.process.wait()
        wait_until(lambda: not is_running(engine), "the engine gone")
    plain.assert_all_gone()
