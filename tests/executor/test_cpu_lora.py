"""CPU LoRA's threads: what they compute, and what becomes of steps whose threads are slow or that are given up."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from manylora.devices.device import open_device
from manylora.executor import cpu_lora
from manylora.executor.cpu_lora import ColdWork, CpuLora, CpuLoraLate, cut
from manylora.kernels import loops
from manylora.kernels.shapes import PageShape, Projection, ProjectionGroup, adapter_geometry
from manylora.memory.pool import HostPool

IN, OUTS, RANKS, LAYERS, PAGES = 24, (16, 40), (3, 9), 3, 6
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Pool:
    """Pages full of numbers, and two adapters whose cells lie anywhere in them: the first is on the first
    projection alone."""

    def __init__(self, dtype: str = "float32") -> None:
        self.dtype = TYPES[dtype]
        page = PageShape(LAYERS, 4, 2, 32, self.dtype.itemsize)
        group = ProjectionGroup("both", (Projection("a", IN, OUTS[0]), Projection("b", IN, OUTS[1])))
        geometry = self.geometry = adapter_geometry(page, ((group,),) * LAYERS)
        self.host = HostPool(PAGES, page, self.dtype, open_device("cpu"))
        torch.manual_seed(1)
        for number in range(PAGES):
            self.host.page(number).copy_(torch.randn(self.host.page(number).shape))
        self.data = self.host.run(0, PAGES).view(self.dtype)
        self.scales = np.array([[[0.5, 0.25, 2.0]] * 2, [[1.0, 1.5, 0.125]] * 2], np.float32)
        self.records = np.zeros((2, 2, 3), np.int64)
        first = 0
        for adapter, rank in enumerate(RANKS):
            for place, out in enumerate(OUTS[: 1 + adapter]):
                of_a = rank * geometry.cells(IN)
                self.records[adapter, place] = first, first + of_a, rank
                first += of_a + rank * geometry.cells(out)
        cells = np.random.default_rng(1).permutation(PAGES * geometry.cells_per_page)[:first]
        assert len(cells) == first
        page_of, cell = np.divmod(cells, geometry.cells_per_page)
        self.cells = page_of * geometry.page_elements + cell * geometry.cell_elements

    def work(self, lengths: list[int], layers: int = LAYERS) -> ColdWork:
        jobs = np.array([(layer, 0) for layer in range(layers)], np.int64)
        return ColdWork(lengths, jobs, self.records, self.scales, self.cells)

    def matrix(self, first: int, rank: int, width: int, layer: int) -> torch.Tensor:
        size, count = self.geometry.cell_elements, self.geometry.cells(width)
        begins = self.cells[first : first + rank * count] + layer * self.geometry.slab_elements
        whole = torch.stack([self.data[begin : begin + size] for begin in begins.tolist()])
        return whole.float().view(rank, count * size)[:, :width]

    def expected(self, x: torch.Tensor, lengths: list[int], layer: int) -> torch.Tensor:
        found = []
        for adapter, rows in enumerate(torch.split(x.float(), lengths)):
            parts = []
            for place, out in enumerate(OUTS):
                first_a, first_b, rank = self.records[adapter, place].tolist()
                part = torch.zeros(len(rows), out)
                if rank:
                    a, b = self.matrix(first_a, rank, IN, layer), self.matrix(first_b, rank, out, layer)
                    part = rows @ a.T * float(self.scales[adapter, place, layer]) @ b
                parts.append(part)
            found.append(torch.cat(parts, 1))
        return torch.cat(found)


@contextlib.contextmanager
def threads(pool: Pool, count: int = 2) -> Iterator[CpuLora]:
    found = CpuLora(pool.geometry, pool.host, count)
    try:
        yield found
    finally:
        found.close()
        pool.host.close()


def run(found: CpuLora, pool: Pool, lengths: list[int]) -> None:
    """A step of all layers, each held against torch."""
    assert found.begin(pool.work(lengths))
    for layer in range(LAYERS):
        x = torch.randn(sum(lengths), IN).to(pool.dtype)
        found.rows(len(x), IN).copy_(x)
        found.post()
        found.wait()
        expected = pool.expected(x, lengths, layer)
        torch.testing.assert_close(found.results(len(x), sum(OUTS)), expected, rtol=1e-5, atol=1e-4)
    assert found.busy_s() > 0
    found.end()


@pytest.mark.parametrize("dtype", sorted(TYPES))
def test_products_are_torchs(dtype: str) -> None:
    pool = Pool(dtype)
    with threads(pool) as found:
        for slice_tokens in (1, 4, 100):
            found.slice_tokens = slice_tokens
            for lengths in ([5, 3], [1, 20], [1, 1]):
                run(found, pool, lengths)


def test_float16_is_widened_exactly() -> None:
    """All finite numbers, the smallest ones too."""
    numbers = np.arange(2**16, dtype=np.uint16)
    numbers = numbers[np.isfinite(numbers.view(np.float16))]
    into = np.empty(len(numbers), np.float32)
    loops._widen(numbers, 0, np.zeros(1, np.int64), 0, len(numbers), into)
    assert (into.view(np.uint32) == numbers.view(np.float16).astype(np.float32).view(np.uint32)).all()


def test_rows_are_cut_by_what_a_core_takes() -> None:
    for lengths, size, count, expected in (
        ([5], 16, 4, 1),
        ([17], 16, 4, 2),
        ([9, 9], 4, 3, 3),
        ([2], 1, 8, 2),
    ):
        slices = [own.tolist() for own in cut(lengths, size, count)]
        assert len(slices) == expected
        rows = sorted((first, end, adapter) for own in slices for adapter, first, end in own)
        assert rows[0][0] == 0
        assert rows[-1][1] == sum(lengths)
        assert all(before[1] == after[0] for before, after in itertools.pairwise(rows))
        sizes = [sum(end - first for _, first, end in own) for own in slices]
        assert max(sizes) - min(sizes) <= 1


def test_a_loop_sees_what_others_write_while_it_waits() -> None:
    """A word that was read once before the loop would be waited for until the bound."""
    words, clock = np.zeros((3, 8), np.int64), np.zeros(2, np.int64)
    found: list[int] = []
    waits = threading.Thread(
        target=lambda: found.append(loops.await_words(words, 2, loops.DONE, 7, 60 * 10**9, clock))
    )
    waits.start()
    for row in (1, 2):
        time.sleep(0.02)
        assert waits.is_alive()
        words[row, loops.DONE] = 7
    waits.join(30)
    assert 0 < found[0] < 30 * 10**9
    assert loops.await_words(words, 2, loops.DONE, 8, 10**6, clock) == -1


@pytest.mark.parametrize("is_late", [False, True])
def test_a_step_that_is_given_up_leaves_the_threads_free(
    is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one whose first job was never posted, as the host sees it when threads are late."""
    pool = Pool()
    with threads(pool) as found:
        assert found.begin(pool.work([2, 2]))
        if is_late:
            monkeypatch.setattr(cpu_lora, "LATE_S", 0.02)
            found.job += 1
            with pytest.raises(CpuLoraLate):
                found.wait()
            assert found.waited_s == 0.02
            monkeypatch.undo()
        found.end()
        run(found, pool, [3, 4])


