"""Copies between the tiers: right bytes, in order, one answer each, whatever goes wrong."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from manylora.devices.device import CopyLane, Device
from manylora.kernels.shapes import PageShape
from manylora.memory import copier as copier_module
from manylora.memory.copier import Copier, merged
from manylora.memory.gates import CopyGate
from manylora.memory.pool import Arena, HostPool
from manylora.protocol.commands import SwapPages
from manylora.protocol.events import CopyDone

PAGE = PageShape(layers=3, page_tokens=4, kv_heads=2, head_dim=8, itemsize=2)
NUM_PAGES, NUM_HOST_PAGES = 40, 60


class GatedLane(CopyLane):
    """Waits for ``gate`` before each transfer; fails where the target or source begins at ``broken``."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.broken: set[int] = set()
        self.broken_ends = 0
        self.transfers: list[int] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.entered.set()
        assert self.gate.wait(30)
        if self.broken & {target.data_ptr(), source.data_ptr()}:
            raise RuntimeError("the bus fell off\nin two pieces")
        self.transfers.append(source.nbytes)
        super().copy(target, source)

    def end(self) -> Callable[[], float]:
        def wait() -> float:
            if self.broken_ends:
                self.broken_ends -= 1
                raise RuntimeError("lost on the way")
            return 0.25

        return wait


