"""Steps whose cold rows the CPU serves: they read no page that the copy brings, and others' rows stand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manylora.executor import cpu_lora
from manylora.executor.cpu_lora import ColdWork, CpuLora
from manylora.protocol.commands import Await, CpuRows, RunStep, SwapPages
from manylora.protocol.executor import StepResult
from tests.executor.conftest import Files
from tests.executor.drive import Rig
from tests.executor.test_gates import (
    PROMPT,
    Hand,
    bring,
    check,
    keep_on_host,
)


@pytest.fixture(scope="module")
def shared(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    made = served_by_cpu(files, tmp_path_factory.mktemp("cold"))
    yield made
    made.worker.close()


def served_by_cpu(files: Files, folder: Path, **settings: Any) -> Rig:
    made = Rig(
        files.model, folder, num_pages=900, page_bytes=3072, cold_start="cpu", cpu_workers="1", **settings
    )
    assert made.worker._cpu_lora is not None
    return keep_on_host(made, files)


@pytest.fixture
def cold(shared: Rig) -> Iterator[Rig]:
    yield shared
    forget_all(shared)


def forget_all(shared: Rig) -> None:
    for sequence in list(shared.sequences):
        shared.direct.end_sequence(sequence)
        del shared.sequences[sequence]
    for adapter in (2, 3):
        shared.direct.evict_adapter(adapter)


def served(rig: Rig, command: SwapPages, *rows: tuple[int, ...]) -> RunStep:
    """A step with rows (sequence,) or (sequence, tokens) of sequences whose adapter the copy brings."""
    step = rig.command(*(rig.row(*row) for row in rows))
    sequences = tuple(row[0] for row in rows)
    step.cpu = (CpuRows(command.copy, sequences),)
    return step


def test_they_end_before_the_copy_begins_and_read_nothing_that_lay_in_its_pages(
    cold: Rig, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Non-finite bytes lie there. Two requests of one adapter, beside others'."""
    hand = Hand(cold, monkeypatch)
    command = bring(cold, 2, 8)
    cold.open(1, PROMPT, adapter=2)
    cold.open(2, PROMPT[:3], adapter=2)
    cold.open(3, PROMPT, adapter=1)
    cold.open(4, PROMPT[2:])
    step = served(cold, command, (1,), (2,))
    others = cold.command(cold.row(3), cold.row(4))
    step = RunStep(step.step, step.starts + others.starts, step.rows + others.rows, cpu=step.cpu)
    result = cold.run(step)
    assert (result.done.ok, result.done.invalid, result.done.unsound) == (True, (), ())
    assert result.done.cpu_s > 0
    assert result.done.cpu_workers == 1
    assert hand.num_landed == 0
    hand.let(1)
    assert cold.direct.wait_for(command).ok  # type: ignore[union-attr]
    cold.decode(4, 1, 2, 3, 4)
    check(cold, files, 1, 2, 3, 4)


