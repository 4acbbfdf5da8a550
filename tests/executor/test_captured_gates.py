"""Gates inside captured steps: the tests of ``test_gates`` on steps whose kernels wait.

The kernel that waits is the GPU's, in Triton's interpreter; beside it run the CPU's operations, which are quicker
there, and Triton's in one test.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch

from manylora.devices.cpu import CpuDevice
from manylora.executor import graphs
from manylora.executor.fixed import FixedAttention, fixed_attention
from manylora.kernels.cpu import CpuOps
from manylora.kernels.ops import Ops
from manylora.kernels.shapes import PageShape
from manylora.kernels.triton.bringing import bring_groups
from manylora.kernels.triton.gate import await_words, pass_gate
from manylora.kernels.triton.operations import TritonOps
from manylora.memory import bringing, gates
from manylora.memory.gates import NUM_ORDERS, CopyGate, LandedWords, layer_groups
from manylora.protocol import SwapPages
from tests.e2e.process import wait_until
from tests.executor.conftest import Files
from tests.executor.drive import Rig
from tests.executor.test_cold_rows import bring_ordered
from tests.executor.test_follows import Coming
from tests.executor.test_follows import Hand as ReadingHand
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
from tests.executor.test_graphs import CapturingDevice, graphs_of, use_triton


class GatedOps(CpuOps):
    """The CPU's, with plans made anew for each replay."""

    def fixed_attention(
        self,
        num_rows: int,
        max_context: int,
        page: PageShape,
        device: torch.device,
        num_tokens: int | None = None,
    ) -> FixedAttention:
        return fixed_attention(CpuOps(), num_rows, num_rows, max_context, page, device)

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

    def __init__(self) -> None:
        super().__init__()
        self.num_brought = 0

    def bring_groups(self, *tensors: torch.Tensor) -> None:
        self.num_brought += 1
        bring_groups(*tensors)


def made(files: Files, folder: Path, monkeypatch: pytest.MonkeyPatch, ops: Ops) -> Rig:
    """One size of decoding steps and one of steps with prompts, with an adapter and without."""
    use_triton(monkeypatch)
    monkeypatch.setattr("manylora.executor.build.ops_for", lambda *_, **__: ops)
    monkeypatch.setattr(graphs, "RANK_CLASSES", (16,))
    monkeypatch.setattr(graphs, "MIXED_TOKENS", (24,))
    monkeypatch.setattr(graphs, "bucket_sizes", lambda most: [most])
    sizes = {"num_pages": 200, "page_bytes": 3072, "max_num_seqs": 5}
    return keep_on_host(Rig(files.model, folder, pads_steps=True, cold_start="layerwise", **sizes), files)


