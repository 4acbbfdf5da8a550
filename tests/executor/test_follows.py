"""Copies that follow reads, and steps that await reads: order by groups of layers, exact tokens, failures in the
middle, and ends in every phase."""

from __future__ import annotations

import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, cast

import pytest

from manylora.adapters import packedfile, store
from manylora.adapters.pack import _Loader
from manylora.adapters.packedfile import PackedFileReader
from manylora.memory import gates
from manylora.memory.gates import layer_groups
from manylora.models.layers import PreNormLayer
from manylora.protocol import AdapterError, AdapterRead, Await, ReadAdapter, RunStep, SwapPages
from tests.e2e.process import wait_until
from tests.executor.conftest import Files
from tests.executor.drive import Rig
from tests.executor.test_gates import LAYERS, PROMPT, beside, check, note_passes
from tests.executor.test_store_reads import fill_store, packed

Source = Literal["files", "store"]
WAYS: list[tuple[Source, str]] = [
    ("files", "host"),
    ("files", "device"),
    ("store", "host"),
    ("store", "device"),
]


class Hand:
    """Holds the first job of a read that writes to a layer, until it is told that the layer may come; then fails
    where ``broken`` says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slab_bytes: int) -> None:
        self._allowed = [threading.Event() for _ in range(LAYERS)]
        self.broken: Callable[[int], None] = lambda layer: None
        self.begun: set[int] = set()
        add, read = _Loader._add, PackedFileReader.read

        def slow_add(loader: _Loader, index: int, side: Any, layers: range, *rest: Any) -> None:
            self._hold(layers[-1])
            add(loader, index, side, layers, *rest)

        def slow_read(file: PackedFileReader, runs: Any, targets: Any) -> None:
            self._hold(runs[0].begin // slab_bytes)
            read(file, runs, targets)

        monkeypatch.setattr(_Loader, "_add", slow_add)
        monkeypatch.setattr(PackedFileReader, "read", slow_read)

    def _hold(self, layer: int) -> None:
        assert self._allowed[layer].wait(30)
        self.begun.add(layer)
        self.broken(layer)

    def let(self, *layers: int) -> None:
        for layer in layers or range(LAYERS):
            self._allowed[layer].set()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer each, as in real models."""
    monkeypatch.setattr(packedfile, "_PIECE_BYTES", 1024)
    monkeypatch.setattr(store, "RUN_BYTES", 1024)
    monkeypatch.setattr(store, "_PART_BYTES", 1024)


def started(files: Files, tmp_path: Path, source: Source = "files") -> Rig:
    """Adapter 1 is on the device; adapters 2 and 3 are known, and perhaps in the store."""
    if source == "store":
        fill_store(files, tmp_path, *files.adapters.values())
    rig = Rig(
        files.model, tmp_path, num_pages=200, page_bytes=3072, num_host_pages=200,
        store=tmp_path / "store" if source == "store" else None,
    )  # fmt: skip
    rig.serve(1, files.adapters[1])
    for adapter in (2, 3):
        rig.direct.add_adapter(adapter, str(files.adapters[adapter]))
    return rig


@pytest.fixture
def rig(files: Files, tmp_path: Path) -> Iterator[Rig]:
    made = started(files, tmp_path)
    yield made
    made.worker.close()