def test_prompts_in_chunks_meet_the_adapter_as_it_lands(
    cold: Rig, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two chunks by the CPU, the second of which finds the copy ended, and the last token by the device."""
    hand = Hand(cold, monkeypatch)
    command = bring(cold, 3, 8)
    cold.open(1, PROMPT, adapter=3)
    assert cold.run(served(cold, command, (1, 3))).done.ok
    hand.let(1)
    assert cold.direct.wait_for(command).ok  # type: ignore[union-attr]
    assert cold.run(served(cold, command, (1, 2))).done.ok, (
        "the step may name it until an end after the answer"
    )
    cold.decode(3, 1)
    check(cold, files, 1)


@pytest.mark.parametrize("is_served", [True, False])
def test_a_row_with_one_token_left(cold: Rig, files: Files, is_served: bool) -> None:
    """All of the prompt but one token was computed before the adapter left: a row like a decoding one."""
    command = bring(cold, 2, 8)
    assert cold.direct.wait_for(command).ok  # type: ignore[union-attr]
    before = cold.open(1, PROMPT, adapter=2)
    assert cold.step(cold.row(1, len(PROMPT) - 1)).done.ok
    cold.direct.evict_adapter(2)
    again = bring(cold, 2, 8)
    cold.open(2, PROMPT, adapter=2, num_computed=len(PROMPT) - 1, pages=before.pages)
    step = served(cold, again, (2,))
    if not is_served:
        step.awaits, step.cpu = (Await(again.copy, (2,)),), ()
    assert cold.run(step).done.invalid == ()
    assert cold.direct.wait_for(again).ok  # type: ignore[union-attr]
    cold.decode(3, 2)
    check(cold, files, 2)


def test_adapters_without_rank_on_some_projections_beside_each_other(cold: Rig, files: Files) -> None:
    """Two adapters of one step, in chunks; the second chunk of one is the device's."""
    commands = []
    for adapter in (2, 3):
        cold.num_copies += 1
        pairs = tuple(zip(cold.on_host[adapter], cold.take(len(cold.on_host[adapter]))))
        commands.append(SwapPages(cold.num_copies, True, pairs, adapter, 8))
        cold.direct.begin(commands[-1])
    cold.open(1, PROMPT, adapter=2)
    cold.open(2, PROMPT, adapter=3)
    parts = [served(cold, commands[0], (1, 4)), served(cold, commands[1], (2,))]
    first, second = parts
    step = RunStep(first.step, first.starts + second.starts, first.rows + second.rows)
    step.cpu = first.cpu + second.cpu
    result = cold.run(step)
    assert (result.done.ok, result.done.invalid, result.done.unsound) == (True, (), ())
    for command in commands:
        assert cold.direct.wait_for(command).ok  # type: ignore[union-attr]
    cold.decode(4, 1, 2)
    check(cold, files, 1, 2)


def test_rows_of_a_copy_that_nobody_brings_fail_and_harm_none(cold: Rig, files: Files) -> None:
    cold.open(1, PROMPT, adapter=1)
    step = cold.command(cold.row(1))
    step.cpu = (CpuRows(99, (1,)),)
    assert not cold.run(step).done.ok


@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_threads_that_are_late_at_any_product_invalidate_their_own_rows_only(
    cold: Rig, files: Files, monkeypatch: pytest.MonkeyPatch, place: float
) -> None:
    """The product is never posted. The next step is served."""
    cpu = cold.worker._cpu_lora
    assert cpu is not None
    posted, num_products, post, begin = 0, 0, CpuLora.post, CpuLora.begin

    def count_and_begin(self: CpuLora, work: ColdWork) -> int:
        nonlocal num_products
        num_products = len(work.jobs)
        return begin(self, work)

    def post_but_one(self: CpuLora) -> None:
        nonlocal posted
        if posted == round(place * (num_products - 1)):
            self.job += 1
        else:
            post(self)
        posted += 1

    with monkeypatch.context() as patch:
        patch.setattr(CpuLora, "begin", count_and_begin)
        patch.setattr(CpuLora, "post", post_but_one)
        patch.setattr(cpu_lora, "LATE_S", 0.3)
        command = bring(cold, 2, 8)
        cold.open(1, PROMPT, adapter=2)
        cold.open(2, PROMPT, adapter=1)
        step, others = served(cold, command, (1,)), cold.command(cold.row(2))
        step = RunStep(step.step, step.starts + others.starts, step.rows + others.rows, cpu=step.cpu)
        result = cold.run(step)
    check_invalid(cold, files, command, result)


def check_invalid(cold: Rig, files: Files, command: SwapPages, result: StepResult) -> None:
    """Sequence 1 was the CPU's, and 2 was not. Another step of the CPU goes well, and both have exact tokens."""
    assert (result.done.ok, result.done.invalid) == (True, (1,))
    assert cold.direct.wait_for(command).ok  # type: ignore[union-attr]
    cold.direct.end_sequence(1)
    del cold.sequences[1]
    cold.direct.evict_adapter(2)
    again = bring(cold, 2, 8)
    cold.open(4, PROMPT, adapter=2)
    done = cold.run(served(cold, again, (4,))).done
    assert (done.invalid, done.cpu_workers) == ((), 1)
    assert done.cpu_s > 0
    assert cold.direct.wait_for(again).ok  # type: ignore[union-attr]
    cold.decode(3, 2, 4)
    check(cold, files, 2, 4)


def test_a_copy_that_fails_beside_the_cpu_leaves_its_rows_alone(
    cold: Rig, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU has read none of it."""
    hand = Hand(cold, monkeypatch)
    hand.is_broken = True
    command = bring(cold, 2, 8)
    cold.open(1, PROMPT, adapter=2)
    result = cold.run(served(cold, command, (1,)))
    assert (result.done.ok, result.done.invalid, result.done.unsound) == (True, (), ())
    hand.let(1)
    assert not cold.direct.wait_for(command).ok  # type: ignore[union-attr]
    hand.is_broken = False
    hand.let(1)
    again = bring(cold, 2, 8)
    assert cold.direct.wait_for(again).ok  # type: ignore[union-attr]
    cold.decode(3, 1)
    check(cold, files, 1)
