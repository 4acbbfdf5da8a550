"""A batch on a CPU gives the same tokens on one thread, and in parts on several."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from manylora.executor.batch import StepInputs
from manylora.executor.parts import StepParts
from tests.parity.engines import Bench, greedy, random_tokens

NUM_TOKENS = 10


@pytest.fixture(params=[1, 3], ids=["one-thread", "three-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_every_way_gives_the_same_tokens(bench: Bench, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    num_parts: set[int] = set()
    cut = StepParts.cut

    def counted(self: StepParts, inputs: StepInputs) -> list[StepInputs]:
        parts = cut(self, inputs)
        num_parts.add(len(parts))
        return parts

    monkeypatch.setattr(StepParts, "cut", counted)
    vocab = bench.checkpoint.vocab_size
    prompts = [random_tokens(i, 1 + 3 * (i % 13), vocab) for i in range(30)]
    models = [bench.names[i % len(bench.names)] for i in range(30)]
    with bench.llm() as llm:
        bench.check(llm.generate(prompts, greedy(NUM_TOKENS), models), NUM_TOKENS)
        one_alone = llm.generate(prompts[:1], greedy(NUM_TOKENS), models[:1])
        bench.check(one_alone, NUM_TOKENS)
        assert torch.get_num_threads() == threads, "the caller's threads are its own"
    assert num_parts == ({1, threads} if threads > 1 else set()), "a large batch is cut, a small one is not"
