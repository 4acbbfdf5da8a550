"""Fields beside ``model`` that name an adapter, and whose KV a request may share."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from manylora.text.tokenizer import Tokenizer
from tests.server.conftest import BASE, client_of, make_app
from tests.server.fakes import FakeEngine
from tests.server.test_errors import check

CHAT = "/v1/chat/completions"
BODIES = {
    "/v1/completions": {"model": BASE, "prompt": [5], "max_tokens": 2},
    CHAT: {"model": BASE, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
}
PATHS = sorted(BODIES)
ROUTES = pytest.mark.parametrize("path", PATHS)


def naming(name: Any) -> list[tuple[str, dict[str, Any]]]:
    """Every way to name an adapter: the field that an error names, and the fields of the body."""
    plain = ["adapter_id", "adapter", "adapter_name", "lora_name", "lora_path"]
    return [
        *((field, {field: name}) for field in plain),
        ("lora_request", {"lora_request": {"lora_name": name, "lora_int_id": 7, "lora_path": "/srv/x"}}),
        ("parameters.adapter_id", {"parameters": {"adapter_id": name, "max_new_tokens": 5}}),
        ("parameters.lora_request", {"parameters": {"lora_request": {"lora_name": name}}}),
    ]


def ask(
    engine: FakeEngine, tokenizer: Tokenizer, path: str, *bodies: dict[str, Any], **settings: Any
) -> list[httpx.Response]:
    """Bodies one after the other, each with what it changes in a good one; "key" is the API key."""

    async def scenario() -> list[httpx.Response]:
        for name in ("german", "french"):
            await engine.add_adapter(name, f"/adapters/{name}")
        async with client_of(make_app(engine, tokenizer, **settings)) as client:
            answers = []
            for body in bodies:
                body = {**BODIES[path], **body}
                key = {"authorization": f"Bearer {body.pop('key')}"} if "key" in body else {}
                answers.append(await client.post(path, content=json.dumps(body), headers=key))
            return answers

    return asyncio.run(scenario())


@ROUTES
@pytest.mark.parametrize(("field", "fields"), naming("german"))
def test_beside_the_base_the_named_adapter_answers(
    engine: FakeEngine, tokenizer: Tokenizer, path: str, field: str, fields: dict[str, Any]
) -> None:
    for model in (BASE, "german", f"{BASE}:german"):
        engine.requests.clear()
        engine.cards.clear()
        (whole, streamed) = ask(
            engine, tokenizer, path, {"model": model, **fields}, {"model": model, **fields, "stream": True}
        )
        assert whole.status_code == 200, whole.text
        answered = "german" if model == BASE else model
        assert whole.json()["model"] == answered
        events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
        assert {event["model"] for event in events} == {answered}
        assert [request.adapter for request in engine.requests] == ["german", "german"]


@ROUTES
@pytest.mark.parametrize(("field", "fields"), naming("nosuch"))
def test_beside_the_base_an_unknown_adapter_is_404(
    engine: FakeEngine, tokenizer: Tokenizer, path: str, field: str, fields: dict[str, Any]
) -> None:
    (answer,) = ask(engine, tokenizer, path, fields)
    assert "nosuch" in check(answer, 404, "NotFoundError", field)
    assert not engine.requests


@ROUTES
@pytest.mark.parametrize("other", ["french", "nosuch", BASE])
@pytest.mark.parametrize("model", ["german", f"{BASE}:german"])
def test_beside_another_adapter_it_is_400(
    engine: FakeEngine, tokenizer: Tokenizer, path: str, other: str, model: str
) -> None:
    ways = naming(other)
    answers = ask(engine, tokenizer, path, *({"model": model, **fields} for _, fields in ways))
    for (field, _), answer in zip(ways, answers, strict=True):
        message = check(answer, 400, "BadRequestError", field)
        assert other in message
        assert "german" in message
    assert not engine.requests


@ROUTES
def test_two_fields_that_name_different_adapters_are_400(
    engine: FakeEngine, tokenizer: Tokenizer, path: str
) -> None:
    pairs = [
        (second, {**fields, **others})
        for i, (_, fields) in enumerate(naming("german"))
        for second, others in naming("french")[i + 1 :]
        if not fields.keys() & others.keys()
    ]
    assert len(pairs) > 20
    answers = ask(engine, tokenizer, path, *(body for _, body in pairs))
    for (field, _), answer in zip(pairs, answers, strict=True):
        assert "french" in check(answer, 400, "BadRequestError", field)
    assert not engine.requests
    (agreeing,) = ask(FakeEngine(), tokenizer, path, {"adapter_id": "german", "lora_path": "german"})
    assert agreeing.json()["model"] == "german"


NO_NAMES: tuple[object, ...] = (3, True, "", ["german"], {})
WRONG = [
    *((field.removeprefix("parameters.").partition(".")[0], fields) for name in NO_NAMES
      for field, fields in naming(name) if "parameters" not in fields),
    ("lora_request", {"lora_request": {}}),
    ("lora_request", {"lora_request": "german"}),
    ("lora_request", {"lora_request": {"lora_int_id": 1, "lora_path": "/srv/german"}}),
    ("parameters", {"parameters": {"adapter_id": 3}}),
    ("parameters", {"parameters": "german"}),
    ("parameters.lora_request", {"parameters": {"lora_request": {}}}),
    ("adapters", {"adapters": ["german"]}),
    ("adapters", {"adapters": [{"name": "german", "weight": 0.5}]}),
    ("adapter_source", {"adapter_id": "german", "adapter_source": "hub"}),
    ("adapter_parameters", {"adapter_parameters": {"ids": ["german", "french"], "weights": [1, 1]}}),
    ("parameters.adapter_source", {"parameters": {"adapter_id": "german", "adapter_source": "s3"}}),
    ("parameters.adapter_parameters", {"parameters": {"adapter_parameters": {"ids": ["german"]}}}),
    ("lora", {"lora": [{"id": 0, "scale": 0.5}]}),
    ("lora_id", {"lora_id": "4f"}),
    ("lora_int_id", {"lora_int_id": 0}),
    ("lora_task_id", {"lora_task_id": 1}),
]  # fmt: skip


@ROUTES
@pytest.mark.parametrize(("field", "fields"), WRONG)
def test_what_cannot_be_honoured_is_400_and_named(
    engine: FakeEngine, tokenizer: Tokenizer, path: str, field: str, fields: dict[str, Any]
) -> None:
    for answer in ask(engine, tokenizer, path, fields, {"model": "german", **fields}):
        check(answer, 400, "BadRequestError", field)
    assert not engine.requests


@ROUTES
def test_null_and_nothing_ask_for_nothing(engine: FakeEngine, tokenizer: Tokenizer, path: str) -> None:
    nothing: list[dict[str, Any]] = [{field: None} for field, _ in naming(None) if "." not in field]
    nothing += [{"parameters": None}, {"parameters": {}}, {"parameters": {"adapter_id": None, "top_k": 3}}]
    nothing += [{"adapters": []}, {"adapters": None}, {"adapter_source": None}, {"lora": []}]
    answers = ask(engine, tokenizer, path, *nothing)
    assert {answer.json()["model"] for answer in answers} == {BASE}
    assert {request.adapter for request in engine.requests} == {None}


def test_metrics_and_log_count_it_under_the_adapter(
    engine: FakeEngine, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> str:
        await engine.add_adapter("german", "/adapters/german")
        async with client_of(make_app(engine, tokenizer)) as client:
            body = {**BODIES["/v1/completions"], "adapter_id": "german"}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            return (await client.get("/metrics")).text

    with caplog.at_level("INFO", "manylora.server.access"):
        page = asyncio.run(scenario())
    assert any("model='german' status=200" in line for line in caplog.messages)
    assert 'manylora:adapter_requests_total{adapter_name="german"} 1.0' in page.splitlines()


# ------------------------------------------------------------ cache scopes


def scopes(tokenizer: Tokenizer, *bodies: dict[str, Any], **settings: Any) -> list[str]:
    """What the engine was told of each request's scope."""
    found = []
    for path in PATHS:
        engine = FakeEngine()
        answers = ask(engine, tokenizer, path, *bodies, **settings)
        assert {answer.status_code for answer in answers} == {200}
        found.append([request.cache_scope for request in engine.requests])
    pattern = [[scopes.index(scope) for scope in scopes] for scopes in found]
    assert pattern[0] == pattern[1]
    return found[0]


