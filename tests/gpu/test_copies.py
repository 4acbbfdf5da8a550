"""Copies between the tiers on a CUDA device: bit-exact, pinned in the background, ordered with compute."""

from __future__ import annotations

import gc
import queue
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from manylora.devices.cuda import CudaDevice
from manylora.kernels.shapes import PageShape
from manylora.memory.copier import Copier
from manylora.memory.gates import CopyGate
from manylora.memory.pool import Arena, HostPool
from manylora.protocol.commands import SwapPages
from manylora.protocol.events import CopyDone

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PAGE = PageShape(layers=8, page_tokens=16, kv_heads=8, head_dim=64, itemsize=2)  # 256 KiB
ODD = PageShape(layers=3, page_tokens=4, kv_heads=2, head_dim=8, itemsize=2)  # 768 bytes
NUM_PAGES, NUM_HOST_PAGES = 300, 400


class Bench:
    def __init__(self, shape: PageShape = PAGE, chunk_bytes: int = 8 * 2**20) -> None:
        self.device = CudaDevice()
        self.arena = Arena(NUM_PAGES, shape, torch.bfloat16, self.device)
        self.host = HostPool(NUM_HOST_PAGES, shape, torch.bfloat16, self.device, chunk_bytes)
        self.copier = Copier(self.arena, self.host, self.device)
        self.answers: queue.Queue[CopyDone] = queue.Queue()
        self.num_copies = 0

    def start(self, to_device: bool, pairs: list[tuple[int, int]]) -> None:
        self.num_copies += 1
        command = SwapPages(self.num_copies, to_device, tuple(pairs))
        self.copier.start(command, lambda: None, self.answers.put)

    def wait(self, count: int) -> None:
        for _ in range(count):
            answer = self.answers.get(timeout=60)
            assert answer.ok, answer.error
            assert answer.copy_s > 0

    def pinned(self) -> None:
        """Wait until all of the host pool is pinned."""
        deadline = time.monotonic() + 60
        while self.host.pinned_bytes < NUM_HOST_PAGES * self.host.shape.page_bytes:
            assert time.monotonic() < deadline, "the host pool was not pinned"
            time.sleep(0.01)

    def close(self) -> None:
        self.copier.close()
        self.device.synchronize()
        self.arena.close()
        self.host.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def is_pinned(memory: torch.Tensor) -> bool:
    """As the driver sees it."""
    return bool(memory.is_pinned())


def round_trip(bench: Bench, seed: int) -> None:
    """All of the device's pages out to random host pages and, shuffled again, back in."""
    generator = torch.Generator().manual_seed(seed)
    size = bench.host.shape.page_bytes
    images = torch.randint(0, 256, (NUM_PAGES, size), generator=generator, dtype=torch.uint8)
    bench.arena.run(0, NUM_PAGES).copy_(images.view(-1))
    shuffle = random.Random(seed)
    # Some runs of neighbours, some scattered.
    shuffled = shuffle.sample(range(NUM_HOST_PAGES), 100)
    free = [page for page in range(NUM_HOST_PAGES) if page not in set(shuffled)]
    out = list(zip(range(NUM_PAGES), [*shuffled, *free[: NUM_PAGES - 100]]))
    parts = [out[at : at + 37] for at in range(0, NUM_PAGES, 37)]
    for part in parts:
        bench.start(False, part)
    bench.wait(len(parts))
    for page, host in out:
        assert torch.equal(bench.host.run(host, 1), images[page])
    bench.arena.run(0, NUM_PAGES).zero_()
    bench.copier.settle()
    back = list(range(NUM_PAGES))
    shuffle.shuffle(back)
    into = [(host, back[page]) for page, host in out]
    parts = [into[at : at + 53] for at in range(0, NUM_PAGES, 53)]
    for part in parts:
        bench.start(True, part)
    bench.wait(len(parts))
    expected = torch.empty_like(images)
    expected[back] = images
    assert torch.equal(bench.arena.run(0, NUM_PAGES).cpu().view(NUM_PAGES, size), expected)


def test_pages_return_bit_by_bit_from_pinned_memory(bench: Bench) -> None:
    bench.pinned()
    assert all(is_pinned(bench.host.run(page, 1)) for page in (0, 31, 32, NUM_HOST_PAGES - 1))
    round_trip(bench, 1)
    round_trip(bench, 2)


def test_pages_return_while_the_pool_is_being_pinned() -> None:
    bench = Bench(chunk_bytes=2**18)
    try:
        round_trip(bench, 3)
        bench.pinned()
        round_trip(bench, 4)
    finally:
        bench.close()


