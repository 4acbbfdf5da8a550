"""Reading adapters: every read is answered once, and what goes wrong harms nobody else."""

from __future__ import annotations

import gc
import json
import shutil
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from manylora.adapters import pack
from manylora.adapters.pack import layout_of, load_into
from manylora.config.merging import MergeConfig
from manylora.devices.device import Device
from manylora.protocol.commands import ReadAdapter
from manylora.protocol.events import AdapterRead
from manylora.protocol.executor import AdapterError, DeviceEvent
from tests.executor.conftest import Files
from tests.executor.drive import Rig


@pytest.fixture
def copied(files: Files, tmp_path: Path) -> Path:
    """A copy of adapter 1, to be invalid."""
    return Path(shutil.copytree(files.adapters[1], tmp_path / "copied"))


def edit_weights(folder: Path, value: float) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(path)
    next(iter(tensors.values()))[0, 0] = value
    safetensors.torch.save_file(tensors, path)


def test_a_file_changed_since_it_was_added(rig: Rig, copied: Path) -> None:
    added = rig.direct.add_adapter(7, str(copied))
    num_pages, rank = added.num_pages, added.rank
    assert rank == 4
    pages = tuple(rig.take(num_pages))
    config = copied / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 64}))
    answer = rig.read(7, pages)
    assert not answer.ok
    assert "adapter_config.json has changed" in answer.error
    assert str(copied.parent) not in answer.error, "clients are told this"
    assert not answer.is_at_fault, "who asks for the adapter could not know"
    rig.open(1, [5, 6, 7], adapter=7)
    assert not rig.step(rig.row(1)).done.ok
    rig.direct.forget_adapter(7)


def test_a_deleted_folder(rig: Rig, copied: Path) -> None:
    num_pages = rig.direct.add_adapter(7, str(copied)).num_pages
    shutil.rmtree(copied)
    answer = rig.read(7, tuple(rig.take(num_pages)))
    assert not answer.ok
    assert "no adapter folder" in answer.error
    assert not answer.is_at_fault
    with pytest.raises(AdapterError) as raised:
        rig.direct.add_adapter(8, str(copied))
    assert raised.value.status == 404


def test_weights_that_are_not_finite_leave_the_pages_usable(rig: Rig, files: Files, copied: Path) -> None:
    edit_weights(copied, float("nan"))
    num_pages = rig.direct.add_adapter(7, str(copied)).num_pages
    pages = tuple(rig.take(num_pages))
    answer = rig.read(7, pages)
    assert not answer.ok
    assert "NaN" in answer.error
    assert answer.is_at_fault
    assert bool(torch.isfinite(rig.worker._arena.pool).all())
    # The same pages now hold KV.
    held = rig.open(1, [5, 6, 7, 8, 9, 10], adapter=1)
    rig.free.extend(pages)
    rig.decode(5, 1)
    files.reference.check_greedy(held.tokens[:6], held.generated, files.path(1))


def check_layout(rig: Rig, adapter: int) -> None:
    """It is the one that follows from what is known of the adapter now."""
    known = rig.worker.inspections
    expected, found = layout_of(known.spec(adapter), rig.worker._geometry), known.layout(adapter)
    assert (found.num_cells, found.num_pages) == (expected.num_cells, expected.num_pages)
    assert np.array_equal(found.records, expected.records)
    assert np.array_equal(found.scales, expected.scales)


def test_adapters_of_one_shape_share_a_layout(files: Files, tmp_path: Path) -> None:
    rig = Rig(files.model, tmp_path)
    try:
        for adapter, path in ((1, 1), (2, 2), (3, 1)):
            rig.direct.add_adapter(adapter, str(files.adapters[path]))
            check_layout(rig, adapter)
        known = rig.worker.inspections
        assert known.layout(1) is known.layout(3)
        assert known.layout(1) is not known.layout(2)
        for adapter in (1, 2, 3):
            rig.direct.forget_adapter(adapter)
        with pytest.raises(AdapterError):
            known.layout(1)
        gc.collect()
        assert not known._layouts
    finally:
        rig.worker.close()


def test_a_wrong_number_of_pages_is_an_answer_too(rig: Rig, files: Files) -> None:
    rig.direct.add_adapter(7, str(files.adapters[1]))
    answer = rig.read(7, tuple(rig.take(1)))
    assert not answer.ok
    assert "pages" in answer.error


