"""Gates inside captured steps: the tests of ``test_gates`` on steps whose kernels wait.

The kernel that waits is the GPU's, in Triton's interpreter; beside it run the CPU's operations, which are quicker
there, and Triton's in one test.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from manylora.devices.device import CopyLane
from manylora.executor import graphs
from manylora.kernels.cpu import CpuOps
from manylora.kernels.ops import MOST_WORDS, Ops
from manylora.kernels.triton.cold import await_words, bring_groups, pass_gate
from manylora.kernels.triton.operations import TritonOps
from manylora.memory import bringing
from manylora.memory.bringing import Bringer
from manylora.memory.gates import CopyGate
from manylora.protocol.commands import SwapPages
from tests.e2e.process import wait_until
from tests.executor.conftest import Files
from tests.executor.drive import Rig
from tests.executor.test_gates import (  # noqa: F401  # tests
    LAYERS,
    PROMPT,
    Hand,
    awaiting,
    beside,
    bring,
    check,
    check_late,
    keep_on_host,
    test_closing_while_a_step_waits,
    test_two_copies_two_adapters_and_kv_in_one_step,
)
from tests.executor.test_graphs import graphs_of, use_triton


class GatedOps(CpuOps):
    """The CPU's, with plans made anew for each replay."""

    captures = waits = True

    def pass_gate(
        self, landed: torch.Tensor, wanted: torch.Tensor, told: torch.Tensor, is_first: bool
    ) -> None:
        pass_gate(landed, wanted, told, is_first)

    def await_words(
        self, words: torch.Tensor, wanted: torch.Tensor, told: torch.Tensor, is_first: bool
    ) -> None:
        await_words(words, wanted, told, is_first)


class BringingOps(GatedOps):
    """And copies in groups by the GPU's kernel."""

    brings = True

    def __init__(self) -> None:
        super().__init__()
        self.num_brought = 0

    def bring_groups(self, *tensors: torch.Tensor) -> None:
        self.num_brought += 1
        bring_groups(*tensors)


def made(
    files: Files, folder: Path, monkeypatch: pytest.MonkeyPatch, ops: Ops, mode: str = "layerwise"
) -> Rig:
    """One size of decoding steps and one of steps with prompts, with an adapter and without."""
    use_triton(monkeypatch)
    monkeypatch.setattr("manylora.executor.build.ops_for", lambda *_, **__: ops)
    monkeypatch.setattr("manylora.executor.plan.with_gates", lambda settings, *_: settings)  # as on a GPU
    monkeypatch.setattr(graphs, "RANK_CLASSES", (16,))
    monkeypatch.setattr(graphs, "MIXED_TOKENS", (24,))
    monkeypatch.setattr(graphs, "bucket_sizes", lambda most: [most])
    sizes = {"num_pages": 200, "page_bytes": 3072, "max_num_seqs": 5}
    return keep_on_host(Rig(files.model, folder, pads_steps=True, cold_start=mode, **sizes), files)


