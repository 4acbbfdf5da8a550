"""Whatever comes in whatever order on a pool of whatever size: every token is the reference's."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manylora import AsyncLLM, SamplingParams
from tests.parity.engines import Bench, greedy, random_tokens
from tests.parity.reference import assert_greedy

ADAPTERS = ("everything", "q-and-v", "patterns", "float16")
STEMS = [random_tokens(seed, 30, 131) for seed in (201, 202)]
CUTS = (0, 3, 4, 9, 16, 30)
TAILS = ([5], [5, 77], [90, 4, 5, 6, 7])
MAX_TOKENS = 12


@dataclasses.dataclass(frozen=True)
class Asked:
    """One request. It is sent when the one before it has streamed ``after`` tokens (or has ended)."""

    prompt: tuple[int, ...]
    adapter: str | None
    num_tokens: int
    n: int
    after: int
    cancel_at: int | None
    seed: int | None

    @property
    def params(self) -> SamplingParams:
        if self.seed is None:
            return greedy(self.num_tokens, n=self.n)
        fields: dict[str, Any] = {"temperature": 0.9, "ignore_eos": True}
        return SamplingParams(max_tokens=self.num_tokens, n=self.n, seed=self.seed, **fields)


@dataclasses.dataclass(frozen=True)
class Workload:
    """``room``: the pool, from 0 (barely the largest request) to 1 (everything beside each other)."""

    requests: list[Asked]
    room: float
    page_tokens: int
    max_num_seqs: int
    extra_batch_tokens: int
    pipeline_depth: int


prompts = st.builds(
    lambda stem, cut, tail: (*STEMS[stem][:cut], *TAILS[tail]),
    st.integers(0, len(STEMS) - 1),
    st.sampled_from(CUTS),
    st.integers(0, len(TAILS) - 1),
)
requests = st.builds(
    Asked,
    prompt=prompts,
    adapter=st.sampled_from((None, *ADAPTERS)),
    num_tokens=st.integers(1, MAX_TOKENS),
    n=st.sampled_from((1, 1, 1, 2, 3)),
    after=st.sampled_from((0, 0, 1, 3, MAX_TOKENS)),
    cancel_at=st.sampled_from((None, None, None, 0, 1, 4)),
    seed=st.sampled_from((None, None, None, 1)),
)
workloads = st.builds(
    Workload,
    requests=st.lists(requests, min_size=2, max_size=8),
    room=st.sampled_from((0.0, 0.0, 0.1, 0.3, 1.0)),
    page_tokens=st.sampled_from((1, 4, 16)),
    max_num_seqs=st.sampled_from((1, 2, 3, 8)),
    extra_batch_tokens=st.sampled_from((0, 1, 5, 40)),
    pipeline_depth=st.sampled_from((1, 2)),
)


class Checker:
    """Knows what each request must give: the reference's tokens, or what it drew when it ran alone."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._sizes = {page_tokens: bench.adapter_pages(page_tokens) for page_tokens in (1, 4, 16)}
        self._alone: dict[Asked, list[list[int]]] = {}

    def num_pages(self, load: Workload) -> int:
        sizes: dict[str | None, int] = {None: 0}
        sizes.update(self._sizes[load.page_tokens])
        kv = [-(-(len(r.prompt) + r.num_tokens) // load.page_tokens) for r in load.requests]
        least = max([4, *(sizes[r.adapter] + pages for r, pages in zip(load.requests, kv))])
        everything = sum(sizes[adapter] for adapter in {r.adapter for r in load.requests})
        everything += sum(r.n * pages for r, pages in zip(load.requests, kv))
        return least + int(load.room * max(0, everything - least))

    def check(self, asked: Asked, sample: int, tokens: list[int], is_whole: bool) -> None:
        if is_whole:
            assert len(tokens) == asked.num_tokens
        if asked.seed is not None:
            assert tokens == self._drawn_alone(asked)[sample][: len(tokens)]
            return
        # All lengths from one generation.
        self.bench.reference.greedy(asked.prompt, asked.adapter, MAX_TOKENS)
        assert_greedy(self.bench.reference, asked.prompt, asked.adapter, tokens)

    def _drawn_alone(self, asked: Asked) -> list[list[int]]:
        key = dataclasses.replace(asked, num_tokens=MAX_TOKENS, n=3, after=0, cancel_at=None)
        if key not in self._alone:
            with self.bench.llm(page_tokens=16) as llm:
                (output,) = llm.generate([list(key.prompt)], key.params, key.adapter)
            self._alone[key] = [sample.token_ids for sample in output.outputs]
        return self._alone[key]


async def _run(bench: Bench, load: Workload, num_pages: int) -> list[list[list[int]]]:
    """By request and sample: the tokens that came."""
    limits = {
        "page_tokens": load.page_tokens,
        "num_pages": num_pages,
        "max_num_seqs": load.max_num_seqs,
        "max_batch_tokens": load.max_num_seqs + load.extra_batch_tokens,
        "pipeline_depth": load.pipeline_depth,
    }
    adapters = sorted({r.adapter for r in load.requests if r.adapter is not None})
    async with bench.async_llm(adapters, **limits) as llm:
        received: list[list[list[int]]] = [[[] for _ in range(r.n)] for r in load.requests]
        tasks: list[asyncio.Task[None]] = []
        for asked, tokens in zip(load.requests, received):
            if tasks:
                while sum(map(len, received[len(tasks) - 1])) < asked.after and not tasks[-1].done():
                    await asyncio.sleep(0.0005)
            tasks.append(asyncio.create_task(_receive(llm, asked, tokens)))
        await asyncio.gather(*tasks)
        stats = await llm.stats()
        for _ in range(1000):  # a step in flight may still hold what was cancelled last
            if stats.num_running == 0:
                break
            await asyncio.sleep(0.005)
            stats = await llm.stats()
        assert (stats.num_running, stats.num_waiting, stats.pages_running) == (0, 0, 0)
        assert stats.pages_free + stats.pages_history + stats.pages_adapters == stats.pages_total == num_pages
        return received


async def _receive(llm: AsyncLLM, asked: Asked, tokens: list[list[int]]) -> None:
    stream = llm.stream(list(asked.prompt), asked.params, asked.adapter)
    if asked.cancel_at == 0:
        task = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return
    async for news in stream:
        tokens[news.sample] += news.token_ids
        if asked.cancel_at is not None and sum(map(len, tokens)) >= asked.cancel_at:
            break
    await stream.aclose()  # type: ignore[attr-defined]  # an async generator


def test_random_workloads(bench: Bench) -> None:
    checker = Checker(bench)

    @settings(
        max_examples=15,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(workloads)
    def every_token_is_right(load: Workload) -> None:
        received = asyncio.run(_run(bench, load, checker.num_pages(load)))
        for asked, samples in zip(load.requests, received):
            for sample, tokens in enumerate(samples):
                checker.check(asked, sample, tokens, is_whole=asked.cancel_at is None)

    every_token_is_right()