def test_pages_that_share_the_systems_pages() -> None:
    bench = Bench(ODD, chunk_bytes=4096)
    try:
        bench.pinned()
        round_trip(bench, 5)
    finally:
        bench.close()


def test_a_refusal_leaves_pageable_memory_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: CudaDevice, memory: torch.Tensor) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(CudaDevice, "pin", refuse)
    bench = Bench()
    try:
        round_trip(bench, 6)
        assert bench.host.pinned_bytes == 0
        assert not is_pinned(bench.host.run(0, 1))
    finally:
        bench.close()


@pytest.mark.parametrize("shape", [PAGE, ODD], ids=["even", "odd"])
def test_copies_that_steps_may_await(shape: PageShape) -> None:
    bench = Bench(shape, chunk_bytes=4096)
    generator = torch.Generator().manual_seed(9)
    try:
        bench.pinned()
        bench.host.run(0, NUM_HOST_PAGES).random_(256, generator=generator)
        for turn in range(5):
            bench.arena.run(0, NUM_PAGES).zero_()
            bench.copier.settle()
            pages = random.Random(turn).sample(range(NUM_HOST_PAGES), NUM_PAGES)
            pairs = [(host, page) for page, host in enumerate(pages) if page % 7]
            bench.num_copies += 1
            gate = CopyGate()
            command = SwapPages(bench.num_copies, True, tuple(pairs), None, 8)
            bench.copier.start(command, lambda: None, bench.answers.put, gate)
            assert gate.pass_whole(time.monotonic() + 30)
            found = bench.arena.run(0, NUM_PAGES).cpu().view(NUM_PAGES, -1)
            bench.wait(1)
            assert gate.wait_answer()
            for page, host in enumerate(pages):
                expected = bench.host.run(host, 1) if page % 7 else torch.zeros_like(found[page])
                assert torch.equal(found[page], expected)
    finally:
        bench.close()


def test_what_the_driver_refuses_is_an_error() -> None:
    device = CudaDevice()
    host = HostPool(64, PAGE, torch.bfloat16, device)
    while host.pinned_bytes < 64 * PAGE.page_bytes:
        time.sleep(0.01)
    # On another thread, as the pool does it: CUDA reports the refusal to that thread once more.
    with ThreadPoolExecutor(1) as threads, pytest.raises(RuntimeError):
        threads.submit(device.pin, host.run(0, 64)).result()
    assert torch.ones(3, device="cuda").sum().item() == 3
    host.close()


def test_a_copy_out_waits_for_compute_that_was_issued_before(bench: Bench) -> None:
    bench.pinned()
    weights = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for turn in range(5):
        value = weights
        for _ in range(20):
            value = (value @ weights).clamp(-1, 1)
        # Many milliseconds of work stand before this write; the copy must come after it all the same.
        bench.arena.page(7).fill_(float(turn + 1))
        bench.start(False, [(7, turn)])
        bench.wait(1)
        assert bool((bench.host.page(turn) == turn + 1).all())


def test_copies_to_the_device_wait_for_what_was_settled_and_for_no_step(bench: Bench) -> None:
    bench.pinned()
    bench.host.page(3).fill_(5.0)
    busy_until = torch.cuda.Event()  # type: ignore[no-untyped-call]
    torch.cuda._sleep(4_000_000_000)  # type: ignore[no-untyped-call]  # cycles: two seconds of a step
    busy_until.record()
    bench.start(True, [(3, 8)])
    bench.wait(1)
    is_over = busy_until.query()  # type: ignore[no-untyped-call]
    assert not is_over, "the copy has landed while the step still runs"
    bench.copier.settle()
    bench.start(True, [(3, 9)])
    bench.wait(1)
    assert busy_until.query()  # type: ignore[no-untyped-call]
    assert bool((bench.arena.page(8) == 5).all())
    assert bool((bench.arena.page(9) == 5).all())


def test_close_unpins_and_frees() -> None:
    bench = Bench()
    bench.pinned()
    for turn in range(20):
        bench.start(turn % 2 == 0, [(page, page) for page in range(200)])
    memory = bench.host.run(0, NUM_HOST_PAGES)
    bench.copier.close()
    answers = [bench.answers.get_nowait() for _ in range(20)]
    assert bench.answers.empty()
    assert {answer.error for answer in answers} <= {"", "the engine is closing"}
    bench.close()
    assert not is_pinned(memory)
    assert bench.host.pinned_bytes == 0
    del memory
    gc.collect()
    round_trip_again = Bench()
    try:
        round_trip(round_trip_again, 8)
    finally:
        round_trip_again.close()
