"""Every cache policy, from a pool for barely one request to one for everything: the tokens never change."""

from __future__ import annotations

from typing import Any

import pytest

from manylora.config.policy import CACHE_POLICIES
from tests.parity.engines import Bench, greedy, random_tokens
from tests.sampled import sampled

PAGE_TOKENS = 4
NUM_TOKENS = 12
TURNS = 3
HISTORY = [policy for policy in CACHE_POLICIES if policy != "s-lora"]
HISTORY_FROM_HOST = [policy for policy in HISTORY if policy not in ("static-lru", "manylora", "lru-drop")]
"""static-lru's share is too small here; manylora saves only what it has measured to come back faster than it is
computed, which a model this small need not show."""


def pages_of(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS)


LONGEST = pages_of(TURNS * (7 + NUM_TOKENS))


def converse(
    bench: Bench, policy: str, num_pages: int, host_pool: int | str, **settings: Any
) -> dict[str, int]:
    """Conversations of three turns over all adapters and the base, in changing order; returns counters."""
    names = bench.names
    histories = [random_tokens(300 + i, 7, bench.checkpoint.vocab_size) for i in range(len(names))]
    with bench.llm(
        page_tokens=PAGE_TOKENS, num_pages=num_pages, host_pool=host_pool, cache_policy=policy, **settings
    ) as llm:
        for turn in range(TURNS):
            order = [(i * 7 + turn) % len(names) for i in range(len(names))]
            outputs = llm.generate(
                [histories[i] for i in order], greedy(NUM_TOKENS), [names[i] for i in order]
            )
            bench.check(outputs, NUM_TOKENS)
            for i, output in zip(order, outputs, strict=True):
                more = random_tokens(400 + 10 * turn + i, 7, bench.checkpoint.vocab_size)
                histories[i] = [*histories[i], *output.outputs[0].token_ids, *more]
        stats = llm.stats()
    used = stats.pages_history + stats.pages_adapters + stats.pages_free
    assert stats.pages_running == 0 or used + stats.pages_running == stats.pages_total
    return {
        name: getattr(stats, name)
        for name in (
            "pages_swapped_in", "pages_swapped_out", "preemptions", "kv_hit_tokens_host", "adapter_hits_host",
            "history_evictions", "swaps_failed", "prefetches",
        )
    }  # fmt: skip


def barely(bench: Bench, policy: str) -> int:
    """Pages for the largest adapter and one longest request."""
    largest = max(bench.adapter_pages(PAGE_TOKENS).values())
    if policy == "static-lru":
        return max(5 * largest + 5, -(-5 * LONGEST // 4) + 1)  # a fifth is the adapters'
    return largest + LONGEST


@pytest.mark.parametrize(
    ("policy", "host_pool"),
    sampled(((name, size) for name in CACHE_POLICIES for size in (0, "1MiB", "256MiB")), 2),
)
def test_barely_one_request(bench: Bench, policy: str, host_pool: int | str) -> None:
    counts = converse(bench, policy, barely(bench, policy), host_pool, max_num_seqs=4, max_batch_tokens=16)
    assert counts["swaps_failed"] == 0
    if host_pool == "256MiB":
        assert counts["pages_swapped_in"] > 0, "swapping was forced"
        assert counts["adapter_hits_host"] > 0
    if host_pool == "256MiB" and policy in HISTORY_FROM_HOST:
        assert counts["kv_hit_tokens_host"] > 0


@pytest.mark.parametrize("policy", CACHE_POLICIES)
def test_half_of_everything(bench: Bench, policy: str) -> None:
    sizes = bench.adapter_pages(PAGE_TOKENS)
    num_pages = max(barely(bench, policy), (sum(sizes.values()) + len(bench.names) * LONGEST) // 2)
    converse(bench, policy, num_pages, 256 * 2**20, max_num_seqs=6)


@pytest.mark.parametrize("policy", CACHE_POLICIES)
def test_everything_fits(bench: Bench, policy: str) -> None:
    sizes = bench.adapter_pages(PAGE_TOKENS)
    num_pages = 5 * sum(sizes.values()) + 2 * len(bench.names) * LONGEST
    counts = converse(bench, policy, num_pages, 256 * 2**20)
    if policy in HISTORY:
        assert counts["history_evictions"] == 0


@pytest.mark.parametrize("policy", ["manylora", "fastlibra", "lru"])
def test_preempted_sequences_come_back_from_the_host(bench: Bench, policy: str) -> None:
    """Six sequences start where only two can end."""
    prompts = [random_tokens(500 + i, 10, bench.checkpoint.vocab_size) for i in range(6)]
    num_pages = 2 * pages_of(10 + 24)
    with bench.llm(
        [], page_tokens=PAGE_TOKENS, num_pages=num_pages, host_pool="64MiB", cache_policy=policy
    ) as llm:
        outputs = llm.generate(prompts, greedy(24))
        stats = llm.stats()
    bench.check(outputs, 24)
    assert stats.preemptions > 0
    if policy in HISTORY_FROM_HOST:
        assert stats.kv_hit_tokens_host > 0
