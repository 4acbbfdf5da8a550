"""Engines of several processes whose steps await copies of each process's own give the reference's tokens."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.parity.conftest import make_bench
from tests.parity.engines import greedy, random_tokens
from tests.parity.test_cold_starts import check_cold
from tests.parity.test_ranks import all_cases

CASES = [
    (family, count, sharding, mode, depth)
    for (family, count, sharding), mode, depth in itertools.product(
        all_cases(), ("layerwise", "block", "auto"), (1, 2)
    )
    if count == 2 or family == "ranks-8-4"
]
IN_CI = (
    ("ranks-12-1", 2, "sharded", "layerwise", 2),
    ("opt-350m", 2, "replicated", "block", 1),
)


def test_the_sample_is_of_the_cases() -> None:
    assert set(IN_CI) <= set(CASES)


def test_a_read_straight_to_the_device_is_waited_for(tmp_path_factory: pytest.TempPathFactory) -> None:
    bench = make_bench(tmp_path_factory, "ranks-12-1")
    settings: dict[str, Any] = {"cold_start": "layerwise", "cold_start_stall": 1.0, "host_pool": 0}
    settings |= {"tensor_parallel_size": 2, "lora_sharding": "sharded", "max_num_seqs": 2}
    num_pages = max(bench.adapter_pages(4).values()) + 24
    with bench.llm(page_tokens=4, num_pages=num_pages, **settings) as llm:
        for number, name in enumerate(bench.checkpoint.adapters):
            prompt = random_tokens(number, 17, bench.checkpoint.vocab_size)
            bench.check(llm.generate([prompt], greedy(4), [name]), 4)
        assert set(llm.stats().cold_starts) == {"wait/files"}


@pytest.mark.parametrize(
    ("family", "count", "sharding", "mode", "depth"),
    [
        pytest.param(*case, id="-".join(map(str, case)), marks=() if case in IN_CI else pytest.mark.long)
        for case in CASES
    ],
)
def test_cold_adapters(
    family: str, count: int, sharding: str, mode: str, depth: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    ranks = {"tensor_parallel_size": count, "lora_sharding": sharding}
    check_cold(make_bench(tmp_path_factory, family), mode, depth, **ranks)
