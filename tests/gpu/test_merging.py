"""Merging on a CUDA device: exact in every type, from either copy, under captured graphs, and without waiting.

The tests of rows of every kind are those of tests/executor/test_merging.py, run here by CUDA's kernels.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from manylora.config.declaring import ConfigError
from manylora.config.merging import MergeConfig, MergeTimes
from manylora.devices.cuda import CudaDevice
from manylora.executor import build
from manylora.executor.merging import HostPristine
from manylora.protocol.commands import SetMerged
from manylora.types import BASE
from tests.executor.conftest import Files, files  # noqa: F401  # fixtures
from tests.executor.drive import Rig
from tests.executor.test_merging import (  # noqa: F401  # tests
    PROMPT,
    bits,
    may_run,
    test_a_failed_switch_leaves_the_loaded_weights,
    test_a_lineup_that_stays_is_laid_out_anew_after_a_switch,
    test_rows_of_all_follow_the_switches,
    test_weights_are_merged_and_restored,
    weights_of,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PAGE_BYTES = 3072
COPIES = ("device", "host")


def rig_of(files: Files, folder: Path, copy: str, dtype: str = "float32", **settings: Any) -> Rig:  # noqa: F811
    merge = MergeConfig(mode="manylora", copy=copy)
    page_bytes = PAGE_BYTES if dtype == "float32" else PAGE_BYTES // 2
    made = Rig(
        files.model, folder, num_pages=400, page_bytes=page_bytes, device="cuda", dtype=dtype, max_num_seqs=6,
        merge=merge, **settings,
    )  # fmt: skip
    for adapter, path in files.adapters.items():
        made.serve(adapter, path)
    return made


@pytest.fixture(params=COPIES)
def rig(
    request: pytest.FixtureRequest,
    files: Files,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Rig]:
    """As on the CPU; decoding steps are captured."""
    monkeypatch.setattr(build, "measure_merging", lambda *args, steps_wait: MergeTimes(steps_wait))
    made = rig_of(files, tmp_path, request.param)
    yield made
    made.worker.close()


def images(rig: Rig) -> list[bytes]:
    return bits(weights_of(rig.worker))


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_random_switches_restore_every_bit(files: Files, tmp_path: Path, dtype: str, copy: str) -> None:  # noqa: F811
    rig = rig_of(files, tmp_path, copy, dtype)
    before, chance = images(rig), random.Random(1)
    for _ in range(100):
        assert rig.merge(chance.choice((BASE, 1, 2, 3))).ok
    assert rig.merge(1).ok
    assert images(rig) != before
    assert rig.merge(BASE).ok
    assert images(rig) == before
    rig.worker.close()


def test_captured_graphs_stay_valid(rig: Rig, files: Files) -> None:  # noqa: F811
    """No decoding step is captured anew: what was captured before the first switch runs after all of them."""
    graphs = rig.worker._graphs
    assert graphs is not None
    for sequence in range(4):
        rig.open(sequence, PROMPT, sequence)
    rig.step(*(rig.row(sequence) for sequence in range(4)))
    before = dict(graphs.captured)
    for merged in (1, 2, BASE, 3):
        assert rig.merge(merged).ok
        rig.decode_overlapped(3, *may_run(merged))
        rig.decode(1, merged or 1)
    assert all(graphs.captured[bucket] is captured for bucket, captured in before.items())
    assert len(graphs.captured) == len(before)
    for held in rig.sequences.values():
        files.reference.check_greedy(PROMPT, held.generated, files.path(held.adapter))


def test_a_switch_from_the_devices_copy_waits_for_nothing(files: Files, tmp_path: Path) -> None:  # noqa: F811
    """Between two steps in flight."""
    rig = rig_of(files, tmp_path, "device")
    for adapter in (1, 2, 1):
        assert rig.merge(adapter).ok  # every kernel is compiled
    for sequence in range(4):
        rig.open(sequence, PROMPT, 2 if sequence == 2 else 1)
    rig.step(*(rig.row(sequence) for sequence in (0, 1, 3)))
    switch = SetMerged(1000, 2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        first = rig.issue(*(rig.row(sequence) for sequence in (0, 1, 3)))
        rig.direct.begin(switch)
        rig.merged = 2
        second = rig.issue(rig.row(2))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    rig.arrive(first)
    rig.arrive(second)
    done = rig.direct.wait_for(switch)
    assert done.ok  # type: ignore[union-attr]
    assert 0 < done.switch_s < 1  # type: ignore[union-attr]
    rig.decode(2, 2)
    rig.worker.close()
    for held in rig.sequences.values():
        files.reference.check_greedy(PROMPT, held.generated, files.path(held.adapter))


def test_the_base_answers_to_the_last_digit_as_before(rig: Rig) -> None:
    """What captured steps write to their pages: the same bits before and after merged ones, at the same buckets
    and pages."""

    def written(sequence: int) -> list[torch.Tensor]:
        found = []
        for page in rig.free:
            rig.worker._arena.page(page).zero_()  # of what other sequences left there
        held = rig.open(sequence, PROMPT, BASE)
        for _ in range(4):
            rig.step(rig.row(sequence))
            found.append(torch.cat([rig.worker._arena.page(page).flatten().clone() for page in held.pages]))
        rig.direct.end_sequence(sequence)
        rig.free += held.pages[::-1]
        return found

    written(0)  # which captures and chooses what later steps run
    before = written(1)
    for number, adapter in zip(range(50), itertools.cycle((1, 2, 3))):
        assert rig.merge(adapter).ok
        held = rig.open(10 + number, PROMPT, adapter)
        rig.step(rig.row(10 + number))
        rig.direct.end_sequence(10 + number)
        rig.free += held.pages[::-1]
    assert rig.merge(BASE).ok
    after = written(2)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_copy_on_the_host_is_pinned_and_comes_back_beside_pages(files: Files, tmp_path: Path) -> None:  # noqa: F811
    rig = rig_of(files, tmp_path, "host", "bfloat16", num_host_pages=200)
    merging = rig.worker._merging
    assert merging is not None
    assert isinstance(merging._pristine, HostPristine)
    assert all(copy.is_pinned() for copy in merging._pristine._copies)
    before = images(rig)
    assert rig.merge(1).ok
    sources, targets = rig.take_host(60), rig.take(60)
    done = rig.swap(True, sources, targets)
    switch = rig.merge(BASE)
    assert done.ok
    assert switch.ok
    assert images(rig) == before
    rig.worker.close()


def test_memory_that_cannot_be_pinned_is_refused(
    files: Files,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(device: CudaDevice, memory: torch.Tensor) -> None:
        raise RuntimeError("CUDA error: operation not permitted")

    monkeypatch.setattr(CudaDevice, "pin", refuse)
    with pytest.raises(ConfigError, match="refuses to pin"):
        rig_of(files, tmp_path, "host")


def test_what_is_measured_before_serving(files: Files, tmp_path: Path) -> None:  # noqa: F811
    for copy in COPIES:
        rig = rig_of(files, tmp_path, copy)
        times = rig.policy.merge.times
        assert times.steps_wait == (copy == "host")
        assert min(times.merge_s, times.restore_s) > 0
        assert all(min(step.unmerged_s, step.merged_s) > 0 for step in times.steps)
        rig.worker.close()
