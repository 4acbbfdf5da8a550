"""A name that is removed and added again with other weights never meets the old ones, nor their KV."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest
import transformers

from manylora.types import InvalidRequest
from tests.parity.checkpoints import WEIGHTS_FILE, write_adapters
from tests.parity.engines import Bench, greedy, random_tokens
from tests.parity.reference import Reference, assert_greedy

NUM_TOKENS = 10
NAME = "changing"


@pytest.fixture(scope="module")
def versions(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], Reference]:
    """Three adapters of one shape but other weights, and one of another shape."""
    folder = tmp_path_factory.mktemp("versions")
    paths: dict[str, Path] = {}
    for seed in range(4):
        base = transformers.AutoModelForCausalLM.from_pretrained(bench.checkpoint.folder)
        targets = ("q_proj", "v_proj", "down_proj") if seed < 3 else ("k_proj", "up_proj")
        kind = {"r": 6, "lora_alpha": 12, "target_modules": targets}
        paths |= write_adapters(folder, base, {f"v{seed}": kind}, seed=100 + seed)
    return paths, Reference(bench.checkpoint.folder, paths)


def test_the_same_name_again(bench: Bench, versions: tuple[dict[str, Path], Reference]) -> None:
    """The same prompt each time, so that stale KV would be found if it were there."""
    paths, reference = versions
    prompt = random_tokens(1, 30, bench.checkpoint.vocab_size)
    answers = set()
    with bench.llm([], page_tokens=4) as llm:
        for version in ("v0", "v1", "v0", "v3", "v2"):
            llm.add_adapter(NAME, str(paths[version]))
            hits = llm.stats().prefix_hits_tokens
            tokens = llm.generate(prompt, greedy(NUM_TOKENS), NAME)[0].outputs[0].token_ids
            assert llm.stats().prefix_hits_tokens == hits
            assert_greedy(reference, prompt, version, tokens)
            answers.add(tuple(tokens))
            llm.remove_adapter(NAME)
            stats = llm.stats()
            assert stats.pages_free == stats.pages_total
            with pytest.raises(InvalidRequest):
                llm.generate(prompt, greedy(1), NAME)
    assert len(answers) == 4


def test_other_weights_in_the_same_folder(
    bench: Bench, versions: tuple[dict[str, Path], Reference], tmp_path: Path
) -> None:
    """As training writes a new checkpoint over the old one: same path, same size, even the same time."""
    paths, reference = versions
    prompt = random_tokens(2, 20, bench.checkpoint.vocab_size)
    folder = tmp_path / "adapter"
    shutil.copytree(paths["v0"], folder)
    before = (folder / WEIGHTS_FILE).stat()
    with bench.llm([], page_tokens=4) as llm:
        for version in ("v0", "v1", "v2"):
            shutil.copyfile(paths[version] / WEIGHTS_FILE, folder / WEIGHTS_FILE)
            os.utime(folder / WEIGHTS_FILE, ns=(before.st_atime_ns, before.st_mtime_ns))
            llm.add_adapter(NAME, str(folder))
            tokens = llm.generate(prompt, greedy(NUM_TOKENS), NAME)[0].outputs[0].token_ids
            assert_greedy(reference, prompt, version, tokens)
            llm.remove_adapter(NAME)


def test_two_names_for_two_versions_at_once(
    bench: Bench, versions: tuple[dict[str, Path], Reference]
) -> None:
    paths, reference = versions
    prompt = random_tokens(3, 25, bench.checkpoint.vocab_size)
    names = list(paths)
    with bench.llm([], page_tokens=4) as llm:
        for name, path in paths.items():
            llm.add_adapter(name, str(path))
        for _ in range(2):
            for output in llm.generate([prompt] * 4, greedy(NUM_TOKENS), names):
                assert_greedy(reference, prompt, output.adapter, output.outputs[0].token_ids)


def test_removal_while_requests_run(bench: Bench, versions: tuple[dict[str, Path], Reference]) -> None:
    """Running requests keep the old weights to their end; the name then stands for the new ones."""
    paths, reference = versions
    prompts = [random_tokens(10 + i, 9, bench.checkpoint.vocab_size) for i in range(3)]

    async def run() -> tuple[list[list[int]], list[list[int]]]:
        async with bench.async_llm(["everything"], page_tokens=4, max_num_seqs=2) as llm:
            await llm.add_adapter(NAME, str(paths["v0"]))
            old = [llm.stream(prompt, greedy(NUM_TOKENS), NAME) for prompt in prompts]
            firsts = [await anext(old[0])]
            running = [asyncio.create_task(_rest(stream)) for stream in old]
            await asyncio.sleep(0)
            other = asyncio.ensure_future(llm.generate(prompts, greedy(NUM_TOKENS), "everything")._all())
            await llm.remove_adapter(NAME)
            await llm.add_adapter(NAME, str(paths["v1"]))
            new = await llm.generate(prompts, greedy(NUM_TOKENS), NAME)
            before = await asyncio.gather(*running)
            before[0] = [*firsts[0].token_ids, *before[0]]
            bench.check(await other, NUM_TOKENS)
            return before, [output.outputs[0].token_ids for output in new]

    before, after = asyncio.run(run())
    for prompt, old_tokens, new_tokens in zip(prompts, before, after):
        assert len(old_tokens) == len(new_tokens) == NUM_TOKENS
        assert_greedy(reference, prompt, "v0", old_tokens)
        assert_greedy(reference, prompt, "v1", new_tokens)


async def _rest(stream: object) -> list[int]:
    return [token async for news in stream for token in news.token_ids]  # type: ignore[attr-defined]
