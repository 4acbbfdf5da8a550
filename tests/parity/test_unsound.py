"""An adapter whose products overflow: its requests fail, and nothing that they touched changes others' tokens."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from manylora import SamplingParams
from manylora.text.generate import GenerationFailed
from tests.parity.engines import Bench, greedy, random_tokens

NUM_TOKENS = 8


@pytest.fixture(scope="module")
def overflowing(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter with finite weights, too large for float32."""
    folder = tmp_path_factory.mktemp("unsound") / "bad"
    shutil.copytree(bench.checkpoint.adapters["everything"], folder)
    path = folder / "adapter_model.safetensors"
    weights = safetensors.torch.load_file(path)
    safetensors.torch.save_file({name: torch.full_like(w, 1e30) for name, w in weights.items()}, path)
    return folder


@pytest.mark.parametrize("depth", [1, 2])
def test_beside_and_after_an_adapter_that_overflows(bench: Bench, overflowing: Path, depth: int) -> None:
    """In a pool so small that pages of the failed requests are soon the others'."""
    sizes = bench.adapter_pages(4)
    num_pages = 2 * sizes["everything"] + sizes["one-layer"] + 40
    prompts = [random_tokens(60 + i, 14, bench.checkpoint.vocab_size) for i in range(12)]
    adapters = [None, "one-layer", "bad"] * 4

    async def scenario() -> None:
        async with bench.async_llm(
            ["one-layer"], num_pages=num_pages, pipeline_depth=depth, host_pool="1MiB", max_batch_tokens=32,
            max_num_seqs=8,
        ) as llm:  # fmt: skip
            await llm.add_adapter("bad", str(overflowing))
            for _ in range(3):
                runs = [
                    llm.generate([prompt], greedy(NUM_TOKENS), adapter)._all()
                    for prompt, adapter in zip(prompts, adapters)
                ]
                for adapter, found in zip(adapters, await asyncio.gather(*runs, return_exceptions=True)):
                    if adapter == "bad":
                        assert isinstance(found, GenerationFailed)
                        assert found.error.status == 500
                        assert "not finite" in str(found)
                    else:
                        assert not isinstance(found, BaseException), found
                        bench.check(found, NUM_TOKENS)
            stats = await llm.stats()
            assert stats.pages_running == 0
            news = llm.stream(prompts[0], SamplingParams(n=3, temperature=1), "bad")
            with pytest.raises(GenerationFailed, match="not finite"):
                await anext(news)

    asyncio.run(asyncio.wait_for(scenario(), 300))
