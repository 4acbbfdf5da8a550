"""The host tier through the worker: the same bytes and tokens by every way, and a clean end in every state."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from manylora.config.declaring import ConfigError
from manylora.devices.device import CopyLane
from manylora.executor.build import build_worker
from manylora.protocol.commands import ReadAdapter, SwapPages
from manylora.protocol.events import CopyDone
from manylora.protocol.executor import DeviceEvent
from tests.executor.conftest import Files
from tests.executor.drive import Rig
from tests.executor.tiny import settings_for

PAGE_BYTES = 3072
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture
def rig(files: Files, tmp_path: Path) -> Iterator[Rig]:
    """A worker that serves all adapters; none is resident."""
    made = Rig(files.model, tmp_path, num_pages=200, page_bytes=PAGE_BYTES, num_host_pages=150)
    for adapter, path in files.adapters.items():
        made.direct.add_adapter(adapter, str(path))
    yield made
    made.worker.close()


def num_pages(rig: Rig, files: Files, adapter: int) -> int:
    return rig.direct.add_adapter(adapter, str(files.adapters[adapter])).num_pages


def read_to_host(rig: Rig, files: Files, adapter: int) -> list[int]:
    pages = rig.take_host(num_pages(rig, files, adapter))
    answer = rig.read(adapter, tuple(pages), "host")
    assert answer.ok, answer.error
    return pages


def device_bytes(rig: Rig, pages: list[int]) -> torch.Tensor:
    return torch.stack([rig.worker._arena.run(page, 1) for page in pages])


def check(rig: Rig, files: Files) -> None:
    for held in rig.sequences.values():
        prompt = held.tokens[: held.num_prompt]
        files.reference.check_greedy(prompt, held.generated, files.path(held.adapter))


def test_a_read_to_the_host_and_a_swap_equal_a_read_to_the_device(rig: Rig, files: Files) -> None:
    # Stale bytes that a kernel must never meet.
    rig.worker._host.run(0, 150).fill_(0xFF)
    for adapter in files.adapters:
        sources = read_to_host(rig, files, adapter)
        direct = list(rig.serve(adapter, files.adapters[adapter]))
        rig.direct.evict_adapter(adapter)
        pages = rig.take(len(sources))
        answer = rig.swap(True, sources, pages, adapter)
        assert answer.ok, answer.error
        assert torch.equal(device_bytes(rig, pages), device_bytes(rig, direct))
        rig.worker._arena.pool[direct] = float("nan")
        rig.open(adapter, PROMPT, adapter)
    rig.decode(8, *files.adapters)
    check(rig, files)


def test_a_read_to_the_host_makes_nothing_resident(rig: Rig, files: Files) -> None:
    read_to_host(rig, files, 1)
    rig.open(1, PROMPT, adapter=1)
    result = rig.step(rig.row(1))
    assert not result.done.ok


def test_an_adapter_comes_and_goes_many_times(rig: Rig, files: Files) -> None:
    sources = {adapter: read_to_host(rig, files, adapter) for adapter in files.adapters}
    for turn in range(12):
        adapter = 1 + turn % 3
        pages = rig.take(len(sources[adapter]))
        assert rig.swap(True, sources[adapter], pages, adapter).ok
        rig.open(turn, [turn + 1, *PROMPT], adapter)
        rig.decode(3, turn)
        rig.direct.end_sequence(turn)
        rig.direct.evict_adapter(adapter)
        rig.worker._arena.pool[pages] = float("nan")
        rig.free[:0] = pages
    check(rig, files)


def test_kv_that_was_saved_and_brought_back_elsewhere(rig: Rig, files: Files) -> None:
    rig.serve(1, files.adapters[1])
    held = rig.open(1, [3, 1, 4, 1, 5, 9, 2, 6, 5], adapter=1)
    rig.decode(1, 1)
    rig.direct.end_sequence(1)
    saved = held.pages[:2]
    on_host = rig.take_host(2)
    assert rig.swap(False, saved, on_host).ok
    for page in held.pages:
        rig.worker._arena.page(page).fill_(float("nan"))
    back = rig.take(2)
    assert rig.swap(True, on_host, back).ok
    rig.open(2, held.tokens, adapter=1, num_prompt=9, num_computed=8, pages=back)
    rig.decode(6, 2)
    del rig.sequences[1]
    check(rig, files)


def test_a_swap_in_during_steps(rig: Rig, files: Files) -> None:
    rig.serve(1, files.adapters[1])
    rig.open(1, PROMPT, adapter=1)
    sources = read_to_host(rig, files, 2)
    pages = rig.take(len(sources))
    copy = SwapPages(1, True, tuple(zip(sources, pages)), 2)
    rig.direct.begin(copy)
    while not rig.direct.has_landed(copy) and len(rig.sequences[1].generated) < 30:
        rig.decode(1, 1)
    answer = rig.direct.wait_for(copy)
    assert isinstance(answer, CopyDone)
    assert answer == CopyDone(1, True, answer.copy_s)
    rig.open(2, PROMPT, adapter=2)
    rig.decode(5, 2)
    check(rig, files)


# ---------------------------------------------------------------- failure


def test_an_adapter_removed_before_or_during_its_swap(
    rig: Rig, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = read_to_host(rig, files, 2)
    pages = rig.take(len(sources))
    real = CopyLane.copy

    def copy_and_remove(lane: CopyLane, target: torch.Tensor, source: torch.Tensor) -> None:
        real(lane, target, source)
        rig.direct.forget_adapter(2)

    with monkeypatch.context() as patch:
        patch.setattr(CopyLane, "copy", copy_and_remove)
        during = rig.swap(True, sources, pages, 2)
    before = rig.swap(True, sources, pages, 2)
    for answer in (during, before):
        assert not answer.ok
        assert "not known" in answer.error
    rig.open(1, PROMPT)
    rig.decode(3, 1)
    assert 2 not in rig.worker._tables
    rig.direct.evict_adapter(2)
    check(rig, files)


def test_wrong_numbers_of_pages_are_answers(rig: Rig, files: Files) -> None:
    sources = read_to_host(rig, files, 1)
    pages = rig.take(len(sources))
    answer = rig.swap(True, sources[1:], pages[1:], 1)
    assert not answer.ok
    assert "pages" in answer.error
    short = rig.read(1, tuple(sources[1:]), "host")
    assert not short.ok
    assert "pages" in short.error
    outside = rig.read(1, (150, *sources[1:]), "host")
    assert not outside.ok
    assert "host pool's 150" in outside.error


def test_without_a_host_pool(files: Files, tmp_path: Path) -> None:
    rig = Rig(files.model, tmp_path, num_pages=200, page_bytes=PAGE_BYTES, num_host_pages=0)
    assert rig.policy.num_host_pages == rig.facts.num_host_pages == 0
    rig.serve(1, files.adapters[1])
    rig.open(1, PROMPT, adapter=1)
    rig.decode(4, 1)
    assert not rig.swap(False, [0], [0]).ok
    assert not rig.read(1, (0,), "host").ok
    rig.worker.close()
    check(rig, files)


def test_less_than_a_page_is_no_host_pool_and_too_much_is_refused(files: Files, tmp_path: Path) -> None:
    settings = settings_for(files.model, num_pages=8, page_bytes=PAGE_BYTES - 1, num_host_pages=1)
    worker, policy, _ = build_worker(settings, registry_path=tmp_path / "r")
    worker.close()
    assert policy.num_host_pages == 0
    settings = settings_for(files.model, num_pages=8, page_bytes=PAGE_BYTES, num_host_pages=2**40)
    with pytest.raises(ConfigError, match=r"host pool of .* does not fit") as raised:
        build_worker(settings, registry_path=tmp_path / "r")
    assert "\n" not in str(raised.value)


# ---------------------------------------------------------------- the end


def test_close_during_copies_and_reads(rig: Rig, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = read_to_host(rig, files, 2)
    entered, leave = threading.Event(), threading.Event()
    real = CopyLane.copy

    def slow(lane: CopyLane, target: torch.Tensor, source: torch.Tensor) -> None:
        entered.set()
        assert leave.wait(60)
        real(lane, target, source)

    monkeypatch.setattr(CopyLane, "copy", slow)
    heard: list[DeviceEvent] = []
    rig.worker.connect(heard.append)
    for copy in range(1, 6):
        pages = rig.take(len(sources))
        rig.worker.obey(SwapPages(copy, True, tuple(zip(sources, pages)), 2))
        rig.worker.obey(SwapPages(10 + copy, False, ((pages[0], 100 + copy),)))
        rig.worker.obey(ReadAdapter(1, tuple(rig.take_host(1)), "host"))
    assert entered.wait(60)
    closing = threading.Thread(target=rig.worker.close)
    closing.start()
    while not rig.worker._copier._closing:
        pass
    leave.set()
    closing.join(60)
    assert not closing.is_alive()
    answers = [answer for answer in heard if isinstance(answer, CopyDone)]
    assert sorted(answer.copy for answer in answers) == [1, 2, 3, 4, 5, 11, 12, 13, 14, 15]
    assert len(heard) - len(answers) == 5
    assert not any(answer.ok for answer in answers if answer.copy in (2, 3, 4, 5))
    rig.worker.obey(SwapPages(30, True, ((0, 0),), None))
    rig.worker.obey(SwapPages(31, True, tuple(zip(sources, sources)), 2))
    answers = [answer for answer in heard if isinstance(answer, CopyDone)]
    assert [(answer.copy, answer.ok) for answer in answers[-2:]] == [(30, False), (31, False)]


def test_close_frees_the_host_pool_and_ends_the_threads(files: Files, tmp_path: Path) -> None:
    before = {thread.ident for thread in threading.enumerate()}
    rig = Rig(files.model, tmp_path, num_pages=200, page_bytes=PAGE_BYTES, num_host_pages=150)
    read_to_host(rig, files, 1)
    assert rig.swap(False, [0, 1], rig.take_host(2)).ok
    assert rig.worker._host._bytes is not None
    memory = weakref.ref(rig.worker._host._bytes)
    rig.worker.close()
    gc.collect()
    assert memory() is None
    assert {thread.ident for thread in threading.enumerate()} <= before
