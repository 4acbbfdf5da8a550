"""Answers that are not streamed: put together in pieces, of what is kept in little room until then."""

from __future__ import annotations

import asyncio
import itertools
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from starlette.applications import Starlette

from manylora.server import generation, logprobs
from manylora.server.errors import unavailable
from manylora.server.logprobs import PackedLogprobs
from manylora.text.tokenizer import Tokenizer
from manylora.types import TokenLogprobs
from tests.server.conftest import BASE, client_of, make_app
from tests.server.fakes import FakeEngine

COMPLETION = ("/v1/completions", {"model": BASE, "prompt": [5, 6], "logprobs": 3})
CHAT = (
    "/v1/chat/completions",
    {"model": BASE, "messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 3},
)
PLAIN = ("/v1/completions", {"model": BASE, "prompt": [[5, 6]] * 20})

Messages = list[dict[str, Any]]


async def ask(
    app: Starlette,
    path: str,
    body: dict[str, Any],
    sent: Callable[[dict[str, Any]], None] | None = None,
    gone: asyncio.Event | None = None,
) -> Messages:
    """What the app sends. ``sent`` hears of each message; ``gone`` is set when the client leaves."""
    raw, messages = [json.dumps(body).encode()], []
    del body
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(b"content-type", b"application/json")], "state": {},
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        if raw:
            return {"type": "http.request", "body": raw.pop()}
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        messages.append(message)
        if sent is not None:
            sent(message)

    await app(scope, receive, send)
    return messages


def body_of(messages: Messages) -> Any:
    answer = json.loads(b"".join(message.get("body", b"") for message in messages))
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


NUMBERS = st.floats(width=32, max_value=0)
ENTRIES = st.builds(
    TokenLogprobs,
    st.integers(0, 2**31 - 1),
    NUMBERS,
    st.lists(st.tuples(st.integers(0, 2**31 - 1), NUMBERS), max_size=20).map(tuple),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(ENTRIES, max_size=4), max_size=4))
def test_what_is_packed_comes_out_as_it_was(parts: list[list[TokenLogprobs]]) -> None:
    packed = PackedLogprobs()
    for part in parts:
        packed.add(part)
    expected = [entry for part in parts for entry in part]
    assert list(packed) == list(packed) == expected


@pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT, PLAIN])
def test_others_have_their_turn_between_pieces(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pieces together are the answer that would go out at once."""
    body = body | {"n": 3, "max_tokens": 20}

    async def scenario() -> tuple[Messages, Messages, list[int]]:
        turns, seen = 0, []

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        def sent(message: dict[str, Any]) -> None:
            seen.append(turns)

        app = make_app(FakeEngine(tokens_per_step=3), tokenizer)
        at_once = await ask(app, path, body)
        monkeypatch.setattr(generation, "PIECE_BYTES", 500)
        task = asyncio.create_task(other())
        pieces = await ask(app, path, body, sent)
        task.cancel()
        return at_once, pieces, seen[1:]

    at_once, pieces, seen = asyncio.run(scenario())
    assert [message["type"] for message in at_once] == ["http.response.start", "http.response.body"]
    assert dict(at_once[0]["headers"])[b"content-length"] == b"%d" % len(at_once[1]["body"])
    assert body_of(pieces) == body_of(at_once)
    start, *bodies = pieces
    assert dict(start["headers"])[b"content-type"] == b"application/json"
    assert [message["more_body"] for message in bodies] == [True] * (len(bodies) - 1) + [False]
    assert len(bodies) > 5
    assert max(len(message["body"]) for message in bodies) < 2000
    assert all(before < after for before, after in itertools.pairwise(seen))


@pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT])
def test_a_whole_answer_has_the_log_probabilities_of_the_stream(
    tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    async def scenario() -> None:
        app = make_app(FakeEngine(tokens_per_step=2), tokenizer)
        whole = body_of(await ask(app, path, body | {"n": 2, "max_tokens": 9}))
        parts: list[dict[str, list[Any]]] = [{}, {}]
        async with client_of(app) as client:
            streamed = await client.post(path, json=body | {"n": 2, "max_tokens": 9, "stream": True})
        for line in streamed.text.split("\n\n")[:-2]:
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                for name, values in (choice["logprobs"] or {}).items():
                    parts[choice["index"]].setdefault(name, []).extend(values)
        assert [choice["logprobs"] for choice in whole["choices"]] == parts
        assert all(len(values) == 9 for part in parts for values in part.values())

    asyncio.run(scenario())


@pytest.mark.parametrize("ends", ["the server's end", "the client's leaving"])
def test_a_half_sent_answer_is_cut_off(
    tokenizer: Tokenizer, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no place for an error: what came must not look like a whole answer."""
    monkeypatch.setattr(generation, "PIECE_BYTES", 100)

    async def scenario() -> Messages:
        app, gone = make_app(FakeEngine(), tokenizer), asyncio.Event()

        def sent(message: dict[str, Any]) -> None:
            if message.get("more_body") and ends == "the client's leaving":
                gone.set()
            elif message.get("more_body"):
                app.state.lifecycle.interrupt_all(unavailable("the server is shutting down"))

        return await ask(app, COMPLETION[0], COMPLETION[1] | {"max_tokens": 50}, sent, gone)

    messages = asyncio.run(scenario())
    assert messages[-1]["more_body"]
    assert len(messages) < 10


def test_more_log_probabilities_than_are_kept_are_refused_before_anything_runs(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where max_tokens is left open, by what the context leaves. A stream keeps none."""
    monkeypatch.setattr(logprobs, "MAX_PACKED", 2 * 3 * 4 * 10)
    engine = FakeEngine()

    async def scenario() -> None:
        async with client_of(make_app(engine, tokenizer)) as client:
            path, body = COMPLETION[0], COMPLETION[1] | {"prompt": [[5, 6], [7]], "n": 3}
            refused = await client.post(path, json=body | {"max_tokens": 11})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, "logprobs")
            assert "264 log-probabilities, more than 240: set stream" in error["message"]
            assert (await client.post(CHAT[0], json=CHAT[1])).status_code == 400
            of_prompts = {"logprobs": None, "prompt_logprobs": 10, "max_tokens": 0}
            assert (await client.post(path, json=body | of_prompts)).status_code == 400
            assert not engine.requests
            for served in ({"max_tokens": 10}, {"stream": True}, {"logprobs": None}):
                answer = await client.post(path, json=body | {"max_tokens": 11} | served)
                assert answer.status_code == 200

    asyncio.run(scenario())


def test_a_request_that_waits_does_not_keep_its_body(tokenizer: Tokenizer) -> None:
    """Which may be of megabytes, of fields that mean nothing here."""
    engine = FakeEngine()
    engine.is_held = True

    async def scenario() -> None:
        app = make_app(engine, tokenizer)
        body = COMPLETION[1] | {"user": "u" * 2**22, "max_tokens": 5}
        waiting = asyncio.create_task(ask(app, COMPLETION[0], body))
        del body
        # The thread that has decoded it lets go of it a moment later.
        async with asyncio.timeout(60):
            while not engine.requests or tracemalloc.get_traced_memory()[0] > 2**22:
                await asyncio.sleep(0.005)
        engine.is_held = False
        await waiting

    tracemalloc.start()
    try:
        asyncio.run(scenario())
    finally:
        tracemalloc.stop()
