"""KV that is found in the tree is as good as KV computed anew, and never that of another model."""

from __future__ import annotations

import pytest

from tests.parity.engines import Bench, greedy, random_tokens

NUM_TOKENS = 10


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
def test_the_same_prompts_again(bench: Bench, page_tokens: int) -> None:
    """Second time everything but each prompt's last page is found."""
    prompts = [random_tokens(i, 33 + i, bench.checkpoint.vocab_size) for i in range(len(bench.names))]
    with bench.llm(page_tokens=page_tokens) as llm:
        first = llm.generate(prompts, greedy(NUM_TOKENS), bench.names)
        assert llm.stats().prefix_hits_tokens == 0
        again = llm.generate(prompts, greedy(NUM_TOKENS), bench.names)
        hits = llm.stats().prefix_hits_tokens
    assert hits == sum((len(p) - 1) // page_tokens * page_tokens for p in prompts)
    bench.check(first, NUM_TOKENS)
    bench.check(again, NUM_TOKENS)


def test_a_shared_stem(bench: Bench) -> None:
    """One at a time, then all at once: prompts that part ways inside a page and at its edge."""
    stem = random_tokens(7, 40, bench.checkpoint.vocab_size)
    cuts = (40, 39, 37, 36, 21, 20, 3)
    prompts = [stem[:cut] + random_tokens(cut, 4, bench.checkpoint.vocab_size) for cut in cuts]
    names: list[str | None] = ["everything"] * len(prompts)
    with bench.llm(page_tokens=4) as llm:
        outputs = [llm.generate(p, greedy(NUM_TOKENS), n)[0] for p, n in zip(prompts, names)]
        assert llm.stats().prefix_hits_tokens > 100
        outputs += llm.generate(prompts, greedy(NUM_TOKENS), names)
    bench.check(outputs, NUM_TOKENS)


def test_a_prompt_and_its_answer_as_the_next_prompt(bench: Bench) -> None:
    """A conversation: generated tokens are history too."""
    prompt = random_tokens(8, 9, bench.checkpoint.vocab_size)
    with bench.llm(page_tokens=4) as llm:
        for turn in range(5):
            output = llm.generate(prompt, greedy(NUM_TOKENS), "rslora")[0]
            bench.check([output], NUM_TOKENS)
            prompt = prompt + output.outputs[0].token_ids + [turn]
        assert llm.stats().prefix_hits_tokens > 80


def test_one_prompt_under_every_model_one_after_another(bench: Bench) -> None:
    prompt = random_tokens(9, 41, bench.checkpoint.vocab_size)
    with bench.llm(page_tokens=4) as llm:
        for name in bench.names:
            bench.check(llm.generate(prompt, greedy(NUM_TOKENS), name), NUM_TOKENS)
        assert llm.stats().prefix_hits_tokens == 0


def test_equal_prompts_at_once(bench: Bench) -> None:
    """Rows of one batch that fill equal pages: the later ones take over the page of the first."""
    prompt = random_tokens(10, 29, bench.checkpoint.vocab_size)
    names = [None, "everything", None, "everything", None, "everything"]
    with bench.llm(page_tokens=4, max_num_seqs=6, max_batch_tokens=20) as llm:
        bench.check(llm.generate([prompt] * 6, greedy(NUM_TOKENS), names), NUM_TOKENS)
