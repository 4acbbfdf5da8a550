"""Every family and kind of adapter gives the reference's tokens when steps await what they read."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from manylora.devices.device import CopyLane
from tests.parity.checkpoints import FAMILIES
from tests.parity.conftest import make_bench
from tests.parity.engines import Bench, greedy, random_tokens

NUM_TOKENS = 6
MODES = [
    ("layerwise", 2),
    ("cpu", 2),
    pytest.param("cpu", 1, marks=pytest.mark.long),
    pytest.param("auto", 2, marks=pytest.mark.long),
    pytest.param("layerwise", 1, marks=pytest.mark.long),
    pytest.param("block", 1, marks=pytest.mark.long),
    pytest.param("block", 2, marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tmp_path_factory, request.param)


def check_cold(bench: Bench, mode: str, depth: int, **others: Any) -> None:
    """Every adapter twice, in a pool that holds few of them, prompts in chunks, two samples each."""
    prompts = [
        random_tokens(i, 3 + 7 * (i % 4), bench.checkpoint.vocab_size) for i in range(len(bench.names))
    ]
    largest = max(bench.adapter_pages(4).values())
    settings: dict[str, Any] = {"cold_start": mode, "pipeline_depth": depth}
    settings |= {"max_num_seqs": 4, "max_batch_tokens": 13}
    if mode in ("layerwise", "auto"):
        settings["cold_start_stall"] = 1.0
    if mode == "cpu":
        settings["cpu_lora_workers"] = 2 if depth == 1 else 1
    copy = CopyLane.copy

    def slow(lane: CopyLane, target: torch.Tensor, source: torch.Tensor) -> None:
        """No copy of this process has landed before its step begins."""
        time.sleep(source.nbytes / 2**22)
        copy(lane, target, source)

    with (
        pytest.MonkeyPatch.context() as patch,
        bench.llm(page_tokens=4, num_pages=2 * largest + 60, **settings, **others) as llm,
    ):
        patch.setattr(CopyLane, "copy", slow)
        # The first copy tells auto how slow they are.
        first = list(bench.checkpoint.adapters)[:1]
        bench.check(llm.generate(prompts[:1], greedy(NUM_TOKENS, n=2), first), NUM_TOKENS)
        for _ in range(2):
            outputs = llm.generate(prompts, greedy(NUM_TOKENS, n=2), bench.names)
            bench.check(outputs, NUM_TOKENS)
        stats = llm.stats()
    begun = {kind.partition("/")[0] for kind in stats.cold_starts}
    # What auto chooses depends on what steps and copies take on this machine now.
    assert begun <= {"wait", "layerwise"} if mode == "auto" else mode in begun, stats.cold_starts
    assert stats.cpu_lora_s > 0 or "cpu" not in begun
    assert stats.spoilt_rows == 0


@pytest.mark.parametrize(("mode", "depth"), MODES)
def test_cold_adapters(family: Bench, mode: str, depth: int) -> None:
    check_cold(family, mode, depth)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_whole_step_waits(bench: Bench, depth: int) -> None:
    check_cold(bench, "block", depth)


@pytest.mark.parametrize("mode", ["layerwise", "cpu"])
def test_cold_adapter_and_cold_history_together(bench: Bench, mode: str) -> None:
    """Prompts that come back when adapter and KV have left the device for the host."""
    # What manylora keeps depends on the time that has passed; what LRU keeps does not.
    settings: dict[str, Any] = {"cold_start": mode, "cache_policy": "lru"}
    settings |= {"cold_start_stall": 1.0} if mode == "layerwise" else {"cpu_lora_workers": "1"}
    names = list(bench.checkpoint.adapters)
    prompts = [random_tokens(50 + i, 33, bench.checkpoint.vocab_size) for i in range(len(names))]
    largest = max(bench.adapter_pages(4).values())
    with bench.llm(page_tokens=4, num_pages=largest + 24, **settings) as llm:
        for _ in range(3):
            for prompt, name in zip(prompts, names):
                bench.check(llm.generate([prompt], greedy(NUM_TOKENS), [name]), NUM_TOKENS)
        stats = llm.stats()
    assert stats.cold_starts.get(f"{mode}/host", 0) > 0, stats.cold_starts
    assert stats.kv_hit_tokens_host > 0
    assert stats.cold_start_hidden_s > 0
