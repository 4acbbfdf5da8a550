"""An engine whose cold rows the CPU serves: its threads are late, and the tokens stay the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from manylora import LLM, SamplingParams
from manylora.executor import cpu_lora
from manylora.executor.cpu_lora import CpuLora
from tests.parity.checkpoints import Checkpoint
from tests.parity.conftest import make_bench
from tests.parity.engines import Bench, greedy, random_tokens


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tmp_path_factory, "llama")


def generate(llm: LLM, bench: Bench, name: str, seed: int) -> None:
    """A request of an adapter that is not on the device, held against the reference."""
    prompt = random_tokens(seed, 23, bench.checkpoint.vocab_size)
    bench.check(llm.generate([prompt], greedy(4), [name]), 4)


@pytest.fixture
def cold(served: Bench) -> Iterator[tuple[Any, Bench]]:
    """An engine whose device holds one adapter at a time."""
    largest = max(served.adapter_pages(4).values())
    settings: dict[str, Any] = {"cold_start": "cpu", "cpu_lora_workers": 2}
    with served.llm(page_tokens=4, num_pages=largest + 16, **settings) as llm:
        yield llm, served
    assert not [thread for thread in threading.enumerate() if thread.name == "manylora-cpu-lora"]


def test_threads_that_are_late(cold: tuple[LLM, Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    """The products of some steps are never posted."""
    llm, bench = cold
    names = list(bench.checkpoint.adapters)
    for number, name in enumerate(names[:3]):
        generate(llm, bench, name, number)
    assert llm.stats().cold_starts.get("cpu/files", 0) > 0
    assert llm.stats().spoilt_rows == 0
    calls, post = 0, CpuLora.post

    def post_most(self: CpuLora) -> None:
        nonlocal calls
        calls += 1
        if calls % 5 == 0:
            self.job += 1
        else:
            post(self)

    with monkeypatch.context() as patch:
        patch.setattr(cpu_lora, "LATE_S", 0.05)
        patch.setattr(CpuLora, "post", post_most)
        for number, name in enumerate(names):
            generate(llm, bench, name, 10 + number)
    before = llm.stats()
    assert before.spoilt_rows > 0
    for number, name in enumerate(names):
        generate(llm, bench, name, 50 + number)
    assert llm.stats().cold_starts["cpu/host"] > before.cold_starts.get("cpu/host", 0)
    assert llm.stats().cpu_lora_s > before.cpu_lora_s
    assert llm.stats().spoilt_rows == before.spoilt_rows


def test_samples_limits_and_prompts_in_chunks(cold: tuple[LLM, Bench]) -> None:
    """Two samples, one token, prompts longer than a step, of adapters that come one after the other."""
    llm, bench = cold
    checkpoint: Checkpoint = bench.checkpoint
    names = list(checkpoint.adapters)
    prompts = [random_tokens(90 + i, 5 + 6 * (i % 3), checkpoint.vocab_size) for i in range(len(names))]
    for params in (greedy(1), greedy(5, n=2), SamplingParams(max_tokens=3, temperature=0.0)):
        bench.check(llm.generate(prompts, params, names), params.max_tokens or 0)
    assert llm.stats().cold_starts["cpu/host"] > 0
    assert llm.stats().spoilt_rows == 0


@pytest.mark.parametrize("mode", ["cpu", "layerwise"])
def test_adapters_that_leave_between_two_chunks_of_a_prompt(served: Bench, mode: str) -> None:
    """Requests of all adapters at once, two of each, in a pool so small that they preempt each other."""
    names = [name for name in served.checkpoint.adapters for _ in range(2)]
    prompts = [random_tokens(70 + i, 21, served.checkpoint.vocab_size) for i in range(len(names))]
    largest = max(served.adapter_pages(4).values())
    settings: dict[str, Any] = {"cold_start": mode, "max_num_seqs": 4, "max_batch_tokens": 5}
    settings |= {"cpu_lora_workers": 1} if mode == "cpu" else {"cold_start_stall": 1.0}
    with served.llm(page_tokens=4, num_pages=largest + 14, **settings) as llm:
        served.check(llm.generate(prompts, greedy(16), names), 16)
        stats = llm.stats()
    assert stats.preemptions > 0
    assert sum(count for kind, count in stats.cold_starts.items() if kind.startswith(mode)) > 0
    assert stats.cold_starts[f"{mode}/host"] > 0, "one that had left came again"
