"""Raw HTTP on real sockets: heads, deadlines, requests sent ahead. ``test_odd_clients`` has what is rarer."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from manylora.server.connection import MAX_AHEAD, ConnectionLimits
from manylora.text.tokenizer import Tokenizer
from tests.server.conftest import BASE, RunningServer, make_app
from tests.server.fakes import FakeEngine
from tests.server.test_lifecycle import POST, until

WAIT_S = 60.0
LIMITS = ConnectionLimits(max_connections=50, head_bytes=2000, head_s=0.5, body_s=0.5)
GET = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
Answer = tuple[int, dict[str, str], bytes]


@contextlib.contextmanager
def serving(
    tokenizer: Tokenizer, engine: FakeEngine | None = None, **changed: Any
) -> Iterator[RunningServer]:
    engine = engine or FakeEngine()
    app = make_app(engine, tokenizer, connections=dataclasses.replace(LIMITS, **changed))
    with RunningServer(app, engine) as server:
        yield server


def connect(server: RunningServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), WAIT_S)


def received(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            data += piece
    return data


def answers(data: bytes) -> list[Answer]:
    """Split what came into answers with a Content-Length or in chunks."""
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        body = b""
        if "content-length" in headers:
            size = int(headers["content-length"])
            body, data = data[:size], data[size:]
        else:
            body, _, data = data.partition(b"0\r\n\r\n")
        found.append((int(first.split()[1]), headers, body))
    return found


def ask(server: RunningServer, *pieces: bytes) -> list[Answer]:
    """Send, and read until the server closes."""
    with connect(server) as connection:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for piece in pieces:
                connection.sendall(piece)
        return answers(received(connection))


def check(answer: Answer, status: int, kind: str, *words: str) -> None:
    code, headers, body = answer
    error = json.loads(body)["error"]
    assert (code, error["code"], error["type"], error["param"]) == (status, status, kind, None)
    assert headers["content-type"] == "application/json"
    assert re.fullmatch(r"[\x21-\x7e]+", headers["x-request-id"])
    assert headers["connection"] == "close"
    for word in words:
        assert word in error["message"]


def head_of(size: int) -> bytes:
    """A GET whose head has so many bytes."""
    head = b"GET /version HTTP/1.1\r\nConnection: close\r\nx: "
    return head + b"a" * (size - len(head) - 4) + b"\r\n\r\n"


def post(body: bytes, *headers: bytes) -> bytes:
    lines = [*POST.splitlines(), b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def body(**changes: Any) -> bytes:
    return json.dumps({"model": BASE, "prompt": [5], "max_tokens": 2, **changes}).encode()


@pytest.mark.parametrize("piece", [1, 7, 100_000])
def test_a_head_of_just_the_limit_is_served_and_one_more_byte_is_not(
    tokenizer: Tokenizer, piece: int
) -> None:
    with serving(tokenizer, head_s=WAIT_S) as server:
        for size, status in ((2000, 200), (2001, 431)):
            head = head_of(size)
            pieces = [head[start : start + piece] for start in range(0, size, piece)]
            (answer,) = ask(server, *pieces)
            assert answer[0] == status
        check(answer, 431, "RequestHeaderFieldsTooLargeError", "2000 bytes")


@pytest.mark.parametrize(
    "start", [b"GET /", b"GET /version HTTP/1.1\r\nx: ", b"GET /version HTTP/1.1\r\n", b"a: b\r\n"]
)
def test_a_head_without_end_is_refused_long_before_it_ends(
    tokenizer: Tokenizer, start: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """An address, a value, and lines; keys are not asked for before."""
    caplog.set_level(logging.INFO, "manylora.server.access")
    fill = b"a" if not start.endswith(b"\r\n") else b"x: y\r\n"
    engine = FakeEngine()
    app = make_app(engine, tokenizer, connections=LIMITS, api_keys=("secret",))
    with RunningServer(app, engine) as server, connect(server) as connection:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(start + fill * (1_000_000 // len(fill)))
        (answer,) = answers(received(connection))
    if start == b"a: b\r\n":
        check(answer, 400, "BadRequestError", "not valid HTTP")
    else:
        check(answer, 431, "RequestHeaderFieldsTooLargeError", "headers")
    assert f"status={answer[0]}" in caplog.text
    assert answer[1]["x-request-id"] in caplog.text


def test_a_body_is_not_bounded_by_the_limit_on_heads(tokenizer: Tokenizer) -> None:
    """Announced or in chunks; its trailers and the words beside a chunk's size are."""
    large = body(user="u" * 10_000)
    chunked = POST + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    chunks = b"".join(b"%x\r\n" % len(part) + part + b"\r\n" for part in (large[:5000], large[5000:]))
    with serving(tokenizer) as server:
        assert ask(server, post(large, b"Connection: close"))[0][0] == 200
        assert ask(server, chunked + chunks + b"0\r\n\r\n")[0][0] == 200
        assert ask(server, chunked + chunks + b"0\r\nx: y\r\n\r\n")[0][0] == 200
        for endless in (b"0\r\n" + b"x: y\r\n" * 1000, b"0\r\nx: " + b"y" * 5000, b"5;x=" + b"y" * 5000):
            (answer,) = ask(server, chunked + chunks, endless)
            check(answer, 431, "RequestHeaderFieldsTooLargeError", "trailers")


