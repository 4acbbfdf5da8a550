"""The engine inside this process, on the shipped model: what its streams and stats say of a start."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from manylora_lab.sim.conformance import replay_difference

from manylora import LLM, AsyncLLM, SamplingParams
from manylora.adapters import peft
from manylora.adapters.files import read_tensors
from manylora.config.declaring import ConfigError
from manylora.engine.journal import fingerprint, read_answered
from manylora.executor.worker import Worker
from manylora.outputs import StreamOutput
from manylora.tensorfile import StoredTensor
from manylora.text.tokenizer import Tokenizer
from manylora.types import InvalidRequest
from tests.e2e.folders import copy_of
from tests.e2e.process import MODEL
from tests.text import made

PROMPT = list(range(5, 45))


async def streamed(llm: AsyncLLM) -> tuple[StreamOutput, list[StreamOutput]]:
    """One request's first news, and the rest."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    first, *rest = [news async for news in llm.stream(PROMPT, params, "german")]
    return first, rest


def test_a_stream_begins_with_what_the_request_waited_for(adapters: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"

    async def scenario() -> None:
        german = {"german": str(adapters / "german")}
        pools = {"device_pool": "8MiB", "host_pool": "8MiB"}
        async with AsyncLLM(MODEL, german, device="cpu", trace=str(trace), **pools) as llm:
            cold, rest = await streamed(llm)
            warm, _ = await streamed(llm)
            assert cold.adapter_s > 0.0
            assert (cold.kv_s, cold.num_cached_tokens) == (0.0, 0)
            assert len(rest) == 3
            for news in rest:
                assert news.queue_s == news.adapter_s == news.kv_s == news.num_cached_tokens == 0
            assert (warm.adapter_s, warm.kv_s, warm.num_cached_tokens) == (0.0, 0.0, 32)
            assert llm.info.num_host_pages == (await llm.stats()).host_pages_total > 0

    asyncio.run(scenario())
    assert any("german@1" in line and " read " in line for line in trace.read_text().splitlines())


def test_folders_say_what_callers_do_not(adapters: Path, tmp_path: Path) -> None:
    """An adapter's template and defaults are those of its prompts alone."""
    own = copy_of(adapters / "german", tmp_path / "own")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(MODEL) / file, own)
    (own / "chat_template.jinja").write_text("Es war {{ messages[0].content }}")
    (own / "generation_config.json").write_text('{"temperature": 0, "max_new_tokens": 3}')
    (tmp_path / "flag.jinja").write_text("flag")
    flag = {"other": str(tmp_path / "flag.jinja")}
    with LLM(MODEL, {"own": str(own), "other": str(own)}, device="cpu", device_pool="8MiB", host_pool="8MiB",
             chat_template=flag) as llm:  # fmt: skip
        chats = [[{"role": "user", "content": "einmal"}]] * 4
        greedy = SamplingParams(temperature=0, max_tokens=2)
        named = ["own", "own", "other", None]
        results = llm.chat(chats, [None, greedy, None, greedy], adapter=named)
        assert llm.tokenizer is not None
        prompts = [llm.tokenizer.decode(result.prompt_token_ids, False) for result in results]
        assert prompts[:3] == ["Es war einmal", "Es war einmal", "flag"]
        assert prompts[3].endswith("einmal<|eos|><|assistant|>")
        assert [len(result.outputs[0].token_ids) for result in results] == [3, 2, 3, 2]
        assert results[0].outputs[0].token_ids[:2] == results[1].outputs[0].token_ids
    content = json.loads((own / "tokenizer.json").read_text())
    content["model"]["merges"].reverse()
    (own / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="its merges differ"):
        LLM(MODEL, {"own": str(own)}, device="cpu")
    with pytest.raises(ConfigError, match="--chat-template nowhere"):
        LLM(MODEL, device="cpu", chat_template="nowhere")