def test_an_unknown_adapter(rig: Rig) -> None:
    answer = rig.read(70, (1, 2))
    assert answer == AdapterRead(70, False, "the adapter is not known", answer.read_s)
    assert answer.read_s == pytest.approx(0, abs=5)


def test_a_rank_over_the_limit(files: Files, tmp_path: Path) -> None:
    rig = Rig(files.model, tmp_path)
    rig.worker.inspections._max_rank = 8
    assert rig.direct.add_adapter(1, str(files.adapters[1])).rank == 4
    with pytest.raises(AdapterError, match="rank 9"):
        rig.direct.add_adapter(2, str(files.adapters[2]))
    rig.worker.close()


def test_reads_go_on_beside_steps(rig: Rig, files: Files) -> None:
    held = rig.open(1, [5, 6, 7], adapter=1)
    reads = []
    for adapter in range(20, 30):
        num_pages = rig.direct.add_adapter(adapter, str(files.adapters[2])).num_pages
        reads.append(ReadAdapter(adapter, tuple(rig.take(num_pages))))
        rig.direct.begin(reads[-1])
        rig.decode(1, 1)
    rig.worker.close()
    answers = [rig.direct.wait_for(read) for read in reads]
    assert [answer.adapter for answer in answers if isinstance(answer, AdapterRead)] == list(range(20, 30))
    files.reference.check_greedy([5, 6, 7], held.generated, files.path(1))


def test_close_answers_reads_that_wait(rig: Rig, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        entered.set()
        leave.wait(60)
        load_into(*arguments)

    monkeypatch.setattr(pack, "load_into", slow)
    pages = {
        adapter: rig.take(rig.direct.add_adapter(adapter, str(files.adapters[2])).num_pages)
        for adapter in range(20, 25)
    }
    heard: list[DeviceEvent] = []
    rig.worker.connect(heard.append)
    for adapter in pages:
        rig.worker.obey(ReadAdapter(adapter, tuple(pages[adapter])))
    assert entered.wait(60)
    closing = threading.Thread(target=rig.worker.close)
    closing.start()
    while not rig.worker._reader._closing:
        pass
    leave.set()
    closing.join(60)
    assert not closing.is_alive()
    rig.worker.obey(ReadAdapter(20, (1,)))
    answers = [answer for answer in heard if isinstance(answer, AdapterRead)]
    assert sorted(answer.adapter for answer in answers[:-1]) == list(range(20, 25))
    assert any("closing" in answer.error for answer in answers[:-1])
    assert len(answers) == len(heard) == 6
    assert not answers[-1].ok


def test_close_frees_everything(files: Files, tmp_path: Path) -> None:
    before = {thread.ident for thread in threading.enumerate()}
    rig = Rig(files.model, tmp_path)
    rig.serve(1, files.adapters[1])
    rig.open(1, [5, 6, 7], adapter=1)
    rig.decode(2, 1)
    worker = rig.worker
    assert worker._forward is not None
    held: list[weakref.ref[Any]] = [weakref.ref(worker._arena.pool), weakref.ref(worker._forward.decoder)]
    row = rig.row(1)
    worker.close()
    worker.close()
    gc.collect()
    assert [reference() for reference in held] == [None, None]
    assert {thread.ident for thread in threading.enumerate()} <= before
    assert not rig.step(row).done.ok, "a step after close is refused, not raised"
    rig.direct.end_sequence(1)
    rig.direct.evict_adapter(1)


@pytest.mark.parametrize("merge", [MergeConfig(), MergeConfig(mode="merged", copy="host")])
def test_a_process_that_ends_leaves_its_memory_to_the_system(
    files: Files, tmp_path: Path, merge: MergeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To unpin gigabytes takes seconds; what writes files ends all the same."""
    held: set[int] = set()
    monkeypatch.setattr(Device, "copies_from_pinned", True)
    monkeypatch.setattr(Device, "pin", lambda self, memory: held.add(memory.data_ptr()))
    monkeypatch.setattr(Device, "unpin", lambda self, memory: held.remove(memory.data_ptr()))
    rig = Rig(files.model, tmp_path, merge=merge)
    rig.serve(1, files.adapters[1])
    pool = rig.worker._host
    assert pool._pinner is not None
    pool._pinner.join(60)
    pinned = set(held)
    assert len(pinned) == 1 + merge.is_on
    rig.worker.close(frees=False)
    assert held == pinned
    assert rig.worker._registry._connection is None
    assert not rig.read(1, (1,)).ok, "no read can begin"
    rig.worker.close()
    assert not held
