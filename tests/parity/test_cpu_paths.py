"""The ways a batch can run on a CPU: with one thread of torch or several, with compiled loops or torch alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from manylora.executor import build
from manylora.kernels.select import ops_for
from tests.parity.engines import Bench, greedy, random_tokens

NUM_TOKENS = 10


@pytest.fixture(params=[1, 3], ids=["one-thread", "three-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "torch"])
def test_every_way_gives_the_same_tokens(
    bench: Bench, threads: int, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_compiled:
        monkeypatch.setattr(
            build, "ops_for", lambda device, **how: ops_for(device, **{**how, "compiled": False})
        )
    vocab = bench.checkpoint.vocab_size
    prompts = [random_tokens(i, 1 + 3 * (i % 13), vocab) for i in range(30)]
    models = [bench.names[i % len(bench.names)] for i in range(30)]
    with bench.llm() as llm:
        assert ("compiled" in llm._llm._driver._ports._executor._forward.decoder.ops.name) == is_compiled  # type: ignore[attr-defined]
        bench.check(llm.generate(prompts, greedy(NUM_TOKENS), models), NUM_TOKENS)
        one_alone = llm.generate(prompts[:1], greedy(NUM_TOKENS), models[:1])
        bench.check(one_alone, NUM_TOKENS)
        assert torch.get_num_threads() == threads, "the caller's threads are its own"
