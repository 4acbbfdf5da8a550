"""Log-probabilities of prompts, against log_softmax of transformers' and PEFT's own float32 logits.

Those of engines of several processes are looked at in ``test_ranks``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from manylora import SamplingParams
from manylora.config.merging import MergeTimes
from manylora.executor import build, forward, sampling
from manylora.outputs import RequestOutput
from manylora.policy.merging import state
from tests.parity.engines import Bench, greedy, random_tokens
from tests.policy.switching import EveryFewSteps

NUM_TOP = 3
LENGTHS = (1, 2, 37, 18, 30, 9, 16, 23)


def asked(max_tokens: int = 2, **fields: Any) -> SamplingParams:
    return greedy(max_tokens, prompt_logprobs=NUM_TOP, **fields)


def prompts_of(bench: Bench, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    return [random_tokens(40 + i, length, bench.checkpoint.vocab_size) for i, length in enumerate(lengths)]


def names_of(bench: Bench, count: int = len(LENGTHS)) -> list[str | None]:
    return [bench.names[i % len(bench.names)] for i in range(count)]


def check(bench: Bench, outputs: Sequence[RequestOutput]) -> None:
    """Of every token of every prompt, with ``NUM_TOP`` alternatives."""
    for output in outputs:
        prompt = output.prompt_token_ids
        expected = bench.reference.logits(prompt, output.adapter).log_softmax(-1)
        assert output.prompt_logprobs is not None
        first, *others = output.prompt_logprobs
        assert first is None
        assert len(others) == len(prompt) - 1
        for token, found, row in zip(prompt[1:], others, expected):
            assert found is not None
            values = torch.tensor([each.logprob for each in found.values()])
            # Random models find some tokens impossible: what has e**-25 differs by more.
            torch.testing.assert_close(values, row[list(found)], atol=1e-4, rtol=1e-5)
            top = [i for i, each in found.items() if each.rank is not None and each.rank <= NUM_TOP]
            assert [found[i].rank for i in top] == list(range(1, NUM_TOP + 1))
            assert found.keys() == {token, *top}
            torch.testing.assert_close(row[top], row.topk(NUM_TOP).values, atol=1e-4, rtol=0.0)
            # Those that are as probable but for rounding may stand on either side of it.
            rank = found[token].rank
            assert rank is not None
            assert (row > row[token] + 1e-4).sum() < rank <= (row > row[token] - 1e-4).sum()


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_in_chunks_beside_others(bench: Bench, monkeypatch: pytest.MonkeyPatch, pipeline_depth: int) -> None:
    """A few rows of logits at a time; samples fork where all is known, and one asks for nothing else."""
    num_rows: list[int] = []

    def score(logits: torch.Tensor, targets: torch.Tensor, width: int) -> torch.Tensor:
        num_rows.append(len(logits))
        return sampling.score(logits, targets, width)

    monkeypatch.setattr(forward, "LOGITS_AT_A_TIME", 5 * bench.checkpoint.vocab_size)
    monkeypatch.setattr(forward, "score", score)
    prompts, names = prompts_of(bench), names_of(bench)
    params = [asked(2), asked(0), asked(0, n=3), asked(4, n=3), greedy(20), asked(2), asked(1), asked(3)]
    limits: Any = {"max_num_seqs": 8, "max_batch_tokens": 16, "pipeline_depth": pipeline_depth}
    with bench.llm(page_tokens=4, **limits) as llm:
        outputs = llm.generate(prompts, params, names)
    assert max(num_rows) == 5
    assert sum(num_rows) == sum(length - 1 for length in LENGTHS) - (LENGTHS[4] - 1), "each once"
    assert outputs.pop(4).prompt_logprobs is None
    check(bench, outputs)
    for output, each in zip(outputs, params[:4] + params[5:]):
        bench.check([output], each.max_tokens or 0)
        assert len(output.outputs) == each.n


def test_what_is_cached_is_computed_anew_and_found_later(bench: Bench) -> None:
    prompts, names = prompts_of(bench), names_of(bench)
    with bench.llm(page_tokens=4) as llm:
        llm.generate(prompts[:4], greedy(2), names[:4])
        for params in (asked(1), asked(0)):
            before = llm.stats().prefix_hits_tokens
            check(bench, llm.generate(prompts, params, names))
            assert llm.stats().prefix_hits_tokens == before
        outputs = llm.generate(prompts, greedy(4), names)
        assert llm.stats().prefix_hits_tokens - before == sum((length - 1) // 4 * 4 for length in LENGTHS)
    bench.check(outputs, 4)


@pytest.mark.parametrize("cache_policy", ["lru-drop", "s-lora"])
@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_preempted_in_the_middle_of_a_prompt(bench: Bench, cache_policy: str, pipeline_depth: int) -> None:
    """What is known of a prompt by then is kept, whether or not its pages are."""
    prompts = prompts_of(bench, [29 + 3 * (i % 4) for i in range(10)])
    limits: Any = {"max_num_seqs": 10, "max_batch_tokens": 24, "pipeline_depth": pipeline_depth}
    with bench.llm((), page_tokens=4, num_pages=16, cache_policy=cache_policy, **limits) as llm:
        outputs = llm.generate(prompts, [asked(20), asked(0)] * 5)
        assert llm.stats().preemptions > 0
    check(bench, outputs)
    for i, output in enumerate(outputs):
        bench.check([output], 0 if i % 2 else 20)


def test_a_prompt_as_long_as_the_context(bench: Bench) -> None:
    """With nothing to be generated it may take all of it."""
    (prompt,) = prompts_of(bench, [64])
    with bench.llm((), page_tokens=4, num_pages=16, max_model_len=64) as llm:
        check(bench, llm.generate([prompt], asked(0)))
        with pytest.raises(ValueError, match="maximum context length is 64"):
            llm.generate([prompt], asked(1))


def test_on_merged_weights(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "measure_merging", lambda *args, steps_wait: MergeTimes(steps_wait))
    monkeypatch.setattr(state, "merge_policy", lambda config, times: EveryFewSteps())
    limits: Any = {"max_num_seqs": 6, "max_batch_tokens": 16, "merge": "manylora"}
    with bench.llm(**limits) as llm:
        check(bench, llm.generate(prompts_of(bench), asked(8), names_of(bench)))
        figures = llm.metrics()
    assert figures['manylora:merge_switches_total{to="merged"}'] > 0
