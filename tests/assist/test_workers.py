"""CPU workers as real processes: what they compute, and what becomes of a step whose workers die or are slow."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from manylora.assist.board import BoardShape
from manylora.assist.orders import LentPool, Product, ProductPart, cut
from manylora.assist.workers import HandedStep, Workers, WorkersFailed

IN, OUTS, RANKS = 24, (16, 40), (3, 8)
SLAB, CELL, LAYERS = 2048, 8, 3
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Pool:
    """A page of each layer, filled with numbers, and two adapters in it: the first is on the first projection
    alone."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        torch.manual_seed(1)
        self.data = torch.randn(LAYERS, SLAB).to(TYPES[dtype])
        self.descriptor = os.memfd_create("pool")
        os.write(self.descriptor, self.data.view(torch.uint8).numpy().tobytes())
        self.place = LentPool(self.descriptor, self.data.nbytes, SLAB, CELL, CELL)
        self.scales = [[0.5, 0.25, 2.0], [1.0, 1.5, 0.125]]
        self.records: list[list[tuple[int, int, int]]] = []
        cells: list[np.ndarray] = []
        free = np.random.default_rng(1).permutation(SLAB // CELL)
        for adapter, rank in enumerate(RANKS):
            own: list[np.ndarray] = []
            records = []
            for out in OUTS:
                if adapter == 0 and out != OUTS[0]:
                    records.append((0, 0, 0))
                    continue
                first = sum(len(part) for part in own)
                own += [free[: rank * IN // CELL], free[rank * IN // CELL : rank * (IN + out) // CELL]]
                free = free[rank * (IN + out) // CELL :]
                records.append((first, first + rank * IN // CELL, rank))
            self.records.append(records)
            cells.append(np.concatenate(own) * CELL)
        self.cells = cells

    @property
    def product(self) -> Product:
        parts, column = [], 0
        for place, width in enumerate(OUTS):
            parts.append(
                ProductPart(column, width, [records[place] for records in self.records], self.scales)
            )
            column += width
        return Product(IN, column, parts)

    def matrix(self, adapter: int, first: int, rank: int, width: int, layer: int) -> torch.Tensor:
        begins = self.cells[adapter][first : first + rank * width // CELL]
        return torch.stack([self.data[layer, b : b + CELL] for b in begins]).float().view(rank, width)

    def expected(self, x: torch.Tensor, lengths: list[int], layer: int) -> torch.Tensor:
        found = torch.zeros(len(x), sum(OUTS))
        row = 0
        for adapter, length in enumerate(lengths):
            column = 0
            for place, out in enumerate(OUTS):
                first_a, first_b, rank = self.records[adapter][place]
                if rank:
                    a = self.matrix(adapter, first_a, rank, IN, layer)
                    b = self.matrix(adapter, first_b, rank, out, layer)
                    part = x[row : row + length].float() @ a.T * self.scales[adapter][layer] @ b
                    found[row : row + length, column : column + out] = part
                column += out
            row += length
        return found


@contextlib.contextmanager
def workers(pool: Pool, count: int = 2, late_s: float = 10.0) -> Iterator[Workers]:
    found = Workers(BoardShape(count, 32, IN, sum(OUTS), pool.dtype), pool.place, [], late_s)
    try:
        assert found.wait_ready(20)
        yield found
    finally:
        found.close()
        os.close(pool.descriptor)


def step_of(found: Workers, pool: Pool, lengths: list[int], layers: int = LAYERS) -> None:
    """Jobs of several layers, each held against torch."""
    step = found.begin(lengths, [(layer, 0) for layer in range(layers)], [pool.product], pool.cells)
    assert step is not None
    for layer in range(layers):
        x = torch.randn(sum(lengths), IN).to(TYPES[pool.dtype])
        numbers = x.numpy() if pool.dtype == "float32" else x.view(torch.int16).numpy().view(np.uint16)
        step.rows(len(x), IN)[:] = numbers
        step.post()
        got = torch.from_numpy(step.take(len(x), sum(OUTS)).copy())
        torch.testing.assert_close(got, pool.expected(x, lengths, layer), rtol=1e-5, atol=1e-4)
    assert step.busy_s() > 0
    step.end()


@pytest.mark.parametrize("dtype", sorted(TYPES))
def test_products_are_torchs(dtype: str) -> None:
    pool = Pool(dtype)
    with workers(pool) as found:
        for slice_tokens in (1, 4, 100):
            found.slice_tokens = slice_tokens
            for lengths in ([5, 3], [1, 20], [1, 1]):
                step_of(found, pool, lengths)


def test_rows_are_cut_by_what_a_core_takes() -> None:
    for lengths, size, count, expected in (
        ([5], 16, 4, 1),
        ([17], 16, 4, 2),
        ([9, 9], 4, 3, 3),
        ([2], 1, 8, 2),
    ):
        slices = cut(lengths, size, count)
        assert len(slices) == expected
        rows = sorted((part.first, part.end, part.adapter) for own in slices for part in own)
        assert rows[0][0] == 0
        assert rows[-1][1] == sum(lengths)
        assert all(before[1] == after[0] for before, after in itertools.pairwise(rows))
        sizes = [sum(part.end - part.first for part in own) for own in slices]
        assert max(sizes) - min(sizes) <= 1


def begin(found: Workers, pool: Pool) -> HandedStep:
    step = found.begin([2, 2], [(0, 0), (1, 0)], [pool.product], pool.cells)
    assert step is not None
    step.rows(4, IN)[:] = 1
    return step


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_dies_or_is_slow_is_replaced(number: int) -> None:
    """What it left undone is told, and nothing of it comes later."""
    pool = Pool("float32")
    with workers(pool, late_s=0.3) as found:
        found.slice_tokens = 1
        before = found.pids()
        step = begin(found, pool)
        os.kill(before[1], number)
        step.post()
        with pytest.raises(WorkersFailed):
            step.take(4, sum(OUTS))
        assert found.wait_ready(20)
        assert found.pids()[0] == before[0]
        assert found.pids()[1] != before[1]
        step_of(found, pool, [3, 4])


def test_after_three_deaths_it_is_off(caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool("float32")
    with caplog.at_level(logging.WARNING), workers(pool, 1) as found:
        for _ in range(3):
            assert found.num_workers == 1
            assert found.wait_ready(20)
            before = found.pids()
            os.kill(before[0], signal.SIGKILL)
            deadline = time.monotonic() + 10
            while found.pids() == before:
                found.begin([1, 1], [(0, 0)], [pool.product], pool.cells)
                assert time.monotonic() < deadline
        assert found.num_workers == 0
        assert found.begin([1, 1], [(0, 0)], [pool.product], pool.cells) is None
    assert [record.getMessage() for record in caplog.records].count(
        "CPU workers have died 3 times: cold requests wait for their adapters from now on"
    ) == 1


def test_a_step_that_is_given_up_leaves_the_workers_free() -> None:
    pool = Pool("float32")
    with workers(pool) as found:
        step = begin(found, pool)
        step.end()
        step_of(found, pool, [3, 4])


_ENGINE = """
import os, sys, time
from manylora.assist.board import BoardShape
from manylora.assist.orders import LentPool
from manylora.assist.workers import Workers
descriptor = os.memfd_create("pool")
size = 64 * 2**20
os.write(descriptor, b"x" * size)
workers = Workers(BoardShape(2, 8, 8, 8, "float32"), LentPool(descriptor, size, 64, 8, 8), [], 5.0)
assert workers.wait_ready(20)
step = workers.begin([4, 4], [(0, 0)], [], [])  # they look for a job
print(*workers.pids(), flush=True)
time.sleep(60)
"""


def private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_worker_outlives_its_engine(number: int) -> None:
    """Whether they sleep or wait for a job; and none holds a copy of the pool."""
    with subprocess.Popen([sys.executable, "-c", _ENGINE], stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        pids = [int(word) for word in engine.stdout.readline().split()]
        assert len(pids) == 2
        assert all(private_bytes(pid) < 48 * 2**20 for pid in pids)
        engine.send_signal(number)
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{pid}").exists() and not is_zombie(pid) for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
