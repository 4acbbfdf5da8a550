"""Contexts that are longer than those of the training, by every way of scaling rotary positions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from manylora.config.declaring import ConfigError
from manylora.outputs import RequestOutput
from tests.models.tiny import rewrite_as_layout_4
from tests.parity.checkpoints import write_checkpoint
from tests.parity.engines import Bench, greedy, random_tokens
from tests.parity.reference import Reference

ADAPTERS = {"everything": {"r": 4, "target_modules": ("q_proj", "k_proj", "down_proj"), "lora_alpha": 9}}
NUM_TOKENS = 12


class Computed(Reference):
    """Each token by all before it, with the factors of that length: what ``generate`` of a model that minds the
    crossing (Phi-3) gives, while that of others keeps keys of both kinds."""

    def generate(
        self, prompt: Sequence[int], adapter: str | None, num_tokens: int, **settings: object
    ) -> list[int]:
        return super().generate(prompt, adapter, num_tokens, use_cache=False)


def bench_of(factory: pytest.TempPathFactory, family: str) -> Bench:
    checkpoint = write_checkpoint(factory.mktemp(family), family, ADAPTERS)
    reference = Computed if family.startswith("longrope") else Reference
    return Bench(checkpoint, reference(checkpoint.folder, checkpoint.adapters))


def prompts_of(bench: Bench, *lengths: int) -> list[list[int]]:
    return [random_tokens(length, length, bench.checkpoint.vocab_size) for length in lengths]


@pytest.mark.parametrize("spelling", [4, 5])
def test_yarn_goes_to_its_original_length_times_its_factor(
    spelling: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bench = bench_of(tmp_path_factory, "yarn")
    if spelling == 4:
        rewrite_as_layout_4(bench.checkpoint.folder)
    prompts = prompts_of(bench, 40, 60, 100, 244)
    with bench.llm() as llm:
        assert llm.info.max_model_len == 256
        outputs = llm.generate(prompts, greedy(NUM_TOKENS), [None, "everything", None, "everything"])
    bench.check(outputs, NUM_TOKENS)


def test_linear_goes_as_far_where_that_is_asked_for(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    bench = bench_of(tmp_path_factory, "linear")
    with caplog.at_level("INFO"), bench.llm() as llm:
        assert llm.info.max_model_len == 64
    assert "up to 64 tokens, and with --max-model-len up to 256" in caplog.text
    with pytest.raises(ConfigError, match="257 is more than the model's 256"), bench.llm(max_model_len=257):
        pass
    prompts = prompts_of(bench, 40, 60, 244)
    with bench.llm(max_model_len=256) as llm:
        outputs = llm.generate(prompts, greedy(NUM_TOKENS), [None, "everything", "everything"])
    bench.check(outputs, NUM_TOKENS)


def test_dynamic_goes_to_its_original_length(tmp_path_factory: pytest.TempPathFactory) -> None:
    bench = bench_of(tmp_path_factory, "dynamic")
    with pytest.raises(ConfigError, match=r"64 positions \(rope type dynamic"):
        bench.llm(max_model_len=65).__enter__()
    with bench.llm() as llm:
        assert llm.info.max_model_len == 64
        outputs = llm.generate(prompts_of(bench, 5, 52), greedy(NUM_TOKENS), ["everything", None])
    bench.check(outputs, NUM_TOKENS)


@pytest.fixture(scope="module", params=["longrope", "longrope-factor"])
def longrope(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return bench_of(tmp_path_factory, request.param)


@pytest.mark.parametrize("depth", [1, 2])
def test_longrope_has_the_factors_of_the_length_so_far(longrope: Bench, depth: int) -> None:
    """Short, long, and across 32: from inside a page and from its end, alone and beside each other."""
    prompts = prompts_of(longrope, 1, 18, 25, 30, 31, 32, 33, 50)
    prompts += [prompts[-1][:length] for length in (20, 22, 32)]  # whose pages are short ones'
    names = [longrope.names[number % 2] for number in range(len(prompts))]
    with longrope.llm(pipeline_depth=depth, max_batch_tokens=24, max_num_seqs=8) as llm:
        for prompt, name in zip(prompts, names, strict=True):
            longrope.check(llm.generate([prompt], greedy(NUM_TOKENS), [name]), NUM_TOKENS)
        longrope.check(llm.generate(prompts, greedy(NUM_TOKENS), names), NUM_TOKENS)


def test_longrope_in_a_pool_that_is_short_of_pages(longrope: Bench) -> None:
    prompts = prompts_of(longrope, 20, 24, 28, 29, 30, 31, 32, 40)
    with longrope.llm(num_pages=40) as llm:
        outputs = llm.generate(prompts, greedy(NUM_TOKENS), [None] * len(prompts))
    longrope.check(outputs, NUM_TOKENS)


@pytest.mark.parametrize("length", [30, 31, 32, 33])
def test_samples_of_longrope_cross_each_for_itself(longrope: Bench, length: int) -> None:
    (prompt,) = prompts_of(longrope, length)
    with longrope.llm() as llm:
        (output,) = llm.generate([prompt], greedy(NUM_TOKENS, n=3), ["everything"])
    assert isinstance(output, RequestOutput)
    assert len(output.outputs) == 3
    longrope.check([output], NUM_TOKENS)
