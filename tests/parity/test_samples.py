"""Several samples of a prompt, and sampling that depends on the seed, the sample and the position alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from manylora import LLM, SamplingParams
from manylora.types import InvalidRequest
from tests.parity.engines import Bench, greedy, random_tokens

NUM_TOKENS = 12
ADAPTER = "everything"


def sampled(seed: int, n: int = 1, **fields: Any) -> SamplingParams:
    fixed = {"temperature": 1.1, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return SamplingParams(seed=seed, n=n, **fixed | fields)


def prompt_of(bench: Bench, length: int = 18) -> list[int]:
    return random_tokens(5, length, bench.checkpoint.vocab_size)


def samples(llm: LLM, prompt: Sequence[int], params: SamplingParams, name: str | None) -> list[list[int]]:
    (output,) = llm.generate([list(prompt)], params, name)
    return [sample.token_ids for sample in output.outputs]


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 16, 18])
def test_greedy_samples_are_all_the_greedy_answer(bench: Bench, page_tokens: int, length: int) -> None:
    prompt = prompt_of(bench, length)
    limits: Any = {"max_num_seqs": 7, "max_batch_tokens": 11}
    with bench.llm(page_tokens=page_tokens, **limits) as llm:
        outputs = llm.generate([prompt] * 3, greedy(NUM_TOKENS, n=3), [None, ADAPTER, "only-mlp"])
    assert [len(output.outputs) for output in outputs] == [3, 3, 3]
    bench.check(outputs, NUM_TOKENS)


@pytest.fixture(scope="module")
def alone(bench: Bench) -> list[list[int]]:
    """Five samples of the prompt, drawn with nothing else running."""
    with bench.llm([ADAPTER], page_tokens=4) as llm:
        found = samples(llm, prompt_of(bench), sampled(3, n=5), ADAPTER)
    assert len({tuple(tokens) for tokens in found}) == 5
    return found


def test_fewer_samples_are_the_first_ones(bench: Bench, alone: list[list[int]]) -> None:
    with bench.llm([ADAPTER], page_tokens=4) as llm:
        for n in (1, 2, 4):
            assert samples(llm, prompt_of(bench), sampled(3, n=n), ADAPTER) == alone[:n]
        assert samples(llm, prompt_of(bench), sampled(4), ADAPTER)[0] not in alone


def test_shorter_answers_are_the_beginning(bench: Bench, alone: list[list[int]]) -> None:
    with bench.llm([ADAPTER], page_tokens=4) as llm:
        found = samples(llm, prompt_of(bench), sampled(3, n=5, max_tokens=5), ADAPTER)
    assert found == [tokens[:5] for tokens in alone]


@pytest.mark.parametrize(
    "settings",
    [
        {"page_tokens": 1},
        {"page_tokens": 16, "max_num_seqs": 2, "max_batch_tokens": 3},
        {"page_tokens": 4, "max_num_seqs": 12, "max_batch_tokens": 12},
        {"page_tokens": 4, "max_num_seqs": 12, "max_batch_tokens": 12, "pipeline_depth": 2},
    ],
)
def test_in_another_batch(bench: Bench, alone: list[list[int]], settings: Any) -> None:
    """Neighbours of other models, other parameters and the same seed."""
    prompts = [random_tokens(i, 4 + 3 * i, bench.checkpoint.vocab_size) for i in range(len(bench.names))]
    others = [greedy(NUM_TOKENS), sampled(3, n=3), sampled(9, top_k=4, top_p=0.7, temperature=0.5)]
    params = [others[i % 3] for i in range(len(prompts))]
    prompts.insert(4, prompt_of(bench))
    params.insert(4, sampled(3, n=5))
    names = [*bench.names[:4], ADAPTER, *bench.names[4:]]
    with bench.llm(**settings) as llm:
        outputs = llm.generate(prompts, params, names)
    assert [sample.token_ids for sample in outputs[4].outputs] == alone
    greedy_ones = [output for output, p in zip(outputs, params) if p.temperature == 0]
    bench.check(greedy_ones, NUM_TOKENS)


def test_after_preemption(bench: Bench, alone: list[list[int]]) -> None:
    """The five samples do not fit beside each other, and others come before and behind them."""
    prompt = prompt_of(bench)
    num_pages = bench.adapter_pages(4)[ADAPTER] + 20
    prompts = [random_tokens(1, 6, bench.checkpoint.vocab_size), prompt, prompt[:7]]
    with bench.llm([ADAPTER], page_tokens=4, num_pages=num_pages) as llm:
        outputs = llm.generate(prompts, [sampled(1, n=2), sampled(3, n=5), sampled(2)], ADAPTER)
        stats = llm.stats()
    assert stats.preemptions > 0
    assert [sample.token_ids for sample in outputs[1].outputs] == alone


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.05, "temperature": 2.0},
        {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"logit_bias": ((3, 4.0), (5, -100.0))},
    ],
)
def test_every_parameter_with_and_without_pressure(bench: Bench, fields: dict[str, Any]) -> None:
    """Penalties look back at what was generated, which a preempted sequence brings along as its prompt, and whose
    last token is not known to the host where two steps are in flight."""
    prompts = [random_tokens(30 + i, 7, bench.checkpoint.vocab_size) for i in range(6)]
    params = [sampled(i, **fields) for i in range(6)]
    names = [None, ADAPTER] * 3
    with bench.llm([ADAPTER], page_tokens=4) as llm:
        roomy = [llm.generate(prompt, p, name)[0] for prompt, p, name in zip(prompts, params, names)]
    num_pages = bench.adapter_pages(4)[ADAPTER] + 11
    for depth in (1, 2):
        limits: Any = {"page_tokens": 4, "num_pages": num_pages, "pipeline_depth": depth}
        with bench.llm([ADAPTER], **limits) as llm:
            tight = llm.generate(prompts, params, names)
            assert llm.stats().preemptions > 0
        assert [o.outputs[0].token_ids for o in tight] == [o.outputs[0].token_ids for o in roomy]


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_log_probabilities(bench: Bench, pipeline_depth: int) -> None:
    """Of sampled tokens too: the model's own, before temperature and filters."""
    prompts = [random_tokens(80 + i, 11, bench.checkpoint.vocab_size) for i in range(len(bench.names))]
    params = sampled(6, logprobs=4, top_k=10, temperature=0.7)
    limits: Any = {"max_num_seqs": 8, "max_batch_tokens": 16, "pipeline_depth": pipeline_depth}
    with bench.llm(page_tokens=4, **limits) as llm:
        outputs = llm.generate(prompts, params, bench.names)
    for output in outputs:
        (sample,) = output.outputs
        tokens = [*output.prompt_token_ids, *sample.token_ids]
        expected = bench.reference.logits(tokens[:-1], output.adapter).log_softmax(-1)[10:]
        assert sample.logprobs is not None
        assert len(sample.logprobs) == len(expected) == NUM_TOKENS
        for token, found, row in zip(sample.token_ids, sample.logprobs, expected):
            assert token in found
            assert set(row.topk(4).indices.tolist()) <= set(found)
            ids = list(found)
            values = torch.tensor([found[i].logprob for i in ids])
            torch.testing.assert_close(values, row[ids], atol=1e-4, rtol=0.0)


