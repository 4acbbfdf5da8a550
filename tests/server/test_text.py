"""Defaults, ends and templates of models and adapters, as far as the engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from manylora.text.texts import Texts, read_base
from manylora.text.tokenizer import Tokenizer
from manylora.types import AdapterCard
from tests.server.conftest import BASE, client_of, make_app
from tests.server.fakes import FakeEngine
from tests.text import made

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
Scenario = Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The base's; in ``own`` an adapter's."""
    said = {"temperature": 0.5, "top_k": 7, "repetition_penalty": 1.2, "max_new_tokens": 12}
    made.layout_5(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "chat_template.jinja").write_text("own: {{ messages[0].content }}")
    said = {"top_k": 3, "eos_token_id": 9}
    (tmp_path / "own" / "generation_config.json").write_text(json.dumps(said))
    return tmp_path


def run(engine: FakeEngine, folder: Path, scenario: Scenario, **settings: Any) -> None:
    async def main() -> None:
        texts = Texts(read_base(folder), folder)
        async with client_of(make_app(engine, texts, **settings)) as client:
            await engine.add_adapter("own", str(folder / "own"))
            await scenario(client)

    asyncio.run(main())


def text_of(engine: FakeEngine, folder: Path) -> str:
    return Tokenizer.from_folder(folder).decode(engine.requests[-1].prompt, skip_special_tokens=False)


def test_defaults_of_requests_that_do_not_say(engine: FakeEngine, folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        for model, top_k, eos_ids in ((BASE, 7, (1,)), ("own", 3, (1, 9))):
            for path, body in (("chat/completions", CHAT), ("completions", {"prompt": "x"})):
                for asked, held in (
                    ({}, (0.5, top_k, 1.2, 12)),
                    ({"temperature": 0, "top_k": 0}, (0, 0, 1.2, 12)),
                    ({"repetition_penalty": 1, "max_tokens": 20}, (0.5, top_k, 1, 20)),
                    ({"min_tokens": 15}, (0.5, top_k, 1.2, 15)),
                ):
                    answer = await client.post(f"/v1/{path}", json={"model": model, **body, **asked})
                    assert answer.status_code == 200
                    params = engine.requests[-1].params
                    found = (params.temperature, params.top_k, params.repetition_penalty, params.max_tokens)
                    assert found == held
                    assert engine.requests[-1].eos_ids == eos_ids

    run(engine, folder, scenario)


def test_completions_stay_short(engine: FakeEngine, folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 100}))

    async def scenario(client: httpx.AsyncClient) -> None:
        await client.post("/v1/completions", json={"model": BASE, "prompt": "x"})
        assert engine.requests[-1].params.max_tokens == 16
        await client.post("/v1/chat/completions", json={"model": BASE, **CHAT})
        assert engine.requests[-1].params.max_tokens == 100

    run(engine, folder, scenario)


def test_templates(engine: FakeEngine, folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        async def asked(model: str, **fields: Any) -> httpx.Response:
            return await client.post("/v1/chat/completions", json={"model": model, **CHAT, **fields})

        assert (await asked("own")).status_code == 200
        assert text_of(engine, folder) == "own: Hi"
        assert (await asked(BASE, adapter_id="own", continue_final_message=True)).status_code == 200
        assert text_of(engine, folder) == "own: Hi"
        assert (await asked(BASE)).status_code == 200
        assert text_of(engine, folder) == "<|bos|><|user|>Hi<|eos|><|assistant|>"
        fields = {"continue_final_message": True, "add_generation_prompt": False}
        assert (await asked(BASE, **fields)).status_code == 200
        assert text_of(engine, folder) == "<|bos|><|user|>Hi"
        refused = await asked(BASE, continue_final_message=True, add_generation_prompt=True)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "continue_final_message")
        refused = await asked(BASE, chat_template="{{ 1 }}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template")
        assert "--trust-request-chat-template" in refused.json()["error"]["message"]

    run(engine, folder, scenario)


def test_a_request_may_bring_a_template_where_it_is_trusted(engine: FakeEngine, folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        for template, status in (("{{ messages[0].content }}{{ x }}", 200), ("{{ ''.__class__.x }}", 400)):
            body = {"model": BASE, **CHAT, "chat_template": template, "chat_template_kwargs": {"x": 3}}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == status
        assert text_of(engine, folder) == "Hi3"

    run(engine, folder, scenario, trusts_templates=True)


def test_a_reloaded_adapter_has_its_new_template(engine: FakeEngine, folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        for text in ("first", "second"):
            await client.post("/v1/unload_lora_adapter", json={"lora_name": "own"})
            (folder / "own" / "chat_template.jinja").write_text(text)
            load = {"lora_name": "own", "lora_path": "own"}
            assert (await client.post("/v1/load_lora_adapter", json=load)).status_code == 200
            await client.post("/v1/chat/completions", json={"model": "own", **CHAT})
            assert text_of(engine, folder) == text

    run(engine, folder, scenario, adapter_dir=folder)


class Replacing(FakeEngine):
    """As a cluster's: another front end may replace an adapter."""

    async def replace_adapter(self, name: str, path: str) -> AdapterCard:
        self.cards.pop(name, None)
        return await self.add_adapter(name, path)

    def card(self, name: str) -> AdapterCard | None:
        return self.cards.get(name)


def test_an_adapter_that_others_have_replaced_has_its_new_template(folder: Path) -> None:
    engine = Replacing()

    async def scenario(client: httpx.AsyncClient) -> None:
        for text in ("first", "second"):
            (folder / "own" / "chat_template.jinja").write_text(text)
            await engine.replace_adapter("own", str(folder / "own"))
            await client.post("/v1/chat/completions", json={"model": "own", **CHAT})
            assert text_of(engine, folder) == text

    run(engine, folder, scenario)


def test_text_follows_the_prompt(folder: Path) -> None:
    made.write_folder(folder, made.word_pieces(), {})
    tokenizer = Tokenizer.from_folder(folder)
    *prompt, last = tokenizer.encode("The lazy dog")
    engine = FakeEngine(lambda *_: [last])

    async def scenario(client: httpx.AsyncClient) -> None:
        for asked in ("The lazy", prompt):
            body = {"model": BASE, "prompt": asked, "max_tokens": 1, "logprobs": 0}
            choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
            assert (choice["text"], choice["logprobs"]["tokens"]) == (" dog", [" dog"])
            stopped = {**body, "stop": " d", "echo": True, "logprobs": None}
            choice = (await client.post("/v1/completions", json=stopped)).json()["choices"][0]
            assert (choice["text"], choice["stop_reason"]) == ("The lazy", " d")

    run(engine, folder, scenario)
