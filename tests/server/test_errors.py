"""Each refusal has its status and body; nothing that a client sends gives a 5xx."""

from __future__ import annotations

import asyncio
import json
import urllib.parse
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manylora.engine.client import Delta, EngineBusy, GenerationRequest
from manylora.flags import FLAGS
from manylora.server.requests import (
    ChatBody,
    CompletionBody,
    LoadAdapterBody,
    LoraBody,
    UnloadAdapterBody,
    as_read,
)
from manylora.text.tokenizer import Tokenizer
from manylora.types import RequestError
from tests.server.conftest import BASE, client_of, make_app
from tests.server.fakes import MAX_MODEL_LEN, TOO_LARGE, VOCAB_SIZE, FakeEngine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
OK = {"model": BASE, "prompt": [5], "max_tokens": 2}
OK_CHAT = {"model": BASE, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


def send(
    app_settings: dict[str, Any], tokenizer: Tokenizer | None, *args: Any, **kwargs: Any
) -> httpx.Response:
    async def scenario() -> httpx.Response:
        async with client_of(make_app(FakeEngine(), tokenizer, **app_settings)) as client:
            return await client.request(*args, **kwargs)

    return asyncio.run(scenario())


def check(response: httpx.Response, status: int, kind: str, param: str | None) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == (kind, param, status)
    return str(error["message"])


BAD = [
    (COMPLETIONS, {"prompt": "x"}, "model"),
    (COMPLETIONS, {"model": None, "prompt": "x"}, "model"),
    (COMPLETIONS, {"model": BASE}, "prompt"),
    (COMPLETIONS, OK | {"prompt": None}, "prompt"),
    (COMPLETIONS, OK | {"prompt": ""}, "prompt"),
    (COMPLETIONS, OK | {"prompt": []}, "prompt"),
    (COMPLETIONS, OK | {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, OK | {"prompt": ["x", ""]}, "prompt"),
    (COMPLETIONS, OK | {"prompt": ["x", 1]}, "prompt"),
    (COMPLETIONS, OK | {"prompt": [1.5]}, "prompt"),
    (COMPLETIONS, OK | {"prompt": [True]}, "prompt"),
    (COMPLETIONS, OK | {"prompt": [VOCAB_SIZE]}, "prompt"),
    (COMPLETIONS, OK | {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, OK | {"prompt": [2**70]}, "prompt"),
    (COMPLETIONS, OK | {"prompt": [1] * MAX_MODEL_LEN}, "prompt"),
    (COMPLETIONS, OK | {"prompt": [TOO_LARGE]}, "prompt"),
    (COMPLETIONS, OK | {"prompt": [TOO_LARGE], "stream": True}, "prompt"),
    (COMPLETIONS, OK | {"prompt": [[1]] * 5000}, "prompt"),
    (COMPLETIONS, OK | {"prompt": [[1]] * 4000, "n": 128}, "n"),
    (COMPLETIONS, OK | {"max_tokens": MAX_MODEL_LEN}, "max_tokens"),
    (COMPLETIONS, OK | {"max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, OK | {"max_tokens": "5"}, "max_tokens"),
    (COMPLETIONS, OK | {"max_tokens": 5.0}, "max_tokens"),
    (COMPLETIONS, OK | {"max_tokens": True}, "max_tokens"),
    (COMPLETIONS, OK | {"max_tokens": 10**40}, "max_tokens"),
    (COMPLETIONS, OK | {"n": 0}, "n"),
    (COMPLETIONS, OK | {"n": 10**6}, "n"),
    (COMPLETIONS, OK | {"temperature": -1}, "temperature"),
    (COMPLETIONS, OK | {"top_p": 0}, "top_p"),
    (COMPLETIONS, OK | {"logprobs": 21}, "logprobs"),
    (COMPLETIONS, OK | {"logprobs": True}, "logprobs"),
    (COMPLETIONS, OK | {"seed": 2**64}, "seed"),
    (COMPLETIONS, OK | {"stop": [""]}, "stop"),
    (COMPLETIONS, OK | {"stop": ["x"] * 1000}, "stop"),
    (COMPLETIONS, OK | {"stop": 3}, "stop"),
    (COMPLETIONS, OK | {"stop": "x" * 100_000}, "stop"),
    (COMPLETIONS, OK | {"stop": ["x" * 10_000] * 10}, "stop"),
    (COMPLETIONS, OK | {"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
    (COMPLETIONS, OK | {"stop_token_ids": [1] * 100_000}, "stop_token_ids"),
    (COMPLETIONS, OK | {"logit_bias": {str(token): 0 for token in range(300_001)}}, "logit_bias"),
    (COMPLETIONS, OK | {"logit_bias": {"x": 1}}, "logit_bias"),
    (COMPLETIONS, OK | {"logit_bias": {"5": 101}}, "logit_bias"),
    (COMPLETIONS, OK | {"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
    (COMPLETIONS, OK | {"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    (COMPLETIONS, OK | {"stream_options": {"include_usage": True}}, "stream_options"),
    (COMPLETIONS, OK | {"suffix": "x"}, "suffix"),
    (COMPLETIONS, OK | {"best_of": 3}, "best_of"),
    (COMPLETIONS, OK | {"prompt_logprobs": 21}, "prompt_logprobs"),
    (COMPLETIONS, OK | {"prompt_logprobs": -1, "echo": True, "logprobs": 1}, "prompt_logprobs"),
    (COMPLETIONS, OK | {"prompt_logprobs": True}, "prompt_logprobs"),
    (COMPLETIONS, OK | {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (COMPLETIONS, OK | {"echo": True, "logprobs": 21}, "logprobs"),
    (COMPLETIONS, OK | {"prompt": [1] * (MAX_MODEL_LEN + 1), "echo": True, "max_tokens": 0}, "prompt"),
    (COMPLETIONS, OK | {"prompt": [1] * MAX_MODEL_LEN, "echo": True}, "prompt"),
    (CHAT, OK_CHAT | {"max_completion_tokens": 0}, "max_tokens"),
    (CHAT, OK_CHAT | {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (COMPLETIONS, OK | {"response_format": {"type": "json_object"}}, "response_format"),
    (COMPLETIONS, OK | {"min_tokens": 5}, "min_tokens"),
    (CHAT, {"model": BASE}, "messages"),
    (CHAT, OK_CHAT | {"messages": []}, "messages"),
    (CHAT, OK_CHAT | {"messages": "hello"}, "messages"),
    (CHAT, OK_CHAT | {"messages": ["hello"]}, "messages"),
    (CHAT, OK_CHAT | {"messages": [{"role": "user", "content": "x " * 3000}]}, "messages"),
    (CHAT, OK_CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    (CHAT, OK_CHAT | {"tools": [{"type": "function"}]}, "tools"),
    (CHAT, OK_CHAT | {"tool_choice": "required"}, "tool_choice"),
    (CHAT, OK_CHAT | {"tool_choice": {"type": "function"}}, "tool_choice"),
    (CHAT, OK_CHAT | {"audio": {"voice": "x"}}, "audio"),
    (CHAT, OK_CHAT | {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, OK_CHAT | {"top_logprobs": 3}, "top_logprobs"),
    (CHAT, OK_CHAT | {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    (CHAT, OK_CHAT | {"logprobs": 3}, "logprobs"),
    (CHAT, OK_CHAT | {"max_completion_tokens": MAX_MODEL_LEN}, "max_tokens"),
    (CHAT, OK_CHAT | {"chat_template": "{{ 1 }}"}, "chat_template"),
    (CHAT, OK_CHAT | {"echo": True}, "echo"),
    (CHAT, OK_CHAT | {"prompt": "x"}, "prompt"),
    (CHAT, OK_CHAT | {"messages": [{"role": "user", "content": "x"}] * 16_385}, "messages"),
    (COMPLETIONS, OK | {"messages": OK_CHAT["messages"]}, "messages"),
    (COMPLETIONS, OK | {"max_completion_tokens": 3}, "max_completion_tokens"),
    (COMPLETIONS, OK | {"top_logprobs": 3}, "top_logprobs"),
    *(
        (COMPLETIONS, OK | {"logit_bias": {key: 1}}, "logit_bias")
        for key in (
            "05",
            " 5",
            "5 ",
            "+5",
            "-5",
            "0_5",
            "٥",
            "5.0",
            "",
            "00",
            "1e2",
        )
    ),
    (COMPLETIONS, OK | {"prompt": [[5]] * 1000, "stop_token_ids": [5] * 501}, "prompt"),
    (
        COMPLETIONS,
        OK | {"prompt": [[5]] * 1000, "logit_bias": {str(i): 0 for i in range(419)}, "stop": "x" * 99},
        "prompt",
    ),
]
ASKING: dict[str, list[object]] = {
    "guided_json": [{}, {"type": "object"}, "{}"], "json_schema": [{}, "{}"], "guided_regex": ["a+"],
    "guided_choice": [["a"]], "guided_grammar": ["root ::= x"], "guided_decoding_backend": ["xgrammar"],
    "guided_whitespace_pattern": ["", " "], "structural_tag": [{"structures": []}, "x"], "grammar": ["x"],
    "regex": ["a"], "ebnf": ["root ::= x"], "stop_regex": ["a"], "custom_logit_processor": ["x"],
    "length_penalty": [0, 0.5, 2, "1"], "early_stopping": [True, "never"], "thinking_token_budget": [0, 5],
    "detokenize": [False], "spaces_between_special_tokens": [False],
}  # fmt: skip
"""Fields that constrain the output or the order of work, with values that ask for something."""

HARMLESS: dict[str, list[object]] = {
    "length_penalty": [1, 1.0], "early_stopping": [False], "detokenize": [True],
    "spaces_between_special_tokens": [True], "guided_regex": [""], "service_tier": ["auto"], "store": [True],
    "metadata": [{"a": "b"}], "parallel_tool_calls": [False], "reasoning_effort": ["high"],
    "verbosity": ["low"], "user": ["me"], "safety_identifier": ["x"], "prompt_cache_key": ["x"],
}  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param"), BAD, ids=lambda value: str(value)[:60])
def test_bad_requests(tokenizer: Tokenizer, path: str, body: dict[str, Any], param: str) -> None:
    check(send({}, tokenizer, "POST", path, json=body), 400, "BadRequestError", param)


@pytest.mark.parametrize(
    "extra",
    [
        {"tools": [], "tool_choice": "auto"},
        {"tools": [{"type": "function"}], "tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"], "parallel_tool_calls": True, "store": False, "whatever": {"x": [1]}},
        {"top_logprobs": 0},
        {"best_of": 1, "user": "me"},
    ],
)
def test_harmless_fields(tokenizer: Tokenizer, extra: dict[str, Any]) -> None:
    assert send({}, tokenizer, "POST", CHAT, json=OK_CHAT | extra).status_code == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b"nul", b'"x"', b"\xff\xfe", b'{"model": "\xff"}', b'{"model": "\\ud800"}',
        b'{"model":"' + BASE.encode() + b'","prompt":[5],"temperature":NaN}',
        b'{"model":"' + BASE.encode() + b'","prompt":[5],"n":1' + b"0" * 6000 + b"}",
        b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=lambda raw: repr(raw[:20]),
)  # fmt: skip
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_malformed_json(tokenizer: Tokenizer, path: str, raw: bytes) -> None:
    response = send({}, tokenizer, "POST", path, content=raw)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "BadRequestError"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("field", ASKING)
def test_what_cannot_be_kept_is_refused_by_name(tokenizer: Tokenizer, path: str, field: str) -> None:
    good = OK if path == COMPLETIONS else OK_CHAT
    for value in ASKING[field]:
        message = check(
            send({}, tokenizer, "POST", path, json=good | {field: value}), 400, "BadRequestError", field
        )
        assert field in message
    assert send({}, tokenizer, "POST", path, json=good | {field: None}).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_hints_and_defaults_are_taken(tokenizer: Tokenizer, path: str) -> None:
    good = OK if path == COMPLETIONS else OK_CHAT
    for field, values in HARMLESS.items():
        for value in values:
            response = send({}, tokenizer, "POST", path, json=good | {field: value})
            assert response.status_code == 200, f"{field}: {response.text}"


def test_the_page_on_http_names_every_field_and_limit() -> None:
    page = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
    for kind in (CompletionBody, ChatBody, LoadAdapterBody, UnloadAdapterBody, LoraBody):
        for field in as_read(kind).__struct_fields__:
            assert f"`{field}`" in page, field
    for flag in FLAGS:
        if flag.is_http and flag.name not in ("host", "port", "drain_timeout"):
            assert f"`{flag.option}" in page, flag.option


def test_context_message(tokenizer: Tokenizer) -> None:
    response = send({}, tokenizer, "POST", COMPLETIONS, json=OK | {"prompt": [1] * 300})
    message = check(response, 400, "BadRequestError", "prompt")
    assert message.startswith("This model's maximum context length is 256 tokens. However, you requested")


def test_pool_message(tokenizer: Tokenizer) -> None:
    response = send({}, tokenizer, "POST", COMPLETIONS, json=OK | {"prompt": [TOO_LARGE], "stream": True})
    assert (
        check(response, 400, "BadRequestError", "prompt") == "the request needs 200 pages; the pool has 100"
    )


@pytest.mark.parametrize("model", ["other", "base", f"{BASE}:other", "other:ad", f"{BASE}:", "", "x" * 10**5])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_unknown_model(tokenizer: Tokenizer, path: str, model: str) -> None:
    body = (OK if path == COMPLETIONS else OK_CHAT) | {"model": model}
    response = send({}, tokenizer, "POST", path, json=body)
    assert "does not exist" in check(response, 404, "NotFoundError", "model")
    assert len(response.content) < 1000


def test_no_tokenizer() -> None:
    for path, body, param in (
        (COMPLETIONS, OK | {"prompt": "text"}, "prompt"),
        (COMPLETIONS, OK | {"stop": "x"}, "stop"),
        (COMPLETIONS, OK | {"echo": True}, "echo"),
        (CHAT, OK_CHAT, "messages"),
    ):
        response = send({}, None, "POST", path, json=body)
        assert "no tokenizer" in check(response, 400, "BadRequestError", param)


def test_unknown_routes_and_methods(tokenizer: Tokenizer) -> None:
    said = check(send({}, tokenizer, "POST", "/v1/responses"), 404, "NotFoundError", None)
    assert "/v1/responses is not offered by this server" in said
    check(send({}, tokenizer, "GET", "/"), 404, "NotFoundError", None)
    response = send({}, tokenizer, "GET", COMPLETIONS)
    check(response, 405, "MethodNotAllowedError", None)
    assert response.headers["allow"] == "POST"
    assert "POST" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"Authorization": "Basic secret"}],
)
def test_missing_or_wrong_key(tokenizer: Tokenizer, headers: dict[str, str]) -> None:
    keys = {"api_keys": ("secret", "zweiter-Schlüssel")}
    for method, path in (
        ("POST", COMPLETIONS),
        ("GET", "/v1/models"),
        ("GET", "/v1/nothing"),
        ("GET", "/metrics"),
    ):
        response = send(keys, tokenizer, method, path, headers=headers)
        check(response, 401, "AuthenticationError", None)
    for path in ("/health", "/version", "/ping", "/docs", "/openapi.json"):
        assert send(keys, tokenizer, "GET", path, headers=headers).status_code == 200


@pytest.mark.parametrize("key", ["secret", "zweiter-Schlüssel"])
def test_right_key(tokenizer: Tokenizer, key: str) -> None:
    headers = {"Authorization": f"Bearer {key}".encode()}
    keys = {"api_keys": ("secret", "zweiter-Schlüssel")}
    assert send(keys, tokenizer, "GET", "/v1/models", headers=headers).status_code == 200


def test_metrics_ask_for_a_key_where_there_are_keys(tokenizer: Tokenizer) -> None:
    """They name every adapter; unless the operator says that they are open."""
    key = {"Authorization": "Bearer secret"}
    check(send({"api_keys": ("secret",)}, tokenizer, "GET", "/metrics"), 401, "AuthenticationError", None)
    assert send({"api_keys": ("secret",)}, tokenizer, "GET", "/metrics", headers=key).status_code == 200
    opened = {"api_keys": ("secret",), "metrics_open": True}
    assert send(opened, tokenizer, "GET", "/metrics").status_code == 200
    check(send(opened, tokenizer, "GET", "/v1/models"), 401, "AuthenticationError", None)
    assert send({}, tokenizer, "GET", "/metrics").status_code == 200


def test_a_refusal_of_the_engine_keeps_its_status(tokenizer: Tokenizer) -> None:
    """Too many wait, or the engine takes in no more: with the moment to try again, in whole seconds."""

    class Refusing(FakeEngine):
        def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
            async def refuse() -> AsyncIterator[Delta]:
                yield Delta(
                    request.id, 0, finish_reason="error", error=RequestError(429, "the queue is full")
                )

            if request.params.n == 1:
                raise EngineBusy("not now")
            return refuse()

    async def scenario() -> None:
        async with client_of(make_app(Refusing(), tokenizer)) as client:
            for stream in (False, True):
                response = await client.post(COMPLETIONS, json=OK | {"n": 2, "stream": stream})
                assert check(response, 429, "rate_limit_error", None) == "the queue is full"
                assert response.headers["retry-after"] == "1"
                response = await client.post(COMPLETIONS, json=OK | {"stream": stream})
                assert check(response, 503, "ServiceUnavailableError", None) == "not now"
                assert response.headers["retry-after"] == "1"

    asyncio.run(scenario())


def test_body_limit(tokenizer: Tokenizer) -> None:
    limit = {"max_body_bytes": 1000}

    async def chunks(size: int) -> AsyncIterator[bytes]:
        for _ in range(size // 100):
            yield b" " * 100

    body = json.dumps(OK).encode()
    for content in (b" " * 1001, chunks(1100), chunks(10**6)):
        response = send(limit, tokenizer, "POST", COMPLETIONS, content=content)
        check(response, 413, "ContentTooLargeError", None)
    padded = body + b" " * (1000 - len(body))
    assert send(limit, tokenizer, "POST", COMPLETIONS, content=padded).status_code == 200


@pytest.mark.parametrize("given_id", ["has space", "x" * 200, "ü", ""])
def test_unusable_request_ids_are_replaced(tokenizer: Tokenizer, given_id: str) -> None:
    response = send({}, tokenizer, "POST", COMPLETIONS, json=OK, headers={"x-request-id": given_id.encode()})
    assert response.json()["id"] == f"cmpl-{response.headers['x-request-id']}"
    assert len(response.headers["x-request-id"]) == 32


def test_a_bug_is_a_500_in_the_same_shape(tokenizer: Tokenizer) -> None:
    def broken(*_: Any) -> list[int]:
        raise ZeroDivisionError

    async def scenario() -> httpx.Response:
        async with client_of(make_app(FakeEngine(broken), tokenizer)) as client:
            return await client.post(COMPLETIONS, json=OK)

    response = asyncio.run(scenario())
    assert response.headers["x-request-id"] in check(response, 500, "InternalServerError", None)


SCALARS = (
    st.none() | st.booleans() | st.integers(-5, 300) | st.integers() | st.floats(allow_nan=False)
    | st.text(max_size=5) | st.sampled_from([BASE, "ad", f"{BASE}:ad", "user", "none", "text"])
)  # fmt: skip
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(max_size=4) | st.sampled_from(["role", "content", "type", "text"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)
LIKELY = {
    "model": st.just(BASE),
    "prompt": st.sampled_from(["x", "hello there", [5, 6], [[5], [6]]]),
    "messages": st.just(OK_CHAT["messages"]),
    "max_tokens": st.integers(1, 8),
    "stream": st.booleans(),
    "n": st.integers(1, 3),
    "logprobs": st.integers(0, 3) | st.booleans(),
}


def bodies(kind: type[msgspec.Struct], required: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    fields = {name: LIKELY.get(name, st.nothing()) | ANYTHING for name in as_read(kind).__struct_fields__}
    mandatory = {name: LIKELY[name] | LIKELY[name] | fields[name] for name in required}
    optional = {name: value for name, value in fields.items() if name not in mandatory}
    few = st.lists(st.sampled_from(sorted(optional)), max_size=4, unique=True)
    return few.flatmap(lambda names: st.fixed_dictionaries(mandatory | {n: optional[n] for n in names}))


def allowed(response: httpx.Response) -> None:
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert response.json()["error"]["code"] == response.status_code


COMPLETION_BODIES = bodies(CompletionBody, ["model", "prompt"])
CHAT_BODIES = bodies(ChatBody, ["model", "messages"])
fuzz = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


class Fuzzed:
    """One app for all examples, over an engine that serves the adapter "ad"."""

    def __init__(self, runner: asyncio.Runner, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        self.runner, self.client, self.engine = runner, client, engine

    def send(self, method: str, path: str, content: bytes | None = None) -> httpx.Response:
        return self.runner.run(self.client.request(method, path, content=content))


@pytest.fixture(scope="module")
def fuzzed(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    engine = FakeEngine()
    entering = client_of(make_app(engine, tokenizer, adapter_dir=tmp_path_factory.getbasetemp()))
    with asyncio.Runner() as runner:
        runner.run(engine.add_adapter("ad", "/adapters/ad"))
        yield Fuzzed(runner, runner.run(entering.__aenter__()), engine)
        runner.run(entering.__aexit__(None, None, None))


@settings(fuzz, max_examples=150)
@given(completion=COMPLETION_BODIES, chat=CHAT_BODIES)
def test_fuzz_generation(fuzzed: Fuzzed, completion: dict[str, Any], chat: dict[str, Any]) -> None:
    for path, body in ((COMPLETIONS, completion), (CHAT, chat)):
        allowed(fuzzed.send("POST", path, json.dumps(body).encode()))
    assert fuzzed.engine.running == {}


@fuzz
@given(raw=st.binary(max_size=40) | ANYTHING.map(lambda value: json.dumps(value).encode()))
def test_fuzz_any_body_to_any_route(fuzzed: Fuzzed, raw: bytes) -> None:
    for path in (COMPLETIONS, CHAT, "/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        allowed(fuzzed.send("POST", path, raw))


@fuzz
@given(name=ANYTHING, path=ANYTHING | st.text() | st.sampled_from(["\x00", "a" * 5000, "../..", "~", "/"]))
def test_fuzz_adapter_routes(fuzzed: Fuzzed, name: Any, path: Any) -> None:
    content = json.dumps({"lora_name": name, "lora_path": path}).encode()
    for route in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        response = fuzzed.send("POST", route, content)
        assert response.status_code in (200, 400, 403, 404), response.text
    if isinstance(name, str):
        response = fuzzed.send("GET", f"/v1/models/{urllib.parse.quote(name, safe='')}")
        assert response.status_code in (200, 404)
