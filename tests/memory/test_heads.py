"""Of a copy in layer groups the step loop's thread asks for the first ones, where that takes it no time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from manylora.devices.cpu import CpuCopyLane
from manylora.memory import copier as copier_module
from manylora.memory.copier import Copier
from manylora.memory.gates import CopyGate, layer_groups
from manylora.memory.host import HostPool
from manylora.memory.pace import Pace
from manylora.protocol import SwapPages
from tests.memory.test_copier import NUM_HOST_PAGES, NUM_PAGES, PAGE, Bench, opened

PAIRS = tuple(zip((7, 3, 50, 12, 31), range(20, 25)))
GROUP_BYTES = len(PAIRS) * PAGE.page_bytes // PAGE.layers


class Heads:
    """A bench whose lane is quick, and by which thread each group was asked for."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bench = bench
        bench.into.is_quick = True
        self.asked: list[str] = []
        self.broken: int | None = None
        self._copy = bench.into.copy_pieces
        monkeypatch.setattr(bench.into, "copy_pieces", self._noted)
        monkeypatch.setattr(bench.into, "end", lambda: CpuCopyLane.end(bench.into))

    def _noted(self, target: torch.Tensor, at: np.ndarray, *more: Any) -> None:
        thread = threading.current_thread()
        self.asked.append("step loop" if thread is threading.main_thread() else "lane")
        if len(self.asked) - 1 == self.broken:
            raise RuntimeError("the bus fell off")
        self._copy(target, at, *more)

    def start(self, pairs: tuple[tuple[int, int], ...] = PAIRS, num_groups: int = PAGE.layers) -> CopyGate:
        bench = self.bench
        bench.num_copies += 1
        copy = bench.num_copies
        gate = CopyGate(layer_groups(PAGE.layers, num_groups), copy)
        command = SwapPages(copy, True, pairs, None, num_groups)
        bench.copier.start(command, lambda: bench.landed.append(copy), bench.answers.put, gate)
        return gate

    def check(self) -> None:
        """All pages arrived, and no others changed."""
        answer = self.bench.answer()
        assert (answer.ok, answer.error) == (True, "")
        assert answer.copy_s > 0
        for source, target in PAIRS:
            assert torch.equal(self.bench.arena.run(target, 1), self.bench.host.run(source, 1))


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Heads]:
    for bench in opened(Bench()):
        yield Heads(bench, monkeypatch)


@pytest.mark.parametrize(
    ("head_bytes", "num_begun"),
    [(0, 0), (1, 1), (GROUP_BYTES, 1), (GROUP_BYTES + 1, 2), (10**9, PAGE.layers - 1)],
)
def test_so_much_is_asked_for_by_the_step_loops_thread(
    heads: Heads, head_bytes: int, num_begun: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier_module, "HEAD_BYTES", head_bytes)
    before = heads.bench.arena.run(0, NUM_PAGES).clone().view(NUM_PAGES, -1)
    gate = heads.start()
    heads.check()
    assert heads.asked == ["step loop"] * num_begun + ["lane"] * (PAGE.layers - num_begun)
    assert gate.wait_answer()
    changed = [n for n in range(NUM_PAGES) if not torch.equal(heads.bench.arena.run(n, 1), before[n])]
    assert set(changed) <= {target for _, target in PAIRS}


@pytest.mark.parametrize("broken", range(PAGE.layers))
def test_a_group_that_fails_fails_the_copy_and_no_other(
    heads: Heads, broken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier_module, "HEAD_BYTES", 2 * GROUP_BYTES)
    heads.broken = broken
    gate = heads.start()
    answer = heads.bench.answer()
    assert (answer.ok, answer.error) == (False, "RuntimeError: the bus fell off")
    assert not gate.wait_answer()
    assert gate.has_failed
    assert len(heads.asked) == broken + 1, "nothing is asked for behind it"
    assert heads.bench.landed == []
    heads.broken = None
    heads.start()
    heads.check()


def test_behind_other_copies_the_lanes_thread_asks(heads: Heads) -> None:
    """For they come in order."""
    bench = heads.bench
    bench.into.gate.clear()
    first = bench.start(True, (1, 1))
    bench.into.entered.wait(60)
    heads.start()
    assert heads.asked == []
    bench.into.gate.set()
    assert bench.answer().copy == first
    heads.check()
    assert heads.asked == ["lane"] * PAGE.layers


@pytest.mark.parametrize("why", ["slow to ask", "a limited rate", "many pages", "not pinned", "one group"])
def test_where_the_lanes_thread_asks_for_all(heads: Heads, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = heads.bench
    match why:
        case "slow to ask":
            bench.into.is_quick = False
        case "a limited rate":
            bench.copier._lanes[True].pace = Pace(10**12)
        case "many pages":
            monkeypatch.setattr(copier_module, "_MOST_HEAD_PAGES", len(PAIRS) - 1)
        case "not pinned":
            monkeypatch.setattr(HostPool, "pages_pinned", NUM_HOST_PAGES - 10)
    heads.start(num_groups=1 if why == "one group" else PAGE.layers)
    heads.check()
    assert set(heads.asked) == {"lane"}


def test_of_a_copy_of_nothing_nothing_is_asked_for(heads: Heads) -> None:
    heads.start(())
    assert heads.bench.answer().ok
    assert "step loop" not in heads.asked


def test_closing_breaks_off_what_was_not_asked_for(heads: Heads) -> None:
    bench = heads.bench
    asks, ask_on = threading.Event(), threading.Event()
    land = Copier._land_groups

    def land_later(*given: Any) -> str:
        if threading.current_thread() is not threading.main_thread():
            asks.set()
            assert ask_on.wait(60)
        return land(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Copier, "_land_groups", land_later)
        gate = heads.start()
        assert asks.wait(60)
        closing = threading.Thread(target=bench.copier.close)
        closing.start()
        while not bench.copier._closing:
            pass
        ask_on.set()
        closing.join(60)
    answer = bench.answer()
    assert (answer.ok, answer.error) == (False, "the engine is closing")
    assert heads.asked == ["step loop"] * (PAGE.layers - 1)
    assert not gate.wait_answer()