@pytest.mark.parametrize("raw", [
    b"garbage\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
    b"GET  HTTP/1.1\r\n\r\n",
    b"GET /\x00 HTTP/1.1\r\n\r\n", b"GET /version HTTP/1.1\r\nno colon\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
], ids=repr)  # fmt: skip
def test_malformed_http_gets_an_error_body_an_id_and_a_log_line(
    tokenizer: Tokenizer, raw: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "manylora.server.access")
    with serving(tokenizer) as server:
        (answer,) = ask(server, raw)
        check(answer, 400, "BadRequestError", "not valid HTTP")
        assert f"id={answer[1]['x-request-id']} model=None status=400" in caplog.text
        assert ask(server, GET.replace(b"x\r\n", b"x\r\nConnection: close\r\n"))[0][0] == 200


def test_a_body_that_breaks_off_in_garbage_is_answered_under_its_own_id(tokenizer: Tokenizer) -> None:
    head = POST + b"Transfer-Encoding: chunked\r\nx-request-id: mine\r\n\r\n"
    with serving(tokenizer, body_s=WAIT_S) as server:
        (answer,) = ask(server, head + b"5\r\nhello\r\n", b"zz\r\n")
        check(answer, 400, "BadRequestError", "not valid HTTP")
        assert answer[1]["x-request-id"] == "mine"


def test_connections_that_send_nothing_are_closed(tokenizer: Tokenizer) -> None:
    with serving(tokenizer) as server, connect(server) as silent, connect(server) as blank:
        assert received(silent) == b""
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for _ in range(1000):  # blank lines before a request are allowed, and are no request
                blank.sendall(b"\r\n")
                time.sleep(0.05)
            pytest.fail("still open")


def test_half_a_head_is_closed_in_time_however_it_drips(tokenizer: Tokenizer) -> None:
    with serving(tokenizer) as server:
        (answer,) = ask(server, GET[:20])
        check(answer, 408, "RequestTimeoutError", "headers")
        with connect(server) as dripping:
            for byte in head_of(1000)[:20]:
                dripping.sendall(bytes([byte]))
                time.sleep(0.05)
            (answer,) = answers(received(dripping))
            check(answer, 408, "RequestTimeoutError", "headers")


def test_half_a_body_is_answered_and_closed(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "manylora.server.access")
    with serving(tokenizer) as server, connect(server) as half:
        half.sendall(post(body(), b"x-request-id: mine")[:-10])
        (answer,) = answers(received(half))
        check(answer, 408, "RequestTimeoutError", "body")
        assert answer[1]["x-request-id"] == "mine"
        until(lambda: "id=mine model=None status=408" in caplog.text)