def test_repetition_penalty_is_that_of_transformers(bench: Bench) -> None:
    prompt = prompt_of(bench)
    params = greedy(NUM_TOKENS, repetition_penalty=1.7)
    with bench.llm(page_tokens=4) as llm:
        for name in (None, ADAPTER):
            (found,) = samples(llm, prompt, params, name)
            expected = bench.reference.generate(prompt, name, NUM_TOKENS, repetition_penalty=1.7)
            assert found == expected != bench.reference.greedy(prompt, name, NUM_TOKENS)


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_stops_where_transformers_stops(bench: Bench, pipeline_depth: int) -> None:
    """At a stop id, which is the last token returned; what was under way then is nobody's, not even of a turn that
    goes on from there."""
    prompt, other = prompt_of(bench), random_tokens(6, 9, bench.checkpoint.vocab_size)
    answer = bench.reference.greedy(prompt, ADAPTER, NUM_TOKENS)
    with bench.llm([ADAPTER], page_tokens=1, pipeline_depth=pipeline_depth) as llm:
        for stop in sorted(set(answer)):
            until = answer[: answer.index(stop) + 1]
            params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, stop_token_ids=(stop,))
            outputs = llm.generate([prompt, other], [params, greedy(NUM_TOKENS)], ADAPTER)
            assert outputs[0].outputs[0].finish_reason == "stop"
            assert outputs[0].outputs[0].token_ids == until
            following = llm.generate([[*prompt, *until, 5, 6]], greedy(NUM_TOKENS), ADAPTER)
            bench.check([outputs[1], *following], NUM_TOKENS)


@pytest.mark.parametrize(("name", "value"), [("params", {"max_tokens": 3}), ("params", 5), ("adapter", 5)])
def test_arguments_of_the_wrong_type_are_named(bench: Bench, name: str, value: Any) -> None:
    with bench.llm(num_pages=100) as llm, pytest.raises(InvalidRequest, match=name) as caught:
        llm.generate([[1, 2, 3]], **{name: value})
    assert caught.value.param == name
