"""What clients ask for in the normal case, mostly through the official client, against a real server."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.e2e.process import BASE, MODEL, PAGES_ADAPTERS, Server, events

PROMPT = "Once upon a time"
GREEDY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
MESSAGES: Any = [{"role": "user", "content": "I want to book two tickets."}]


def test_a_completion_has_all_fields(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=BASE, **GREEDY)
    (choice,) = answer.choices
    assert (answer.object, answer.model, choice.index) == ("text_completion", BASE, 0)
    assert answer.id.startswith("cmpl-")
    assert choice.text
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_chat_completion_has_all_fields(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="film-tickets", messages=MESSAGES, max_tokens=12, seed=1)
    (choice,) = answer.choices
    assert (answer.object, answer.model) == ("chat.completion", "film-tickets")
    assert answer.id.startswith("chatcmpl-")
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("length", "stop")
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 12


@pytest.mark.parametrize("model", [BASE, "german", f"{BASE}:german"])
def test_a_streamed_completion_is_the_whole_one_in_pieces(client: openai.OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, **GREEDY)
    options: Any = {"include_usage": True}
    chunks = list(client.completions.create(model=model, stream=True, stream_options=options, **GREEDY))
    *texts, last = chunks
    assert last.choices == []
    assert last.usage == whole.usage or last.usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in texts)
    assert "".join(chunk.choices[0].text for chunk in texts) == whole.choices[0].text
    reasons = [chunk.choices[0].finish_reason for chunk in texts]
    assert reasons == [None] * (len(texts) - 1) + ["length"]
    assert len(texts) > 1
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.model for chunk in chunks} == {model}


def test_a_streamed_chat_is_the_whole_one_in_pieces(client: openai.OpenAI) -> None:
    arguments: Any = {"model": "coffee", "messages": MESSAGES, "max_completion_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**arguments)
    chunks = list(client.chat.completions.create(stream=True, **arguments))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(len(chunk.choices) == 1 for chunk in chunks)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_each_adapter_answers_for_itself(server: Server, names: list[str]) -> None:
    texts = {name: server.text(model=name, max_tokens=24) for name in [BASE, *names]}
    assert len(names) >= 8
    assert len(set(texts.values())) == len(texts), texts
    # All at once, in one batch with the base: the same texts.
    answers = server.complete_all([{"model": model, "max_tokens": 24} for model in texts])
    assert [answer.json()["choices"][0]["text"] for answer in answers] == [*texts.values()]


def test_samples_are_reproducible_and_differ(client: openai.OpenAI) -> None:
    def sample(seed: int, n: int) -> list[str]:
        answer = client.completions.create(
            model="shakespeare", prompt=PROMPT, max_tokens=16, temperature=1.0, seed=seed, n=n
        )
        assert [choice.index for choice in answer.choices] == list(range(n))
        assert answer.usage is not None
        return [choice.text for choice in answer.choices]

    three = sample(7, 3)
    assert len(set(three)) == 3
    assert sample(7, 3) == three
    # Sample i draws from (seed, i), however many there are.
    assert sample(7, 2) == three[:2]
    assert sample(7, 1) == three[:1]
    assert sample(8, 3) != three


def test_streamed_samples_are_told_apart_by_index(client: openai.OpenAI) -> None:
    arguments: Any = {"model": "german", "prompt": [PROMPT, "Der"], "max_tokens": 6, "seed": 3, "n": 2}
    whole = client.completions.create(**arguments)
    texts = ["", "", "", ""]
    for chunk in client.completions.create(stream=True, **arguments):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="german", logprobs=3, **GREEDY)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.text_offset is not None
    lengths = {len(logprobs.tokens), len(logprobs.token_logprobs), len(logprobs.top_logprobs)}
    assert lengths == {12}
    assert "".join(logprobs.tokens) == answer.choices[0].text
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs):
        # Greedy: what was chosen is the most probable.
        assert top[token] == logprob == max(top.values()) <= 0
        assert 1 <= len(top) <= 4


@pytest.mark.parametrize("model", [BASE, "german"])
def test_an_echo_gives_answers_the_logprobs_with_which_they_were_drawn(
    client: openai.OpenAI, model: str
) -> None:
    """As lm-evaluation-harness asks: prompts as token ids, several at once; and the same in vLLM's form."""
    names = {"return_tokens_as_token_ids": True}
    drawn = client.completions.create(model=model, logprobs=2, echo=True, extra_body=names, **GREEDY)
    said = drawn.choices[0].logprobs
    assert said is not None
    assert said.tokens is not None
    assert said.token_logprobs is not None
    tokens = [int(name.removeprefix("token_id:")) for name in said.tokens]
    prompts = [tokens, tokens[:-3]]
    told = client.completions.create(
        model=model, prompt=prompts, max_tokens=0, echo=True, logprobs=1, extra_body={"prompt_logprobs": 0}
    )
    for choice, prompt in zip(told.choices, prompts):
        logprobs: Any = choice.logprobs
        entries: Any = choice.model_extra
        none, *found = logprobs.token_logprobs
        assert (choice.finish_reason, none) == ("length", None)
        assert found == pytest.approx(said.token_logprobs[1 : len(prompt)], abs=1e-4)
        of_ids = zip(entries["prompt_logprobs"][1:], prompt[1:], strict=True)
        assert [entry[str(token)]["logprob"] for entry, token in of_ids] == found
    assert told.usage is not None
    assert told.usage.completion_tokens == 0


