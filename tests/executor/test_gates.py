"""Steps that await copies: order by groups of layers, exact tokens, and what a copy that fails or is late does."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from manylora.adapters.pack import layout_of
from manylora.executor import tables
from manylora.memory import bringing, gates
from manylora.memory.gates import layer_groups
from manylora.models.layers import PostNormLayer, PreNormLayer
from manylora.protocol.commands import Await, ReadAdapter, RunStep, SwapPages
from manylora.protocol.events import CopyDone
from manylora.protocol.executor import StepResult
from tests.e2e.process import wait_until
from tests.executor.conftest import Files
from tests.executor.drive import Rig

PROMPT = [5, 3, 8, 2, 9, 1, 7]
LAYERS = 3


class Hand:
    """Holds copies of a lane until it is told to let them land; fails them where it is ``broken``."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bringing.Bringer, "can_bring", lambda self, pairs: False)  # which cannot be held
        copier = rig.worker._copier
        self.allowed = threading.Semaphore(0)
        self.is_broken = False
        self.num_landed = 0
        self._transfer = copier._transfer
        monkeypatch.setattr(copier, "_transfer", self._held)

    def _held(self, lane: Any, command: SwapPages) -> str:
        assert self.allowed.acquire(timeout=30)
        if self.is_broken:
            raise RuntimeError("the bus fell off")
        error = self._transfer(lane, command)
        self.num_landed += not error
        return error

    def let(self, count: int) -> None:
        self.allowed.release(count)


