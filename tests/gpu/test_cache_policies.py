"""On a CUDA device: with the pool squeezed and every cache policy, float32 tokens stay the CPU's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from manylora import LLM
from manylora.config.policy import CACHE_POLICIES
from tests.gpu.test_parity import ADAPTERS, DEMO, GREEDY, workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PAGE_BYTES = 32768  # float32, 16 tokens
SQUEEZED = dict.fromkeys(CACHE_POLICIES, 110 * PAGE_BYTES) | {"static-lru": 400 * PAGE_BYTES}


def two_rounds(**settings: Any) -> tuple[list[list[int]], Any]:
    """Everything is asked twice, so that history is wanted back after it had to leave."""
    prompts, models = workload()
    found: list[list[int]] = []
    with LLM(str(DEMO / "model"), adapters=ADAPTERS, **settings) as llm:
        for _ in range(2):
            found += [r.outputs[0].token_ids for r in llm.generate(prompts, GREEDY, models)]
        stats = llm.stats()
    return found, stats


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    found, _ = two_rounds(device="cpu", dtype="float32", device_pool="256MiB", host_pool=0)
    return found


@pytest.mark.parametrize("policy", CACHE_POLICIES)
def test_float32_tokens_equal_the_cpus(policy: str, expected: list[list[int]]) -> None:
    found, stats = two_rounds(
        device="cuda",
        dtype="float32",
        device_pool=SQUEEZED[policy],
        host_pool="512MiB",
        cache_policy=policy,
        page_tokens=16,
    )
    assert found == expected
    assert stats.pages_swapped_in > 0, "the squeezed pool squeezes"
    assert stats.swaps_failed == 0
