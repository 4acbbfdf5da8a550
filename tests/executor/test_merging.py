"""Merged weights of a worker: exact, restored to the bit, right for every row, whatever fails or comes
meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from manylora_lab.bench.reference import ReferenceOps

from manylora.config.merging import MergeConfig, MergeTimes
from manylora.devices.device import CopyLane, Device
from manylora.executor import build
from manylora.executor.merging import HostPristine
from manylora.executor.worker import Worker
from manylora.kernels.cpu import CpuOps
from manylora.kernels.ops import MergedLayer, MergePlan
from manylora.kernels.shapes import ProjectionGroup
from manylora.protocol.commands import SetMerged
from manylora.protocol.events import SwitchDone
from manylora.types import BASE, SamplingParams
from tests.executor.conftest import Files
from tests.executor.drive import Rig
from tests.executor.tiny import ALL_MODULES, write_adapter
from tests.kernels.implementations import Subject

PAGE_BYTES = 3072
DTYPES = ("float32", "float16", "bfloat16")
COPIES = ("device", "host")
PROMPT = [5, 6, 7, 8, 9, 10, 11]


@pytest.fixture(autouse=True)
def _not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rig would measure its steps first."""

    monkeypatch.setattr(build, "measure_merging", lambda *args, steps_wait: MergeTimes(steps_wait))


def make_rig(files: Files, folder: Path, copy: str = "device", num_adapters: int = 3, **settings: Any) -> Rig:
    merge = MergeConfig(mode="manylora", copy=copy)
    given: dict[str, Any] = {"num_pages": 400, "page_bytes": PAGE_BYTES, "merge": merge}
    rig = Rig(files.model, folder, **given | settings)
    for adapter in sorted(files.adapters)[:num_adapters]:
        rig.serve(adapter, files.adapters[adapter])
    return rig


@pytest.fixture(params=COPIES)
def rig(request: pytest.FixtureRequest, files: Files, tmp_path: Path) -> Iterator[Rig]:
    made = make_rig(files, tmp_path, request.param)
    yield made
    made.worker.close()


def weights_of(worker: Worker) -> list[torch.Tensor]:
    assert worker._forward is not None
    return [linear.weight.data for linear in worker._forward.decoder.linears]


def may_run(merged: int, count: int = 4) -> Sequence[int]:
    """Of sequences that are named as their adapters are, those that may run while this one is merged."""
    return range(count) if merged == BASE else (merged,)


def bits(matrices: list[torch.Tensor]) -> list[bytes]:
    return [matrix.cpu().view(torch.uint8).numpy().tobytes() for matrix in matrices]


def fail_merges(rig: Rig, monkeypatch: pytest.MonkeyPatch, failing: set[int]) -> list[int]:
    """The calls of ``merge_linears`` with these numbers, counted in the list, write a row and raise."""
    assert rig.worker._forward is not None
    ops = rig.worker._forward.decoder.ops
    calls: list[int] = []
    merge_linears = ops.merge_linears

    def broken(
        layers: Sequence[MergedLayer], pool: torch.Tensor, group: ProjectionGroup, plan: MergePlan
    ) -> None:
        calls.append(len(calls))
        if calls[-1] in failing:
            last = layers[-1]
            for part in plan.parts(group, last.layer)[:1]:
                last.merged[group.offsets[part.place]] = 7.0
            raise RuntimeError("a launch went wrong\nin two lines")
        merge_linears(layers, pool, group, plan)

    monkeypatch.setattr(ops, "merge_linears", broken)
    return calls


# ---------------------------------------------------------------- weights


def test_weights_are_merged_and_restored(rig: Rig, files: Files) -> None:
    """Adapter 2 is on q and down alone, adapter 3 on some layers: what they do not touch keeps every bit."""
    weights = weights_of(rig.worker)
    addresses, before = [w.data_ptr() for w in weights], bits(weights)
    for adapter, changed in ((1, {0, 1, 2, 3}), (2, {0, 3}), (BASE, set()), (2, {0, 3}), (BASE, set())):
        done = rig.merge(adapter)
        assert done.ok, done.error
        assert done.switch_s > 0
        rig.settle()
        now = bits(weights)
        differing = {number % 4 for number, (a, b) in enumerate(zip(now, before)) if a != b}
        assert differing == changed
    assert [w.data_ptr() for w in weights] == addresses


