"""The shapes that clients expect, chunk by chunk."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from manylora.text.tokenizer import Tokenizer
from tests.server.conftest import BASE, client_of, make_app
from tests.server.fakes import EOS, FakeEngine, plain_tokens
from tests.text import made

COMPLETION = {"model": BASE, "prompt": "One coffee", "max_tokens": 5}
CHAT = {"model": BASE, "messages": [{"role": "user", "content": "One coffee"}], "max_tokens": 5}


def post(
    engine: FakeEngine, tokenizer: Tokenizer | None, path: str, body: dict[str, Any], **headers: str
) -> Any:
    async def scenario() -> Any:
        async with client_of(make_app(engine, tokenizer)) as client:
            await engine.add_adapter("ad", "/adapters/ad")
            return await client.post(path, json=body, headers=headers)

    return asyncio.run(scenario())


def events(response: Any) -> list[dict[str, Any]]:
    """A stream's chunks, after checking its framing."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *parts, end = response.text.split("\n\n")
    assert end == ""
    assert parts[-1] == "data: [DONE]"
    assert all(part.startswith("data: ") for part in parts)
    return [json.loads(part[6:]) for part in parts[:-1]]


def text_of(engine: FakeEngine, tokenizer: Tokenizer, number: int = 0, sample: int = 0) -> str:
    return tokenizer.decode(plain_tokens(engine.requests[number], sample))