def test_chat_logprobs(client: openai.OpenAI) -> None:
    arguments: Any = {"model": BASE, "messages": MESSAGES, "max_tokens": 5, "temperature": 0}
    answer = client.chat.completions.create(logprobs=True, top_logprobs=2, **arguments)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].token == entry.token
        assert entry.bytes is not None
        assert bytes(entry.bytes).decode(errors="replace") == entry.token
    streamed = client.chat.completions.create(logprobs=True, stream=True, **arguments)
    tokens = [e.token for c in streamed if c.choices[0].logprobs for e in c.choices[0].logprobs.content or []]
    assert tokens == [entry.token for entry in logprobs.content]


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    text = client.completions.create(model=BASE, **GREEDY).choices[0].text
    stop = text[4:6]
    stopped = client.completions.create(model=BASE, stop=[stop, "\x00never"], **GREEDY).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == text[: text.index(stop)]
    streamed = client.completions.create(model=BASE, stop=stop, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in streamed) == stopped.text


def test_logit_bias_forces_and_forbids(server: Server) -> None:
    forced = server.complete(logit_bias={"65": 100}, max_tokens=4, ignore_eos=True, logprobs=0,
                             return_tokens_as_token_ids=True).json()  # fmt: skip
    assert forced["choices"][0]["logprobs"]["tokens"] == ["token_id:65"] * 4
    text = server.text(max_tokens=1)
    first = server.complete(max_tokens=1, logprobs=0, return_tokens_as_token_ids=True).json()
    token = first["choices"][0]["logprobs"]["tokens"][0].removeprefix("token_id:")
    assert server.text(max_tokens=1, logit_bias={token: -100}) != text


def test_echo_and_token_id_prompts(client: openai.OpenAI, server: Server) -> None:
    plain = client.completions.create(model="french", **GREEDY)
    echoed = client.completions.create(model="french", echo=True, **GREEDY)
    assert echoed.choices[0].text == PROMPT + plain.choices[0].text
    ids = [400, 500, 600]
    by_ids = client.completions.create(model="french", prompt=ids, max_tokens=5, temperature=0)
    assert by_ids.usage is not None
    assert by_ids.usage.prompt_tokens == 3
    both = client.completions.create(model="french", prompt=[ids, ids[:2]], max_tokens=5, temperature=0)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[0].text == by_ids.choices[0].text
    texts = client.completions.create(model="french", prompt=[PROMPT, "Le"], max_tokens=12, temperature=0)
    assert texts.choices[0].text == plain.choices[0].text
    assert texts.usage is not None
    assert texts.usage.completion_tokens == 24
    chunks = list(client.completions.create(model="french", echo=True, stream=True, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == echoed.choices[0].text


def test_sampling_fields_beyond_openai(client: openai.OpenAI) -> None:
    greedy = client.completions.create(model=BASE, **GREEDY).choices[0].text
    for extra in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}):
        hot: Any = {**GREEDY, "temperature": 5.0, "extra_body": extra}
        assert client.completions.create(model=BASE, **hot).choices[0].text == greedy
    long: Any = {**GREEDY, "max_tokens": 40}
    eager = {"min_tokens": 40, "ignore_eos": True, "stop_token_ids": [5]}
    plain = client.completions.create(model=BASE, extra_body=eager, **long)
    assert plain.usage is not None
    assert plain.usage.completion_tokens == 40
    assert plain.choices[0].text.startswith(greedy)
    penalised = client.completions.create(model=BASE, extra_body={**eager, "repetition_penalty": 2.0}, **long)
    assert penalised.choices[0].text != plain.choices[0].text
    both: Any = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "extra_body": eager}
    assert client.completions.create(model=BASE, **both, **long).choices[0].text != plain.choices[0].text