def test_one_after_another_is_as_if_the_first_had_never_been(rig: Rig) -> None:
    weights = weights_of(rig.worker)
    found = []
    for history in ([2], [1, 2], [3, 1, 3, 2], [2, 2]):
        for adapter in history:
            assert rig.merge(adapter).ok
        rig.settle()
        found.append(bits(weights))
        assert rig.merge(BASE).ok
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_random_switches_restore_every_bit(
    dtype: str, copy: str, count: int, eight: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight adapters and the base in random order; every tenth switch fails somewhere in its pass."""
    rig = make_rig(eight, tmp_path, copy, num_adapters=8, dtype=dtype, page_bytes=PAGE_BYTES // 2)
    weights = weights_of(rig.worker)
    before, chance = bits(weights), random.Random(count)
    failing: set[int] = set()
    calls = fail_merges(rig, monkeypatch, failing)
    logging.disable(logging.ERROR)
    num_failed = 0
    try:
        for number in range(count):
            failing.clear()
            if number % 10 == 3:
                failing.add(len(calls) + chance.randrange(4))
            adapter = chance.choice([BASE, *range(1, 9)])
            done = rig.merge(adapter)
            num_failed += not done.ok
            rig.settle()
            if not done.ok or adapter == BASE:
                assert bits(weights) == before
        failing.clear()
        assert rig.merge(BASE).ok
        rig.settle()
        assert bits(weights) == before
        assert num_failed > count // 20
    finally:
        logging.disable(logging.NOTSET)
        rig.worker.close()


@pytest.fixture(scope="module")
def eight(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Eight adapters of mixed ranks and modules."""
    folder, chance = tmp_path_factory.mktemp("eight"), random.Random(8)
    adapters = {}
    for adapter in range(1, 9):
        modules = chance.sample(ALL_MODULES, chance.randint(1, 7))
        adapters[adapter] = write_adapter(
            folder / str(adapter), files.model, rank=chance.randint(1, 12), modules=modules, seed=adapter
        )
    return dataclasses.replace(files, adapters=adapters)


# ---------------------------------------------------------------- steps


@pytest.mark.parametrize("overlapped", [False, True])
def test_rows_of_all_follow_the_switches(rig: Rig, files: Files, overlapped: bool) -> None:
    """The base's rows and each adapter's, while one adapter after another is merged."""
    for sequence in range(4):
        rig.open(sequence, PROMPT[: 3 + sequence], sequence)
    rig.step(*(rig.row(sequence) for sequence in range(4)))
    for merged in (1, 3, BASE, 2, 1, BASE):
        assert rig.merge(merged).ok
        if overlapped:
            rig.decode_overlapped(3, *may_run(merged))
        else:
            rig.decode(3, *may_run(merged))
    for sequence, held in rig.sequences.items():
        files.reference.check_greedy(PROMPT[: 3 + sequence], held.generated, files.path(held.adapter))


def test_a_step_of_the_merged_adapter_alone_has_no_segments(rig: Rig) -> None:
    for merged, adapter, expected in ((1, 1, None), (BASE, BASE, None), (BASE, 2, 1)):
        rig.open(adapter, PROMPT, adapter)
        rig.merge(merged)
        rig.step(rig.row(adapter))
        layout = rig.worker._inputs._layout
        assert layout is not None
        lora = layout.lora
        assert (None if lora is None else len(lora.start)) == expected


def test_rows_of_others_are_refused_while_an_adapter_is_merged(rig: Rig, files: Files) -> None:
    for sequence in range(3):
        rig.open(sequence, PROMPT, sequence)
    rig.merge(1)
    for others in ((BASE,), (1, 2)):
        done = rig.run(rig.command(*map(rig.row, others))).done
        assert (done.ok, done.error) == (
            False, "ValueError: the step has rows of others than the merged adapter 1"
        )  # fmt: skip
    held = rig.open(3, PROMPT, 1)
    rig.decode(2, 3)
    files.reference.check_greedy(PROMPT, held.generated, files.path(1))


def test_a_lineup_that_stays_is_laid_out_anew_after_a_switch(rig: Rig, files: Files) -> None:
    """The row is the same in every step; only what is merged changes between them."""
    rig.open(1, PROMPT, 1)
    for merged in (BASE, 1, BASE, 1):
        rig.merge(merged)
        rig.decode(1, 1)
    for held in rig.sequences.values():
        files.reference.check_greedy(PROMPT, held.generated, files.path(held.adapter))


def test_steps_at_fixed_sizes_follow_merged_weights(files: Files, tmp_path: Path) -> None:
    rig = make_rig(files, tmp_path, pads_steps=True, max_num_seqs=8)
    for sequence in range(4):
        rig.open(sequence, PROMPT, sequence)
    rig.step(*(rig.row(sequence) for sequence in range(4)))
    for merged in (1, 2, BASE, 3):
        rig.merge(merged)
        rig.decode(2, *may_run(merged))
        assert rig.worker.bucket is not None
    rig.worker.close()
    for held in rig.sequences.values():
        files.reference.check_greedy(PROMPT, held.generated, files.path(held.adapter))


@pytest.mark.parametrize("kind", ["reference", "cpu", "interpreted"])
def test_no_operation_keeps_a_copy_of_the_weights(
    kind: str, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps before the merge, with it, and after it, by the operations of each path."""
    ops = ReferenceOps() if kind == "reference" else Subject(kind, torch.float32).ops()
    monkeypatch.setattr(build, "ops_for", lambda *args, **kwargs: ops)
    rig = make_rig(files, tmp_path)
    for sequence in range(3):
        rig.open(sequence, PROMPT[:2], sequence)
    rig.step(*(rig.row(sequence) for sequence in range(3)))
    for merged in (1, BASE):
        assert rig.merge(merged).ok
        rig.decode(1, *may_run(merged, 3))
    rig.worker.close()
    for held in rig.sequences.values():
        files.reference.check_greedy(PROMPT[:2], held.generated, files.path(held.adapter))


def logprobs_of(rig: Rig, sequence: int) -> list[Any]:
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=5)
    held = rig.open(sequence, PROMPT, BASE, params=params)
    told = []
    for _ in range(4):
        result = rig.step(rig.row(sequence))
        told.append(result.logprobs[sequence, 0])
    rig.free += held.pages[::-1]
    return told


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("count", [50, pytest.param(500, marks=pytest.mark.long)])
def test_the_base_answers_to_the_last_digit_as_before(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, copy: str
) -> None:
    """With steps of merged adapters between."""
    monkeypatch.setattr(build, "ops_for", lambda *args, **kwargs: CpuOps())
    rig = make_rig(files, tmp_path, copy)
    before = logprobs_of(rig, 1)
    chance = random.Random(count)
    for number in range(count):
        adapter = chance.choice((1, 2, 3))
        assert rig.merge(adapter).ok
        if number % 10 == 0:
            held = rig.open(10 + number, PROMPT, adapter)
            rig.step(rig.row(10 + number))
            rig.free += held.pages[::-1]
    assert rig.merge(BASE).ok
    assert logprobs_of(rig, 2) == before
    rig.worker.close()


# ---------------------------------------------------------------- failures


def test_a_failed_switch_leaves_the_loaded_weights(
    rig: Rig, files: Files, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weights = weights_of(rig.worker)
    before = bits(weights)
    for sequence in range(4):
        rig.open(sequence, PROMPT, sequence)
    rig.step(*(rig.row(sequence) for sequence in range(4)))
    rig.merge(3)
    failing = {2}
    fail_merges(rig, monkeypatch, failing)
    done = rig.merge(1)
    assert not done.ok
    assert done.error == "RuntimeError: a launch went wrong"
    rig.decode(2, *range(4))  # as if 1 were merged: the pristine weights, and segments of all adapters
    assert bits(weights) == before
    assert rig.merge(2).ok
    rig.decode(2, 2)
    for held in rig.sequences.values():
        files.reference.check_greedy(PROMPT, held.generated, files.path(held.adapter))


def test_an_adapter_that_is_not_resident_is_not_merged(rig: Rig) -> None:
    weights = weights_of(rig.worker)
    before = bits(weights)
    rig.merge(1)
    done = rig.merge(77)
    assert (done.ok, done.error) == (False, "adapter 77 is not resident")
    rig.settle()
    assert bits(weights) == before


def test_lost_weights_break_the_device(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the switch nor the way back goes well: told once, and nothing is obeyed after it."""
    fail_merges(rig, monkeypatch, set(range(100)))
    monkeypatch.setattr(HostPristine, "_restore", lambda *args: 1 / 0)
    answers: list[Any] = []
    rig.worker.connect(answers.append)
    rig.open(1, PROMPT)
    with contextlib.suppress(RuntimeError):  # with a copy on the host it is known later
        rig.worker.obey(SetMerged(7, 1))
    with pytest.raises(RuntimeError, match="the base's weights are lost"):
        rig.worker.obey(rig.command(rig.row(1)))
    with pytest.raises(RuntimeError, match="the base's weights are lost"):
        rig.worker.obey(SetMerged(8, BASE))
    rig.worker.close()
    switches = [answer for answer in answers if isinstance(answer, SwitchDone)]
    assert [(done.switch, done.ok) for done in switches] == [(7, False)]


def test_a_step_for_other_weights_is_refused(rig: Rig) -> None:
    rig.open(1, PROMPT, 1)
    rig.merge(1)
    command = dataclasses.replace(rig.command(rig.row(1)), merged=2)
    result = rig.run(command)
    assert not result.done.ok
    assert "names adapter 2 as merged, the last switch 1" in result.done.error


def test_without_merging_a_switch_is_refused(files: Files, tmp_path: Path) -> None:
    rig = make_rig(files, tmp_path, merge=MergeConfig())
    done = rig.merge(1)
    assert (done.ok, done.error) == (False, "merging is off")
    assert rig.facts.pristine_bytes == 0
    rig.open(1, PROMPT, 1)
    assert not rig.run(dataclasses.replace(rig.command(rig.row(1)), merged=1)).done.ok
    rig.worker.close()
    assert rig.direct.set_merged(SetMerged(9, 1)).error == "the executor is closed"


class GatedLane(CopyLane):
    """Waits for ``gate`` before each transfer."""

    gate, entered = threading.Event(), threading.Event()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.entered.set()
        assert self.gate.wait(30)
        super().copy(target, source)


@pytest.fixture
def gated(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """Adapter 1 is merged; what comes back from the host's copy waits for ``GatedLane.gate``."""
    monkeypatch.setattr(Device, "copy_lane", lambda device, behind=None: GatedLane())
    GatedLane.gate.set()
    made = make_rig(files, tmp_path, "host")
    assert made.merge(1).ok
    GatedLane.gate.clear()
    GatedLane.entered.clear()
    yield made
    GatedLane.gate.set()
    made.worker.close()


def test_no_step_runs_on_weights_that_are_half_restored(gated: Rig, files: Files) -> None:
    """The policy waits for the answer; were it not to, the step would."""
    gated.open(1, PROMPT)
    gated.merged = BASE
    switch = SetMerged(50, BASE)
    gated.direct.begin(switch)
    assert GatedLane.entered.wait(30)
    command = gated.command(gated.row(1))
    issuing = threading.Thread(target=gated.worker.obey, args=(command,))
    issuing.start()
    issuing.join(0.05)
    assert issuing.is_alive()
    assert not gated.direct.has_landed(switch)
    GatedLane.gate.set()
    issuing.join(30)
    assert gated.finish(command).done.ok
    files.reference.check_greedy(PROMPT, gated.sequences[1].generated)
    assert gated.direct.has_landed(switch)


def test_closing_answers_a_switch_on_its_way(gated: Rig) -> None:
    answers: list[Any] = []
    gated.worker.connect(answers.append)
    gated.worker.obey(SetMerged(50, 2))
    assert GatedLane.entered.wait(30)
    closing = threading.Thread(target=gated.worker.close)
    closing.start()
    merging = gated.worker._merging
    assert merging is not None
    assert isinstance(merging._pristine, HostPristine)
    assert merging._pristine._closing.wait(30)
    GatedLane.gate.set()
    closing.join(30)
    assert not closing.is_alive()
    assert [(done.switch, done.ok) for done in answers] == [(50, False)]