class GatedDevice(Device):
    """Its lanes in the order they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.lanes: list[GatedLane] = []

    def copy_lane(self) -> CopyLane:
        self.lanes.append(GatedLane())
        return self.lanes[-1]


class Bench:
    """Both pools, filled with what tells pages apart, and a copier whose answers are collected."""

    def __init__(self, *, puts_off: bool = False) -> None:
        self.threads_before = {*threading.enumerate()}
        self.device = GatedDevice()
        self.arena = Arena(NUM_PAGES, PAGE, torch.bfloat16, self.device)
        self.host = HostPool(NUM_HOST_PAGES, PAGE, torch.bfloat16, self.device, chunk_bytes=1)
        self.copier = Copier(self.arena, self.host, self.device, puts_off=puts_off)
        self.into, self.out, *_ = self.device.lanes
        generator = torch.Generator().manual_seed(0)
        for pool in (self.arena.run(0, NUM_PAGES), self.host.run(0, NUM_HOST_PAGES)):
            pool.copy_(torch.randint(0, 256, pool.shape, generator=generator, dtype=torch.uint8))
        self.answers: queue.Queue[CopyDone] = queue.Queue()
        self.landed: list[int] = []
        self.num_copies = 0

    def start(self, to_device: bool, *pairs: tuple[int, int]) -> int:
        self.num_copies += 1
        copy = self.num_copies
        command = SwapPages(copy, to_device, pairs)
        self.copier.start(command, lambda: self.landed.append(copy), self.answers.put)
        return copy

    def answer(self) -> CopyDone:
        return self.answers.get(timeout=60)


@pytest.fixture
def bench() -> Iterator[Bench]:
    yield from opened(Bench())


@pytest.fixture
def putting_off() -> Iterator[Bench]:
    yield from opened(Bench(puts_off=True))


def opened(made: Bench) -> Iterator[Bench]:
    yield made
    for lane in made.device.lanes:
        lane.gate.set()
    made.copier.close()
    made.arena.close()
    made.host.close()


def test_only_copies_from_the_device_wait_for_what_was_just_issued(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = iter(range(1, 100))
    begun: dict[bool, list[object]] = {True: [], False: []}
    monkeypatch.setattr(bench.device, "issued", lambda: next(moments))
    monkeypatch.setattr(bench.into, "begin", begun[True].append)
    monkeypatch.setattr(bench.out, "begin", begun[False].append)
    bench.copier.settle()
    for to_device in (True, False, True, False):
        bench.start(to_device, (1, 2))
        bench.answer()
    bench.copier.settle()
    bench.start(True, (1, 2))
    bench.answer()
    assert begun == {True: [1, 1, 4], False: [2, 3]}


def test_random_runs_arrive_both_ways(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier_module, "TRANSFER_BYTES", 5 * PAGE.page_bytes)
    generator = random.Random(3)
    before_device = bench.arena.run(0, NUM_PAGES).clone().view(NUM_PAGES, -1)
    before_host = bench.host.run(0, NUM_HOST_PAGES).clone().view(NUM_HOST_PAGES, -1)
    expected_device, expected_host = before_device.clone(), before_host.clone()
    # The lower halves are only read, the upper halves only written, so that the lanes do not meet.
    count = 0
    for _ in range(60):
        to_device = generator.random() < 0.5
        sources = NUM_HOST_PAGES // 2 if to_device else NUM_PAGES // 2
        targets = NUM_PAGES if to_device else NUM_HOST_PAGES
        length = generator.randrange(1, 12)
        first, second = (
            generator.randrange(sources - length),
            generator.randrange(targets // 2, targets - length),
        )
        pairs = [(first + i, second + i) for i in range(length)]
        if generator.random() < 0.5:
            generator.shuffle(pairs)
            pairs = pairs[: generator.randrange(1, length + 1)]
        for source, destination in pairs:
            if to_device:
                expected_device[destination] = before_host[source]
            else:
                expected_host[destination] = before_device[source]
        bench.start(to_device, *pairs)
        count += 1
    assert all(bench.answer().ok for _ in range(count))
    assert torch.equal(bench.arena.run(0, NUM_PAGES).view(NUM_PAGES, -1), expected_device)
    assert torch.equal(bench.host.run(0, NUM_HOST_PAGES).view(NUM_HOST_PAGES, -1), expected_host)
    assert sorted(bench.landed) == list(range(1, count + 1))


@pytest.mark.parametrize("to_device", [True, False])
def test_merged_runs_cover_each_pair_once(to_device: bool) -> None:
    generator = random.Random(7)
    for _ in range(200):
        pages = list(range(64))
        first, second = generator.randrange(20), generator.randrange(20)
        pairs = [(page + first, page + second) for page in pages]
        pairs = generator.sample(pairs, generator.randrange(1, len(pairs)))
        most, chunk = generator.randrange(1, 9), generator.randrange(1, 20)
        runs = merged(pairs, to_device, most, chunk)
        assert sorted((s + i, d + i) for s, d, n in runs for i in range(n)) == sorted(pairs)
        for source, destination, count in runs:
            host = source if to_device else destination
            assert 1 <= count <= most
            assert host // chunk == (host + count - 1) // chunk
    assert merged([(5, 9), (3, 7), (4, 8)], to_device, 8, 100) == [(3, 7, 3)]
    assert merged([(3, 8), (4, 7)], to_device, 8, 100) == [(3, 8, 1), (4, 7, 1)]


def test_neighbours_go_in_one_transfer_up_to_a_chunk(bench: Bench) -> None:
    chunk = bench.host.chunk_pages
    assert chunk < NUM_HOST_PAGES
    bench.start(False, *((page, chunk - 2 + page) for page in (3, 1, 0, 2)))
    assert bench.answer().ok
    assert bench.out.transfers == [2 * PAGE.page_bytes] * 2


def test_each_direction_answers_in_order_and_for_itself(bench: Bench) -> None:
    bench.out.gate.clear()
    out = [bench.start(False, (page, page)) for page in range(8)]
    into = [bench.start(True, (20 + page, 20 + page)) for page in range(8)]
    assert [bench.answer().copy for _ in into] == into
    assert bench.answers.empty()
    bench.out.gate.set()
    answers = [bench.answer() for _ in out]
    assert [answer.copy for answer in answers] == out
    assert {answer.copy_s for answer in answers} == {0.25}, (
        "what the lane measured, not the wait for the gate"
    )


def test_a_copy_that_fails_harms_no_other(bench: Bench) -> None:
    bench.into.broken = {bench.host.run(7, 1).data_ptr()}
    copies = [bench.start(True, (page, page), (page + 20, page + 10)) for page in (6, 7, 8)]
    answers = [bench.answer() for _ in copies]
    assert [(answer.copy, answer.ok) for answer in answers] == list(zip(copies, (True, False, True)))
    assert answers[1].error == "RuntimeError: the bus fell off"
    assert bench.landed == [copies[0], copies[2]]
    bench.into.broken_ends = 1
    late = bench.start(True, (1, 1))
    assert bench.answer() == CopyDone(late, False, 0.0, "RuntimeError: lost on the way")


def test_pages_outside_the_pools_fail_the_copy(bench: Bench) -> None:
    for to_device, pair in ((True, (NUM_HOST_PAGES, 0)), (True, (0, NUM_PAGES)), (False, (-1, 0))):
        bench.start(to_device, pair)
        answer = bench.answer()
        assert not answer.ok
        assert "IndexError" in answer.error


def test_what_landed_raises_is_the_copys_failure(bench: Bench) -> None:
    def landed() -> None:
        raise LookupError("nobody wants it")

    bench.copier.start(SwapPages(5, True, ((0, 0),)), landed, bench.answers.put)
    assert bench.answer() == CopyDone(5, False, 0.25, "LookupError: nobody wants it")


def test_close_breaks_off_and_answers_everything_once(bench: Bench) -> None:
    bench.into.gate.clear()
    copies = [
        bench.start(True, (page, page), (page + 2, page + 4), (page + 4, page + 8)) for page in range(5)
    ]
    bench.into.entered.wait(60)
    closing = threading.Thread(target=bench.copier.close)
    closing.start()
    while not bench.copier._closing:
        pass
    bench.into.gate.set()
    closing.join(60)
    assert not closing.is_alive()
    answers = [bench.answers.get_nowait() for _ in copies]
    assert bench.answers.empty()
    assert [answer.copy for answer in answers] == copies
    assert {answer.error for answer in answers} == {"the engine is closing"}
    assert len(bench.into.transfers) == 1, "the one that was on its way"
    assert bench.landed == []
    with pytest.raises(RuntimeError):
        bench.start(True, (0, 0))
    assert bench.answers.empty()
    others = {*threading.enumerate()} - bench.threads_before
    assert not [thread for thread in others if thread.name.startswith("manylora-copy")]


def test_copies_from_the_device_begin_with_a_flush(
    putting_off: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their order, and after what had been issued when they were commanded."""
    bench, moments, begun = putting_off, iter(range(1, 100)), list[object]()
    monkeypatch.setattr(bench.device, "issued", lambda: next(moments))
    monkeypatch.setattr(bench.out, "begin", begun.append)
    copies = [bench.start(False, (page, page + 9)) for page in range(3)]
    next(moments)
    assert not bench.out.entered.is_set()
    bench.copier.flush()
    assert [bench.answer().copy for _ in copies] == copies
    assert begun == [1, 2, 3]
    bench.copier.flush()
    assert bench.answers.empty()