def test_neither_long_answers_nor_pauses_between_requests_are_cut(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(delay_s=0.3)
    with serving(tokenizer, engine, head_s=0.2, body_s=0.2) as server, connect(server) as connection:
        for _ in range(2):
            connection.sendall(post(body(max_tokens=4)))
            data = b""
            while not data.endswith(b"}"):
                data += connection.recv(65536)
            assert data.startswith(b"HTTP/1.1 200 ")
            time.sleep(0.6)
        connection.sendall(GET[:20])
        *_, last = answers(received(connection))
        check(last, 408, "RequestTimeoutError", "headers")


def test_who_was_refused_need_not_send_the_rest_and_is_not_kept_for_ever(tokenizer: Tokenizer) -> None:
    """The answer comes before the body; then half of that comes, and nothing more."""
    engine = FakeEngine()
    app = make_app(engine, tokenizer, connections=LIMITS, api_keys=("secret",))
    with RunningServer(app, engine) as server, connect(server) as connection:
        connection.sendall(post(b"a" * 10_000)[:5000])
        (answer,) = answers(received(connection))
        assert answer[0] == 401


def test_requests_sent_ahead_are_answered_in_order(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(delay_s=0.05)
    with serving(tokenizer, engine) as server:
        few = b"".join(post(body(user="u"), b"x-request-id: r%d" % number) for number in range(5))
        found = ask(server, few + GET.replace(b"x\r\n", b"x\r\nConnection: close\r\n"))
        assert [(status, headers["x-request-id"]) for status, headers, _ in found[:5]] == [
            (200, f"r{number}") for number in range(5)
        ]
        assert found[5][0] == 200


def test_garbage_after_a_request_does_not_take_its_answer(tokenizer: Tokenizer) -> None:
    with serving(tokenizer, FakeEngine(delay_s=0.1)) as server:
        good, bad = ask(server, post(body()) + b"garbage\r\n\r\n")
        assert good[0] == 200
        assert json.loads(good[2])["choices"]
        check(bad, 400, "BadRequestError", "not valid HTTP")


def test_who_sends_too_much_ahead_is_answered_so_far_and_closed(tokenizer: Tokenizer) -> None:
    """Many requests, or a large body, while the first one is answered: the server keeps little of it."""
    engine = FakeEngine(delay_s=0.05)
    with serving(tokenizer, engine) as server:
        *good, bad = ask(server, post(body()) * 1000)
        assert [status for status, _, _ in good] == [200] * (MAX_AHEAD + 1)
        check(bad, 400, "BadRequestError", "ahead")
        engine.is_held = True  # the first answer does not end before all has been sent
        with connect(server) as connection:
            connection.sendall(post(body(max_tokens=9)))
            until(lambda: bool(engine.running))
            num_sent = 0
            with contextlib.suppress(ConnectionResetError, BrokenPipeError, TimeoutError):
                connection.settimeout(1.0)
                for piece in [post(b"a" * 10**8)[:200], *[b"a" * 10**6] * 50]:
                    connection.sendall(piece)
                    num_sent += len(piece)
            assert num_sent < 40 * 10**6  # what the system's buffers hold
            engine.is_held = False

            def abort_all() -> None:
                for stream in list(engine.running.values()):
                    stream.abort(None, "abort")

            server.call(abort_all)
            connection.settimeout(WAIT_S)
            assert [status for status, _, _ in answers(received(connection))] == [200, 413]


@pytest.mark.parametrize(("most", "expected"), [(256, 128), (100, 50), (4096, 3968), (20_000, 10_000)])
def test_the_limit_on_open_files_bounds_connections(most: int, expected: int) -> None:
    """It is raised as far as it goes; some files are left for other things."""
    code = f"""
import resource
from manylora.server.connection import connections_allowed
resource.setrlimit(resource.RLIMIT_NOFILE, (64, {most}))
print(connections_allowed(10_000), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.split() == [str(expected), str(most)]
