"""The edge of a real server: what is too much is refused, in order and at once, and others do not notice."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.process import BASE, Server, assert_error, completion, get, wait_until

KEY = "secret"
LATEST_S = 5.0
"""How late another request may be on a busy machine. Without bounds it was up to ten seconds."""


@pytest.fixture(scope="module")
def tight() -> Iterator[Server]:
    """One request runs, two wait, thirty connections, small bodies."""
    args = (
        "--max-num-seqs",
        "1",
        "--max-waiting",
        "2",
        "--max-connections",
        "30",
        "--max-body-size",
        "200KB",
    )
    with Server(*args, "--device-pool", "16MiB", "--api-key", KEY) as started:
        started.http.headers["Authorization"] = f"Bearer {KEY}"
        yield started.wait_ready()
        started.wait_quiet()


def raw(server: Server, *pieces: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send as it is and read until the server closes."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), 60.0) as connection:
        data = b""
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for piece in pieces:
                connection.sendall(piece)
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(65536):
                data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in lines), body


def peak_mib(server: Server) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) // 1024


def test_prompts_of_one_body_are_refused_together(tight: Server) -> None:
    """Two find the queue empty; of three the last does not, and then none of them runs."""
    assert tight.complete(prompt=["a", "b"]).status_code == 200
    for stream in (False, True):
        for count in (3, 8, 300):
            answer = tight.complete(prompt=["a"] * count, max_tokens=100, stream=stream)
            error = assert_error(answer, 429, "queue is full", "2 requests wait")
            assert error["type"] == "rate_limit_error"
            assert answer.headers["retry-after"] == "1"
    metrics = tight.wait_quiet()
    assert metrics['vllm:num_requests_waiting{model_name="demo"}'] == 0
    assert tight.complete(n=64, max_tokens=2).status_code == 200  # samples are not counted


def test_of_many_requests_some_are_refused_and_the_others_answered(tight: Server) -> None:
    expected = tight.text(max_tokens=100, ignore_eos=True)
    body = {"max_tokens": 100, "ignore_eos": True}
    for _ in range(5):  # they may come one after the other
        answers = tight.complete_all([body] * 20)
        if refused := [answer for answer in answers if answer.status_code != 200]:
            break
    assert 0 < len(refused) <= 17
    for answer in answers:
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] == expected
        else:
            assert assert_error(answer, 429)["type"] == "rate_limit_error"
    client = openai.OpenAI(base_url=f"{tight.url}/v1", api_key=KEY, max_retries=0, timeout=60.0)
    with client, pytest.raises(openai.RateLimitError):
        client.completions.create(model=BASE, prompt=["a", "b", "c"])
    # The official client comes again by itself.
    patient = openai.OpenAI(base_url=f"{tight.url}/v1", api_key=KEY, max_retries=20, timeout=60.0)
    with patient, ThreadPoolExecutor(6) as threads:
        texts = list(threads.map(lambda _: patient.completions.create(
            model=BASE, prompt="Once upon a time", temperature=0, max_tokens=100,
            extra_body={"ignore_eos": True}).choices[0].text, range(6)))  # fmt: skip
    assert texts == [expected] * 6


def test_metrics_need_a_key(tight: Server) -> None:
    assert assert_error(get(f"{tight.url}/metrics"), 401)["type"] == "AuthenticationError"
    assert "german" not in get(f"{tight.url}/docs").text
    assert tight.metrics()
    for path in ("/health", "/version", "/docs", "/openapi.json"):
        assert get(f"{tight.url}{path}").status_code == 200


def test_the_body_limit_of_a_flag(tight: Server) -> None:
    """By the announced length, before anything of it has come; without one as soon as it is passed."""
    head = b"POST /v1/completions HTTP/1.1\r\nAuthorization: Bearer secret\r\nConnection: close\r\n"
    status, _, body = raw(tight, head + b"Content-Length: 200001\r\n\r\n")
    assert (status, json.loads(body)["error"]["type"]) == (413, "ContentTooLargeError")
    pieces = iter([b"a" * 100_000] * 3)
    assert_error(tight.http.post("/v1/completions", content=pieces), 413, "200000")
    assert tight.complete(user="u" * 190_000).status_code == 200


def test_connections_beyond_the_limit(tight: Server) -> None:
    address = ("127.0.0.1", int(tight.url.rpartition(":")[2]))
    with contextlib.ExitStack() as stack:
        for _ in range(30):
            stack.enter_context(socket.create_connection(address))
        answer = None

        def is_refused() -> bool:
            nonlocal answer
            with contextlib.suppress(httpx.TransportError):  # it closes, whatever the client still sends
                answer = get(f"{tight.url}/docs")
            return answer is not None and answer.status_code == 503

        wait_until(is_refused, "a refused connection")
        assert answer is not None
        assert_error(answer, 503, "connections")
        assert answer.headers["retry-after"] == "1"
        assert get(f"{tight.url}/health").status_code == 200
    wait_until(lambda: get(f"{tight.url}/docs").status_code == 200, "room for connections")


@pytest.mark.parametrize("start", [b"GET /", b"GET /health HTTP/1.1\r\nx: ", b"GET /health HTTP/1.1\r\n"])
def test_endless_heads_are_refused_at_once(server: Server, start: bytes) -> None:
    fill = b"x: y\r\n" if start.endswith(b"\r\n") else b"a"
    status, headers, body = raw(server, start, *[fill * (10**6 // len(fill))] * 50)
    error = json.loads(body)["error"]
    assert (status, error["code"], error["type"]) == (431, 431, "RequestHeaderFieldsTooLargeError")
    assert headers["x-request-id"] in server.log
    assert peak_mib(server) < 300


def test_malformed_http_is_answered_like_all_else(server: Server) -> None:
    status, headers, body = raw(server, b"\x16\x03\x01\x02\x00\x01\x00")
    error = json.loads(body)["error"]
    assert (status, error["code"], error["type"]) == (400, 400, "BadRequestError")
    assert headers["content-type"] == "application/json"
    assert f"id={headers['x-request-id']} model=None status=400" in server.log


@pytest.mark.long  # tests/server/test_connection.py asks the same of shorter times
def test_half_a_head_is_answered_within_its_time(server: Server) -> None:
    """And a connection that never says anything is closed in the same time."""
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    with socket.create_connection(address, 60.0) as silent:
        start_s = time.monotonic()
        status, _, body = raw(server, b"POST /v1/completions HTTP/1.1\r\nHost")
        assert (status, json.loads(body)["error"]["type"]) == (408, "RequestTimeoutError")
        assert time.monotonic() - start_s > 5
        assert silent.recv(1) == b""


def test_a_server_of_the_loopback_answers_to_its_names_alone(server: Server) -> None:
    for host, status in (("localhost", 200), ("127.0.0.1:1", 200), ("[::1]", 200), ("evil.example", 403)):
        assert get(f"{server.url}/v1/models", headers={"Host": host}).status_code == status


def test_routes_that_are_not_offered(server: Server) -> None:
    for path in ("/v1/responses", "/v1/embeddings", "/v1/audio/speech", "/v1/files"):
        assert_error(server.post(path, {}), 404, f"{path} is not offered by this server")


# A process of its own, so that only the server's delays are measured; until its input ends.
ASK_ON = """
import http.client, select, sys, time
latest_s = 0.0
print("asking", flush=True)
while not select.select([sys.stdin], [], [], 0.01)[0]:
    start_s = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=60)
    connection.request("GET", "/version")
    assert connection.getresponse().status == 200
    connection.close()
    latest_s = max(latest_s, time.perf_counter() - start_s)
