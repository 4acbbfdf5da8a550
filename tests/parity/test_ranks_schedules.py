"""Two ranks under every schedule: pages of any size, small pools, chunks, forks, seeds, cache policies, two steps
in flight. Greedy tokens are the reference's, drawn ones those of one rank, and the ranks' own bits repeat."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from manylora.config.policy import CACHE_POLICIES
from manylora.flags import build_settings
from manylora.inspection import check_adapter
from tests.parity.engines import Bench, greedy, random_tokens
from tests.parity.test_samples import sampled

NUM_TOKENS = 12
TWO = {"tensor_parallel_size": 2}

CASES = list(itertools.product((1, 4, 16), ("sharded", "replicated"), (1, 2), (*CACHE_POLICIES,)))
IN_CI = [(1, "replicated", 2, "manylora"), (4, "sharded", 2, "s-lora"), (16, "sharded", 1, "static-lru")]


def pages_of(bench: Bench, name: str, page_tokens: int, **settings: Any) -> int:
    values = {"model": str(bench.checkpoint.folder), "dtype": "float32", "page_tokens": page_tokens}
    engine, _ = build_settings(values | settings)
    found = json.loads(check_adapter(engine, str(bench.checkpoint.adapters[name]), as_json=True))
    pages: int = found["pages"]
    assert found["pages_per_rank"] == [pages] * 2
    return pages


@pytest.mark.parametrize(
    ("page_tokens", "sharding", "depth", "policy"),
    [
        pytest.param(*case, id="-".join(map(str, case)), marks=() if case in IN_CI else pytest.mark.long)
        for case in CASES
    ],
)
def test_small_pools(bench: Bench, page_tokens: int, sharding: str, depth: int, policy: str) -> None:
    """Room for the largest adapter and two or three requests: preemptions, swaps, adapters that are read again."""
    ranks: dict[str, Any] = TWO | {"lora_sharding": sharding}
    largest = max(pages_of(bench, name, page_tokens, **ranks) for name in bench.checkpoint.adapters)
    names = [bench.names[i * 7 % len(bench.names)] for i in range(len(bench.names))]
    prompts = [random_tokens(i, 7 + i % 9, bench.checkpoint.vocab_size) for i in range(len(names))]
    num_pages = (largest + -(-150 // page_tokens)) * (5 if policy == "static-lru" else 1)
    pool = num_pages * page_tokens * bench.checkpoint.token_bytes
    limits: dict[str, Any] = {"max_num_seqs": 7, "max_batch_tokens": 14, "pipeline_depth": depth}
    with bench.llm(
        page_tokens=page_tokens,
        num_pages=num_pages,
        host_pool=2 * pool,
        cache_policy=policy,
        **limits,
        **ranks,
    ) as llm:
        for _ in range(2):
            bench.check(llm.generate(prompts, greedy(NUM_TOKENS, n=2), names), NUM_TOKENS)
        stats = llm.stats()
    if policy != "static-lru":
        assert stats.adapter_evictions > 0
    assert stats.swaps_failed == 0


@pytest.fixture(scope="module")
def drawn(bench: Bench) -> list[Any]:
    return draw(bench)


def draw(bench: Bench, **settings: Any) -> list[Any]:
    """Of requests that come one at a time."""
    prompts = [random_tokens(i, 18, bench.checkpoint.vocab_size) for i in range(2)]
    params = sampled(3, n=3, top_p=0.9, logprobs=2)
    found = []
    with bench.llm(["everything"], **settings) as llm:
        for prompt, name in itertools.product(prompts, (None, "everything")):
            (output,) = llm.generate([prompt], params, name)
            found += [(s.token_ids, s.logprobs) for s in output.outputs]
    return found


def numbers(drawn: list[Any]) -> list[float]:
    return [found[token].logprob for tokens, said in drawn for token, found in zip(tokens, said, strict=True)]


@pytest.mark.parametrize("sharding", ["sharded", pytest.param("replicated", marks=pytest.mark.long)])
def test_seeded_samples_are_those_of_one_rank(bench: Bench, drawn: list[Any], sharding: str) -> None:
    ranks: dict[str, Any] = TWO | {"lora_sharding": sharding}
    found = draw(bench, **ranks)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in drawn]
    assert numbers(found) == pytest.approx(numbers(drawn), abs=1e-4)


def test_repeats_are_the_same_to_the_last_bit(bench: Bench) -> None:
    """In bfloat16: what the compiled loops of small float32 models give depends, with one rank too, on where in
    memory the numbers lie."""
    ranks: dict[str, Any] = TWO | {"lora_sharding": "sharded", "dtype": "bfloat16"}
    assert numbers(draw(bench, **ranks)) == numbers(draw(bench, **ranks))
