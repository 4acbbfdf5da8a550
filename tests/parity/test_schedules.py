"""Chunking, page sizes, staggered arrivals and cancelled neighbours change nothing."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from manylora import AsyncLLM
from manylora.outputs import RequestOutput
from tests.parity.engines import Bench, greedy, random_tokens
from tests.parity.reference import assert_greedy

NUM_TOKENS = 14


def prompts_of(bench: Bench, count: int, seed: int = 0) -> list[list[int]]:
    return [random_tokens(seed + i, 3 + 7 * (i % 8), bench.checkpoint.vocab_size) for i in range(count)]


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
@pytest.mark.parametrize(("max_num_seqs", "max_batch_tokens"), [(1, 1), (3, 5), (10, 16)])
def test_chunked_prefill(bench: Bench, page_tokens: int, max_num_seqs: int, max_batch_tokens: int) -> None:
    names = bench.names if max_num_seqs > 1 else bench.names[:3]
    limits: Any = {"max_num_seqs": max_num_seqs, "max_batch_tokens": max_batch_tokens}
    with bench.llm(page_tokens=page_tokens, **limits) as llm:
        outputs = llm.generate(prompts_of(bench, len(names)), greedy(NUM_TOKENS), names)
        steps = llm.stats().steps
    bench.check(outputs, NUM_TOKENS)
    num_computed = sum(len(o.prompt_token_ids) + NUM_TOKENS - 1 for o in outputs)
    assert steps >= num_computed / max_batch_tokens


def test_more_sequences_than_slots(bench: Bench) -> None:
    """Each model with several sequences, so that the segments of a batch vary."""
    prompts = prompts_of(bench, 40)
    names = [bench.names[i * i % len(bench.names)] for i in range(len(prompts))]
    with bench.llm(page_tokens=16, max_num_seqs=24) as llm:
        outputs = llm.generate(prompts, greedy(5), names)
    bench.check(outputs, 5)


async def _tokens(
    llm: AsyncLLM, prompt: list[int], adapter: str | None, started: asyncio.Event, is_pinned: bool = True
) -> list[int]:
    """Stream one request; ``started`` is set once three tokens are there, after which others never end."""
    tokens: list[int] = []
    async for news in llm.stream(prompt, greedy(NUM_TOKENS), adapter):
        tokens += news.token_ids
        if len(tokens) >= 3:
            started.set()
            if not is_pinned:
                await asyncio.Event().wait()
    return tokens


def test_staggered_arrivals(bench: Bench) -> None:
    """Each request comes when the one before it has generated three tokens."""
    prompts = prompts_of(bench, len(bench.names), seed=50)

    async def run() -> list[list[int]]:
        async with bench.async_llm(page_tokens=4, max_num_seqs=8, max_batch_tokens=16) as llm:
            tasks = []
            for prompt, name in zip(prompts, bench.names):
                started = asyncio.Event()
                tasks.append(asyncio.create_task(_tokens(llm, prompt, name, started)))
                await started.wait()
            return await asyncio.gather(*tasks)

    for prompt, name, tokens in zip(prompts, bench.names, asyncio.run(run())):
        assert len(tokens) == NUM_TOKENS
        assert_greedy(bench.reference, prompt, name, tokens)


def test_calls_from_many_threads(bench: Bench) -> None:
    prompts = prompts_of(bench, len(bench.names), seed=70)
    found: list[RequestOutput] = []
    with bench.llm(page_tokens=4, max_batch_tokens=16, max_num_seqs=16) as llm:

        def call(index: int) -> None:
            found.extend(llm.generate(prompts[index], greedy(NUM_TOKENS), bench.names[index]))

        threads = [threading.Thread(target=call, args=(i,)) for i in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == len(prompts)
    bench.check(found, NUM_TOKENS)


def test_cancelled_neighbours(bench: Bench) -> None:
    """A third of the requests is cancelled on the way, waiting ones and running ones; pages are short."""
    prompts = prompts_of(bench, 18, seed=90)
    names = [bench.names[i % 4] for i in range(len(prompts))]

    async def run() -> list[list[int] | None]:
        wanted = [name for name in bench.names[:4] if name is not None]
        sizes = bench.adapter_pages(4)
        num_pages = sum(sizes[name] for name in wanted) + 60
        async with bench.async_llm(wanted, page_tokens=4, num_pages=num_pages, max_num_seqs=9) as llm:
            tasks, starts = [], []
            for number, (prompt, name) in enumerate(zip(prompts, names)):
                starts.append(asyncio.Event())
                asked = _tokens(llm, prompt, name, starts[-1], is_pinned=number % 3 != 1)
                tasks.append(asyncio.create_task(asked))
            await starts[3].wait()
            for task in tasks[1::3]:
                task.cancel()
            await asyncio.wait(tasks)
            stats = await llm.stats()
            assert (stats.num_running, stats.num_waiting, stats.pages_running) == (0, 0, 0)
            # Any other exception than that of cancelling would be raised here.
            return [None if task.cancelled() else task.result() for task in tasks]

    found = asyncio.run(run())
    assert found.count(None) == len(prompts) // 3
    for prompt, name, tokens in zip(prompts, names, found):
        if tokens is not None:
            assert len(tokens) == NUM_TOKENS
            assert_greedy(bench.reference, prompt, name, tokens)
