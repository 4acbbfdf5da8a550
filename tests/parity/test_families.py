"""Every family, with the base and every kind of adapter in one batch, gives the reference's tokens."""

from __future__ import annotations

import pytest

from tests.parity.checkpoints import FAMILIES
from tests.parity.conftest import make_bench
from tests.parity.engines import Bench, greedy, random_tokens

NUM_TOKENS = 12


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A family's models are let go of when its tests are done."""
    return make_bench(tmp_path_factory, request.param)


def prompts_of(bench: Bench) -> list[list[int]]:
    """One for each model, of lengths from a single token to several windows."""
    lengths = [1 + 9 * (i % 6) for i in range(len(bench.names))]
    return [random_tokens(i, length, bench.checkpoint.vocab_size) for i, length in enumerate(lengths)]


def test_one_mixed_batch(family: Bench) -> None:
    prompts = prompts_of(family)
    with family.llm(page_tokens=4) as llm:
        outputs = llm.generate(prompts, greedy(NUM_TOKENS), family.names)
    assert [output.adapter for output in outputs] == family.names
    family.check(outputs, NUM_TOKENS)


def test_one_prompt_chunked_under_every_adapter(family: Bench) -> None:
    """Chunks of a few tokens beside decoding rows; one prompt for all, whose KV must not be shared."""
    prompt = prompts_of(family)[3]
    with family.llm(page_tokens=4, max_num_seqs=10, max_batch_tokens=13) as llm:
        outputs = llm.generate([prompt] * len(family.names), greedy(NUM_TOKENS), family.names)
    family.check(outputs, NUM_TOKENS)
    # Else the test would not see an adapter that is not applied. (Two may agree by chance.)
    answers = {tuple(output.outputs[0].token_ids) for output in outputs}
    assert len(answers) >= len(family.names) - 1