def test_without_keys_and_salts_all_share(tokenizer: Tokenizer) -> None:
    assert scopes(tokenizer, {}, {"cache_salt": None}, {"adapter_id": "german"}, {"key": "any"}) == [""] * 4


def test_salts_narrow(tokenizer: Tokenizer) -> None:
    none, one, two, one_again = scopes(
        tokenizer, {}, {"cache_salt": "1"}, {"cache_salt": "2"}, {"cache_salt": "1"}
    )
    assert none == ""
    assert one == one_again
    assert len({none, one, two}) == 3


def test_keys_separate_and_salts_narrow_each(tokenizer: Tokenizer) -> None:
    keys = ("alpha", "beta")
    salts: list[dict[str, str]] = [{}, {"cache_salt": "1"}, {"cache_salt": "2"}]
    bodies = [{"key": key, **salt} for key in keys for salt in salts]
    found = scopes(tokenizer, *bodies, *bodies, api_keys=keys)
    assert found[: len(bodies)] == found[len(bodies) :]
    assert len(set(found)) == len(bodies)
    assert "" not in found


def test_scopes_tell_neither_key_nor_salt(tokenizer: Tokenizer) -> None:
    bodies = [{"key": "alpha", "cache_salt": "1"}] * 2
    first, second = (scopes(tokenizer, *bodies, api_keys=("alpha",)) for _ in range(2))
    assert first[0] != second[0], "each server has a secret of its own"
    assert {len(scope) for scope in first} == {32}


@ROUTES
@pytest.mark.parametrize("salt", ["", 3, True, [], ["x"], {}])
def test_a_salt_must_be_a_text_that_is_not_empty(
    engine: FakeEngine, tokenizer: Tokenizer, path: str, salt: Any
) -> None:
    (answer,) = ask(engine, tokenizer, path, {"cache_salt": salt})
    check(answer, 400, "BadRequestError", "cache_salt")
    assert not engine.requests
