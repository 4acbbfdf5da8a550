"""Cold rows that the device itself hands to the CPU's threads, whose results it takes itself: tests of
``test_cold_rows``, and what becomes of threads that are late meanwhile.

The kernel that waits is the GPU's, in Triton's interpreter, beside the CPU's operations; there the device has done
what it was asked for when the host goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from manylora.devices.device import Device
from manylora.executor.cold_rows import DeviceHandover, device_handover
from manylora.executor.cpu_lora import CpuLora
from manylora.kernels.triton.cold import await_words
from manylora.protocol.commands import RunStep
from tests.executor.conftest import Files
from tests.executor.drive import Rig
from tests.executor.test_captured_gates import GatedOps
from tests.executor.test_cold_rows import (  # noqa: F401  # tests
    check_invalid,
    forget_all,
    served,
    served_by_cpu,
    test_adapters_without_rank_on_some_projections_beside_each_other,
    test_prompts_in_chunks_meet_the_adapter_as_it_lands,
    test_they_end_before_the_copy_begins_and_read_nothing_that_lay_in_its_pages,
)
from tests.executor.test_cpu_lora import Pool, threads
from tests.executor.test_gates import PROMPT, bring, check

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def queued(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("manylora.executor.build.ops_for", lambda *_, **__: GatedOps())
        made = served_by_cpu(files, tmp_path_factory.mktemp("queued"))
    yield made
    made.worker.close()


@pytest.fixture
def cold(queued: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    assert handover_of(queued) is not None

    def refuse(*_: object) -> None:
        raise AssertionError("the host waits for no product")

    monkeypatch.setattr(CpuLora, "wait", refuse)
    yield queued
    while queued.worker._in_flight:  # of a test that failed
        queued.worker.wait_step()
    forget_all(queued)


def handover_of(rig: Rig) -> DeviceHandover:
    assert rig.worker._handover is not None
    return rig.worker._handover


@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_threads_that_are_late_at_any_product_invalidate_their_own_rows_only(
    cold: Rig, files: Files, monkeypatch: pytest.MonkeyPatch, place: float
) -> None:
    """The product is never posted, and the device goes on after its bound. The next step is served."""
    handover = handover_of(cold)
    posted, num_products, begin, mark = 0, 0, DeviceHandover.begin, handover._device.mark

    def count_and_begin(self: DeviceHandover, num_jobs: int, num_given: int) -> None:
        nonlocal num_products
        num_products = num_jobs
        begin(self, num_jobs, num_given)

    def mark_but_one(word: torch.Tensor, number: int) -> None:
        nonlocal posted
        if posted != round(place * (num_products - 1)):
            mark(word, number)
        posted += 1

    with monkeypatch.context() as patch:
        patch.setattr(DeviceHandover, "begin", count_and_begin)
        patch.setattr(handover._device, "mark", mark_but_one)
        patch.setattr(handover, "_late_ns", 3 * 10**8)
        command = bring(cold, 2, 8)
        cold.open(1, PROMPT, adapter=2)
        cold.open(2, PROMPT, adapter=1)
        step, others = served(cold, command, (1,)), cold.command(cold.row(2))
        step = RunStep(step.step, step.starts + others.starts, step.rows + others.rows, cpu=step.cpu)
        result = cold.run(step)
    assert not handover.is_busy
    check_invalid(cold, files, command, result)


def test_each_product_waits_for_its_own_job_of_those_that_compute_it(cold: Rig) -> None:
    """A kernel that waited for the job before would mostly find the right results, too."""
    handover = handover_of(cold)
    first = handover._cpu.job
    handover.begin(3, 1)
    assert handover._wanted.tolist() == [[handover._late_ns, first + job] for job in (1, 2, 3)]
    handover.is_busy = False
    pool = Pool()
    with threads(pool, 4) as cpu:
        several = device_handover(cpu, GatedOps(), Device())
        assert several is not None
        several.begin(2, 3)
        assert several._wanted.tolist() == [[10**10, 1, 1, 1, 0, 0], [10**10, 2, 2, 2, 0, 0]]
        several.close()


@pytest.mark.parametrize("fault", ["refuses", "is lost", "cannot"])
def test_a_device_that_cannot_write_there_leaves_it_to_the_host(
    fault: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[int] = []

    def mark(self: Device, word: torch.Tensor, number: int) -> None:
        if fault == "refuses":
            raise RuntimeError("the driver does not write a number in a stream: error 1")
        if fault == "cannot":
            raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(Device, "mark", mark)
    monkeypatch.setattr(Device, "pin", lambda self, memory: pinned.append(memory.nbytes))
    monkeypatch.setattr(Device, "unpin", lambda self, memory: pinned.remove(memory.nbytes))
    with caplog.at_level(logging.WARNING), threads(Pool()) as cpu:
        assert device_handover(cpu, GatedOps(), Device()) is None
    assert not pinned
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("the host hands rows to the CPU's threads: ")


def test_a_step_that_finds_the_threads_busy_waits_for_the_copy(cold: Rig, files: Files) -> None:
    handover_of(cold).is_busy = True
    command = bring(cold, 2, 8)
    cold.open(1, PROMPT, adapter=2)
    done = cold.run(served(cold, command, (1,))).done
    handover_of(cold).is_busy = False
    assert (done.ok, done.invalid, done.cpu_s) == (True, (), 0.0)
    assert cold.direct.wait_for(command).ok  # type: ignore[union-attr]
    cold.decode(3, 1)
    check(cold, files, 1)


def test_a_step_that_fails_leaves_the_threads_free(
    cold: Rig, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = bring(cold, 2, 8)
    cold.open(1, PROMPT, adapter=2)
    with monkeypatch.context() as patch:
        patch.setattr(type(cold.worker._forward.decoder.ops), "rotate_and_store", lambda *_, **__: 1 / 0)  # type: ignore[union-attr]
        assert not cold.run(served(cold, command, (1,))).done.ok
    del cold.sequences[1]
    cold.open(2, PROMPT, adapter=2)
    done = cold.run(served(cold, command, (2,))).done
    assert (done.ok, done.invalid) == (True, ())
    assert done.cpu_s > 0
    assert cold.direct.wait_for(command).ok  # type: ignore[union-attr]
    cold.decode(3, 2)
    check(cold, files, 2)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_kernel_waits_for_the_last_word(count: int) -> None:
    """And adds up what a step has waited, up to its bound."""
    words = torch.zeros(count, 8, dtype=torch.int64)
    words[:, 1:] = 99  # others' numbers
    wanted = torch.tensor([10**12, *[7] * count])
    told = torch.tensor([5, 1])
    words[:, 0] = 7
    await_words(words, wanted, told, False)
    assert told.tolist() == [5, 1], "it did not wait; what was told stays"
    await_words(words, wanted, told, True)
    assert told.tolist() == [0, 0]
    words[:, 0] = 6
    waits = threading.Thread(target=await_words, args=(words, wanted, told, False))
    waits.start()
    for place in range(count):
        time.sleep(0.01)
        assert waits.is_alive()
        words[place, 0] = 8
    waits.join(30)
    assert told[0] > 0
    assert told[1] == 0
    words[count - 1, 0] = 6
    wanted[0] = told[0] + 10**6
    await_words(words, wanted, told, False)
    assert told[0] >= wanted[0]
    assert told[1] == 1
