"""Pages are short: sequences are preempted, history and adapters evicted and read again. Same tokens."""

from __future__ import annotations

import pytest

from tests.parity.engines import Bench, greedy, random_tokens

NUM_TOKENS = 20


def pages_of(num_tokens: int, page_tokens: int) -> int:
    return -(-num_tokens // page_tokens)


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
@pytest.mark.parametrize("adapter", [None, "everything"])
def test_preemption(bench: Bench, page_tokens: int, adapter: str | None) -> None:
    """Six sequences start where only two can end."""
    length = 10
    prompts = [random_tokens(i, length, bench.checkpoint.vocab_size) for i in range(6)]
    num_tokens = 50 if page_tokens == 16 else NUM_TOKENS
    num_pages = 2 * pages_of(length + num_tokens, page_tokens)
    if adapter is not None:
        num_pages += bench.adapter_pages(page_tokens)[adapter]
    with bench.llm([adapter] if adapter else [], page_tokens=page_tokens, num_pages=num_pages) as llm:
        outputs = llm.generate(prompts, greedy(num_tokens), adapter)
        stats = llm.stats()
    bench.check(outputs, num_tokens)
    assert stats.preemptions > 0
    assert stats.pages_running == 0


def test_preemption_while_prompts_are_chunked(bench: Bench) -> None:
    """Victims may be in the middle of their prompt; what they kept as history is found again."""
    names = [None, "q-and-v", "one-layer"]
    sizes = bench.adapter_pages(4)
    prompts = [random_tokens(20 + i, 5 + 6 * (i % 5), bench.checkpoint.vocab_size) for i in range(12)]
    num_pages = sizes["q-and-v"] + sizes["one-layer"] + 26
    limits = {"max_num_seqs": 12, "max_batch_tokens": 14}
    with bench.llm(["q-and-v", "one-layer"], page_tokens=4, num_pages=num_pages, **limits) as llm:
        outputs = llm.generate(prompts, greedy(NUM_TOKENS), names * 4)
        stats = llm.stats()
    bench.check(outputs, NUM_TOKENS)
    assert stats.preemptions > 0
    assert stats.history_evictions > 0


def test_adapters_take_turns(bench: Bench) -> None:
    """The pool holds the largest adapter and one request, no host: each round reads every adapter again."""
    sizes = bench.adapter_pages(4)
    prompts = [random_tokens(40 + i, 12, bench.checkpoint.vocab_size) for i in range(len(sizes))]
    num_pages = max(sizes.values()) + pages_of(12 + NUM_TOKENS, 4)
    with bench.llm(page_tokens=4, num_pages=num_pages, host_pool=0) as llm:
        for _ in range(2):
            bench.check(llm.generate(prompts, greedy(NUM_TOKENS), list(sizes)), NUM_TOKENS)
        stats = llm.stats()
    assert stats.adapter_evictions > 0
    assert stats.adapter_reads > len(sizes)


def test_adapters_come_and_go_among_running_requests(bench: Bench) -> None:
    """Room for about half of the adapters, several sequences, the base among them; an order without sense."""
    sizes = bench.adapter_pages(4)
    names = [bench.names[i * 7 % len(bench.names)] for i in range(2 * len(bench.names))]
    prompts = [random_tokens(60 + i % 5, 6 + i % 9, bench.checkpoint.vocab_size) for i in range(len(names))]
    num_pages = max(max(sizes.values()), sum(sizes.values()) // 2) + 20
    with bench.llm(page_tokens=4, num_pages=num_pages, max_num_seqs=6) as llm:
        outputs = llm.generate(prompts, greedy(NUM_TOKENS), names)
        stats = llm.stats()
    bench.check(outputs, NUM_TOKENS)
    assert stats.adapter_evictions > 0
    assert stats.pages_running == 0
    assert stats.pages_free + stats.pages_history + stats.pages_adapters == stats.pages_total
