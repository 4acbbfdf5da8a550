"""Engines of several processes whose steps await copies of each process's own give the reference's tokens."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from manylora.config import ColdStartConfig
from manylora.executor.ranks.executor import RankedExecutor
from manylora.protocol import DeviceCommand, ReadAdapter, RunStep, SwapPages
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


@pytest.mark.parametrize("host_pool", [0, pytest.param("16MiB", marks=pytest.mark.long)])
def test_reads_by_layer_groups(
    host_pool: Any, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the device, where steps await them, or to the host, where copies follow them."""
    said: list[DeviceCommand] = []
    obey = RankedExecutor.obey

    def noting(self: RankedExecutor, command: DeviceCommand) -> None:
        said.append(command)
        obey(self, command)

    monkeypatch.setattr(RankedExecutor, "obey", noting)
    monkeypatch.setattr(ColdStartConfig, "host_read_groups", ColdStartConfig.read_groups)
    bench = make_bench(tmp_path_factory, "ranks-12-1")
    settings: dict[str, Any] = {"cold_start": "layerwise", "cold_start_stall": 1.0, "host_pool": host_pool}
    settings |= {"tensor_parallel_size": 2, "lora_sharding": "sharded", "max_num_seqs": 2}
    num_pages = max(bench.adapter_pages(4).values()) + 24
    with bench.llm(page_tokens=4, num_pages=num_pages, **settings) as llm:
        for turn in range(2):
            for number, name in enumerate(bench.checkpoint.adapters):
                prompt = random_tokens(10 * turn + number, 17, bench.checkpoint.vocab_size)
                bench.check(llm.generate([prompt], greedy(4), [name]), 4)
    reads = [command for command in said if isinstance(command, ReadAdapter)]
    assert all(read.groups for read in reads)
    if host_pool == 0:
        assert len(reads) > len(bench.checkpoint.adapters)
        numbers = {read.copy for read in reads}
    else:
        numbers = {copy.copy for copy in said if isinstance(copy, SwapPages) and copy.follows_read}
    awaited = {each.copy for step in said if isinstance(step, RunStep) for each in step.awaits}
    assert numbers & awaited


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
