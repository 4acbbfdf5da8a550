"""Engines of several processes give the reference's tokens: every family, every kind of adapter, in one batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from manylora.config.declaring import ConfigError
from manylora.kernels.shapes import possible_counts
from tests.parity import test_prompt_logprobs
from tests.parity.checkpoints import FAMILIES, OF_RANKS
from tests.parity.conftest import make_bench
from tests.parity.engines import Bench, greedy, random_tokens

NUM_TOKENS = 10

SHARDINGS = ("sharded", "replicated")


def heads_of(family: str) -> tuple[int, int]:
    settings = (FAMILIES | OF_RANKS)[family][1]
    heads = settings["num_attention_heads"]
    return heads, settings.get("num_key_value_heads", heads)


def all_cases() -> Iterator[tuple[str, int, str]]:
    """Every family at each of 2, 3 and 4 ranks among which its heads can be shared out, in both shardings."""
    for family in (*OF_RANKS, *sorted(FAMILIES)):
        for count in possible_counts(*heads_of(family), 4)[1:]:
            for sharding in SHARDINGS:
                yield family, count, sharding


IN_CI = (
    ("ranks-8-1", 4, "sharded"),
    ("ranks-8-4", 2, "replicated"),
    ("ranks-12-12", 3, "sharded"),
    ("ranks-12-1", 3, "replicated"),
    ("opt-350m", 2, "sharded"),
    ("qwen3-window", 2, "replicated"),
    ("gemma2", 2, "sharded"),
    ("gemma3-linear", 2, "replicated"),
)
"""Of all cases a few, each with an adapter of every kind: both shardings with 2, 3 and (sharded) 4 ranks, KV heads
that are cut, shared and one for each; OPT, head norms and Gemma; the rest by ``make test-long``."""


def test_the_sample_is_of_the_cases() -> None:
    assert set(IN_CI) <= set(all_cases())
    for family, count, sharding in all_cases():
        print(family, count, sharding, "in CI" if (family, count, sharding) in IN_CI else "long")


_CASES = [
    pytest.param(*case, id="-".join(map(str, case)), marks=() if case in IN_CI else pytest.mark.long)
    for case in all_cases()
]


@pytest.mark.parametrize(("family", "count", "sharding"), _CASES)
def test_one_mixed_batch(
    family: str, count: int, sharding: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Long and short prompts, in one step and in chunks, under every adapter; then one under all of them, with its
    log-probabilities."""
    bench = make_bench(tmp_path_factory, family)
    names = bench.names
    prompts = [random_tokens(i, 1 + 9 * (i % 6), bench.checkpoint.vocab_size) for i in range(len(names))]
    with bench.llm(tensor_parallel_size=count, lora_sharding=sharding, max_batch_tokens=61) as llm:
        assert len(llm.info.ranks) == count
        outputs = llm.generate(prompts, greedy(NUM_TOKENS), names)
        scored = greedy(NUM_TOKENS, prompt_logprobs=test_prompt_logprobs.NUM_TOP)
        again = llm.generate(prompts[3:4] * len(names), scored, names)
    test_prompt_logprobs.check(bench, again)
    bench.check(outputs, NUM_TOKENS)
    bench.check(again, NUM_TOKENS)
    answers = {tuple(output.outputs[0].token_ids) for output in again}
    assert len(answers) >= len(names) - 1


@pytest.mark.parametrize(
    ("family", "count", "words"),
    [
        ("ranks-8-4", 3, ("8 heads", "2, 4")),
        ("llama", 3, ("2 KV heads", "these do: 1, 2, 6")),
        ("ranks-8-4", 17, ("8 heads",)),
    ],
)
def test_what_does_not_come_out_even_is_refused(
    family: str, count: int, words: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    bench: Bench = make_bench(tmp_path_factory, family)
    with pytest.raises(ConfigError) as refused, bench.llm((), tensor_parallel_size=count):
        pass
    message = str(refused.value)
    assert "\n" not in message
    assert all(word in message for word in words), message