class Coming:
    """An adapter on its way to the device: read, and copied behind that where it goes by the host."""

    def __init__(self, rig: Rig, files: Files, adapter: int, tier: str, groups: int = 8) -> None:
        rig.num_copies += 1
        self.rig, self.number = rig, rig.num_copies
        count = rig.direct.add_adapter(99, str(files.adapters[adapter])).num_pages
        rig.direct.forget_adapter(99)
        pages = rig.take(count)
        for page in pages:
            rig.worker._arena.page(page).fill_(float("nan"))
        rig.worker._device.synchronize()
        self.copy: SwapPages | None = None
        if tier == "device":
            self.read = ReadAdapter(adapter, tuple(pages), "device", groups, self.number)
            rig.direct.begin(self.read)
            return
        held = rig.take_host(count)
        for page in held:
            rig.worker._host.page(page).fill_(float("nan"))
        self.read = ReadAdapter(adapter, tuple(held), "host", groups)
        rig.direct.begin(self.read)
        self.copy = SwapPages(self.number, True, tuple(zip(held, pages)), adapter, groups, 0, True)
        rig.direct.begin(self.copy)

    def awaiting(self, *sequences: int, others: tuple[int, ...] = ()) -> RunStep:
        step = self.rig.command(*(self.rig.row(sequence) for sequence in (*sequences, *others)))
        step.awaits = (Await(self.number, sequences),)
        return step

    def answers(self) -> tuple[AdapterRead, bool]:
        """The read's, and whether the adapter is on the device; all has been told by now."""
        commands: list[ReadAdapter | SwapPages] = [self.read]
        if self.copy is not None:
            commands.append(self.copy)
        assert all(self.rig.direct.has_landed(command) for command in commands)
        read = cast("AdapterRead", self.rig.direct.wait_for(self.read))
        return read, read.ok if self.copy is None else self.rig.direct.wait_for(self.copy).ok  # type: ignore[union-attr]


@pytest.mark.parametrize(("source", "tier"), WAYS)
@pytest.mark.parametrize("groups", [1, 3, 8])
def test_a_layer_begins_when_it_has_been_read_and_not_before(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Source, tier: str, groups: int
) -> None:
    rig = started(files, tmp_path, source)
    hand = Hand(monkeypatch, rig.worker._arena.shape.slab_bytes)
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    began: list[int] = []
    whole = PreNormLayer.__call__

    def noting(layer, *args):  # type: ignore[no-untyped-def]
        began.append(layer.attention.qkv.layer)
        result = whole(layer, *args)
        ended.put(layer.attention.qkv.layer)
        return result

    monkeypatch.setattr(PreNormLayer, "__call__", noting)
    coming = Coming(rig, files, 2, tier, groups)
    rig.open(1, PROMPT, adapter=2)
    results = beside(rig, coming.awaiting(1))
    for first, end in layer_groups(LAYERS, groups):
        hand.let(*range(first, end - 1)) if end - 1 > first else None
        with pytest.raises(queue.Empty):
            ended.get(timeout=0.05)
        assert began == list(range(first)), "layers from this group on have not begun"
        hand.let(end - 1)
        assert [ended.get(timeout=30) for _ in range(first, end)] == list(range(first, end))
    result = results.get(timeout=30)
    assert (result.done.ok, result.done.spoilt) == (True, ())
    assert result.done.stall_s > 0
    read, is_there = coming.answers()
    assert (read.ok, read.from_store, is_there) == (True, source == "store", True)
    rig.decode(4, 1)
    check(rig, files, 1)
    rig.worker.close()


