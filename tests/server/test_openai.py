"""The official client against a real socket."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from manylora.text.tokenizer import Tokenizer
from tests.server.conftest import BASE, RunningServer
from tests.server.fakes import FakeEngine, plain_tokens


@pytest.fixture
def client(running: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0, timeout=60)


def test_base_and_adapter(
    client: openai.OpenAI, running: RunningServer, engine: FakeEngine, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "ad").mkdir()
    client.post("/load_lora_adapter", body={"lora_name": "ad", "lora_path": "ad"}, cast_to=str)
    assert [model.id for model in client.models.list()] == [BASE, "ad"]
    assert client.models.retrieve("ad").id == "ad"
    assert client.models.retrieve(BASE).id == BASE
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]
    for model in (BASE, "ad"):
        whole = client.completions.create(model=model, prompt="One coffee", max_tokens=6)
        expected = tokenizer.decode(plain_tokens(engine.requests[-1], 0))
        assert whole.choices[0].text == expected
        stream = client.completions.create(model=model, prompt="One coffee", max_tokens=6, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == expected

        chat = client.chat.completions.create(model=model, messages=messages, max_completion_tokens=6)
        expected = tokenizer.decode(plain_tokens(engine.requests[-1], 0))
        assert chat.choices[0].message.content == expected
        assert chat.choices[0].message.role == "assistant"
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 6
        chunks = list(
            client.chat.completions.create(
                model=model, messages=messages, max_completion_tokens=6, stream=True,
                stream_options={"include_usage": True}, logprobs=True, top_logprobs=1,
            )
        )  # fmt: skip
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == expected
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 6
        assert chunks[1].choices[0].logprobs is not None
    client.post("/unload_lora_adapter", body={"lora_name": "ad"}, cast_to=str)


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="none", prompt="x")
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model=BASE, prompt="x", max_tokens=1000, stream=True)


def test_large_body_is_413_although_the_server_does_not_read_it(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model=BASE, prompt="x" * (34 * 2**20))
    assert caught.value.status_code == 413
    # The connection stays usable.
    assert client.completions.create(model=BASE, prompt="x", max_tokens=1).choices


def test_death_in_a_stream_raises(client: openai.OpenAI, running: RunningServer, engine: FakeEngine) -> None:
    engine.is_held = True
    stream = client.completions.create(model=BASE, prompt="x", max_tokens=200, stream=True)
    next(stream)
    running.call(engine.die)
    with pytest.raises(openai.APIError, match="the engine has died: killed by signal 9"):
        list(stream)
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model=BASE, prompt="x")
    assert caught.value.status_code == 503
    assert running.wait() == 1
