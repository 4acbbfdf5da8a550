"""What is measured of merging before serving, and which settings of it are refused at the start."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from manylora.config.declaring import ConfigError
from manylora.config.merging import MergeConfig, MergeTimes
from manylora.devices.device import Device
from manylora.executor import build, probing
from manylora.executor.worker import Worker
from manylora.kernels.ops import Weight
from manylora.protocol.commands import SetMerged
from manylora.protocol.events import SwitchDone
from manylora.types import BASE
from tests.executor.conftest import Files
from tests.executor.drive import Rig

PAGE_BYTES = 3072
PROMPT = [5, 6, 7, 8, 9, 10, 11]


def rig_of(files: Files, folder: Path, **settings: Any) -> Rig:
    given: dict[str, Any] = {"num_pages": 400, "page_bytes": PAGE_BYTES, "max_num_seqs": 20}
    return Rig(files.model, folder, **given | settings)


@pytest.mark.parametrize("copy", ["device", "host"])
def test_switches_and_steps_are_measured_and_leave_no_trace(
    files: Files, tmp_path: Path, copy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "_MOST_S", float("inf"))
    rig = rig_of(files, tmp_path, merge=MergeConfig(mode="manylora", copy=copy))
    times = rig.policy.merge.times
    assert times.steps_wait == (copy == "host")
    assert times.merge_s > 0
    assert times.restore_s > 0
    sizes = [(step.num_rows, step.num_tokens) for step in times.steps]
    assert sizes == [(1, 1), (4, 4), (16, 16), (20, 20), (1, 64)]
    for step in times.steps:
        assert step.unmerged_s > 0
        assert step.merged_s > 0
    assert rig.policy.merge.mode == "manylora"
    assert (rig.worker._tables.merged, rig.worker._tables._held) == (BASE, {})
    assert rig.worker._forward is not None
    linears = rig.worker._forward.decoder.linears
    assert rig.facts.pristine_bytes == sum([linear.weight.data.nbytes for linear in linears])
    for adapter, path in files.adapters.items():
        rig.serve(adapter, path)
    for sequence in range(4):
        rig.open(sequence, PROMPT, sequence)
    rig.step(*(rig.row(sequence) for sequence in range(4)))
    rig.merge(2)
    rig.decode(4, 2)
    rig.worker.close()
    for held in rig.sequences.values():
        files.reference.check_greedy(PROMPT, held.generated, files.path(held.adapter))


def test_a_pool_too_small_for_an_adapter_is_not_measured(
    files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    rig = rig_of(files, tmp_path, num_pages=5, merge=MergeConfig(mode="merged", copy="host"))
    assert rig.policy.merge.times == MergeTimes(steps_wait=True)
    assert "the pool has no room for an adapter of rank 16" in caplog.text
    rig.open(1, PROMPT)
    rig.decode(1, 1)
    rig.worker.close()


def test_what_fails_before_serving_is_a_warning(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(worker: Worker, command: SetMerged) -> None:
        worker._report(SwitchDone(command.switch, command.adapter == BASE, error="no luck"))

    monkeypatch.setattr(Worker, "set_merged", failing)
    rig = rig_of(files, tmp_path, merge=MergeConfig(mode="dlora"))
    assert rig.policy.merge.times == MergeTimes()
    assert "merging was not measured: no luck" in caplog.text
    rig.worker.close()


def test_steps_that_take_long_end_the_measurement(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "_MOST_S", 0.0)
    rig = rig_of(files, tmp_path, merge=MergeConfig(mode="dlora"))
    assert rig.policy.merge.times.merge_s > 0
    assert len(rig.policy.merge.times.steps) == 1
    rig.worker.close()


def test_without_merging_not_a_byte_is_spent(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("nothing may be copied or measured")

    for name in ("DevicePristine", "HostPristine", "measure_merging", "pristine_bytes"):
        monkeypatch.setattr(build, name, refuse)
    rig = rig_of(files, tmp_path)
    assert rig.facts.pristine_bytes == 0
    assert rig.policy.merge == MergeConfig()
    rig.worker.close()


# ---------------------------------------------------------------- refused


def test_a_copy_that_does_not_fit_beside_the_pool(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Device, "free_bytes", lambda device: 400 * PAGE_BYTES + 1000)
    with pytest.raises(
        ConfigError, match=r"a copy of the base's weights of .* beside a pool of .* does not fit"
    ):
        rig_of(files, tmp_path, merge=MergeConfig(mode="merged"), num_host_pages=0)
    rig_of(files, tmp_path, num_host_pages=0).worker.close()


def test_a_base_that_cannot_be_merged(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight of today is plain: the test takes that away."""
    monkeypatch.setattr(Weight, "plain", lambda weight: None)
    with pytest.raises(
        ConfigError, match="adapters cannot be merged into weights that are no plain matrices"
    ):
        rig_of(files, tmp_path, merge=MergeConfig(mode="merged"))
