"""What ranks exchange, counted, against what it is stated to be (S-LoRA §6.2; docs/tensor-parallelism.md)."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from manylora import LLM, SamplingParams
from manylora.types import RankTraffic
from tests.parity.checkpoints import write_checkpoint

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
RANKS = (1, 3, 8, 16, 32, 64, 128)
STATED = {4: (5, 3), 7: (9, 5)}
"""By the number of projections with adapters: S-LoRA's n in n (N - 1) B r / N elements on the wire (for all seven
by its rule: one for a gather, two for a sum), and of how many it gathers what is added up here."""
HIDDEN, LAYERS, TOKENS = 48, 2, 12


def of_one_step(llm: LLM, name: str | None) -> list[RankTraffic]:
    """Of a prompt and its one token."""
    before = llm.stats().traffic
    (output,) = llm.generate([list(range(TOKENS))], SamplingParams(max_tokens=1, temperature=0), name)
    assert len(output.outputs[0].token_ids) == 1
    after = llm.stats().traffic
    return [
        RankTraffic(*(now - then for now, then in zip(one, other, strict=True)))
        for one, other in zip(after, before, strict=True)
    ]


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.long)])
def test_bytes_are_those_stated(count: int, tmp_path: Path) -> None:
    kinds = {
        f"{len(modules)}-{rank}": {"r": rank, "target_modules": modules}
        for modules in (ATTENTION, ALL)
        for rank in RANKS
    }
    checkpoint = write_checkpoint(tmp_path, "ranks-8-4", kinds)
    paths = {name: str(path) for name, path in checkpoint.adapters.items()}
    fixed: dict[str, Any] = {"device": "cpu", "dtype": "float32", "device_pool": "64MiB"}
    sharded: dict[str, Any] = {"tensor_parallel_size": count, "lora_sharding": "sharded"}
    with LLM(str(checkpoint.folder), paths, **fixed, **sharded) as llm:
        for name in (None, *kinds):
            num_modules, rank = map(int, name.split("-")) if name else (0, 0)
            groups = {0: 0, 4: 2, 7: 4}[num_modules]
            for traffic in of_one_step(llm, name):
                assert traffic.base == 1 + 2 * LAYERS
                assert traffic.base_bytes == 4 * TOKENS * HIDDEN * (1 + 2 * LAYERS)
                assert traffic.lora == groups * LAYERS
                assert traffic.lora_bytes == 4 * TOKENS * rank * num_modules * LAYERS
                if not num_modules:
                    continue
                # On the wire, as rings: a sum moves a rank's tensor 2 (N - 1) / N times, a gather half of that.
                unit = Fraction((count - 1) * TOKENS * rank, count)
                ours = Fraction(2 * (count - 1), count) * traffic.lora_bytes / 4 / LAYERS
                stated, gathers = STATED[num_modules]
                assert ours == 2 * num_modules * unit
                assert ours - stated * unit == gathers * unit