print(latest_s)
"""


def lists(size: int) -> bytes:
    return b'{"model":"demo","prompt":[' + b",".join([b"[]"] * (size // 3)) + b"]}"


def token_ids(size: int) -> bytes:
    return b'{"model":"demo","prompt":[' + b",".join([b"5"] * (size // 2)) + b"]}"


def messages(size: int) -> bytes:
    return (
        b'{"model":"demo","messages":[' + b",".join([b'{"role":"user","content":""}'] * (size // 29)) + b"]}"
    )


def biases(size: int) -> bytes:
    each = b",".join(b'"%d":1' % number for number in range(size // 11))
    return b'{"model":"demo","prompt":[5],"logit_bias":{' + each + b"}}"


def tools(size: int) -> bytes:
    each = b",".join([b"{}"] * (size // 3))
    start = b'{"model":"demo","messages":[{"role":"user","content":"a"}],"max_tokens":1,"tool_choice":"none",'
    return start + b'"tools":[' + each + b"]}"


HOSTILE = [
    ("/v1/completions", lists), ("/v1/completions", token_ids), ("/v1/completions", biases),
    ("/v1/chat/completions", messages), ("/v1/chat/completions", tools),
]  # fmt: skip


@pytest.fixture(scope="module")
def roomy() -> Iterator[Server]:
    """As an operator sets it whose clients send large batches."""
    with Server("--max-body-size", "32MiB", "--device-pool", "16MiB") as started:
        yield started.wait_ready()


@pytest.mark.parametrize("size", [4_200_000, 28_000_000])
@pytest.mark.parametrize(("path", "make"), HOSTILE, ids=lambda value: getattr(value, "__name__", "at"))
def test_hostile_bodies_hold_nobody_up(roomy: Server, path: str, make: Any, size: int) -> None:
    content = make(size)
    port = roomy.url.rpartition(":")[2]
    with subprocess.Popen(
        [sys.executable, "-c", ASK_ON, port], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as asking:
        assert asking.stdout is not None
        assert asking.stdout.readline() == "asking\n"
        answer = roomy.http.post(path, content=content)
        latest_s, _ = asking.communicate("", 60.0)
    assert_error(answer, 400)
    assert float(latest_s) < LATEST_S
    assert peak_mib(roomy) < 400


def test_by_default_the_context_says_how_large_a_body_may_be(server: Server) -> None:
    for path, make in HOSTILE[::3]:  # refused by their length alone
        assert_error(server.http.post(path, content=make(28_000_000)), 413)
    assert server.complete(user="u" * 4 * 2**20).status_code == 200
    assert peak_mib(server) < 300
    assert server.complete(**completion()).status_code == 200
