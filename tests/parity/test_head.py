"""Adapters that change the output head give the reference's tokens and log-probabilities, beside others."""

from __future__ import annotations

from typing import Any

import pytest

from manylora.config.declaring import ConfigError
from manylora.protocol.executor import AdapterError
from tests.parity.checkpoints import every_kind, write_checkpoint
from tests.parity.engines import Bench, greedy, random_tokens
from tests.parity.reference import Reference
from tests.parity.test_cold_starts import check_cold
from tests.parity.test_prompt_logprobs import asked, check

NUM_TOKENS = 8

FAMILIES = ("llama-main", "qwen2", "gemma2", "opt", "opt-350m")
"""Heads of their own and tied ones, one with a cap of its logits, one narrower than the layers."""


def with_head(family: str) -> dict[str, dict[str, Any]]:
    """Adapters on the head and elsewhere, on the head alone, and on the layers alone."""
    everything = every_kind(family)["everything"]
    modules = everything["target_modules"]
    return {
        "with-others": {"r": 6, "target_modules": (*modules, "lm_head"), "rank_pattern": {"lm_head": 9}},
        "alone": {"r": 3, "target_modules": ("lm_head",), "lora_alpha": 5, "use_rslora": True},
        "without": everything,
    }


@pytest.fixture(scope="module", params=FAMILIES)
def heads(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    family = request.param
    checkpoint = write_checkpoint(tmp_path_factory.mktemp(family), family, with_head(family))
    return Bench(checkpoint, Reference(checkpoint.folder, checkpoint.adapters))


def test_one_mixed_batch_and_its_prompts(heads: Bench) -> None:
    """In chunks too, and the log-probabilities of prompts for those of which rounding changes least."""
    names = heads.names * 2
    prompts = [random_tokens(i, 1 + 10 * (i % 6), heads.checkpoint.vocab_size) for i in range(len(names))]
    params = [greedy(NUM_TOKENS) if i % 2 else asked(NUM_TOKENS) for i in range(len(names))]
    every: tuple[dict[str, Any], ...] = ({}, {"max_num_seqs": 5, "max_batch_tokens": 11})
    for limits in every:
        with heads.llm(page_tokens=4, **limits) as llm:
            outputs = llm.generate(prompts, params, names)
        heads.check(outputs, NUM_TOKENS)
        check(heads, outputs[::2])
        answers = {tuple(output.outputs[0].token_ids) for output in outputs[-len(heads.names) :]}
        assert len(answers) == len(heads.names), "every adapter changes what is said"


@pytest.mark.parametrize("heads", ["llama-main", "gemma2"], indirect=True)
def test_cold_adapters_land_before_the_head_runs(heads: Bench) -> None:
    """In a pool that holds few of them: they leave for the host, and come again in groups of layers."""
    check_cold(heads, "layerwise", 2)


@pytest.mark.parametrize("heads", ["llama-main"], indirect=True)
@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"merge": "manylora"}, "--merge manylora"),
        ({"cold_start": "cpu"}, "--cold-start cpu"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size above 1"),
    ],
)
def test_options_that_leave_the_head_as_it_is(heads: Bench, settings: dict[str, Any], option: str) -> None:
    """Whether the adapter is named at the start or comes later; others are served."""
    why = rf"lm_head\.lora_A\S* is not supported beside {option}: LoRA on lm_head"
    with pytest.raises(ConfigError, match=why), heads.llm(["alone"], **settings):
        pass
    with heads.llm(["without"], **settings) as llm:
        with pytest.raises(AdapterError, match=why):
            llm.add_adapter("alone", str(heads.checkpoint.adapters["alone"]))
        heads.check(llm.generate([[5, 6, 7]], greedy(2), ["without"]), 2)