def test_models_are_listed_with_root_and_parent(server: Server, client: openai.OpenAI, adapters: Any,
                                                names: list[str]) -> None:  # fmt: skip
    cards = {card.id: card for card in client.models.list().data}
    assert next(iter(cards)) == BASE
    assert {BASE, *names} <= set(cards)
    for name in [BASE, *names]:
        card = server.http.get(f"/v1/models/{name}").json()
        assert client.models.retrieve(name).id == name
        assert card["object"] == "model"
        assert card["max_model_len"] == 1024
        expected = (MODEL, None) if name == BASE else (str(adapters / name), BASE)
        assert (card["root"], card["parent"]) == expected
        assert card == cards[name].to_dict()


@pytest.mark.parametrize("model", [BASE, "german"])
def test_the_requests_of_vllm_bench_serve(server: Server, model: str) -> None:
    """Bodies and expectations as in vLLM's endpoint_request_func.py, both backends."""
    common = {"model": model, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0,
              "repetition_penalty": 1.0, "ignore_eos": True}  # fmt: skip
    content = [{"type": "text", "text": PROMPT}]
    bodies = {
        "/v1/completions": {"prompt": PROMPT, "max_tokens": 9, "logprobs": None, **common},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": content}],
                                 "max_completion_tokens": 9, **common},
    }  # fmt: skip
    headers = {"Authorization": "Bearer EMPTY", "x-request-id": "bench-17"}
    for path, body in bodies.items():
        with server.http.stream("POST", path, json=body, headers=headers) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            assert response.headers["x-request-id"] == "bench-17"
            *chunks, usage, done = events(response)
        assert done == "[DONE]"
        assert usage["choices"] == []  # type: ignore[index]
        assert usage["usage"]["completion_tokens"] == 9  # type: ignore[index]
        for chunk in chunks:
            assert isinstance(chunk, dict)
            (choice,) = chunk["choices"]
            text = choice["text"] if path == "/v1/completions" else choice["delta"]["content"]
            assert isinstance(text, str)


def test_probes_and_documents(server: Server) -> None:
    health = server.http.get("/health")
    assert (health.status_code, health.content) == (200, b"")
    assert set(server.http.get("/version").json()) == {"version"}
    assert "/v1/completions" in server.http.get("/docs").text
    assert "/v1/load_lora_adapter" in server.http.get("/openapi.json").json()["paths"]


TTFT_PARTS = ["queue", "adapter", "kv", "prefill"]


def test_metrics_have_vllms_names_and_true_residency(server: Server) -> None:
    server.text(model="greek")
    metrics = server.metrics()
    label = f'{{model_name="{BASE}"}}'
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
        "prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total", "num_preemptions_total",
        "time_to_first_token_seconds_count", "inter_token_latency_seconds_count",
        "e2e_request_latency_seconds_count", "request_queue_time_seconds_count",
    ):  # fmt: skip
        assert f"vllm:{name}{label}" in metrics, name
    assert metrics[f'vllm:request_success_total{{finished_reason="length",model_name="{BASE}"}}'] > 0
    assert any(name.startswith("vllm:lora_requests_info{max_lora=") for name in metrics)
    resident = [name for name in metrics if name.startswith("vllm:lora_adapter_loaded{")]
    assert any('adapter_name="greek"' in name and 'level="gpu"' in name for name in resident)
    assert metrics['manylora:adapter_state{adapter_name="greek",state="resident"}'] == 1
    parts = [metrics[f'manylora:ttft_part_seconds_sum{{part="{part}"}}'] for part in TTFT_PARTS]
    assert sum(parts) == pytest.approx(metrics[f"vllm:time_to_first_token_seconds_sum{label}"], rel=0.01)
    greek = [
        f'manylora:adapter_ttft_part_seconds_total{{adapter_name="greek",part="{part}"}}'
        for part in TTFT_PARTS
    ]
    assert metrics[greek[TTFT_PARTS.index("adapter")]] > 0  # it was read once
    assert sum(metrics[name] for name in greek) == pytest.approx(
        metrics['manylora:adapter_time_to_first_token_seconds_sum{adapter_name="greek"}'], rel=0.01
    )
    assert metrics[PAGES_ADAPTERS] >= metrics['manylora:adapter_pages{adapter_name="greek"}'] > 0


def test_a_damaged_registry_is_not_used(server: Server) -> None:
    """The fixture damaged it before the start: the server serves, and one line says so."""
    assert server.log.count("going on without it") == 1
    assert "Traceback" not in server.log