def test_a_copy_to_the_device_is_not_put_off(putting_off: Bench) -> None:
    """Nor does it wait for what is."""
    out, into = putting_off.start(False, (1, 2)), putting_off.start(True, (3, 4))
    assert putting_off.answer().copy == into
    assert not putting_off.out.entered.is_set()
    putting_off.copier.flush()
    assert putting_off.answer().copy == out


def test_closing_answers_what_was_put_off(putting_off: Bench) -> None:
    copies = [putting_off.start(False, (page, page)) for page in range(3)]
    putting_off.copier.close()
    answers = [putting_off.answer() for _ in copies]
    assert [answer.copy for answer in answers] == copies
    assert {answer.error for answer in answers} == {"the engine is closing"}
    with pytest.raises(RuntimeError):
        putting_off.start(False, (0, 0))
    assert putting_off.answers.empty()


def test_a_gate_opens_when_its_copy_has_landed(bench: Bench) -> None:
    """And never where it fails."""
    bench.into.gate.clear()
    gates = [CopyGate(), CopyGate()]
    for number, gate in enumerate(gates):
        command = SwapPages(number, True, ((number, number),), groups=8)
        bench.copier.start(command, lambda: None, bench.answers.put, gate)
    assert not gates[0].pass_whole(0.0)
    bench.into.broken = {bench.host.run(1, 1).data_ptr()}
    bench.into.gate.set()
    assert [bench.answer().ok for _ in gates] == [True, False]
    assert gates[0].pass_whole(0.0)
    assert torch.equal(bench.arena.run(0, 1), bench.host.run(0, 1))
    assert not gates[1].pass_whole(0.0)
    assert [gate.wait_answer() for gate in gates] == [True, False]


def test_the_cpus_own_lane_measures_its_copies() -> None:
    device = Device()
    arena = Arena(NUM_PAGES, PAGE, torch.bfloat16, device)
    host = HostPool(NUM_HOST_PAGES, PAGE, torch.bfloat16, device)
    copier = Copier(arena, host, device)
    arena.page(3).fill_(5.0)
    answers: queue.Queue[CopyDone] = queue.Queue()
    copier.start(SwapPages(1, False, ((3, 8),)), lambda: None, answers.put)
    answer = answers.get(timeout=60)
    copier.close()
    assert answer.ok
    assert answer.copy_s > 0
    assert bool((host.page(8) == 5.0).all())
