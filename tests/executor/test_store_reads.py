"""Reads through the adapter store: the same tokens, no adapter file opened, and each read has one right answer."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manylora.adapters import store
from manylora.adapters.packedfile import PackedFileReader, PackedFileWriter, PackedRun
from manylora.adapters.peft import AdapterSpec
from manylora.adapters.store import AdapterStore
from manylora.adapters.storefolder import StoreFolder
from manylora.executor import reader
from manylora.executor.keeper import Keeper
from manylora.protocol import AdapterRead, DeviceEvent, ExecutorState, ReadAdapter, ReportState, Tier
from tests.e2e.process import wait_until
from tests.executor.conftest import Files
from tests.executor.drive import Rig

PROMPT = [5, 6, 7, 8, 9]
TIERS: tuple[Tier, ...] = ("device", "host")

_opened: list[str] = []


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and str(arguments[0]).endswith(".safetensors"):
        _opened.append(str(arguments[0]))


sys.addaudithook(_note)


@pytest.fixture
def adapter(files: Files, tmp_path: Path) -> Path:
    """A copy of adapter 1, to be changed."""
    return Path(shutil.copytree(files.adapters[1], tmp_path / "adapter"))


def started(files: Files, tmp_path: Path) -> Rig:
    """A worker with a store; each start finds what the one before it left."""
    return Rig(
        files.model, tmp_path, num_pages=200, page_bytes=3072, num_host_pages=200, store=tmp_path / "store"
    )


def packed(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "store").glob("*.packed"))


def fill_store(files: Files, tmp_path: Path, *adapters: Path) -> None:
    """Read these for the first time, and wait until they are kept."""
    rig = started(files, tmp_path)
    for adapter, path in enumerate(adapters, 1):
        rig.serve(adapter, path)
    wait_until(lambda: len(packed(tmp_path)) == len(adapters), "packed files")
    rig.worker.close()


def load(rig: Rig, tier: Tier, adapter: int, path: Path) -> list[int]:
    """Bring an adapter to the device, perhaps by way of the host."""
    count = rig.direct.add_adapter(adapter, str(path)).num_pages
    pages = rig.take(count)
    if tier == "device":
        answer = rig.read(adapter, tuple(pages))
        assert answer.ok, answer.error
        return pages
    held = rig.take_host(count)
    answer = rig.read(adapter, tuple(held), "host")
    assert answer.ok, answer.error
    assert rig.swap(True, held, pages, adapter).ok
    return pages


def counts(rig: Rig) -> tuple[int, int]:
    heard: list[DeviceEvent] = []
    rig.worker.connect(heard.append)
    rig.worker.obey(ReportState())
    rig.connect()
    (state,) = heard
    assert isinstance(state, ExecutorState)
    return state.adapter_store_hits, state.adapter_store_misses


@pytest.mark.parametrize("tier", TIERS)
def test_a_second_start_opens_no_adapter_file(files: Files, tmp_path: Path, tier: Tier) -> None:
    paths = files.adapters
    _opened.clear()
    fill_store(files, tmp_path, *paths.values())
    assert {Path(name).parent for name in _opened if "adapter_model" in name} == set(paths.values())
    rig = started(files, tmp_path)
    try:
        rig.worker._host.run(0, 200).fill_(0xFF)
        rig.worker._arena.run(0, 200).fill_(0xFF)
        _opened.clear()
        for adapter, path in paths.items():
            load(rig, tier, adapter, path)
        # What no adapter was read into may be multiplied by zero.
        for page in rig.free:
            rig.worker._arena.page(page).zero_()
        for adapter in paths:
            rig.open(adapter, list(PROMPT), adapter=adapter)
        rig.decode(6, *paths)
        assert [name for name in _opened if "adapter_model" in name] == []
        assert counts(rig) == (len(paths), 0)
        for adapter, path in paths.items():
            files.reference.check_greedy(PROMPT, rig.sequences[adapter].generated, path)
    finally:
        rig.worker.close()


def test_the_bits_are_those_of_the_first_read(files: Files, tmp_path: Path) -> None:
    rig = started(files, tmp_path)
    try:
        found = []
        for turn, tier in enumerate(("device", "device", "host")):
            pages = load(rig, TIERS[tier == "host"], 1 + turn, files.adapters[1])
            found.append(torch.stack([rig.worker._arena.run(page, 1) for page in pages]))
            wait_until(lambda: packed(tmp_path), "a packed file")
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
        assert counts(rig) == (2, 1)
    finally:
        rig.worker.close()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("damage", ["first byte", "middle", "last byte", "cut", "replaced adapter"])
def test_damage_costs_time_and_nothing_else(
    files: Files, tmp_path: Path, adapter: Path, tier: Tier, damage: str
) -> None:
    fill_store(files, tmp_path, adapter)
    (file,) = packed(tmp_path)
    data = bytearray(file.read_bytes())
    place = {"first byte": 0, "middle": len(data) // 2, "last byte": -1}.get(damage)
    if place is not None:
        data[place] ^= 0x10
        file.write_bytes(data)
    elif damage == "cut":
        file.write_bytes(data[: len(data) // 3])
    else:
        shutil.rmtree(adapter)
        shutil.copytree(files.adapters[3], adapter)
    rig = started(files, tmp_path)
    try:
        load(rig, tier, 7, adapter)
        held = rig.open(7, list(PROMPT), adapter=7)
        rig.decode(4, 7)
        files.reference.check_greedy(
            PROMPT, held.generated, files.adapters[3 if place is None and damage != "cut" else 1]
        )
        assert counts(rig)[0] == 0
        wait_until(
            lambda: packed(tmp_path) and packed(tmp_path)[0].read_bytes()[:8] == b"MLorPack", "a new file"
        )
    finally:
        rig.worker.close()


def test_a_store_that_becomes_read_only_is_still_read(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill_store(files, tmp_path, files.adapters[1])
    rig = started(files, tmp_path)
    wrote = threading.Event()

    def refused(*_: Any) -> None:
        wrote.set()
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(StoreFolder, "created", refused)
    try:
        for adapter, path in files.adapters.items():
            load(rig, "device", adapter, path)
        assert wrote.wait(60)
        assert counts(rig) == (1, 2)
    finally:
        rig.worker.close()
    warnings = [record.message for record in caplog.records if "cannot be written" in record.message]
    assert len(warnings) == 1


@pytest.mark.parametrize("tier", TIERS)
def test_close_breaks_off_reads_from_the_store(
    files: Files, tmp_path: Path, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_store(files, tmp_path, files.adapters[1])
    rig = started(files, tmp_path)
    count = rig.direct.add_adapter(1, str(files.adapters[1])).num_pages
    entered, leave = threading.Event(), threading.Event()
    read, num_read = PackedFileReader.read, [0]

    def slow(self: PackedFileReader, runs: Sequence[PackedRun], targets: Sequence[np.ndarray]) -> None:
        entered.set()
        assert leave.wait(60)
        num_read[0] += 1
        read(self, runs, targets)

    monkeypatch.setattr(PackedFileReader, "read", slow)
    monkeypatch.setattr(store, "RUN_BYTES", 1024)
    monkeypatch.setattr(store, "_LEAST_BYTES", 1024)
    heard: list[DeviceEvent] = []
    rig.worker.connect(heard.append)
    take = rig.take if tier == "device" else rig.take_host
    for _ in range(3):
        rig.worker.obey(ReadAdapter(1, tuple(take(count)), tier))
    assert entered.wait(60)
    closing = threading.Thread(target=rig.worker.close)
    closing.start()
    wait_until(lambda: rig.worker._reader._closing, "closing")
    leave.set()
    closing.join(60)
    assert not closing.is_alive()
    answers = [answer for answer in heard if isinstance(answer, AdapterRead)]
    assert [(answer.ok, answer.error) for answer in answers] == [(False, "the engine is closing")] * 3
    assert num_read[0] <= reader.READERS + reader._MOST_HELPERS < count, "the pieces that were under way"
    assert len(packed(tmp_path)) == 1, "that a read was broken off says nothing against the file"


@pytest.mark.parametrize("ending", ["closed", "forgotten", "removed"])
def test_an_end_during_the_background_write(
    files: Files, tmp_path: Path, adapter: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {thread.ident for thread in threading.enumerate()}
    entered, leave = threading.Event(), threading.Event()
    write_page = PackedFileWriter.write_page

    def slow(self: PackedFileWriter, page: int, image: np.ndarray) -> None:
        entered.set()
        assert leave.wait(60)
        write_page(self, page, image)

    monkeypatch.setattr(PackedFileWriter, "write_page", slow)
    rig = started(files, tmp_path)
    rig.serve(7, adapter)  # which does not wait for the write
    assert entered.wait(60)
    if ending == "closed":
        closing = threading.Thread(target=rig.worker.close)
        closing.start()
        wait_until(lambda: rig.worker._reader._keeper and rig.worker._reader._keeper._closing, "closing")
        leave.set()
        closing.join(60)
        assert not closing.is_alive()
    else:
        rig.direct.evict_adapter(7)
        rig.direct.forget_adapter(7)
        if ending == "removed":
            shutil.rmtree(adapter)
        leave.set()
        wait_until(lambda: not list((tmp_path / "store").glob("*.part")), "the end of the write")
    rig.worker.close()
    names = sorted(path.suffix for path in (tmp_path / "store").iterdir() if path.name != "lock")
    assert names == ([".packed"] if ending == "forgotten" else [])
    assert {thread.ident for thread in threading.enumerate()} <= before


class Recorded(AdapterStore):
    """Notes what is to be written."""

    def __init__(self) -> None:
        self.written: list[str] = []

    def tidy(self, check: Any) -> None:
        check()

    def write(self, spec: AdapterSpec, check: Any) -> None:
        self.written.append(spec.path)
        check()
        if spec.path == "bad":
            raise RuntimeError("such a thing was not foreseen")


@pytest.fixture
def keeper() -> Iterator[tuple[Keeper, Recorded]]:
    store = Recorded()
    made = Keeper(store)
    yield made, store
    made.close()
    made.close()


def spec_at(path: str) -> AdapterSpec:
    spec = object.__new__(AdapterSpec)
    object.__setattr__(spec, "path", path)
    return spec


def test_nothing_is_written_beside_reads_for_a_while(
    keeper: tuple[Keeper, Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, store = keeper
    monkeypatch.setattr("manylora.executor.keeper._YIELD_S", 60.0)
    with kept.reading():
        kept.keep(spec_at("a"))
        wait_until(lambda: store.written == ["a"], "the first")
        kept.keep(spec_at("b"))
        kept.keep(spec_at("b"))
        assert store.written == ["a"], "it waits before its first page"
    wait_until(lambda: store.written == ["a", "b"], "the second, once")
    with kept.reading():
        monkeypatch.setattr("manylora.executor.keeper._YIELD_S", 0.01)
        kept.keep(spec_at("bad"))
        kept.keep(spec_at("c"))
        wait_until(lambda: store.written[2:] == ["bad", "c"], "what comes though reads never end")


def test_a_keeper_that_waits_for_a_read_can_be_closed(
    keeper: tuple[Keeper, Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, store = keeper
    monkeypatch.setattr("manylora.executor.keeper._YIELD_S", 60.0)
    with kept.reading():
        kept.keep(spec_at("a"))
        wait_until(lambda: store.written == ["a"], "the first")
        kept.close()
    kept.keep(spec_at("b"))
    assert store.written == ["a"]