class Layers:
    """Which layers have begun, and which have results."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._began: list[int] = []
        for kind in (PreNormLayer, PostNormLayer):
            whole = kind.__call__

            def noting(layer, *args, whole=whole):  # type: ignore[no-untyped-def]
                self._began.append(layer.attention.qkv.layer)
                result = whole(layer, *args)
                self._ended.put(layer.attention.qkv.layer)
                return result

            monkeypatch.setattr(kind, "__call__", noting)

    def check_begun(self, count: int) -> None:
        """Those before have begun, and none ends."""
        with pytest.raises(queue.Empty):
            self._ended.get(timeout=0.05)
        assert self._began == list(range(count)), "layers from there on have not begun"

    def check_ended(self, first: int, end: int | None = None) -> None:
        """These end now, in order."""
        for layer in range(first, first + 1 if end is None else end):
            assert self._ended.get(timeout=30) == layer


@pytest.fixture
def cold(files: Files, tmp_path: Path) -> Iterator[Rig]:
    made = Rig(files.model, tmp_path, num_pages=200, page_bytes=3072)
    yield keep_on_host(made, files)
    made.worker.close()


def keep_on_host(made: Rig, files: Files) -> Rig:
    """Adapter 1 is on the device, adapters 2 and 3 are on the host."""
    made.serve(1, files.adapters[1])
    for adapter in (2, 3):
        num_pages = made.direct.add_adapter(adapter, str(files.adapters[adapter])).num_pages
        made.on_host[adapter] = made.take_host(num_pages)
        assert made.read(adapter, tuple(made.on_host[adapter]), "host").ok
    return made


def bring(rig: Rig, adapter: int, groups: int, before: Callable[[], None] = lambda: None) -> SwapPages:
    """Begin to copy the adapter; non-finite bytes lie where it goes. ``before`` that the device has nothing to
    do."""
    rig.num_copies += 1
    pages = rig.take(len(rig.on_host[adapter]))
    for page in pages:
        rig.worker._arena.page(page).fill_(float("nan"))
    rig.worker._device.synchronize()
    before()
    command = SwapPages(rig.num_copies, True, tuple(zip(rig.on_host[adapter], pages)), adapter, groups)
    rig.direct.begin(command)
    return command


def awaiting(rig: Rig, command: SwapPages, *sequences: int, others: tuple[int, ...] = ()) -> RunStep:
    step = rig.command(*(rig.row(sequence) for sequence in (*sequences, *others)))
    step.awaits = (Await(command.copy, sequences),)
    return step


def check(rig: Rig, files: Files, *sequences: int) -> None:
    for held in (rig.sequences[sequence] for sequence in sequences):
        files.reference.check_greedy(held.tokens[: held.num_prompt], held.generated, files.path(held.adapter))


def beside(rig: Rig, step: RunStep) -> queue.SimpleQueue[StepResult]:
    """Run the step on a thread, since it is run where it is commanded."""
    results: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
    threading.Thread(target=lambda: results.put(rig.run(step)), daemon=True).start()
    return results


def test_groups_are_even_and_none_is_empty() -> None:
    assert layer_groups(3, 8) == ((0, 1), (1, 2), (2, 3))
    assert layer_groups(32, 8) == tuple((4 * g, 4 * g + 4) for g in range(8))
    assert layer_groups(7, 2) == ((0, 3), (3, 7))
    assert layer_groups(5, 1) == ((0, 5),)


@pytest.mark.parametrize("groups", [1, 8])
def test_a_step_begins_when_its_copy_has_landed_and_not_before(
    cold: Rig, files: Files, monkeypatch: pytest.MonkeyPatch, groups: int
) -> None:
    hand = Hand(cold, monkeypatch)
    layers = Layers(monkeypatch)
    command = bring(cold, 2, groups)
    cold.open(1, PROMPT, adapter=2)
    results = beside(cold, awaiting(cold, command, 1))
    layers.check_begun(0)
    hand.let(1)
    layers.check_ended(0, LAYERS)
    result = results.get(timeout=30)
    assert (result.done.ok, result.done.invalid) == (True, ())
    assert result.done.stall_s > 0
    assert cold.direct.has_landed(command), "the copy's answer was told before the step's"
    assert cold.direct.wait_for(command).ok  # type: ignore[union-attr]
    cold.decode(4, 1)
    check(cold, files, 1)


def test_a_copy_that_fails_invalidates_its_own_rows_only(
    cold: Rig, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = Hand(cold, monkeypatch)
    cold.open(1, PROMPT, adapter=2)
    cold.open(2, PROMPT, adapter=1)
    cold.open(3, PROMPT[:4])
    cold.decode(2, 2)
    hand.is_broken = True
    command = bring(cold, 2, 8)
    hand.let(1)
    result = cold.run(awaiting(cold, command, 1, others=(2, 3)))
    assert result.done.ok
    assert result.done.invalid == (1,)
    assert not cold.direct.wait_for(command).ok  # type: ignore[union-attr]
    cold.direct.end_sequence(1)
    del cold.sequences[1]
    cold.decode(3, 2, 3)
    check(cold, files, 2, 3)
    hand.is_broken = False
    hand.let(1)
    again = bring(cold, 2, 8)
    cold.open(4, PROMPT, adapter=2)
    assert cold.run(awaiting(cold, again, 4)).done.invalid == ()
    cold.decode(4, 2, 3, 4)
    check(cold, files, 2, 3, 4)


def test_a_step_commanded_before_the_failure_was_known_invalidates_its_own_rows_only(
    cold: Rig, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = Hand(cold, monkeypatch)
    hand.is_broken = True
    command = bring(cold, 2, 8)
    hand.let(1)
    for sequence in (1, 2):
        cold.open(sequence, PROMPT, adapter=2)
    cold.open(3, PROMPT, adapter=1)
    assert cold.run(awaiting(cold, command, 1, others=(3,))).done.invalid == (1,)
    assert cold.run(awaiting(cold, command, 2, others=(3,))).done.invalid == (2,)
    assert not cold.direct.wait_for(command).ok  # type: ignore[union-attr]
    check(cold, files, 3)
    cold.decode(2, 3)
    assert 2 not in cold.worker._tables


def test_a_rank_forgets_a_copy_when_it_is_told(cold: Rig, files: Files) -> None:
    """When others have answered it, too: until then steps may await it."""
    cold.worker._is_rank = True
    command = bring(cold, 2, 8)
    cold.open(1, PROMPT, adapter=2)
    assert cold.run(awaiting(cold, command, 1)).done.invalid == ()
    cold.decode(4, 1)
    cold.open(2, PROMPT, adapter=2)
    result = cold.run(awaiting(cold, command, 2))
    assert (result.done.ok, result.done.invalid) == (True, ())
    check(cold, files, 1, 2)
    cold.worker.forget_copies([(command.copy, False)])
    assert 2 not in cold.worker._tables
    cold.open(3, PROMPT)
    step = cold.command(cold.row(3))
    step.awaits = (Await(command.copy, (3,)),)
    assert not cold.run(step).done.ok


@pytest.mark.parametrize("brought", ["copy", "copy in groups", "read"])
def test_what_failed_leaves_room_for_what_comes_to_its_pages(
    brought: str, cold: Rig, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a rank's table, which must stay where it is and is full: the other rank's copy has failed, the policy has
    given the pages away, and no two steps have ended since."""
    specs = [cold.worker.inspections.spec(adapter) for adapter in files.adapters]
    cells = [layout_of(spec, cold.worker._geometry).num_cells for spec in specs]
    monkeypatch.setattr(tables, "_FIRST_CELLS", cells[0] + max(cells[1:]))
    rig = Rig(files.model, tmp_path / "full", num_pages=200, page_bytes=3072)
    rig.worker._tables.fix(0)
    keep_on_host(rig, files)
    rig.worker._is_rank = True
    larger, smaller = (2, 3) if cells[1] > cells[2] else (3, 2)
    failed = bring(rig, larger, 8)
    rig.open(1, PROMPT, adapter=larger)
    assert rig.run(awaiting(rig, failed, 1)).done.ok
    rig.open(2, PROMPT, adapter=1)
    pages = [page for _, page in failed.pairs][: len(rig.on_host[smaller])]
    groups = 8 if "groups" in brought else 0
    if "copy" in brought:
        rig.num_copies += 1
        pairs = tuple(zip(rig.on_host[smaller], pages, strict=True))
        copy = SwapPages(rig.num_copies, True, pairs, smaller, groups)
        assert rig.direct.swap_pages(copy).ok
    else:
        assert rig.direct.read_adapter(ReadAdapter(smaller, tuple(pages), "device")).ok
    rig.open(3, PROMPT, adapter=smaller)
    rig.decode(3, 2, 3)
    assert larger not in rig.worker._tables
    check(rig, files, 2, 3)
    rig.worker.forget_copies([(failed.copy, False)])
    rig.decode(2, 3)
    check(rig, files, 3)
    rig.worker.close()


