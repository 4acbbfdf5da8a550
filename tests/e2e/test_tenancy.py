"""The official client against real servers: adapters named as other engines' clients do, and KV of one's own."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from manylora import LLM, AsyncLLM, SamplingParams
from manylora.engine.journal import read_journal
from manylora.protocol.events import Arrive
from manylora.types import InvalidRequest
from tests.e2e.process import BASE, MODEL, TIMEOUT_S, Server
from tests.e2e.test_cli import assert_refused

PROMPT = "Once upon a time there was a small town by the sea, and in that town there lived a very old man"
MESSAGES: Any = [{"role": "user", "content": f"Tell me how this goes on. {PROMPT}"}]
WAYS: list[dict[str, Any]] = [
    {"adapter_id": "german"},
    {"adapter": "german"},
    {"lora_name": "german"},
    {"lora_path": "german"},
    {"lora_request": {"lora_name": "german", "lora_int_id": 1, "lora_path": "/srv/german"}},
    {"parameters": {"adapter_id": "german"}},
]


def complete(client: openai.OpenAI, model: str = BASE, prompt: str = PROMPT, **extra: Any) -> Any:
    return client.completions.create(
        model=model, prompt=prompt, max_tokens=8, temperature=0, extra_body=extra or None
    )


def chat(client: openai.OpenAI, model: str = BASE, **extra: Any) -> Any:
    return client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=8, temperature=0, extra_body=extra or None
    )


def cached_tokens(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def test_the_adapter_that_is_named_answers(client: openai.OpenAI) -> None:
    expected = complete(client, "german").choices[0].text
    assert complete(client).choices[0].text != expected
    for way in WAYS:
        for model in (BASE, "german"):
            answer = complete(client, model, **way)
            assert (answer.model, answer.choices[0].text) == ("german", expected)
    said = chat(client, "german").choices[0].message.content
    for way in WAYS:
        answer = chat(client, **way)
        assert (answer.model, answer.choices[0].message.content) == ("german", said)


@pytest.mark.parametrize("way", WAYS)
def test_no_other_model_ever_answers_in_its_place(client: openai.OpenAI, server: Server, way: Any) -> None:
    nobody = json.loads(json.dumps(way).replace("german", "nobody"))
    for ask in (complete, chat):
        with pytest.raises(openai.NotFoundError, match="nobody"):
            ask(client, **nobody)
        with pytest.raises(openai.BadRequestError, match="german") as refused:
            ask(client, "french", **way)
        assert str(refused.value.param).split(".")[-1] in json.dumps(way)
        with pytest.raises(openai.BadRequestError):
            ask(client, adapters=["french"], **way)


def test_an_adapter_loaded_at_run_time_is_named_likewise(
    client: openai.OpenAI, server: Server, adapters: Path
) -> None:
    with pytest.raises(openai.NotFoundError):
        complete(client, adapter_id="later")
    assert server.load("later", adapters / "german").status_code == 200
    try:
        assert complete(client, adapter_id="later").model == "later"
    finally:
        assert server.unload("later").status_code == 200
    with pytest.raises(openai.NotFoundError):
        complete(client, adapter_id="later")


def test_no_adapter_takes_over_the_name_of_another(server: Server, adapters: Path) -> None:
    refused = server.load(f"{BASE}:german", adapters / "french")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "lora_name"
    assert server.text(model=f"{BASE}:german") == server.text(model="german")


def test_at_the_start_such_a_name_is_refused_or_skipped(adapters: Path, tmp_path: Path) -> None:
    german = adapters / "german"
    named = ("--served-model-name", BASE, "--port", "0")
    for name in (f"{BASE}:german", BASE):
        assert_refused("serve", MODEL, *named, "--adapter", f"{name}={german}", says=(repr(name),))
    (tmp_path / f"{BASE}:german").symlink_to(adapters / "french")
    (tmp_path / "german").symlink_to(german)
    with Server("--adapter-dir", str(tmp_path)) as started:
        started.wait_ready()
        assert f"adapter '{BASE}:german'" in started.log
        models = [model["id"] for model in started.http.get("/v1/models").json()["data"]]
        assert models == [BASE, "german"]


# ------------------------------------------------------------ KV of one's own

KEYS = ("key-of-alpha", "key-of-beta")


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tenancy") / "journal"


@pytest.fixture(scope="module")
def keyed(adapters: Path, journal: Path) -> Iterator[Server]:
    """A server with two keys."""
    keys = [word for key in KEYS for word in ("--api-key", key)]
    german = f"german={adapters / 'german'}"
    with Server(*keys, "--adapter", german, "--journal", str(journal), "--device-pool", "32MiB") as started:
        yield started.wait_ready()


@pytest.fixture(scope="module")
def tenants(keyed: Server) -> Iterator[tuple[openai.OpenAI, openai.OpenAI]]:
    first, second = (
        openai.OpenAI(base_url=f"{keyed.url}/v1", api_key=key, max_retries=0, timeout=TIMEOUT_S)
        for key in KEYS
    )
    with first, second:
        yield first, second


@pytest.mark.parametrize("model", [BASE, "german"])
def test_a_key_finds_its_own_prompts_only(tenants: tuple[openai.OpenAI, openai.OpenAI], model: str) -> None:
    alpha, beta = tenants
    for ask in (complete, chat):
        assert cached_tokens(ask(alpha, model)) == 0
        hits = cached_tokens(ask(alpha, model))
        assert hits > 0
        assert cached_tokens(ask(beta, model)) == 0
        assert cached_tokens(ask(beta, model)) == hits
        assert cached_tokens(ask(alpha, model)) == hits


def test_a_salt_narrows_a_keys_share(tenants: tuple[openai.OpenAI, openai.OpenAI]) -> None:
    alpha, beta = tenants
    prompt = "A quite different beginning, " + PROMPT
    complete(alpha, prompt=prompt)
    for client in (alpha, beta):
        for salt in ("salt-of-one", "salt-of-two"):
            assert cached_tokens(complete(client, prompt=prompt, cache_salt=salt)) == 0
            assert cached_tokens(complete(client, prompt=prompt, cache_salt=salt)) > 0
    assert cached_tokens(complete(alpha, prompt=prompt)) > 0
    assert cached_tokens(complete(beta, prompt=prompt)) == 0
    for wrong in ("", 5):
        with pytest.raises(openai.BadRequestError) as refused:
            complete(alpha, cache_salt=wrong)
        assert refused.value.param == "cache_salt"


def test_samples_of_one_request_share_their_prompt(tenants: tuple[openai.OpenAI, openai.OpenAI]) -> None:
    alpha, _ = tenants
    prompt = "And another beginning, " + PROMPT
    answer = alpha.completions.create(
        model=BASE, prompt=prompt, max_tokens=8, n=3, temperature=0, extra_body={"cache_salt": "forks"}
    )
    assert len({choice.text for choice in answer.choices}) == 1
    assert cached_tokens(complete(alpha, prompt=prompt, cache_salt="forks")) > 0


def test_the_journal_holds_neither_keys_nor_salts(
    tenants: tuple[openai.OpenAI, openai.OpenAI], keyed: Server, journal: Path
) -> None:
    """The last test of this server, which it ends."""
    alpha, beta = tenants
    for client in (alpha, beta):
        complete(client)
        complete(client, cache_salt="salt-of-one")
    keyed.process.send_signal(signal.SIGTERM)
    assert keyed.wait_exit() == 0
    written = journal.read_text()
    for secret in (*KEYS, "salt-of-one"):
        assert secret not in written
        assert hashlib.sha256(secret.encode()).hexdigest() not in written
    _, events = read_journal(journal)
    scopes = [event.request.cache_scope for _, event in events if isinstance(event, Arrive)]
    assert len(set(scopes[-4:])) == 4
    assert {len(scope) for scope in scopes} == {32}


def test_without_keys_all_share_but_for_salts(client: openai.OpenAI) -> None:
    prompt = "Nobody has begun like this before, " + PROMPT
    assert cached_tokens(complete(client, prompt=prompt)) == 0
    other = client.with_options(api_key="another")
    hits = cached_tokens(complete(other, prompt=prompt))
    assert hits > 0
    assert cached_tokens(complete(client, prompt=prompt, cache_salt="mine")) == 0
    assert cached_tokens(complete(other, prompt=prompt, cache_salt="mine")) == hits


def test_in_process_prompts_share_by_salt() -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    token_ids = list(range(5, 45))

    async def streamed(llm: AsyncLLM, salt: str | None) -> int:
        news = [news async for news in llm.stream(token_ids, params, cache_salt=salt)]
        return news[0].num_cached_tokens

    async def scenario() -> list[int]:
        async with AsyncLLM(MODEL, device="cpu", device_pool="8MiB", host_pool="0") as llm:
            return [await streamed(llm, salt) for salt in (None, "a", "b", None, "a", "b")]

    assert asyncio.run(scenario()) == [0, 0, 0, 32, 32, 32]
    with LLM(MODEL, device="cpu", device_pool="8MiB", host_pool="0") as llm:
        first, second = llm.generate([token_ids] * 2, params, cache_salt=["a", "b"])
        assert first.outputs[0].token_ids == second.outputs[0].token_ids
        assert llm.stats().prefix_hits_tokens == 0
        llm.generate(token_ids, params, cache_salt="a")
        assert llm.stats().prefix_hits_tokens == 32
        llm.chat(MESSAGES, params, cache_salt="c")
        for wrong in ("", 5, ["a", "b"], [""]):
            with pytest.raises(InvalidRequest, match="cache_salt"):
                llm.generate(token_ids, params, cache_salt=wrong)  # type: ignore[arg-type]
