"""Steps whose cold rows the CPU serves: they read no page that the copy brings, and others' rows stand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manylora.adapters.pack import layout_of, pages_of_b
from manylora.assist.workers import HandedStep
from manylora.protocol import Await, CpuRows, RunStep, SwapPages
from tests.executor.conftest import Files
from tests.executor.drive import Rig
from tests.executor.test_gates import (
    LAYERS,
    PROMPT,
    Hand,
    Layers,
    awaiting,
    beside,
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
    assert made.worker._workers is not None
    assert made.worker._workers.wait_ready(30)
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


def served(rig: Rig, command: SwapPages, *rows: tuple[int, ...], groups: int | None = None) -> RunStep:
    """A step with rows (sequence,) or (sequence, tokens) of sequences whose adapter the copy brings."""
    step = rig.command(*(rig.row(*row) for row in rows))
    sequences = tuple(row[0] for row in rows)
    step.cpu = (CpuRows(command.copy, sequences, groups or command.groups, command.brings_b_first),)
    return step


def bring_ordered(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
    adapter: int,
    first_group: int = 0,
    brings_b_first: bool = False,
) -> SwapPages:
    """As ``bring``, by groups of one layer, in this order."""
    begin = rig.direct.begin
    monkeypatch.setattr(rig.direct, "begin", lambda command: None)
    plain = bring(rig, adapter, LAYERS)
    monkeypatch.setattr(rig.direct, "begin", begin)
    command = SwapPages(
        plain.copy, True, plain.pairs, adapter, LAYERS, first_group, brings_b_first=brings_b_first
    )
    rig.direct.begin(command)
    return command


def num_pages_of_b(rig: Rig, adapter: int) -> tuple[int, int]:
    """Of the adapter's, and all of them."""
    worker = rig.worker
    found = pages_of_b(layout_of(worker.inspections.spec(adapter), worker._geometry), worker._geometry)
    return int(found.sum()), len(found)


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
    assert (result.done.ok, result.done.spoilt, result.done.unsound) == (True, (), ())
    assert result.done.cpu_s > 0
    assert result.done.cpu_workers == 1
    assert hand.num_landed == 0
    hand.let(LAYERS)
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
    hand.let(LAYERS)
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
    assert cold.run(step).done.spoilt == ()
    assert cold.direct.wait_for(again).ok  # type: ignore[union-attr]
    cold.decode(3, 2)
    check(cold, files, 2)


