"""The engine inside this process, on the shipped model: what its streams and stats say of a start."""

from __future__ import annotations

import asyncio
from pathlib import Path

from manylora import AsyncLLM, SamplingParams
from manylora.llm import StreamOutput
from tests.e2e.process import MODEL

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