def test_what_is_checked_before_the_model_is_loaded_is_not_read_again(
    adapters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    reads: list[Path] = []

    def noted(path: Path) -> dict[str, StoredTensor]:
        reads.append(path)
        return read_tensors(path)

    monkeypatch.setattr(peft, "read_tensors", noted)
    named = {name: str(adapters / name) for name in ("german", "french", "greek")}
    for start in range(2):
        with LLM(MODEL, named, device="cpu", device_pool="8MiB", host_pool="8MiB") as llm:
            assert [card.name for card in llm.adapters()] == list(named)
        assert len(reads) == 3, f"start {start}"


def test_every_closer_waits_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, has_come = threading.Event(), threading.Event()
    close = Worker.close

    def slow(worker: Worker, *, frees: bool = True) -> None:
        has_come.set()
        gate.wait(60)
        close(worker, frees=frees)

    monkeypatch.setattr(Worker, "close", slow)
    llm = LLM(MODEL, device="cpu", device_pool="8MiB", host_pool="8MiB")
    first, second = (threading.Thread(target=llm.close) for _ in range(2))
    first.start()
    assert has_come.wait(60)
    second.start()
    second.join(0.3)
    is_early = not second.is_alive()
    gate.set()
    for closer in (first, second):
        closer.join(60)
        assert not closer.is_alive()
    assert not is_early, "the engine was still there"
    llm.close()


def test_a_journal_in_parts_replays(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    settings: dict[str, Any] = {"device_pool": "8MiB", "journal": str(journal), "journal_rotate": "4KiB"}
    with LLM(MODEL, device="cpu", **settings) as llm:
        llm.generate([PROMPT] * 4, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    assert len(list(tmp_path.iterdir())) > 1
    config, entries = read_answered(journal)
    assert replay_difference(config, entries, fingerprint) is None
    assert sum(1 for _ in read_answered(journal)[1]) > 40


def test_vllms_keywords_mean_what_they_mean_there(
    adapters: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    german = {"lora-model:1234": str(adapters / "german")}
    folder = made.layout_5(tmp_path)
    settings: dict[str, Any] = {
        "seed": 7, "tokenizer": str(folder), "gpu_memory_utilization": 0.9, "enforce_eager": True, "max_loras": 4,
    }  # fmt: skip
    with LLM(MODEL, german, device="cpu", host_pool="8MiB", **settings) as llm:
        drawn = SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True)
        seeded = dataclasses.replace(drawn, seed=7)
        answers = llm.generate(["One coffee"] * 3, [drawn, drawn, seeded], "lora-model:1234")
        assert {tuple(answer.outputs[0].token_ids) for answer in answers} == {
            tuple(answers[0].outputs[0].token_ids)
        }
        other = dataclasses.replace(drawn, seed=8)
        (differs,) = llm.generate("One coffee", other, "lora-model:1234")
        assert differs.outputs[0].token_ids != answers[0].outputs[0].token_ids
        assert answers[0].prompt_token_ids == list(Tokenizer.from_folder(folder).encode("One coffee"))
    assert (
        sum("--gpu-memory-utilization does nothing on a CPU" in message for message in caplog.messages) == 1
    )
    with pytest.raises(ConfigError, match=r"--tokenizer: .* has no tokenizer.json"):
        LLM(MODEL, device="cpu", tokenizer=str(adapters))


def test_priorities_and_fairness_in_process(adapters: Path) -> None:
    pools: dict[str, Any] = {"device_pool": "8MiB", "host_pool": "8MiB"}
    adapter = {"german": str(adapters / "german")}
    order: dict[str, Any] = {"scheduling_policy": "priority", "fairness": "vtc", "fair_share": {"german": 3}}
    with LLM(MODEL, adapter, device="cpu", adapter_batch_limit=1, **order, **pools) as llm:
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        outputs = llm.generate(["a", "b", "c"], params, [None, "german", None], priority=[2, 0, 1])
        assert all(len(output.outputs[0].token_ids) == 4 for output in outputs)
        figures = llm.metrics()
        assert figures['manylora:fair_service_tokens_total{client="german"}'] >= 9
        assert figures['manylora:priority_queue_time_seconds_count{priority="2"}'] == 1
        for wrong in (-1, "x", 1.5, [0, 0]):
            with pytest.raises(InvalidRequest, match="priority"):
                llm.generate("a", params, priority=wrong)  # type: ignore[arg-type]
    with LLM(MODEL, device="cpu", **pools) as llm, pytest.raises(InvalidRequest, match="--scheduling-policy"):
        llm.generate("a", params, priority=1)


@pytest.mark.parametrize("num_requests", [20, pytest.param(60, marks=pytest.mark.long)])
def test_seeded_answers_are_the_same_alone_and_in_a_crowd(adapters: Path, num_requests: int) -> None:
    """Long answers at temperature 1: all at once, then few at a time in a pool that is too small for these."""
    rng = random.Random(num_requests)
    named = {folder.name: str(folder) for folder in sorted(adapters.iterdir())[:8]}
    prompts = [[rng.randrange(10, 4000) for _ in range(rng.randint(5, 60))] for _ in range(num_requests)]
    lengths = [rng.randint(200, 420) for _ in prompts]
    params = [
        SamplingParams(temperature=1.0, seed=rng.randrange(2**40), max_tokens=length, ignore_eos=True)
        for length in lengths
    ]
    chosen = [rng.choice((None, *named)) for _ in prompts]
    crowds = {"max_num_seqs": 64, "device_pool": "96MiB"}, {"max_num_seqs": 16, "device_pool": "12MiB"}
    answers = []
    for settings in crowds:
        with LLM(MODEL, named, device="cpu", dtype="float32", host_pool="8MiB", **settings) as llm:
            found = llm.generate(prompts, params, chosen)
            answers.append([output.outputs[0].token_ids for output in found])
    differ = [number for number, (one, other) in enumerate(zip(*answers)) if one != other]
    assert len(differ) <= 1, differ
