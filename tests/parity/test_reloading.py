"""A name that is removed and added again with other weights never meets the old ones, nor their KV."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest
import transformers

from manylora.outputs import RequestOutput
from manylora.types import InvalidRequest
from tests.parity.checkpoints import WEIGHTS_FILE, write_adapters
from tests.parity.engines import Bench, greedy, random_tokens
from tests.parity.reference import Reference, assert_greedy

NUM_TOKENS = 10
LONG = 40
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

    async def run() -> tuple[list[RequestOutput], list[RequestOutput]]:
        async with bench.async_llm(["everything"], page_tokens=4, max_num_seqs=2) as llm:
            await llm.add_adapter(NAME, str(paths["v0"]))
            old = asyncio.ensure_future(llm.generate(prompts, greedy(LONG), NAME)._all())
            other = asyncio.ensure_future(llm.generate(prompts, greedy(LONG), "everything")._all())
            while not old.done() and (await llm.stats()).num_waiting < 2 * len(prompts) - 2:
                await asyncio.sleep(0.001)
            await llm.remove_adapter(NAME)
            await llm.add_adapter(NAME, str(paths["v1"]))
            new = await llm.generate(prompts, greedy(LONG), NAME)
            bench.check(await other, LONG)
            return await old, new

    before, after = asyncio.run(run())
    for outputs, version in ((before, "v0"), (after, "v1")):
        for output in outputs:
            assert len(output.outputs[0].token_ids) == LONG
            assert_greedy(reference, output.prompt_token_ids, version, output.outputs[0].token_ids)