@pytest.fixture
def cold(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    rig = made(files, tmp_path, monkeypatch, GatedOps())
    yield rig
    rig.worker.close()


def words_of(rig: Rig) -> LandedWords:
    found = rig.worker._copier._words
    assert found is not None
    return found


def layers_written(rig: Rig, page: int) -> list[bool]:
    """Whether the page's keys of each layer are no longer what ``poison`` wrote."""
    return [not bool(layer.isnan().all()) for layer in rig.worker._arena.page(page)]


def written_within(rig: Rig, page: int, count: int, seconds: float) -> list[bool]:
    """``layers_written`` once it is so many layers, or that long later."""
    until = time.monotonic() + seconds
    while (found := layers_written(rig, page)).count(True) < count and time.monotonic() < until:
        time.sleep(0.005)
    return found


def check_order(rig: Rig, hand: Hand, groups: int) -> None:
    """A layer's keys are written once its group has landed, and those of later layers are not."""
    command = bring(rig, 2, groups)
    rig.open(1, PROMPT, adapter=2)
    step = awaiting(rig, command, 1)
    page = rig.sequences[1].pages[0]
    rig.worker._arena.page(page).fill_(float("nan"))
    rig.worker._device.synchronize()
    assert layers_written(rig, page) == [False] * LAYERS
    results = beside(rig, step)
    for first, end in layer_groups(LAYERS, groups):
        expected = [layer < first for layer in range(LAYERS)]
        assert written_within(rig, page, first, 30) == expected
        time.sleep(0.05)
        assert layers_written(rig, page) == expected, "layers from this group on have not begun"
        hand.let(1)
        assert written_within(rig, page, end, 30)[:end] == [True] * end
    result = results.get(timeout=30)
    # For how long gates were shut is told by those that are late: a slow host's step may find all open.
    assert (result.done.ok, result.done.spoilt) == (True, ())
    assert rig.direct.wait_for(command).ok  # type: ignore[union-attr]


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_keys_are_written_layer_by_layer(
    cold: Rig, files: Files, monkeypatch: pytest.MonkeyPatch, groups: int
) -> None:
    hand = Hand(cold, monkeypatch)
    captured = graphs_of(cold).num_captured
    check_order(cold, hand, groups)
    cold.decode(3, 1)
    check(cold, files, 1)
    assert graphs_of(cold).num_captured == captured == 4, "warm and cold steps share captures"


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_copies_by_a_kernel(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: int
) -> None:
    """From the step loop's thread, to the same bytes, words and tokens; an answer as for others; the next one is
    the lane's where that cannot be."""
    ops = BringingOps()
    rig = made(files, tmp_path, monkeypatch, ops)
    assert ops.num_brought == 1, "compiled before the first copy"
    for turn in range(3):
        monkeypatch.setattr(bringing, "MOST_BYTES", 0 if turn == 1 else 2**30)
        command = bring(rig, 2, groups)
        rig.open(turn, [turn, *PROMPT], adapter=2)
        assert rig.run(awaiting(rig, command, turn)).done.spoilt == ()
        assert rig.direct.wait_for(command).ok  # type: ignore[union-attr]
        for source, target in command.pairs:
            assert torch.equal(rig.worker._host.page(source), rig.worker._arena.page(target))
        assert words_of(rig).words[:, 0].tolist() == [turn + 1] * len(words_of(rig).groups)
        rig.decode(2, turn)
        rig.direct.end_sequence(turn)
        rig.direct.evict_adapter(2)
    check(rig, files, *range(3))
    assert ops.num_brought == 3
    rig.worker.close()


def test_keys_are_written_layer_by_layer_by_the_triton_kernels(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = made(files, tmp_path, monkeypatch, TritonOps())
    check_order(rig, Hand(rig, monkeypatch), 8)
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
    assert cold.run(awaiting(cold, command, 2)).done.spoilt == ()
    assert cold.direct.wait_for(command).ok  # type: ignore[union-attr]
    cold.decode(3, 2)
    check(cold, files, 2)


def test_words_say_nothing_of_what_comes_ahead(
    cold: Rig, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages with rows of B have landed; a step that awaits the copy needs A, too."""
    hand = Hand(cold, monkeypatch)
    command = bring_ordered(cold, monkeypatch, 2, brings_b_first=True)
    cold.open(1, PROMPT, adapter=2)
    results = beside(cold, awaiting(cold, command, 1))
    hand.let(LAYERS)
    wait_until(lambda: hand.num_landed == LAYERS, "the groups have landed")
    assert words_of(cold).words.tolist() == [[0, 0]] * LAYERS
    hand.let(LAYERS)
    result = results.get(timeout=30)
    assert (result.done.ok, result.done.spoilt) == (True, ())
    assert words_of(cold).words.tolist() == [[1, 0]] * LAYERS
    cold.decode(3, 1)
    check(cold, files, 1)


@pytest.mark.parametrize("mark_fails", [False, True])
def test_words_move_on_when_a_copy_breaks_off(
    cold: Rig, files: Files, monkeypatch: pytest.MonkeyPatch, mark_fails: bool
) -> None:
    """And where even that fails, the device waits for its bound and no longer."""
    hand = Hand(cold, monkeypatch)
    hand.broken = 1
    if mark_fails:
        monkeypatch.setattr(gates.Awaited.__init__, "__defaults__", (0.05,))
        monkeypatch.setattr(LandedWords, "mark", lambda *_: (_ for _ in ()).throw(RuntimeError("lost")))
    command = bring(cold, 2, 8)
    cold.open(1, PROMPT, adapter=2)
    cold.open(2, PROMPT, adapter=1)
    hand.let(LAYERS)
    result = cold.run(awaiting(cold, command, 1, others=(2,)))
    assert (result.done.ok, result.done.spoilt) == (True, (1,))
    assert words_of(cold).words.tolist() == [[0 if mark_fails else 1, 0]] * LAYERS
    cold.decode(3, 2)
    check(cold, files, 2)


def test_a_copy_that_is_late_spoils_its_rows_and_the_step_still_ends_after_its_answer(
    cold: Rig, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = graphs_of(cold)._gates._told  # type: ignore[union-attr]
    check_late(cold, files, monkeypatch, lambda: bool(told[1]))


@pytest.mark.parametrize("tier", ["host", "device"])
def test_what_follows_a_read_opens_the_gates_of_captured_steps(
    cold: Rig, files: Files, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    """Beside a copy from the host, which has an order of its own. A read straight to the device tells it nothing:
    the host waits for all of it."""
    size = cold.worker._arena.shape.slab_bytes
    hand = ReadingHand(monkeypatch, size)
    coming = Coming(cold, files, 2, tier)
    beside_it = bring(cold, 3, 8)
    assert cold.direct.wait_for(beside_it).ok  # type: ignore[union-attr]
    cold.open(1, PROMPT, adapter=2)
    step = coming.awaiting(1)
    page = cold.sequences[1].pages[0]
    cold.worker._arena.page(page).fill_(float("nan"))
    results = beside(cold, step)
    for layer in range(LAYERS):
        num_written = layer if tier == "host" else 0
        expected = [at < num_written for at in range(LAYERS)]
        assert written_within(cold, page, num_written, 30) == expected
        time.sleep(0.05)
        assert layers_written(cold, page) == expected, "layers from this one on have not begun"
        hand.let(layer)
    result = results.get(timeout=30)
    assert (result.done.ok, result.done.spoilt) == (True, ())
    assert result.done.stall_s > 0
    assert coming.answers()[1]
    assert words_of(cold).words.tolist() == [[1, tier == "host"]] * LAYERS
    cold.decode(3, 1)
    check(cold, files, 1)


def test_copies_of_other_groups_than_the_graphs(cold: Rig, files: Files) -> None:
    """Words follow layers, however a copy is cut."""
    for turn, groups in enumerate((1, 2, 3, 8), 1):
        command = bring(cold, 2, groups)
        cold.open(turn, [turn, *PROMPT], adapter=2)
        assert cold.run(awaiting(cold, command, turn)).done.spoilt == ()
        assert cold.direct.wait_for(command).ok  # type: ignore[union-attr]
        assert words_of(cold).words.tolist() == [[turn, 0]] * LAYERS
        cold.decode(2, turn)
        cold.direct.evict_adapter(2)
    check(cold, files, 1, 2, 3, 4)


def test_two_steps_await_one_copy(cold: Rig, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand(cold, monkeypatch)
    command = bring(cold, 2, 8)
    hand.let(LAYERS)
    cold.open(1, PROMPT, adapter=2)
    cold.open(2, PROMPT[:5], adapter=2)
    first, second = awaiting(cold, command, 1), awaiting(cold, command, 2)
    for step in (first, second):
        cold.direct.issue_step(step)
    for step in (first, second):
        done = cold.direct.wait_step(step).done
        assert (done.ok, done.spoilt) == (True, ())


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


def test_without_words_a_captured_step_waits_for_the_whole_copy(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(CapturingDevice, "can_mark", lambda _: False)
    rig = made(files, tmp_path, monkeypatch, GatedOps())
    assert rig.worker._copier._words is None
    assert "captured steps wait for whole copies" in caplog.text
    command = bring(rig, 2, 8)
    rig.open(1, PROMPT, adapter=2)
    assert rig.run(awaiting(rig, command, 1)).done.spoilt == ()
    rig.decode(2, 1)
    check(rig, files, 1)
    rig.worker.close()


@pytest.mark.parametrize(("mode", "told"), [("layerwise", True), ("wait", False)])
def test_launches_that_wait_allow_no_gates(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    mode: str, told: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr("manylora.devices.cpu.CpuDevice.launches_wait", True)
    rig = Rig(files.model, tmp_path, num_pages=200, page_bytes=3072, cold_start=mode)
    assert rig.policy.cold_start.mode == "wait"
    assert ("CUDA_LAUNCH_BLOCKING" in caplog.text) == told
    rig.worker.close()


def test_words_are_written_at_the_ends_of_groups() -> None:
    class Lane:
        def __init__(self) -> None:
            self.marked: list[tuple[int, int]] = []

        def mark(self, word: torch.Tensor, number: int) -> None:
            self.marked.append((int(word.storage_offset()), number))

    words = LandedWords(8, 4, CpuDevice())
    for layers, groups in [((0, 3), [0]), ((3, 4), [1]), ((0, 8), [0, 1, 2, 3]), ((0, 1), []), ((1, 2), [0])]:
        for order in range(NUM_ORDERS):
            lane = Lane()
            words.mark(lane, CopyGate([], 7, order), layers)  # type: ignore[arg-type]
            assert lane.marked == [(NUM_ORDERS * group + order, 7) for group in groups]
