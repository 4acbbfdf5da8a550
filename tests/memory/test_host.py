"""The host tier's memory: shared, taken as it is written, pinned in the background, given back."""

from __future__ import annotations

import gc
import logging
import os
import threading
from pathlib import Path

import pytest
import torch

from manylora.config.declaring import ConfigError
from manylora.devices.device import Device
from manylora.kernels.shapes import PageShape
from manylora.memory.budget import host_pool_pages
from manylora.memory.pool import HostPool

PAGE = PageShape(layers=3, page_tokens=4, kv_heads=2, head_dim=8, itemsize=2)  # 768 bytes
GIB = 2**30


class PinningDevice(Device):
    """Counts what is pinned; refuses past ``limit`` chunks; ``gate`` holds the pinning thread up."""

    copies_from_pinned = True

    def __init__(self, limit: int = 10**6) -> None:
        super().__init__()
        self.limit = limit
        self.held: dict[int, int] = {}
        self.gate = threading.Event()
        self.gate.set()

    def pin(self, memory: torch.Tensor) -> None:
        self.gate.wait(60)
        if len(self.held) == self.limit:
            raise RuntimeError("out of memory (2)\nand a second line")
        self.held[memory.data_ptr()] = memory.nbytes

    def unpin(self, memory: torch.Tensor) -> None:
        assert self.held.pop(memory.data_ptr()) == memory.nbytes


def pool(num_pages: int, device: Device | None = None, chunk_bytes: int = 4096) -> HostPool:
    return HostPool(num_pages, PAGE, torch.bfloat16, device or Device(), chunk_bytes)


def finish_pinning(made: HostPool) -> None:
    assert made._pinner is not None
    made._pinner.join(60)
    assert not made._pinner.is_alive()


def test_pages_are_views_of_their_runs() -> None:
    made = pool(7)
    page = made.page(4)
    assert page.shape == (3, PAGE.slab_elements)
    assert not page.any()
    page[1, 0] = 7.0
    run = made.run(3, 3).view(torch.bfloat16)
    assert run[PAGE.page_elements + PAGE.slab_elements] == 7.0
    assert run.count_nonzero() == 1
    for first, count in ((-1, 1), (7, 1), (5, 3)):
        with pytest.raises(IndexError, match="host pool's 7"):
            made.run(first, count)
    made.close()
    made.close()
    with pytest.raises(RuntimeError, match="closed"):
        made.page(0)


def test_the_dtype_must_fit_the_page() -> None:
    with pytest.raises(ValueError, match="2-byte"):
        HostPool(5, PAGE, torch.float32, Device())


def test_no_pages_at_all() -> None:
    device = PinningDevice()
    made = pool(0, device)
    with pytest.raises(IndexError):
        made.page(0)
    assert made._pinner is None
    made.close()
    assert made.pinned_bytes == 0


def test_more_than_the_system_has() -> None:
    with pytest.raises(ConfigError, match="no memory for a host pool") as raised:
        pool(2**55)
    assert "\n" not in str(raised.value)


def test_all_is_pinned_in_the_background_and_unpinned() -> None:
    device = PinningDevice()
    device.gate.clear()
    made = pool(200, device)
    made.page(199).fill_(3.0)
    assert made.pinned_bytes == made.pages_pinned == 0, "usable before anything is pinned"
    device.gate.set()
    finish_pinning(made)
    begin = made.run(0, 1).data_ptr()
    size = os.sysconf("SC_PAGE_SIZE")
    assert made.chunk_pages * PAGE.page_bytes % size == 0
    assert made.pinned_bytes == sum(device.held.values()) == -(-200 * PAGE.page_bytes // size) * size
    assert made.pages_pinned == 200
    assert len(device.held) > 10
    assert all((address - begin) % (made.chunk_pages * PAGE.page_bytes) == 0 for address in device.held)
    assert all(address % size == 0 for address in device.held)
    made.close()
    assert device.held == {}


def test_a_refusal_is_one_warning_and_what_was_pinned_is_unpinned(caplog: pytest.LogCaptureFixture) -> None:
    device = PinningDevice(limit=3)
    with caplog.at_level(logging.WARNING):
        made = pool(200, device)
        finish_pinning(made)
    assert made.pinned_bytes == 3 * made.chunk_pages * PAGE.page_bytes
    assert made.pages_pinned == 3 * made.chunk_pages
    made.page(199).fill_(3.0)
    (record,) = caplog.records
    assert "out of memory (2)" in record.getMessage()
    assert "\n" not in record.getMessage()
    made.close()
    assert device.held == {}


def test_close_while_it_is_being_pinned() -> None:
    device = PinningDevice()
    device.gate.clear()
    made = pool(4000, device)
    threading.Timer(0.05, device.gate.set).start()
    made.close()
    assert device.held == {}
    assert made.pinned_bytes == 0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_is_taken_as_pages_are_written_and_given_back() -> None:
    def shared_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[2]) * os.sysconf("SC_PAGE_SIZE")

    mib = 2**20
    before, files = shared_bytes(), len(os.listdir("/proc/self/fd"))
    made = pool(256 * mib // PAGE.page_bytes)
    assert shared_bytes() - before < 32 * mib
    made.run(0, made.num_pages // 4).fill_(1)
    assert shared_bytes() - before > 60 * mib
    made.close()
    gc.collect()
    assert shared_bytes() - before < 32 * mib
    assert len(os.listdir("/proc/self/fd")) == files


# ---------------------------------------------------------------- how large


class Machine(Device):
    def free_bytes(self) -> int:
        return 100 * GIB


def test_default_sizes() -> None:
    def pages(kind: str, promised: int = 0, asked: int | None = None, page_bytes: int = 2**20) -> int:
        return host_pool_pages(Machine(), asked, kind, promised, page_bytes)  # type: ignore[arg-type]

    assert pages("cpu") == 4 * 1024
    assert pages("cpu", promised=92 * GIB) == 2 * 1024
    assert pages("cpu", promised=200 * GIB) == 0
    assert pages("cuda") == 50 * 1024
    assert pages("cuda", asked=0) == 0
    assert pages("cuda", asked=2**20 - 1) == 0
    assert pages("cuda", asked=99 * GIB, page_bytes=3 * 2**20) == 33 * 1024
    with pytest.raises(ConfigError, match=r"a host pool of .* does not fit") as raised:
        pages("cpu", promised=GIB, asked=100 * GIB)
    assert "beside the device's pool of 1024 MiB" in str(raised.value)
    assert "\n" not in str(raised.value)
