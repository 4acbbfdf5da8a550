"""What runs before anybody asks leaves nothing behind."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest

from manylora.executor.probing import warm_up
from manylora.kernels.cpu import CpuOps
from manylora.kernels.ops import LoraSegments
from manylora.protocol.commands import DeviceCommand, RunStep
from tests.executor.drive import Rig
from tests.executor.tiny import Reference, write_adapter, write_model


def test_served_tokens_are_the_same_after_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_model(tmp_path / "model")
    rig = Rig(model, tmp_path, max_batch_tokens=100, max_num_seqs=8, max_model_len=40)
    try:
        with caplog.at_level(logging.INFO):
            assert warm_up(rig.worker, rig.policy) == [100]  # in prompts of 40, 40 and 20
        assert "warmed up with steps of [100] tokens" in caplog.text
        rig.connect()
        prompt = [7, 8, 9, 10, 11]
        adapter = write_adapter(tmp_path / "r4", model, rank=4, seed=1)
        rig.serve(1, adapter)
        rig.open(1, prompt)
        rig.open(2, prompt, adapter=1)
        rig.decode(6, 1, 2)
        Reference(model).check_greedy(prompt, rig.sequences[1].generated)
        Reference(model).check_greedy(prompt, rig.sequences[2].generated, adapter)
        # More than its tables hold: said, not raised.
        caplog.clear()
        warm_up(rig.worker, dataclasses.replace(rig.policy, max_model_len=10**4, max_batch_tokens=10**4))
        assert "failed before serving began" in caplog.text
    finally:
        rig.worker.close()


def test_steps_with_an_adapter_are_among_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of scale 0, so they draw what the base model does; where the pool has no room for it, there are none."""
    model = write_model(tmp_path / "model")
    limits: dict[str, Any] = {"max_batch_tokens": 100, "max_num_seqs": 8, "max_model_len": 40}
    rig = Rig(model, tmp_path, num_pages=1000, page_bytes=3072, **limits)
    ranks: list[int] = []
    plan = CpuOps.plan_lora

    def noted(self: CpuOps, segments: LoraSegments, *rest: Any) -> Any:
        ranks.extend(segments.records[:, :, 2].max(axis=1, initial=0).tolist())
        assert not segments.scales.any()
        return plan(self, segments, *rest)

    monkeypatch.setattr(CpuOps, "plan_lora", noted)
    try:
        warm_up(rig.worker, rig.policy, 3)
        assert set(ranks) == {3}
        ranks.clear()
        warm_up(rig.worker, rig.policy, 10**6)
        assert set(ranks) == {16, 64}
        monkeypatch.setattr("manylora.executor.probing._PRETENDED", {-1: 10**6})
        ranks.clear()
        warm_up(rig.worker, rig.policy)
        assert not ranks
    finally:
        rig.worker.close()


@pytest.mark.parametrize(("max_num_seqs", "expected"), [(8, [40, 29, 9, 1, 1]), (4, [40, 40]), (1, [40])])
def test_short_rows_are_beside_the_long_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_num_seqs: int, expected: list[int]
) -> None:
    model = write_model(tmp_path / "model")
    limits: dict[str, Any] = {"max_batch_tokens": 80, "max_num_seqs": max_num_seqs, "max_model_len": 40}
    monkeypatch.setattr("manylora.executor.probing._BESIDE", (9, 1, 1))
    rig = Rig(model, tmp_path, num_pages=1000, page_bytes=3072, **limits)
    rows: list[list[int]] = []
    adapters: list[list[int]] = []
    obey = rig.worker.obey

    def noted(command: DeviceCommand) -> None:
        if isinstance(command, RunStep):
            rows.append([row.num_tokens for row in command.rows])
            adapters.append([start.adapter for start in command.starts])
        obey(command)

    monkeypatch.setattr(rig.worker, "obey", noted)
    try:
        warm_up(rig.worker, rig.policy)
        assert rows[0] == expected
        num_long = sum(length > 9 for length in expected)
        beside = {(set(each[:num_long]).pop(), *set(each[num_long:])) for each in adapters}
        assert beside == ({(0, 0), (-1, -2), (-2, -1)} if num_long < len(expected) else {(0,), (-1,), (-2,)})
    finally:
        rig.worker.close()
