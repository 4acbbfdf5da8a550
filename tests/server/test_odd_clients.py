"""Clients that speak HTTP otherwise than most do, or hold what others need: on real sockets."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import socket
import time
from collections.abc import Iterator

import pytest

from manylora.server import generation
from manylora.server.connection import PROBE_CONNECTIONS, ConnectionLimits
from manylora.text.tokenizer import Tokenizer
from tests.server.conftest import RunningServer, make_app
from tests.server.fakes import FakeEngine
from tests.server.test_connection import (
    GET,
    LIMITS,
    WAIT_S,
    answers,
    ask,
    body,
    check,
    connect,
    post,
    received,
    serving,
)
from tests.server.test_lifecycle import POST, until

H2C = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQAAP__")
CLOSE = b"Connection: close"


@pytest.mark.parametrize("piece", [1, 11, 100_000])
def test_other_protocols_are_not_spoken_and_the_connection_goes_on(tokenizer: Tokenizer, piece: int) -> None:
    """As Java's client asks by default. The body is read, and what was sent ahead is answered."""
    large = body(user="u" * 1000)
    chunked = POST + b"\r\n".join((*H2C, b"Transfer-Encoding: chunked", b"", b""))
    chunked += b"%x\r\n" % len(large) + large + b"\r\n0\r\n\r\n"
    websocket = GET[:-2] + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    everything = post(large, *H2C) + websocket + chunked + post(body(), *H2C) + post(body(), CLOSE)
    with serving(tokenizer, head_s=WAIT_S, body_s=WAIT_S) as server:
        found = ask(
            server, *[everything[start : start + piece] for start in range(0, len(everything), piece)]
        )
        assert [status for status, _, _ in found] == [200] * 5
        assert [b"choices" in content for _, _, content in found] == [True, False, True, True, True]
        for other in (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
            (refused,) = ask(server, other)
            check(refused, 400, "BadRequestError", "not valid HTTP")


def test_a_head_that_asks_for_another_protocol_has_the_same_limits(tokenizer: Tokenizer) -> None:
    with serving(tokenizer) as server:
        (answer,) = ask(server, POST + b"\r\n".join((*H2C, b"x: " + b"a" * 2000, b"", b"")))
        check(answer, 431, "RequestHeaderFieldsTooLargeError")
        (answer,) = ask(server, post(body(), *H2C)[:-5])
        check(answer, 408, "RequestTimeoutError", "body")


def test_the_first_version_has_no_chunks(tokenizer: Tokenizer) -> None:
    first = b"HTTP/1.0"
    with serving(tokenizer) as server, connect(server) as connection:
        stream = post(body(stream=True), b"Connection: keep-alive", b"Expect: 100-continue")
        connection.sendall(stream.replace(b"HTTP/1.1", first))
        head, _, events = received(connection).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"transfer-encoding" not in head.lower()
        assert b"connection: close" in head.lower()
        assert events.startswith(b"data: {")
        assert events.endswith(b"}\n\ndata: [DONE]\n\n")
        ((status, headers, content),) = ask(server, post(body()).replace(b"HTTP/1.1", first))
        assert (status, len(content)) == (200, int(headers["content-length"]))
        (probe,) = ask(server, GET.replace(b"HTTP/1.1", first).replace(b"GET /version", b"HEAD /health"))
        assert (probe[0], probe[2]) == (200, b"")


def test_a_body_that_drips_is_ended_and_one_that_is_only_slow_is_not(tokenizer: Tokenizer) -> None:
    raw = post(body(user="u" * 3000), CLOSE)
    with (
        serving(tokenizer, body_bytes_per_s=500) as server,
        connect(server) as slow,
        connect(server) as dripping,
    ):
        dripping.sendall(raw[:-1000])
        for start in range(0, len(raw), 200):
            slow.sendall(raw[start : start + 200])
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                dripping.sendall(b"u")
            time.sleep(0.1)
        assert answers(received(slow))[0][0] == 200
        check(answers(received(dripping))[0], 408, "RequestTimeoutError", "bytes of the body")


def test_who_is_refused_early_may_not_drip_on(tokenizer: Tokenizer) -> None:
    """A wrong key is answered before the body; what is left of that may take a moment, but not for ever."""
    engine = FakeEngine()
    app = make_app(engine, tokenizer, connections=LIMITS, api_keys=("secret",))
    with RunningServer(app, engine) as server, connect(server) as connection:
        connection.sendall(post(b"a" * 10_000)[:5000])
        assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for _ in range(1000):
                connection.sendall(b"a")
                time.sleep(0.05)
            pytest.fail("still open")
        with connect(server) as quick:  # who sends it all at once goes on
            quick.sendall(post(b"a" * 100_000) + GET.replace(b"x\r\n", b"x\r\n" + CLOSE + b"\r\n"))
            assert [status for status, _, _ in answers(received(quick))] == [401, 200]


def test_all_bodies_together_are_bounded(tokenizer: Tokenizer) -> None:
    """The slowest is refused for one that comes quickly; a whole one takes no room."""
    engine = FakeEngine()
    app = make_app(engine, tokenizer, connections=LIMITS)
    app.state.connection_limits = ConnectionLimits(upload_bytes=300_000, body_s=WAIT_S)
    large = post(body(user="u" * 200_000), CLOSE)
    with RunningServer(app, engine) as server, connect(server) as first:
        first.sendall(large[:150_000])
        time.sleep(0.1)
        assert ask(server, large)[0][0] == 200
        check(answers(received(first))[0], 503, "ServiceUnavailableError", "300000")


def test_two_of_the_largest_bodies_have_room(tokenizer: Tokenizer) -> None:
    for size, room in ((None, LIMITS.upload_bytes), (10**8, 2 * 10**8)):
        app = make_app(FakeEngine(), tokenizer, connections=LIMITS, max_body_bytes=size)
        assert app.state.connection_limits.upload_bytes == room


def test_probes_have_places_beside_all_others(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "manylora.server.access")
    with serving(tokenizer, max_connections=3, head_s=WAIT_S) as server, contextlib.ExitStack() as stack:
        for _ in range(3):
            held = stack.enter_context(connect(server))
            held.sendall(GET)
            assert held.recv(65536).startswith(b"HTTP/1.1 200 ")
        for path in (b"/health", b"/ping", b"/version", b"/metrics?x=1", b"/health/"):
            (answer,) = ask(server, GET.replace(b"/version", path))  # one, and closed
            assert (answer[0], answer[1]["connection"]) == (200, "close")
        for other in (GET.replace(b"/version", b"/v1/models"), post(body())):
            (answer,) = ask(server, other)
            check(answer, 503, "ServiceUnavailableError", "connections")
            assert answer[1]["retry-after"] == "1"
        silent = [stack.enter_context(connect(server)) for _ in range(PROBE_CONNECTIONS)]
        (answer,) = ask(server)  # there is no place for this one, whatever it asks
        check(answer, 503, "ServiceUnavailableError", "connections")
        check(answers(received(silent[0]))[0], 503, "ServiceUnavailableError", "connections")
        until(lambda: ask(server, GET)[0][0] == 200)


@contextlib.contextmanager
def streaming(
    tokenizer: Tokenizer, write_s: float, num_tokens: int = 10**6
) -> Iterator[tuple[FakeEngine, socket.socket]]:
    """An engine whose answer has more than a kilobyte for each token of each choice, and a connection on which it
    comes, with little room on its way."""
    engine = FakeEngine(script=lambda request, sample: [39] * num_tokens, delay_s=0.001)
    app = make_app(engine, tokenizer, connections=dataclasses.replace(LIMITS, write_s=write_s))
    with RunningServer(app, engine, send_bytes=2**16) as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(WAIT_S)
        host, port = server.url.removeprefix("http://").split(":")
        connection.connect((host, int(port)))
        connection.sendall(post(body(stream=True, n=8, logprobs=20), CLOSE))
        until(lambda: bool(engine.running))
        yield engine, connection


def test_a_stream_that_nobody_reads_is_ended(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "manylora.server.access")
    with streaming(tokenizer, write_s=0.5) as (engine, _):
        until(lambda: "status=499" in caplog.text)
        assert not engine.running
        assert [reason for _, _, reason in engine.aborts] == ["closed"]


def test_a_stream_that_is_read_slowly_is_served(tokenizer: Tokenizer) -> None:
    """So slowly that for more than twice the time of one that is not read nothing can be written."""
    with streaming(tokenizer, write_s=1.0, num_tokens=60) as (_, connection):
        data, end_s = b"", time.monotonic() + 3.0
        while piece := connection.recv(2**10 if time.monotonic() < end_s else 2**20):
            data += piece
            if time.monotonic() < end_s:
                time.sleep(0.05)
        assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert data.count(b"data: {") == 8 * 60


def test_what_is_not_read_of_one_answer_has_a_bound(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "MAX_UNSENT_BYTES", 2**20)
    with streaming(tokenizer, write_s=WAIT_S) as (engine, connection):
        until(lambda: not engine.running)
        events = received(connection).split(b"data: ")
        assert json.loads(events[-2].partition(b"\n\n")[0])["error"]["code"] == 408
        assert events[-1].startswith(b"[DONE]")
