"""The ways a batch can run on a CPU: split among threads or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from manylora.executor import shards
from tests.parity.engines import Bench, greedy, random_tokens

NUM_TOKENS = 10


@pytest.fixture(params=[1, 3], ids=["one-thread", "three-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_every_way_gives_the_same_tokens(bench: Bench, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    num_parts: list[int] = []
    split = shards.Shards.split

    def counted(self: shards.Shards, costs: Any) -> Any:
        ranges = split(self, costs)
        num_parts.append(0 if ranges is None else len(ranges))
        return ranges

    monkeypatch.setattr(shards.Shards, "split", counted)
    vocab = bench.checkpoint.vocab_size
    prompts = [random_tokens(i, 1 + 3 * (i % 13), vocab) for i in range(30)]
    models = [bench.names[i % len(bench.names)] for i in range(30)]
    with bench.llm() as llm:
        bench.check(llm.generate(prompts, greedy(NUM_TOKENS), models), NUM_TOKENS)
        one_alone = llm.generate(prompts[:1], greedy(NUM_TOKENS), models[:1])
        bench.check(one_alone, NUM_TOKENS)
        assert torch.get_num_threads() == threads, "the caller's threads are its own"
    if threads > 1:
        assert max(num_parts) == threads, "a large batch is split"
        assert 0 in num_parts, "a small one is not"
    else:
        assert not num_parts