@pytest.fixture
def cold(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    rig = made(files, tmp_path, monkeypatch, BringingOps())
    yield rig
    rig.worker.close()


def bringer_of(rig: Rig) -> Bringer:
    found = rig.worker._copier.bringer
    assert found is not None
    return found


def words_of(rig: Rig) -> list[int]:
    return [int(word) for word in bringer_of(rig).words.words]


class KernelHand:
    """Stands for the kernel that brings copies: each group of layers lands when it is told to let it. ``beside``:
    where its work goes, beside the steps'."""

    def __init__(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch, beside: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self.allowed = threading.Semaphore(0)
        self._rig, self._bringer, self._beside = rig, bringer_of(rig), beside
        self._lane = rig.worker._copier._lanes[True].copies
        self._end = self._lane.end
        self._landing: threading.Thread | None = None
        monkeypatch.setattr(self._bringer, "bring", self._bring)
        monkeypatch.setattr(self._lane, "end", self._ended)

    def _bring(self, lane: CopyLane, pairs: Sequence[tuple[int, int]], gate: CopyGate) -> None:
        number = self._bringer._num_copies = self._bringer._num_copies + 1
        landing = self._landing = threading.Thread(target=self._land, args=(pairs, number))
        landing.start()
        gate.open(lambda: landing.join(30), number)

    def _land(self, pairs: Sequence[tuple[int, int]], number: int) -> None:
        worker, words = self._rig.worker, self._bringer.words
        with torch.inference_mode(), self._beside():
            for group, (first, end) in enumerate(words.groups):
                assert self.allowed.acquire(timeout=30)
                for source, target in pairs:
                    worker._arena.page(target)[first:end] = worker._host.page(source)[first:end]
                words.words[group] = number

    def _ended(self) -> Callable[[], float]:
        wait, landing = self._end(), self._landing

        def ended() -> float:
            if landing is not None:
                landing.join(30)
            return wait()

        return ended

    def let(self, count: int) -> None:
        self.allowed.release(count)


def layers_written(rig: Rig, page: int) -> list[bool]:
    """Whether the page's keys of each layer are no longer what ``poison`` wrote."""
    return [not bool(layer.isnan().all()) for layer in rig.worker._arena.page(page)]


def written_within(rig: Rig, page: int, count: int, seconds: float) -> list[bool]:
    """``layers_written`` once it is so many layers, or that long later."""
    until = time.monotonic() + seconds
    while (found := layers_written(rig, page)).count(True) < count and time.monotonic() < until:
        time.sleep(0.005)
    return found


def check_order(rig: Rig, hand: KernelHand) -> None:
    """A layer's keys are written once its group has landed, and those of later layers are not."""
    command = bring(rig, 2, 8)
    rig.open(1, PROMPT, adapter=2)
    step = awaiting(rig, command, 1)
    page = rig.sequences[1].pages[0]
    rig.worker._arena.page(page).fill_(float("nan"))
    rig.worker._device.synchronize()
    assert layers_written(rig, page) == [False] * LAYERS
    results = beside(rig, step)
    for first, end in bringer_of(rig).words.groups:
        expected = [layer < first for layer in range(LAYERS)]
        assert written_within(rig, page, first, 30) == expected
        time.sleep(0.05)
        assert layers_written(rig, page) == expected, "layers from this group on have not begun"
        hand.let(1)
        assert written_within(rig, page, end, 30)[:end] == [True] * end
    result = results.get(timeout=30)
    # For how long gates were shut is told by those that are late: a slow host's step may find all open.
    assert (result.done.ok, result.done.invalid) == (True, ())
    assert rig.direct.wait_for(command).ok  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", ["block", "layerwise"])
def test_keys_are_written_layer_by_layer(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    rig = made(files, tmp_path, monkeypatch, BringingOps(), mode)
    assert len(bringer_of(rig).words.groups) == (1 if mode == "block" else LAYERS)
    captured = len(graphs_of(rig).captured)
    check_order(rig, KernelHand(rig, monkeypatch, nullcontext))
    rig.decode(3, 1)
    check(rig, files, 1)
    assert len(graphs_of(rig).captured) == captured == 4, "warm and cold steps share captures"
    rig.worker.close()


def test_copies_by_a_kernel(cold: Rig, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the step loop's thread, to the same bytes, words and tokens; an answer as for others; the second one is
    the lane's, since its table would be too long."""
    ops = cold.worker._forward.decoder.ops  # type: ignore[union-attr]
    assert isinstance(ops, BringingOps)
    assert ops.num_brought == 1, "compiled before the first copy"
    for turn in range(3):
        monkeypatch.setattr(bringing, "MOST_WORDS", 0 if turn == 1 else MOST_WORDS)
        command = bring(cold, 2, 8)
        cold.open(turn, [turn, *PROMPT], adapter=2)
        assert cold.run(awaiting(cold, command, turn)).done.invalid == ()
        assert cold.direct.wait_for(command).ok  # type: ignore[union-attr]
        for source, target in command.pairs:
            assert torch.equal(cold.worker._host.page(source), cold.worker._arena.page(target))
        assert words_of(cold) == [1 if turn < 2 else 2] * LAYERS
        cold.decode(2, turn)
        cold.direct.end_sequence(turn)
        cold.direct.evict_adapter(2)
    check(cold, files, *range(3))
    assert ops.num_brought == 3


def test_keys_are_written_layer_by_layer_by_the_triton_kernels(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = made(files, tmp_path, monkeypatch, TritonOps())
    check_order(rig, KernelHand(rig, monkeypatch, nullcontext))
    check(rig, files, 1)
    rig.worker.close()


def test_gates_stand_in_steps_with_prompts_only(cold: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[bool] = []
    ops = cast("GatedOps", cold.worker._forward.decoder.ops)  # type: ignore[union-attr]
    whole = ops.pass_gate

    def noting(landed, wanted, told, is_first):  # type: ignore[no-untyped-def]
        passed.append(is_first)
        whole(landed, wanted, told, is_first)

    monkeypatch.setattr(ops, "pass_gate", noting)
    cold.open(1, PROMPT, adapter=1)
    cold.decode(1, 1)
    assert passed == [True, False, False], "one before each group of layers"
    passed.clear()
    cold.decode(2, 1)
    assert not passed


def test_a_cold_row_with_one_token_left_waits_for_the_whole_copy(cold: Rig, files: Files) -> None:
    """It is in a step for decoding rows, which has no gates."""
    cold.open(1, [3, 1, 4, 1], adapter=2)
    pages = tuple(cold.take(len(cold.on_host[2])))
    assert cold.read(2, pages).ok
    cold.decode(1, 1)
    held = cold.sequences.pop(1)
    cold.direct.end_sequence(1)
    cold.direct.evict_adapter(2)
    command = bring(cold, 2, 8)
    cold.open(2, held.tokens, adapter=2, num_prompt=4, num_computed=4, pages=held.pages)
    assert cold.run(awaiting(cold, command, 2)).done.invalid == ()
    assert cold.direct.wait_for(command).ok  # type: ignore[union-attr]
    cold.decode(3, 2)
    check(cold, files, 2)


def test_a_copy_that_cannot_be_launched_invalidates_its_own_rows_only(
    cold: Rig, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the device waits for nothing."""

    def refuse(*_: object) -> None:
        raise RuntimeError("no launch")

    with monkeypatch.context() as patched:
        patched.setattr(type(cold.worker._copier._lanes[True].copies), "launch", refuse)
        command = bring(cold, 2, 8)
    cold.open(1, PROMPT, adapter=2)
    cold.open(2, PROMPT, adapter=1)
    result = cold.run(awaiting(cold, command, 1, others=(2,)))
    assert (result.done.ok, result.done.invalid) == (True, (1,))
    assert words_of(cold) == [0] * LAYERS
    cold.decode(3, 2)
    check(cold, files, 2)


def test_a_copy_that_is_late_invalidates_its_rows_and_the_step_still_ends_after_its_answer(
    cold: Rig, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = graphs_of(cold)._gates._told  # type: ignore[union-attr]
    hand = KernelHand(cold, monkeypatch, nullcontext)
    check_late(cold, files, monkeypatch, hand, lambda: bool(told[1]))


def test_two_steps_await_one_copy(cold: Rig, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    hand = KernelHand(cold, monkeypatch, nullcontext)
    command = bring(cold, 2, 8)
    hand.let(LAYERS)
    cold.open(1, PROMPT, adapter=2)
    cold.open(2, PROMPT[:5], adapter=2)
    first, second = awaiting(cold, command, 1), awaiting(cold, command, 2)
    for step in (first, second):
        cold.direct.issue_step(step)
    for step in (first, second):
        done = cold.direct.wait_step(step).done
        assert (done.ok, done.invalid) == (True, ())


@pytest.mark.parametrize("ends_with", ["a step", "a wait", "a flush"])
def test_copies_from_the_device_begin_when_a_step_has_been_launched(cold: Rig, ends_with: str) -> None:
    """Or when nothing is to be launched."""
    (page,), (host,) = cold.take(1), cold.take_host(1)
    cold.worker._arena.page(page).fill_(3.0)
    cold.open(1, PROMPT)
    put_off = cold.worker._copier._lanes[False].put_off
    cold.worker.obey(SwapPages(77, False, ((page, host),)))
    assert len(put_off) == 1
    assert not cold.worker._host.page(host).any()
    if ends_with == "a step":
        cold.issue(cold.row(1))
    elif ends_with == "a wait":
        cold.worker.wait_step()
    else:
        cold.worker.flush()
    assert not cold.worker._copier._lanes[False].put_off
    wait_until(lambda: bool((cold.worker._host.page(host) == 3.0).all()), "the copy")


def test_without_such_a_kernel_a_captured_step_waits_for_the_whole_copy(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = made(files, tmp_path, monkeypatch, GatedOps())
    assert rig.worker._copier.bringer is None
    assert graphs_of(rig)._gates is None
    command = bring(rig, 2, 8)
    rig.open(1, PROMPT, adapter=2)
    assert rig.run(awaiting(rig, command, 1)).done.invalid == ()
    rig.decode(2, 1)
    check(rig, files, 1)
    rig.worker.close()


@pytest.mark.parametrize(("mode", "told"), [("layerwise", True), ("wait", False)])
def test_launches_that_wait_allow_no_gates(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    mode: str, told: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr("manylora.devices.device.Device.launches_wait", True)
    rig = Rig(files.model, tmp_path, num_pages=200, page_bytes=3072, cold_start=mode)
    assert rig.policy.cold_start.mode == "wait"
    assert ("CUDA_LAUNCH_BLOCKING" in caplog.text) == told
    rig.worker.close()