def test_completion(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    response = post(engine, tokenizer, "/v1/completions", COMPLETION, **{"x-request-id": "abc-1"})
    assert response.status_code == 200
    assert response.headers["x-request-id"] == "abc-1"
    body = response.json()
    assert body.pop("created") > 1.7e9
    num_prompt = len(tokenizer.encode("One coffee"))
    assert engine.requests[0].prompt == tuple(tokenizer.encode("One coffee"))
    assert body == {
        "id": "cmpl-abc-1",
        "object": "text_completion",
        "model": BASE,
        "choices": [
            {
                "index": 0,
                "text": text_of(engine, tokenizer),
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": 5,
            "total_tokens": num_prompt + 5,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


def test_chat(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    body = post(engine, tokenizer, "/v1/chat/completions", CHAT).json()
    prompt = tokenizer.encode("<|bos|><|user|>One coffee<|eos|><|assistant|>", add_special_tokens=False)
    assert engine.requests[0].prompt == tuple(prompt)
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": text_of(engine, tokenizer), "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert body["usage"]["completion_tokens"] == 5


def test_completion_stream(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    extra = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(post(engine, tokenizer, "/v1/completions", COMPLETION | extra))
    assert [len(chunk["choices"]) for chunk in chunks] == [1] * 5
    assert all("usage" not in chunk for chunk in chunks)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1
    assert chunks[0]["choices"][0].keys() == {"index", "text", "logprobs", "finish_reason", "stop_reason"}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text_of(engine, tokenizer)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["length"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5


def test_chat_stream(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = CHAT | {"stream": True, "stream_options": options, "n": 2}
    *chunks, last = events(post(engine, tokenizer, "/v1/chat/completions", body))
    roles = chunks[:2]
    assert [chunk["choices"][0]["index"] for chunk in roles] == [0, 1]
    assert all(c["choices"][0]["delta"] == {"role": "assistant", "content": ""} for c in roles)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for sample in (0, 1):
        mine = [c["choices"][0] for c in chunks[2:] if c["choices"][0]["index"] == sample]
        text = "".join(choice["delta"]["content"] for choice in mine)
        assert text == text_of(engine, tokenizer, sample=sample)
        assert mine[-1]["finish_reason"] == "length"
    assert [c["usage"]["completion_tokens"] for c in chunks[2:]] == list(range(1, 11))
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 10


def test_stream_without_usage_has_no_usage_chunk(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    chunks = events(post(engine, tokenizer, "/v1/completions", COMPLETION | {"stream": True}))
    assert all(chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_with_several_samples(engine: FakeEngine, tokenizer: Tokenizer, stream: bool) -> None:
    body = COMPLETION | {"prompt": ["one", "two", "three"], "n": 2, "stream": stream}
    response = post(engine, tokenizer, "/v1/completions", body)
    texts = dict.fromkeys(range(6), "")
    for chunk in events(response) if stream else [response.json()]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {p * 2 + s: text_of(engine, tokenizer, p, s) for p in range(3) for s in range(2)}
    if not stream:
        assert response.json()["usage"]["completion_tokens"] == 30
        assert response.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7], [8]]])
def test_token_id_prompts(engine: FakeEngine, prompt: list[Any]) -> None:
    """They work without a tokenizer, too."""
    response = post(engine, None, "/v1/completions", COMPLETION | {"prompt": prompt})
    assert response.status_code == 200
    assert engine.requests[0].prompt == (5, 6, 7)
    assert response.json()["choices"][0]["text"] == ""


def test_completion_logprobs(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(lambda *_: [60, 61])
    body = post(engine, tokenizer, "/v1/completions", COMPLETION | {"logprobs": 5}).json()
    logprobs = body["choices"][0]["logprobs"]
    tokens = [tokenizer.decode([60]), tokenizer.decode([61])]
    assert logprobs["tokens"] == tokens
    assert logprobs["token_logprobs"] == [-0.5, -0.5]
    assert logprobs["text_offset"] == [0, len(tokens[0])]
    assert logprobs["top_logprobs"][0][tokens[0]] == -0.5
    # JSON has no infinity.
    assert list(logprobs["top_logprobs"][0].values()) == [-0.5, -1.5, -2.5, -9999.0, -9999.0]


def test_completion_logprobs_stream_continues_offsets(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(lambda *_: [60, 61, 62])
    body = COMPLETION | {"logprobs": 0, "stream": True, "return_tokens_as_token_ids": True}
    chunks = events(post(engine, tokenizer, "/v1/completions", body))
    offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks]
    assert offsets == [[0], [11], [22]]
    assert chunks[0]["choices"][0]["logprobs"]["top_logprobs"] == [{"token_id:60": -0.5}]


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(tokenizer: Tokenizer, stream: bool) -> None:
    engine = FakeEngine(lambda *_: [60, 200])
    body = CHAT | {"logprobs": True, "top_logprobs": 2, "stream": stream}
    response = post(engine, tokenizer, "/v1/chat/completions", body)
    if stream:
        chunks = events(response)[1:]
        content = [e for chunk in chunks for e in chunk["choices"][0]["logprobs"]["content"]]
    else:
        content = response.json()["choices"][0]["logprobs"]["content"]
    assert [bytes(entry["bytes"]) for entry in content] == [tokenizer.token_bytes(t) for t in (60, 200)]
    assert content[0]["token"] == tokenizer.decode([60])
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -1.5]
    assert content[0].keys() == {"token", "logprob", "bytes", "top_logprobs"}


@pytest.mark.parametrize("stream", [False, True])
def test_echo(engine: FakeEngine, tokenizer: Tokenizer, stream: bool) -> None:
    body = COMPLETION | {"echo": True, "stream": stream, "n": 2}
    response = post(engine, tokenizer, "/v1/completions", body)
    chunks = events(response) if stream else [response.json()]
    text = "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == 1)
    assert text == "One coffee" + text_of(engine, tokenizer, sample=1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("prompt", ["One coffee", "é<|eos|>One", [0, 60, 200, 1, 61], [5]], ids=str)
def test_echo_with_logprobs(
    engine: FakeEngine, tokenizer: Tokenizer, stream: bool, max_tokens: int, prompt: str | list[int]
) -> None:
    """As lm-evaluation-harness asks for them: offsets are places in the text, which special tokens may be left out
    of, and characters of several tokens begin once."""
    body = {"model": BASE, "prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "n": 2}
    response = post(engine, tokenizer, "/v1/completions", body | {"stream": stream})
    found: dict[int, dict[str, Any]] = {}
    for chunk in events(response) if stream else [response.json()]:
        for choice in chunk["choices"]:
            mine = found.setdefault(choice["index"], {"text": ""})
            mine["text"] += choice["text"]
            mine["finish_reason"] = choice["finish_reason"]
            for name, values in choice["logprobs"].items():
                mine.setdefault(name, []).extend(values)
    ids = list(engine.requests[0].prompt)
    shown = prompt if isinstance(prompt, str) else tokenizer.decode(ids)
    for sample, choice in found.items():
        new = plain_tokens(engine.requests[0], sample)
        assert choice["text"] == shown + tokenizer.decode(new)
        assert choice["finish_reason"] == "length"
        assert choice["tokens"] == [tokenizer.token_bytes(t).decode(errors="replace") for t in ids + new]
        assert choice["token_logprobs"] == [None, *(-t / 64 for t in ids[1:]), *[-0.5] * max_tokens]
        none, *tops = choice["top_logprobs"]
        assert none is None
        assert [top[token] for top, token in zip(tops, choice["tokens"][1:])] == choice["token_logprobs"][1:]
        for token, begin in zip(choice["tokens"][len(ids) :], choice["text_offset"][len(ids) :]):
            assert choice["text"].startswith(token, begin)
        offsets = [len(_shown(tokenizer, prompt, ids[:i])) for i in range(len(ids))]
        assert choice["text_offset"][: len(ids)] == offsets
    assert found.keys() == {0, 1}
    if not stream:
        assert response.json()["usage"]["completion_tokens"] == 2 * max_tokens


def _shown(tokenizer: Tokenizer, prompt: str | list[int], ids: list[int]) -> str:
    """What a prompt's first tokens add to its text, without the beginnings of characters."""
    bos = [0] if isinstance(prompt, str) else [0, 1]
    return tokenizer.decode([token for token in ids if token not in bos], False).rstrip("\ufffd")


@pytest.mark.parametrize("prompt", ["dog", " dog"])
def test_offsets_of_an_echo_whose_decoder_strips(engine: FakeEngine, tmp_path: Path, prompt: str) -> None:
    """Whether the text begins with the space that its first token stands for, or not."""
    stripping = Tokenizer.from_folder(made.layout_llama(tmp_path))
    engine.info = dataclasses.replace(engine.info, vocab_size=stripping.vocab_size)
    echo = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 0}
    choice = post(engine, stripping, "/v1/completions", COMPLETION | echo).json()["choices"][0]
    _, first, *offsets = choice["logprobs"]["text_offset"]
    assert first == 0
    for token, begin in zip(choice["logprobs"]["tokens"][2:], offsets, strict=True):
        assert token
        assert choice["text"].startswith(token, begin)


def test_prompt_logprobs(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    """In vLLM's form: of each choice of a completion, of the whole chat. JSON has no infinity."""
    answer = post(engine, tokenizer, "/v1/chat/completions", CHAT | {"prompt_logprobs": 3}).json()
    prompt = engine.requests[0].prompt
    none, *entries = answer["prompt_logprobs"]
    assert none is None
    assert len(entries) == len(prompt) - 1
    for token, entry in zip(prompt[1:], entries):
        assert list(entry) == [str(token), str(token + 1), str(token + 2)]
        text = tokenizer.token_bytes(token + 1).decode(errors="replace")
        assert entry[str(token + 1)] == {"logprob": -token / 64 - 1, "rank": 2, "decoded_token": text}
        assert entry[str(token + 2)]["logprob"] == -9999.0
    engine.cards.clear()
    body = COMPLETION | {"prompt": [[5, 60, 61], [7]], "n": 2, "prompt_logprobs": 0}
    choices = post(engine, None, "/v1/completions", body).json()["choices"]
    described = [{str(t): {"logprob": -t / 64, "rank": t, "decoded_token": None}} for t in (60, 61)]
    told = [None, *described]
    assert [choice["prompt_logprobs"] for choice in choices] == [told, told, [None], [None]]
    assert choices[0]["logprobs"] is None


def test_an_echo_and_prompt_logprobs_ask_for_what_both_need(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    body = COMPLETION | {"echo": True, "logprobs": 2, "prompt_logprobs": 1}
    (choice,) = post(engine, tokenizer, "/v1/completions", body).json()["choices"]
    assert engine.requests[0].params.prompt_logprobs == 2
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:3]] == [2, 2]
    assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [1] * (
        len(engine.requests[0].prompt) - 1
    )
    engine.cards.clear()
    (choice,) = post(
        engine, tokenizer, "/v1/completions", COMPLETION | {"echo": True, "max_tokens": 0}
    ).json()["choices"]
    assert (choice["text"], choice["logprobs"], choice["finish_reason"]) == ("One coffee", None, "length")
    assert "prompt_logprobs" not in choice


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_and_eos(tokenizer: Tokenizer, stream: bool) -> None:
    tokens = tokenizer.encode("big and small", add_special_tokens=False)
    engine = FakeEngine(lambda *_: [*tokens, EOS, 60])
    for extra, text, reason in (({"stop": " and"}, "big", " and"), ({}, "big and small", None)):
        body = COMPLETION | {"stream": stream, "max_tokens": 50} | extra
        response = post(engine, tokenizer, "/v1/completions", body)
        choices = [c["choices"][0] for c in (events(response) if stream else [response.json()])]
        assert "".join(choice["text"] for choice in choices) == text
        assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", reason)
        engine.cards.clear()
    assert engine.running == {}


def test_defaults(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    names = (
        "max_tokens", "temperature", "stop", "logprobs", "n", "seed", "logit_bias", "stream",
        "stream_options", "user", "top_p", "echo", "suffix", "best_of",
    )  # fmt: skip
    nulls = dict.fromkeys(names)
    post(engine, tokenizer, "/v1/completions", COMPLETION | nulls)
    params = engine.requests[0].params
    assert (params.max_tokens, params.temperature, params.n, params.seed) == (16, 1.0, 1, None)
    engine.cards.clear()
    body = {"model": BASE, "messages": CHAT["messages"], "max_tokens": 9, "max_completion_tokens": None}
    post(engine, tokenizer, "/v1/chat/completions", body)
    assert engine.requests[1].params.max_tokens == 9
    engine.cards.clear()
    post(engine, tokenizer, "/v1/chat/completions", {"model": BASE, "messages": CHAT["messages"]})
    assert engine.requests[2].params.max_tokens is None


def test_every_sampling_field_arrives(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    fields = {
        "n": 2, "max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
        "stop": ["x", "y"], "stop_token_ids": [3], "include_stop_str_in_output": True,
        "skip_special_tokens": False, "seed": 11, "ignore_eos": True, "presence_penalty": 0.1,
        "frequency_penalty": 0.2, "repetition_penalty": 1.1,
    }  # fmt: skip
    post(
        engine, tokenizer, "/v1/completions", COMPLETION | fields | {"logit_bias": {"5": -1.5}, "logprobs": 3}
    )
    params = engine.requests[0].params
    for name, value in fields.items():
        assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value), name
    assert params.logit_bias == ((5, -1.5),)
    assert params.logprobs == 3


@pytest.mark.parametrize("model", ["ad", f"{BASE}:ad"])
def test_adapter_selection(engine: FakeEngine, tokenizer: Tokenizer, model: str) -> None:
    response = post(engine, tokenizer, "/v1/completions", COMPLETION | {"model": model})
    assert engine.requests[0].adapter == "ad"
    assert response.json()["model"] == model


NAMES = ("llama3", "org/llama3:8b", "llama3:8b")
ADAPTERS = ("lora-model:1234", "ft:base:org::id", "8b:x", "a/b")


@pytest.mark.parametrize(
    ("model", "adapter"),
    [
        *((f"{base}:{adapter}", adapter) for base in NAMES for adapter in ADAPTERS),
        *((adapter, adapter) for adapter in ADAPTERS), *((base, None) for base in NAMES),
        ("llama3:8b:x", "8b:x"), ("llama3:x", ""), ("llama3:", ""), (":a/b", ""), ("llama3::a/b", ""),
        ("8b:a/b", ""), ("org/llama3:a/b", ""),
    ],
)  # fmt: skip
def test_a_name_is_split_after_the_base(tokenizer: Tokenizer, model: str, adapter: str | None) -> None:
    engine = FakeEngine()

    async def scenario() -> None:
        async with client_of(make_app(engine, tokenizer, other_names=NAMES)) as client:
            for name in ADAPTERS:
                await engine.add_adapter(name, "/adapters/ad")
            response = await client.post("/v1/completions", json=COMPLETION | {"model": model})
            card = (await client.get(f"/v1/models/{model}")).json()
        if adapter == "":
            assert response.json()["error"]["code"] == card["error"]["code"] == 404
            return
        assert engine.requests[0].adapter == adapter
        assert response.json()["model"] == (BASE if adapter is None else model)
        assert card["id"] == (model if adapter is None else adapter)

    asyncio.run(scenario())


def test_the_longest_name_is_the_base(tokenizer: Tokenizer) -> None:
    engine = FakeEngine()

    async def scenario() -> None:
        async with client_of(make_app(engine, tokenizer, other_names=NAMES)) as client:
            for name in ("8b:x", "x"):
                await engine.add_adapter(name, "/adapters/ad")
            await client.post("/v1/completions", json=COMPLETION | {"model": "llama3:8b:x"})
            listed = (await client.get("/v1/models")).json()["data"]
        assert engine.requests[0].adapter == "x"
        assert [card["id"] for card in listed] == [BASE, *NAMES, "8b:x", "x"]
        assert {card["parent"] for card in listed[4:]} == {BASE}

    asyncio.run(scenario())


def test_bench_bodies(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    """What ``vllm bench serve`` sends."""
    common = {
        "model": "ad", "temperature": 0.0, "repetition_penalty": 1.0, "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    body = common | {"prompt": "One coffee", "max_tokens": 4, "logprobs": None}
    *chunks, last = events(post(engine, tokenizer, "/v1/completions", body))
    assert (len(chunks), last["usage"]["completion_tokens"]) == (4, 4)
    engine.cards.clear()
    content = [{"type": "text", "text": "One coffee"}]
    body = common | {"messages": [{"role": "user", "content": content}], "max_completion_tokens": 4}
    *chunks, last = events(post(engine, tokenizer, "/v1/chat/completions", body))
    assert (len(chunks), last["usage"]["completion_tokens"]) == (5, 4)
    assert engine.requests[1].params.ignore_eos


def test_a_slash_at_the_end_means_nothing(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        await engine.add_adapter("team/german", "/adapters/german")
        app = make_app(engine, tokenizer, api_keys=("secret",))
        async with client_of(app) as client:
            assert (await client.get("/v1/models/")).status_code == 401
            assert (await client.get("/health/")).status_code == 200
            key = {"Authorization": "Bearer secret"}
            listed = (await client.get("/v1/models//", headers=key)).json()
            assert [card["id"] for card in listed["data"]] == [BASE, "team/german"]
            one = (await client.get("/v1/models/team/german/", headers=key)).json()
            assert one["id"] == "team/german"
            for path in ("/v1/completions/", "/v1/chat/completions/"):
                body = COMPLETION if "chat" not in path else CHAT
                assert (await client.post(path, json=body, headers=key)).status_code == 200
            assert (await client.get("/", headers=key)).status_code == 404

    asyncio.run(scenario())


def test_ids_inside_are_not_the_clients(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    """Random bits, since two front ends of a cluster would number their requests alike."""
    post(
        engine, tokenizer, "/v1/completions", COMPLETION | {"prompt": ["a", "b"]}, **{"x-request-id": "same"}
    )
    ids = [request.id for request in engine.requests]
    assert len(set(ids)) == 2
    assert all(re.fullmatch("cmpl-same-[0-9a-f]{16}", each) for each in ids)
