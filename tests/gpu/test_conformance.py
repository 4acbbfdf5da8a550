"""Real runs on a CUDA device, replayed by a fresh policy and lived through again in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from manylora_lab.sim.conformance import replay_difference, simulation_difference

from manylora.engine.journal import fingerprint
from tests.sim.test_conformance import crowd, read

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("pipeline_depth", [1, 2])
@pytest.mark.parametrize("policy", ["manylora", "fastlibra", "static-lru"])
def test_a_real_run_comes_out_the_same_again(policy: str, pipeline_depth: int, tmp_path: Path) -> None:
    asyncio.run(crowd(policy, pipeline_depth, tmp_path / "journal", "cuda"))
    run = read(tmp_path / "journal")
    assert run.kinds >= {"Arrive", "Abort", "StepDone", "AdapterRead", "CopyDone", "RunStep", "SwapPages"}
    assert str(replay_difference(run.config, run.entries, fingerprint)) == "None"
    assert str(simulation_difference(run.config, run.told)) == "None"