@pytest.mark.parametrize("first", [1, 2])
def test_layers_split_between_the_cpu_and_the_link(
    cold: Rig, files: Files, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """The link brings the groups from ``first`` on before the others; these are the CPU's."""
    hand = Hand(cold, monkeypatch)
    command = bring_ordered(cold, monkeypatch, 2, first)
    cold.open(1, PROMPT, adapter=2)
    hand.let(LAYERS - first)
    result = cold.run(served(cold, command, (1,), groups=first))
    assert (result.done.ok, result.done.spoilt, result.done.unsound) == (True, (), ())
    assert hand.num_landed == LAYERS - first
    hand.let(first)
    assert cold.direct.wait_for(command).ok  # type: ignore[union-attr]
    cold.decode(4, 1)
    check(cold, files, 1)


def test_a_layer_that_the_cpu_shrinks_begins_when_its_b_has_landed_and_not_before(
    cold: Rig, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the step ends before any page without B has begun to land. Two requests of it, one beside."""
    of_b, num_pages = num_pages_of_b(cold, 2)
    assert 0 < of_b < num_pages
    hand = Hand(cold, monkeypatch)
    layers = Layers(monkeypatch)
    command = bring_ordered(cold, monkeypatch, 2, brings_b_first=True)
    cold.open(1, PROMPT, adapter=2)
    cold.open(2, PROMPT[:3], adapter=2)
    cold.open(3, PROMPT, adapter=1)
    step, others = served(cold, command, (1,), (2,)), cold.command(cold.row(3))
    step = RunStep(step.step, step.starts + others.starts, step.rows + others.rows, cpu=step.cpu)
    results = beside(cold, step)
    for layer in range(LAYERS):
        layers.check_begun(layer)
        hand.let(1)
        layers.check_ended(layer)
    result = results.get(timeout=30)
    assert (result.done.ok, result.done.spoilt, result.done.unsound) == (True, (), ())
    assert result.done.cpu_s > 0
    assert hand.num_landed == LAYERS
    assert not cold.direct.has_landed(command)
    hand.let(LAYERS)
    assert cold.direct.wait_for(command).ok  # type: ignore[union-attr]
    cold.decode(4, 1, 2, 3)
    check(cold, files, 1, 2, 3)


def test_a_step_that_awaits_the_same_copy_waits_for_a_too(
    cold: Rig, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = Hand(cold, monkeypatch)
    layers = Layers(monkeypatch)
    command = bring_ordered(cold, monkeypatch, 2, brings_b_first=True)
    cold.open(1, PROMPT, adapter=2)
    results = beside(cold, awaiting(cold, command, 1))
    hand.let(LAYERS)
    for layer in range(LAYERS):
        layers.check_begun(layer)
        hand.let(1)
        layers.check_ended(layer)
    result = results.get(timeout=30)
    assert (result.done.ok, result.done.spoilt) == (True, ())
    cold.decode(4, 1)
    check(cold, files, 1)


@pytest.mark.parametrize("broken", range(2 * LAYERS))
def test_a_copy_that_fails_spoils_what_the_cpu_shrank_if_b_had_not_come(
    cold: Rig, files: Files, monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    """B's groups come first; that A's fail harms no row. Others' rows stand."""
    hand = Hand(cold, monkeypatch)
    hand.broken = broken
    command = bring_ordered(cold, monkeypatch, 2, brings_b_first=True)
    cold.open(1, PROMPT, adapter=2)
    cold.open(2, PROMPT, adapter=1)
    step, others = served(cold, command, (1,)), cold.command(cold.row(2))
    hand.let(2 * LAYERS)
    result = cold.run(RunStep(step.step, step.starts + others.starts, step.rows + others.rows, cpu=step.cpu))
    assert (result.done.ok, result.done.spoilt) == (True, (1,) if broken < LAYERS else ())
    assert not cold.direct.wait_for(command).ok  # type: ignore[union-attr]
    monkeypatch.undo()
    again = bring(cold, 2, 8)
    assert cold.direct.wait_for(again).ok  # type: ignore[union-attr]
    kept = [2] if broken < LAYERS else [1, 2]
    cold.decode(3, *kept)
    check(cold, files, *kept)


def test_adapters_without_rank_on_some_projections_beside_each_other(cold: Rig, files: Files) -> None:
    """Two adapters of one step, in chunks; the second chunk of one is the device's."""
    commands = []
    for adapter in (2, 3):
        cold.num_copies += 1
        pairs = tuple(zip(cold.on_host[adapter], cold.take(len(cold.on_host[adapter]))))
        commands.append(SwapPages(cold.num_copies, True, pairs, adapter, 8, brings_b_first=True))
        cold.direct.begin(commands[-1])
    cold.open(1, PROMPT, adapter=2)
    cold.open(2, PROMPT, adapter=3)
    parts = [served(cold, commands[0], (1, 4)), served(cold, commands[1], (2,))]
    first, second = parts
    step = RunStep(first.step, first.starts + second.starts, first.rows + second.rows)
    step.cpu = first.cpu + second.cpu
    result = cold.run(step)
    assert (result.done.ok, result.done.spoilt, result.done.unsound) == (True, (), ())
    for command in commands:
        assert cold.direct.wait_for(command).ok  # type: ignore[union-attr]
    cold.decode(4, 1, 2)
    check(cold, files, 1, 2)


def test_adapters_that_the_cpu_serves_in_two_ways_are_refused(cold: Rig) -> None:
    first, second = bring(cold, 2, 8), bring(cold, 3, 8)
    cold.open(1, PROMPT, adapter=2)
    cold.open(2, PROMPT, adapter=3)
    step = cold.command(cold.row(1), cold.row(2))
    step.cpu = (CpuRows(first.copy, (1,), 8), CpuRows(second.copy, (2,), 8, True))
    assert not cold.run(step).done.ok


def test_rows_of_a_copy_that_nobody_brings_fail_and_harm_none(cold: Rig, files: Files) -> None:
    cold.open(1, PROMPT, adapter=1)
    step = cold.command(cold.row(1))
    step.cpu = (CpuRows(99, (1,), 8),)
    assert not cold.run(step).done.ok


@pytest.mark.parametrize(("place", "shrinks"), [(0.0, False), (0.5, False), (1.0, False), (0.5, True)])
def test_a_worker_that_dies_at_any_product_spoils_its_own_rows_only(
    cold: Rig, files: Files, monkeypatch: pytest.MonkeyPatch, place: float, shrinks: bool
) -> None:
    """It is gone before the product's rows are there; another one serves the next step."""
    workers = cold.worker._workers
    assert workers is not None
    monkeypatch.setattr(workers, "_num_deaths", 0)
    posted, num_products, post, begin = 0, 0, HandedStep.post, workers.begin

    def count_and_begin(lengths: Any, jobs: Any, *more: Any, **how: Any) -> HandedStep | None:
        nonlocal num_products
        num_products = len(jobs)
        return begin(lengths, jobs, *more, **how)

    def kill_and_post(step: HandedStep) -> None:
        nonlocal posted
        if posted == round(place * (num_products - 1)):
            step.given[0].process.kill()
            step.given[0].process.wait()
        posted += 1
        post(step)

    monkeypatch.setattr(workers, "begin", count_and_begin)
    monkeypatch.setattr(HandedStep, "post", kill_and_post)
    command = bring_ordered(cold, monkeypatch, 2, brings_b_first=shrinks)
    cold.open(1, PROMPT, adapter=2)
    cold.open(2, PROMPT, adapter=1)
    step, others = served(cold, command, (1,)), cold.command(cold.row(2))
    result = cold.run(RunStep(step.step, step.starts + others.starts, step.rows + others.rows, cpu=step.cpu))
    assert (result.done.ok, result.done.spoilt) == (True, (1,))
    assert cold.direct.wait_for(command).ok  # type: ignore[union-attr]
    monkeypatch.setattr(HandedStep, "post", post)
    cold.direct.end_sequence(1)
    del cold.sequences[1]
    cold.direct.evict_adapter(2)
    assert workers.wait_ready(30)
    again = bring(cold, 2, 8)
    cold.open(4, PROMPT, adapter=2)
    assert cold.run(served(cold, again, (4,))).done.spoilt == ()
    assert cold.direct.wait_for(again).ok  # type: ignore[union-attr]
    cold.decode(3, 2, 4)
    check(cold, files, 2, 4)


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_copy_that_fails_beside_the_cpu_leaves_its_rows_alone(
    cold: Rig, files: Files, monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    """At the first, the middle and the last group: the CPU has read none of it."""
    hand = Hand(cold, monkeypatch)
    hand.broken = broken
    command = bring(cold, 2, 8)
    cold.open(1, PROMPT, adapter=2)
    result = cold.run(served(cold, command, (1,)))
    assert (result.done.ok, result.done.spoilt, result.done.unsound) == (True, (), ())
    hand.let(LAYERS)
    assert not cold.direct.wait_for(command).ok  # type: ignore[union-attr]
    hand.broken, hand.num_landed, hand._is_first = None, 0, True
    hand.let(LAYERS)
    again = bring(cold, 2, 8)
    assert cold.direct.wait_for(again).ok  # type: ignore[union-attr]
    cold.decode(3, 1)
    check(cold, files, 1)