def test_while_a_thread_is_at_an_old_step_nothing_new_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may still write where the new one's results would lie."""
    pool, go = Pool(), threading.Event()
    serve = loops.serve_cold
    with threads(pool, 1) as found:

        def slow(*given: Any) -> None:
            go.wait(30)
            serve(*given)

        monkeypatch.setattr(loops, "serve_cold", slow)
        assert found.begin(pool.work([2, 2]))
        found.end()
        assert not found.begin(pool.work([2, 2]))
        go.set()
        deadline = time.monotonic() + 30
        while not found.begin(pool.work([2, 2])):
            assert time.monotonic() < deadline
        found.end()
        run(found, pool, [3, 4])


def test_more_rows_than_there_is_room_for_are_not_taken() -> None:
    pool = Pool()
    with threads(pool) as found:
        assert not found.begin(pool.work([500, 13]))


def test_closing_ends_threads_and_lets_a_device_go() -> None:
    """Within a step whose jobs do not come."""
    pool = Pool()
    with threads(pool) as found:
        found.slice_tokens = 1
        assert found.begin(pool.work([2, 2])) == 2
        found.close()
        assert not [t for t in threading.enumerate() if t.name == "manylora-cpu-lora" and t in found._threads]
        assert (found.words[1:, loops.DONE] > 2**60).all()
        assert not found.begin(pool.work([2, 2]))
