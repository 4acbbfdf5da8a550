"""What ranks hold, and what they say of it: KV heads that several ranks share are counted as often as they are
held."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.conftest import make_bench
from tests.threaded_ranks import RankThread, threaded_ranks

__all__ = ["threaded_ranks"]

POOL = 2**20


@pytest.mark.parametrize(("kv_heads", "count", "times"), [(2, 2, 1), (2, 4, 2), (1, 4, 4), (1, 2, 2)])
def test_kv_heads_that_are_held_twice_count_twice(
    kv_heads: int,
    count: int,
    times: int,
    threaded_ranks: list[RankThread],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    bench = make_bench(tmp_path_factory, f"ranks-8-{kv_heads}")
    with bench.llm((), device_pool=POOL) as llm:
        one = llm.info
    ranks: dict[str, Any] = {"tensor_parallel_size": count}
    with bench.llm((), device_pool=POOL, **ranks) as llm:
        info, figures = llm.info, llm.metrics()
        held = [thread.rank._worker for thread in threaded_ranks if thread.rank is not None]
        arenas = [worker._arena.pool for worker in held if worker is not None]
    assert info.page_bytes == times * one.page_bytes
    assert info.num_pages == POOL // info.page_bytes
    assert len(arenas) == count
    for number, (arena, rank) in enumerate(zip(arenas, info.ranks, strict=True)):
        own = arena.numel() * arena.itemsize
        assert own == info.num_pages * rank.page_bytes
        assert count * rank.page_bytes == info.page_bytes
        assert figures[f'manylora:rank_pool_bytes{{rank="{number}",tier="device"}}'] == own
