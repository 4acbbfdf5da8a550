"""Engines of several processes whose steps await copies of each process's own give the reference's tokens."""

from __future__ import annotations

import itertools

import pytest

from tests.parity.conftest import make_bench
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