def test_copies_from_the_host_pass_one_that_waits_for_a_read(
    rig: Rig, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = rig.take_host(rig.direct.add_adapter(99, str(files.adapters[3])).num_pages)
    rig.direct.forget_adapter(99)
    assert rig.read(3, tuple(held), "host").ok
    hand = Hand(monkeypatch, rig.worker._arena.shape.slab_bytes)
    coming = Coming(rig, files, 2, "host")
    assert rig.swap(True, held, rig.take(len(held)), 3).ok
    assert not rig.direct.has_landed(coming.read)
    rig.open(1, PROMPT, adapter=3)
    rig.decode(2, 1)
    hand.let()
    rig.open(2, PROMPT, adapter=2)
    assert rig.run(coming.awaiting(2, others=(1,))).done.spoilt == ()
    rig.decode(2, 1, 2)
    check(rig, files, 1, 2)


@pytest.mark.parametrize("tier", ["host", "device"])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_read_that_fails_in_the_middle_spoils_its_own_rows_only(
    rig: Rig, files: Files, monkeypatch: pytest.MonkeyPatch, tier: str, layer: int
) -> None:
    hand = Hand(monkeypatch, rig.worker._arena.shape.slab_bytes)
    hand.let()

    def break_off(at: int) -> None:
        if at == layer:
            raise AdapterError("the disk fell off")

    hand.broken = break_off
    rig.open(1, PROMPT, adapter=2)
    rig.open(2, PROMPT, adapter=1)
    rig.open(3, PROMPT[:4])
    rig.decode(2, 2)
    coming = Coming(rig, files, 2, tier)
    result = rig.run(coming.awaiting(1, others=(2, 3)))
    assert (result.done.ok, result.done.spoilt) == (True, (1,))
    read, is_there = coming.answers()
    assert (read.ok, read.error, is_there) == (False, "the disk fell off", False)
    rig.direct.end_sequence(1)
    del rig.sequences[1]
    rig.decode(3, 2, 3)
    hand.broken = lambda at: None
    again = Coming(rig, files, 2, tier)
    rig.open(4, PROMPT, adapter=2)
    assert rig.run(again.awaiting(4)).done.spoilt == ()
    rig.decode(3, 2, 3, 4)
    check(rig, files, 2, 3, 4)


@pytest.mark.parametrize("tier", ["host", "device"])
@pytest.mark.parametrize("damage", ["cut", "flip", "truncated meanwhile", "replaced meanwhile"])
def test_a_packed_file_that_is_off_between_its_groups_is_a_miss(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str, damage: str
) -> None:
    """What was handed on before is sound, and the rest comes from the adapter's own files."""
    rig = started(files, tmp_path, "store")
    size = rig.worker._arena.shape.slab_bytes
    hits = rig.worker.state()
    hand = Hand(monkeypatch, size)
    for path in packed(tmp_path):
        data = bytearray(path.read_bytes())
        if damage == "cut":
            path.write_bytes(bytes(data[:-size]))
        elif damage == "flip":
            data[-size] ^= 64  # of the last layer of its last page
            path.write_bytes(bytes(data))

    def harm(layer: int) -> None:
        if layer == 1:
            for path in packed(tmp_path):
                if damage == "truncated meanwhile":
                    os.truncate(path, path.stat().st_size - size)
                elif damage == "replaced meanwhile":
                    with path.open("r+b") as file:
                        file.seek(-size, os.SEEK_END)
                        file.write(os.urandom(size))

    hand.broken = harm
    hand.let()
    coming = Coming(rig, files, 2, tier)
    rig.open(1, PROMPT, adapter=2)
    result = rig.run(coming.awaiting(1))
    assert (result.done.ok, result.done.spoilt) == (True, ())
    read, is_there = coming.answers()
    assert (read.ok, read.from_store, is_there) == (True, False, True)
    assert rig.worker.state() != hits
    rig.decode(4, 1)
    check(rig, files, 1)
    rig.worker.close()


@pytest.mark.parametrize("tier", ["host", "device"])
def test_files_that_were_replaced_give_the_new_adapter_to_later_rows(
    files: Files, tmp_path: Path, tier: str
) -> None:
    """Its entry was made by what was known before."""
    adapter = Path(shutil.copytree(files.adapters[1], tmp_path / "adapter"))
    rig = started(files, tmp_path)
    rig.direct.add_adapter(4, str(adapter))
    shutil.copy(files.adapters[1] / "adapter_model.safetensors", adapter / "again")
    os.replace(adapter / "again", adapter / "adapter_model.safetensors")
    coming = Coming(rig, Files(files.model, {**files.adapters, 4: adapter}, files.reference), 4, tier)
    rig.open(1, PROMPT, adapter=4)
    result = rig.run(coming.awaiting(1))
    read, _ = coming.answers()
    assert result.done.spoilt == (() if read.ok else (1,))
    rig.open(2, PROMPT, adapter=1)
    rig.decode(3, 2)
    check(rig, files, 2)
    rig.worker.close()


def test_a_failed_read_leaves_the_entry_of_the_one_after_it(
    rig: Rig, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = Hand(monkeypatch, rig.worker._arena.shape.slab_bytes)
    hand.let()

    def break_off(at: int) -> None:
        raise AdapterError("the disk fell off")

    hand.broken = break_off
    first = Coming(rig, files, 2, "host")
    wait_until(lambda: rig.direct.has_landed(first.read), "the read's answer")
    hand.broken = lambda at: None
    second = Coming(rig, files, 2, "host")
    wait_until(lambda: rig.direct.has_landed(second.copy), "the copy's answer")  # type: ignore[arg-type]
    rig.open(1, PROMPT, adapter=2)
    assert rig.run(second.awaiting(1)).done.spoilt == ()
    assert not first.answers()[1]
    rig.decode(3, 1)
    check(rig, files, 1)


@pytest.mark.parametrize("tier", ["host", "device"])
def test_what_is_late_spoils_its_rows_and_the_step_ends_after_its_answer(
    rig: Rig, files: Files, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    monkeypatch.setattr(gates.Awaited.__init__, "__defaults__", (0.05,))
    hand = Hand(monkeypatch, rig.worker._arena.shape.slab_bytes)
    coming = Coming(rig, files, 2, tier)
    rig.open(1, PROMPT, adapter=2)
    rig.open(2, PROMPT, adapter=1)
    passed = note_passes(monkeypatch)
    results = beside(rig, coming.awaiting(1, others=(2,)))
    wait_until(lambda: bool(passed), "a gate to be passed too early")
    with pytest.raises(queue.Empty):
        results.get(timeout=0.1)
    hand.let()
    result = results.get(timeout=30)
    assert (result.done.ok, result.done.spoilt) == (True, (1,))
    assert coming.answers()[1]
    rig.direct.end_sequence(1)
    del rig.sequences[1]
    rig.open(3, PROMPT, adapter=2)  # by now it is there
    rig.decode(4, 2, 3)
    check(rig, files, 2, 3)


@pytest.mark.parametrize("tier", ["host", "device"])
@pytest.mark.parametrize("num_read", range(LAYERS))
def test_closing_in_every_phase(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str, num_read: int
) -> None:
    rig = started(files, tmp_path)
    hand = Hand(monkeypatch, rig.worker._arena.shape.slab_bytes)
    coming = Coming(rig, files, 2, tier)
    rig.open(1, PROMPT, adapter=2)
    results = beside(rig, coming.awaiting(1))
    for layer in range(num_read):
        hand.let(layer)
    wait_until(lambda: len(hand.begun) >= num_read, "what was let through")
    closing = threading.Thread(target=rig.worker._reader.close)
    closing.start()
    wait_until(lambda: rig.worker._reader._closing, "the reader's end")
    hand.let()  # what is being read ends; the rest is broken off
    result = results.get(timeout=30)
    closing.join(30)
    assert not closing.is_alive()
    assert result.done.spoilt == (1,)
    read, is_there = coming.answers()
    assert (read.ok, read.error, is_there) == (False, "the engine is closing", False)
    rig.worker.close()


def test_what_follows_no_read_fails_and_harms_none(rig: Rig, files: Files) -> None:
    held, pages = rig.take_host(2), rig.take(2)
    rig.num_copies += 1
    command = SwapPages(rig.num_copies, True, tuple(zip(held, pages)), 2, 8, 0, True)
    rig.direct.begin(command)
    answer = rig.direct.wait_for(command)
    assert not answer.ok  # type: ignore[union-attr]
    rig.open(1, PROMPT, adapter=1)
    rig.decode(2, 1)
    check(rig, files, 1)


def test_reads_are_forgotten_when_steps_have_ended(rig: Rig, files: Files) -> None:
    for _ in range(3):
        coming = Coming(rig, files, 2, "host")
        rig.open(1, PROMPT, adapter=2)
        assert rig.run(coming.awaiting(1)).done.spoilt == ()
        assert coming.answers()[1]
        rig.decode(2, 1)
        check(rig, files, 1)
        rig.direct.end_sequence(1)
        rig.direct.evict_adapter(2)
    rig.open(1, PROMPT)
    rig.decode(3, 1)
    assert not rig.worker._coming._fillings
    assert not rig.worker._coming._gates
