"""Cold rows that the device itself hands to CPU workers, whose results it takes itself: tests of
``test_cold_rows``, and what becomes of workers that die or are slow meanwhile.

The kernel that waits is the GPU's, in Triton's interpreter, beside the CPU's operations; there the device has done
what it was asked for when the host goes on.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from manylora.assist.board import BoardShape, new_board
from manylora.assist.workers import HandedStep
from manylora.devices.device import Device
from manylora.executor.cold_rows import DeviceHandover, device_handover
from manylora.kernels.triton.gate import await_words
from manylora.protocol import RunStep
from tests.assist.test_workers import IN, OUTS, Pool, workers
from tests.executor.conftest import Files
from tests.executor.drive import Rig
from tests.executor.test_captured_gates import GatedOps
from tests.executor.test_cold_rows import (  # noqa: F401  # tests
    forget_all,
    served,
    served_by_cpu,
    test_adapters_without_rank_on_some_projections_beside_each_other,
    test_prompts_in_chunks_meet_the_adapter_as_it_lands,
    test_they_end_before_the_copy_begins_and_read_nothing_that_lay_in_its_pages,
)
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

    monkeypatch.setattr(HandedStep, "take", refuse)
    yield queued
    while queued.worker._in_flight:  # of a test that failed
        queued.worker.wait_step()
    forget_all(queued)


def handover_of(rig: Rig) -> DeviceHandover:
    assert rig.worker._handover is not None
    return rig.worker._handover


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_a_worker_that_dies_or_is_slow_at_any_product_spoils_its_own_rows_only(
    cold: Rig, files: Files, monkeypatch: pytest.MonkeyPatch, place: float, number: int
) -> None:
    """The device goes on after its bound. Another worker serves the next step."""
    workers, handover = cold.worker._workers, handover_of(cold)
    assert workers is not None
    monkeypatch.setattr(workers, "_num_deaths", 0)
    posted, num_products, post, begin = 0, 0, DeviceHandover.post, DeviceHandover.begin

    def count_and_begin(self: DeviceHandover, first_job: int, num_jobs: int, given: list[int]) -> None:
        nonlocal num_products
        num_products = num_jobs
        begin(self, first_job, num_jobs, given)

    def strike_and_post(self: DeviceHandover, rows: torch.Tensor, job: int) -> None:
        nonlocal posted
        if posted == round(place * (num_products - 1)):
            os.kill(workers.pids()[0], number)
        posted += 1
        post(self, rows, job)

    with monkeypatch.context() as patch:
        patch.setattr(DeviceHandover, "begin", count_and_begin)
        patch.setattr(DeviceHandover, "post", strike_and_post)
        patch.setattr(handover, "_late_ns", 10**7)
        command = bring(cold, 2, 8)
        cold.open(1, PROMPT, adapter=2)
        cold.open(2, PROMPT, adapter=1)
        step, others = served(cold, command, (1,)), cold.command(cold.row(2))
        step = RunStep(step.step, step.starts + others.starts, step.rows + others.rows, cpu=step.cpu)
        result = cold.run(step)
    assert (result.done.ok, result.done.spoilt) == (True, (1,))
    assert not handover.is_busy
    assert cold.direct.wait_for(command).ok  # type: ignore[union-attr]
    cold.direct.end_sequence(1)
    del cold.sequences[1]
    cold.direct.evict_adapter(2)
    assert workers.wait_ready(30)
    again = bring(cold, 2, 8)
    cold.open(4, PROMPT, adapter=2)
    done = cold.run(served(cold, again, (4,))).done
    assert (done.spoilt, done.cpu_workers) == ((), 1)
    assert done.cpu_s > 0
    assert cold.direct.wait_for(again).ok  # type: ignore[union-attr]
    cold.decode(3, 2, 4)
    check(cold, files, 2, 4)


def test_each_product_waits_for_its_own_job_of_those_that_compute_it(cold: Rig) -> None:
    """A kernel that waited for the job before would mostly find the right results, too."""
    handover = handover_of(cold)
    handover.begin(40, 3, [0])
    assert handover._wanted.tolist() == [[handover._late_ns, job] for job in (41, 42, 43)]
    handover.end()
    descriptor, board = new_board(BoardShape(4, 8, 8, 8, "float32"))
    os.close(descriptor)
    several = device_handover(board, GatedOps(), Device(), 1.0)
    assert several is not None
    several.begin(7, 2, [1, 3])
    assert several._wanted.tolist() == [[10**9, 0, 8, 0, 8, 0], [10**9, 0, 9, 0, 9, 0]]
    several.close()


@pytest.mark.parametrize("fault", ["refuses", "is lost", "cannot"])
def test_a_device_that_cannot_write_there_leaves_it_to_the_host(
    fault: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[int] = []

    def mark(self: Device, word: torch.Tensor, number: int) -> None:
        if fault == "refuses":
            raise RuntimeError("the driver does not write a number in a stream: error 1")

    monkeypatch.setattr(Device, "mark", mark)
    monkeypatch.setattr(Device, "can_mark", lambda self: fault != "cannot")
    monkeypatch.setattr(Device, "pin", lambda self, memory: pinned.append(memory.nbytes))
    monkeypatch.setattr(Device, "unpin", lambda self, memory: pinned.remove(memory.nbytes))
    descriptor, board = new_board(BoardShape(2, 8, 8, 8, "float32"))
    os.close(descriptor)
    with caplog.at_level(logging.WARNING):
        assert device_handover(board, GatedOps(), Device(), 1.0) is None
    assert not pinned
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("the host hands rows to CPU workers: ")


def test_a_step_that_finds_the_workers_busy_waits_for_the_copy(cold: Rig, files: Files) -> None:
    handover_of(cold).is_busy = True
    command = bring(cold, 2, 8)
    cold.open(1, PROMPT, adapter=2)
    done = cold.run(served(cold, command, (1,))).done
    handover_of(cold).is_busy = False
    assert (done.ok, done.spoilt, done.cpu_s) == (True, (), 0.0)
    assert cold.direct.wait_for(command).ok  # type: ignore[union-attr]
    cold.decode(3, 1)
    check(cold, files, 1)


def test_a_step_that_fails_leaves_the_workers_free(
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
    assert (done.ok, done.spoilt) == (True, ())
    assert done.cpu_s > 0
    assert cold.direct.wait_for(command).ok  # type: ignore[union-attr]
    cold.decode(3, 2)
    check(cold, files, 2)


def test_a_device_that_waits_for_a_dead_worker_is_let_go() -> None:
    """A thread stands for the device; its bound is far."""
    pool = Pool("float32")
    with workers(pool) as found:
        found.slice_tokens = 2
        step = found.begin([2, 2], [(0, 0)], [pool.product], pool.cells)
        assert step is not None
        os.kill(step.given[1].process.pid, signal.SIGKILL)
        words = torch.from_numpy(found.board.done_words)
        wanted = torch.tensor([10**12, step.job + 1, step.job + 1])
        told = torch.zeros(2, dtype=torch.int64)
        step.rows(4, IN)[:] = 1
        step.post()
        device = threading.Thread(target=await_words, args=(words, wanted, told, True))
        device.start()
        assert not step.wait(lambda: not device.is_alive())
        device.join()
        assert told[1] == 0
        found.failed(step)
        assert found.wait_ready(20)
        again = found.begin([2, 2], [(0, 0)], [pool.product], pool.cells)
        assert again is not None
        again.rows(4, IN)[:] = 1
        again.post()
        assert again.take(4, sum(OUTS)).shape == (4, sum(OUTS))


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