def test_an_entry_that_cannot_be_made_fails_its_copy(
    cold: Rig, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which has begun by then. Brought again it is there."""
    hand = Hand(cold, monkeypatch)
    begun: list[int] = []

    def put(adapter: int, *_: object) -> None:
        begun.append(len(cold.worker._arrivals._gates))
        raise RuntimeError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(cold.worker._tables, "put", put)
        command = bring(cold, 2, 3)
    assert begun == [1]
    hand.let(1)
    answer = cold.direct.wait_for(command)
    assert isinstance(answer, CopyDone)
    assert (answer.ok, "no entry" in answer.error) == (False, True)
    assert 2 not in cold.worker._tables
    hand.let(1)
    again = bring(cold, 2, 3)
    cold.open(1, PROMPT, adapter=2)
    assert cold.run(awaiting(cold, again, 1)).done.invalid == ()
    cold.decode(3, 1)
    check(cold, files, 1)


def test_what_is_brought_elsewhere_drops_nothing(cold: Rig, files: Files) -> None:
    """Nor what comes to the same pages again for the same adapter."""
    cold.worker._is_rank = True
    command = bring(cold, 2, 8)
    other = bring(cold, 3, 8)
    assert cold.direct.wait_for(other).ok  # type: ignore[union-attr]
    assert cold.direct.wait_for(command).ok  # type: ignore[union-attr]
    assert {2, 3} <= set(cold.worker._tables._held)
    again = SwapPages(99, True, command.pairs, 2, 8)
    assert cold.direct.swap_pages(again).ok
    for sequence, adapter in ((1, 2), (2, 3)):
        cold.open(sequence, PROMPT, adapter=adapter)
    cold.decode(3, 1, 2)
    check(cold, files, 1, 2)


def test_a_copy_that_is_late_invalidates_its_rows_and_the_step_still_ends_after_its_answer(
    cold: Rig, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = note_passes(monkeypatch)
    check_late(cold, files, monkeypatch, Hand(cold, monkeypatch), lambda: bool(passed))


def note_passes(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows when the host has passed a copy, or waits for it no longer."""
    passed: list[None] = []
    whole = gates.Awaited._pass

    def noting(*args: Any) -> None:
        whole(*args)
        passed.append(None)

    monkeypatch.setattr(gates.Awaited, "_pass", noting)
    return passed


def check_late(
    cold: Rig, files: Files, monkeypatch: pytest.MonkeyPatch, hand: Any, is_late: Callable[[], bool]
) -> None:
    """``hand``: holds copies."""
    monkeypatch.setattr(gates, "LATE_S", 0.05)
    command = bring(cold, 2, 8)
    cold.open(1, PROMPT, adapter=2)
    cold.open(2, PROMPT, adapter=1)
    results = beside(cold, awaiting(cold, command, 1, others=(2,)))
    wait_until(is_late, "a gate to be passed too early", 20)
    with pytest.raises(queue.Empty):
        results.get(timeout=0.1)
    hand.let(LAYERS)
    result = results.get(timeout=30)
    assert (result.done.ok, result.done.invalid) == (True, (1,))
    assert cold.direct.wait_for(command).ok  # type: ignore[union-attr]
    cold.direct.end_sequence(1)
    del cold.sequences[1]
    cold.open(3, PROMPT, adapter=2)  # by now it is there
    cold.decode(4, 2, 3)
    check(cold, files, 2, 3)


def test_two_copies_two_adapters_and_kv_in_one_step(cold: Rig, files: Files) -> None:
    cold.open(1, [3, 1, 4, 1, 5, 9, 2, 6, 5], adapter=1)
    cold.decode(1, 1)
    held = cold.sequences.pop(1)
    cold.direct.end_sequence(1)
    on_host = cold.take_host(2)
    assert cold.swap(False, held.pages[:2], on_host).ok
    for page in held.pages:
        cold.worker._arena.page(page).fill_(float("nan"))
    cold.worker._device.synchronize()
    first, second = bring(cold, 2, 8), bring(cold, 3, 1)
    back = cold.take(2)
    cold.num_copies += 1
    kv = SwapPages(cold.num_copies, True, tuple(zip(on_host, back)), None, 8)
    cold.direct.begin(kv)
    cold.open(2, PROMPT, adapter=2)
    cold.open(3, PROMPT, adapter=3)
    cold.open(4, held.tokens, adapter=1, num_prompt=9, num_computed=8, pages=back)
    cold.open(5, PROMPT, adapter=2)
    step = cold.command(*(cold.row(sequence) for sequence in (2, 3, 4, 5)))
    step.awaits = Await(first.copy, (2, 5)), Await(second.copy, (3,)), Await(kv.copy, (4,))
    assert cold.run(step).done.invalid == ()
    cold.decode(4, 2, 3, 4, 5)
    check(cold, files, 2, 3, 4, 5)


def test_a_step_that_awaits_what_nobody_brings_fails_and_harms_none(cold: Rig, files: Files) -> None:
    cold.open(1, PROMPT, adapter=1)
    step = cold.command(cold.row(1))
    step.awaits = (Await(99, (1,)),)
    assert not cold.run(step).done.ok


def test_closing_while_a_step_waits(cold: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand(cold, monkeypatch)
    command = bring(cold, 2, 8)
    cold.open(1, PROMPT, adapter=2)
    results = beside(cold, awaiting(cold, command, 1))
    with pytest.raises(queue.Empty):
        results.get(timeout=0.1)
    closing = threading.Thread(target=cold.worker._copier.close)
    closing.start()
    hand.let(1)
    result = results.get(timeout=30)
    closing.join(30)
    assert result.done.invalid == (1,)
    assert not closing.is_alive()
