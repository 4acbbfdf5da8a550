"""Log-probabilities of prompts, against log_softmax of transformers' and PEFT's own float32 logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from manylora import LLM, SamplingParams
from manylora.executor import forward
from manylora.outputs import RequestOutput
from tests.parity.engines import Bench, greedy, random_tokens

ADAPTER = "everything"
NUM_TOP = 3


def prompts_of(bench: Bench, lengths: Sequence[int]) -> list[list[int]]:
    return [random_tokens(40 + i, length, bench.checkpoint.vocab_size) for i, length in enumerate(lengths)]


def check(bench: Bench, outputs: Sequence[RequestOutput], num_top: int = NUM_TOP) -> None:
    for output in outputs:
        prompt = output.prompt_token_ids
        expected = bench.reference.logits(prompt, output.adapter).log_softmax(-1)
        assert output.prompt_logprobs is not None
        first, *others = output.prompt_logprobs
        assert first is None
        assert len(others) == len(prompt) - 1
        for token, found, row in zip(prompt[1:], others, expected):
            assert found is not None
            top = [i for i, each in found.items() if each.rank is not None and each.rank <= num_top]
            assert found.keys() == {token, *row.topk(num_top).indices.tolist()}
            assert [found[i].rank for i in top] == list(range(1, len(top) + 1))
            if found[token].rank != int((row > row[token]).sum()) + 1:
                # Where another is as probable but for rounding.
                assert (row - row[token]).abs().sort().values[1] < 1e-4
            values = torch.tensor([each.logprob for each in found.values()])
            torch.testing.assert_close(values, row[list(found)], atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("pipeline_depth", [1, 2])
@pytest.mark.parametrize("merge", ["off", "fastest"])
def test_in_chunks_beside_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, pipeline_depth: int, merge: str
) -> None:
    monkeypatch.setattr(forward, "LOGITS_AT_A_TIME", 5 * bench.checkpoint.vocab_size)
    prompts = prompts_of(bench, [1, 2, 37, 18, 30, 9])
    asked = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, prompt_logprobs=NUM_TOP)
    params: list[SamplingParams] = [greedy(20), *[asked] * 5]
    limits: Any = {"max_num_seqs": 8, "max_batch_tokens": 16, "pipeline_depth": pipeline_depth}
    with bench.llm(page_tokens=4, **limits) as llm:
        outputs = llm.generate(prompts, params, bench.names[: len(prompts)])
    assert outputs[0].prompt_logprobs is None
    check(bench, outputs[1:])
