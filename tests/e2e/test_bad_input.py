"""Requests at fault: the right status and error body, other requests unharmed, nothing left behind."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.process import BASE, Server, assert_error, completion, events, wait_until

CHAT = {"model": BASE, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
ROUTES = (
    "/v1/completions", "/v1/chat/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def bystander(server: Server) -> Iterator[None]:
    """Streams that run beside all the bad requests of this module, again and again, always the same."""
    texts: list[str] = []
    done = threading.Event()

    def run() -> None:
        with httpx.Client(base_url=server.url, timeout=60.0) as http:
            while not done.is_set():
                body = completion(model="spanish", max_tokens=20, stream=True)
                with http.stream("POST", "/v1/completions", json=body) as response:
                    *chunks, last = events(response)
                assert last == "[DONE]"
                texts.append("".join(chunk["choices"][0]["text"] for chunk in chunks))  # type: ignore[index]

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run)
        wait_until(lambda: texts or running.done(), "the first stream")
        yield
        done.set()
        running.result(60.0)
    assert len(set(texts)) == 1
    server.wait_quiet()


@pytest.fixture(autouse=True)
def _nothing_left() -> None:
    """The bystander keeps running; it looks at the end."""


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("content", [
    b"", b"{", b"[]", b"null", b"7", b'"x"', b"\xff\xfe", b"[" * 50000, b'{"model": NaN}',
    b'{"model": "\\ud800"}', b'{"model": 1e999}',
])  # fmt: skip
def test_malformed_json(server: Server, path: str, content: bytes) -> None:
    assert_error(server.http.post(path, content=content), 400)


WRONG = [
    {"model": None}, {"model": 5}, {"model": ["demo"]},
    {"prompt": None}, {"prompt": 5}, {"prompt": {}}, {"prompt": ""}, {"prompt": []}, {"prompt": [""]},
    {"prompt": [[]]}, {"prompt": ["a", [5]]}, {"prompt": [1.5]}, {"prompt": [True]}, {"prompt": [None]},
    {"prompt": [-1]}, {"prompt": [4096]}, {"prompt": [10**30]}, {"prompt": [[5], [4096]]},
    {"prompt": "word " * 3000}, {"prompt": [5] * 1024}, {"prompt": [5] * 1000, "max_tokens": 25},
    {"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": 1024}, {"max_tokens": "5"}, {"max_tokens": 1.5},
    {"max_tokens": 10**30}, {"min_tokens": -1}, {"min_tokens": 9}, {"n": 0}, {"n": -1}, {"n": 129},
    {"n": "2"}, {"n": True}, {"temperature": -0.1}, {"temperature": "hot"}, {"temperature": 101},
    {"top_p": 0}, {"top_p": 1.01}, {"top_p": -1}, {"top_k": -2}, {"top_k": 0.5}, {"min_p": -0.1},
    {"min_p": 1.1}, {"stop": 5}, {"stop": [5]}, {"stop": [""]}, {"stop": ["x"] * 1000}, {"seed": 1.5},
    {"seed": 2**64}, {"seed": "x"}, {"logprobs": -1}, {"logprobs": 21}, {"logprobs": True},
    {"ignore_eos": "yes"}, {"stream": 1}, {"echo": "x"}, {"logit_bias": {"x": 1}},
    {"logit_bias": {"4096": 1}}, {"logit_bias": {"-1": 1}}, {"logit_bias": {"5": 101}},
    {"logit_bias": {"5": "x"}}, {"logit_bias": [5]}, {"presence_penalty": 2.1}, {"presence_penalty": -2.1},
    {"frequency_penalty": 3}, {"repetition_penalty": 0}, {"repetition_penalty": -1},
    {"stop_token_ids": [4096]}, {"stop_token_ids": ["x"]}, {"stop_token_ids": 5},
    {"stream_options": {"include_usage": True}}, {"stream": True, "stream_options": 5},
    {"best_of": 5}, {"suffix": "x"}, {"response_format": {"type": "json_object"}},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: str(wrong)[:40])
def test_a_wrong_field_is_named(server: Server, wrong: dict[str, Any]) -> None:
    error = assert_error(server.complete(**wrong), 400)
    # Where one of several fields may be too large, the other may be blamed.
    assert error["param"] in {*wrong, "max_tokens"}
    assert error["type"] == "BadRequestError"
    streamed = server.complete(**{"stream": True, **wrong})
    if wrong.keys() != {"stream_options"}:  # which is fine in a stream
        assert_error(streamed, 400)


@pytest.mark.parametrize("wrong", [
    {"messages": None}, {"messages": []}, {"messages": "Hi"}, {"messages": [{}]}, {"messages": [5]},
    {"messages": [{"role": "user"}]}, {"messages": [{"role": 5, "content": "x"}]},
    {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    {"messages": [{"role": "user", "content": "word " * 3000}]}, {"max_completion_tokens": 0},
    {"max_tokens": 5000}, {"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": 3},
    {"tools": [{}]}, {"chat_template_kwargs": []}, {"temperature": -1}, {"n": 0}, {"stop": [""]},
], ids=lambda wrong: str(wrong)[:40])  # fmt: skip
def test_a_wrong_chat_field_is_refused(server: Server, wrong: dict[str, Any]) -> None:
    assert_error(server.post("/v1/chat/completions", {**CHAT, **wrong}), 400)


def test_the_prompts_length_is_said(server: Server) -> None:
    assert_error(server.complete(prompt=[5] * 1020, max_tokens=10), 400, "1024", "1030")


@pytest.mark.parametrize("missing", ["model", "prompt"])
def test_a_missing_field_is_named(server: Server, missing: str) -> None:
    body = completion()
    del body[missing]
    assert_error(server.post("/v1/completions", body), 400, missing, param=missing)


@pytest.mark.parametrize("name", [
    "nope", "", "demo:", "demo:nope", ":german", "demo:demo", "other:german", "german:demo", "German",
    "demo:german:", "../german", "x" * 5000,
])  # fmt: skip
def test_an_unknown_model_is_404_and_never_the_base(server: Server, name: str) -> None:
    for answer in (
        server.complete(model=name),
        server.complete(model=name, stream=True),
        server.post("/v1/chat/completions", {**CHAT, "model": name}),
    ):
        error = assert_error(answer, 404, "does not exist", param="model")
        assert error["type"] == "NotFoundError"


def test_unknown_routes_and_methods(server: Server) -> None:
    for path in ("/", "/v1", "/v1/nope", "/v2/completions", "/v1/completions/x"):
        assert_error(server.http.get(path), 404)
    for name in ("nope", "demo%3Anope", "%00", "%ff", "..%2f.."):
        assert_error(server.http.get(f"/v1/models/{name}"), 404)
    assert_error(server.http.get("/v1/completions"), 405)
    assert_error(server.http.post("/v1/models"), 405)


def test_a_body_over_the_limit_is_413(server: Server) -> None:
    body = b'{"model": "demo", "prompt": "' + b"a" * (33 * 2**20) + b'"}'
    assert_error(server.http.post("/v1/completions", content=body), 413)
    pieces = iter([b"a" * 2**20] * 33)
    assert_error(server.http.post("/v1/load_lora_adapter", content=pieces), 413)


def test_a_long_prompt_holds_nobody_up(server: Server) -> None:
    """Encoding three megabytes takes seconds; the server answers others meanwhile."""
    with ThreadPoolExecutor(1) as thread:
        long = thread.submit(server.complete, prompt=["ab c" * 2**11] * 384)
        num_answers = 0
        while not long.done():
            assert server.http.get("/health").status_code == 200
            num_answers += 1
        assert_error(long.result(), 400, "1024")
    assert num_answers > 3, "a few may slip in at either end of an encoding that blocks"


EXTREMES = [
    {"temperature": 1e-300}, {"temperature": 1e-45}, {"temperature": 100}, {"top_p": 1e-300},
    {"top_k": 10**18}, {"min_p": 1}, {"repetition_penalty": 1e-300}, {"repetition_penalty": 1e300},
    {"presence_penalty": -2, "frequency_penalty": -2}, {"seed": -(2**63)}, {"seed": 2**64 - 1},
    {"logit_bias": {str(token): -100 for token in range(4096)}}, {"prompt": [0]}, {"prompt": [2, 2, 2]},
    {"logit_bias": {str(token): 100 for token in range(4096)}, "temperature": 1e-45, "top_p": 1e-45},
    {"n": 128, "max_tokens": 1}, {"prompt": "\x00"}, {"prompt": "\ufffd\U0001f9ff"}, {"stop": ["\ufffd"]},
    {"prompt": [5] * 1023, "max_tokens": 1}, {"min_tokens": 8, "stop": "e"},
]  # fmt: skip


@pytest.mark.parametrize("extreme", EXTREMES, ids=lambda extreme: str(extreme)[:40])
def test_extreme_yet_valid_values_are_served(server: Server, extreme: dict[str, Any]) -> None:
    answer = server.complete(**{"temperature": 1.0, "logprobs": 2, **extreme})
    assert answer.status_code == 200, answer.text


def _anything(chance: random.Random, depth: int = 0) -> Any:
    kinds: list[Any] = [
        None, True, False, 0, 1, -1, 2, 5, 10**20, -(2**63), 0.0, 0.5, -0.5, 1e300, 1e-300, "", "a", "demo",
        "german", "demo:german", "\x00", "é" * 9, [], {}, [5], ["a"], [[5, 6]], {"5": 1}, {"type": "text"},
        [{"role": "user", "content": "Hi"}], "../..", "german/", "/etc/passwd", [4096], "a" * 3000,
    ]  # fmt: skip
    if depth < 3 and chance.random() < 0.2:
        return [_anything(chance, depth + 1) for _ in range(chance.randrange(4))]
    if depth < 3 and chance.random() < 0.1:
        return {chance.choice("abc5"): _anything(chance, depth + 1) for _ in range(chance.randrange(4))}
    return chance.choice(kinds)


FIELDS = [
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "min_tokens", "n", "temperature",
    "top_p", "top_k", "min_p", "stop", "stop_token_ids", "seed", "logprobs", "top_logprobs", "ignore_eos",
    "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "stream", "stream_options",
    "echo", "add_special_tokens", "chat_template_kwargs", "user", "best_of", "response_format", "tools",
    "include_stop_str_in_output", "skip_special_tokens", "return_tokens_as_token_ids",
    "truncate_prompt_tokens",
]  # fmt: skip


def _random_body(chance: random.Random, path: str) -> Any:
    if chance.random() < 0.05:
        return _anything(chance)
    if path.endswith("adapter"):
        return {
            key: _anything(chance)
            for key in ("lora_name", "lora_path", "load_inplace")
            if chance.random() < 0.8
        }
    body: dict[str, Any] = completion(max_tokens=2)
    if "chat" in path:
        del body["prompt"]
        body["messages"] = CHAT["messages"]
    for field in chance.sample(FIELDS, chance.choice([1, 1, 2, 3, 8])):
        body[field] = _anything(chance)
    return body


def test_random_bodies_never_give_a_5xx(server: Server) -> None:
    chance = random.Random(2)
    # Unloading what happens to be served would be right, and would take it from the tests that follow.
    paths = ROUTES[:3]
    cases = [(path, _random_body(chance, path)) for path in (chance.choice(paths) for _ in range(700))]
    before = {card["id"] for card in server.http.get("/v1/models").json()["data"]}

    def status(case: tuple[str, Any]) -> int:
        path, body = case
        answer = server.http.post(path, content=json.dumps(body).encode())
        assert answer.status_code < 500, f"{path} {json.dumps(body)[:500]}: {answer.text}"
        if answer.status_code >= 400:
            assert_error(answer, answer.status_code)
        elif answer.headers["content-type"].startswith("text/event-stream"):
            assert answer.text.endswith("data: [DONE]\n\n")
            assert '"error"' not in answer.text
        return answer.status_code

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(status, cases))
    assert found.count(200) > 20
    assert found.count(400) > 100
    for card in server.http.get("/v1/models").json()["data"]:
        if card["id"] not in before:
            assert server.unload(card["id"]).status_code == 200
