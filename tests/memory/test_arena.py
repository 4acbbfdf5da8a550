"""The pool of pages and its size."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

import pytest
import torch

from manylora.config.declaring import ConfigError
from manylora.devices.device import Device
from manylora.kernels.shapes import PageShape
from manylora.memory.budget import pool_bytes, pool_pages
from manylora.memory.pool import Arena

PAGE = PageShape(layers=3, page_tokens=4, kv_heads=2, head_dim=8, itemsize=2)


def arena(num_pages: int = 5) -> Arena:
    return Arena(num_pages, PAGE, torch.bfloat16, Device())


def test_a_page_is_one_run_of_bytes_and_zero() -> None:
    made = arena()
    assert made.pool.shape == (5, 3, 2, 4, 2, 8)
    assert not made.pool.any()
    page = made.page(2)
    assert page.shape == (3, PAGE.slab_elements)
    page[1, 0] = 7.0
    assert made.pool.view(-1)[2 * PAGE.page_elements + PAGE.slab_elements] == 7.0
    assert made.pool.count_nonzero() == 1


def test_copies_happen_in_order() -> None:
    made = arena()
    for page in range(5):
        made.page(page).fill_(page + 1)
    made.copy_pages(((0, 1), (1, 2), (4, 0)))
    assert [float(made.page(page)[0, 0]) for page in range(5)] == [5, 1, 1, 4, 5]


def test_pages_outside_the_pool_are_refused() -> None:
    for page in (-1, 5):
        with pytest.raises(IndexError):
            arena().page(page)


def test_the_dtype_must_fit_the_page() -> None:
    with pytest.raises(ValueError, match="2-byte"):
        Arena(5, PAGE, torch.float32, Device())


def test_close_frees_the_pool() -> None:
    made = arena()
    pool = weakref.ref(made.pool)
    made.close()
    made.close()
    gc.collect()
    assert pool() is None
    with pytest.raises(RuntimeError, match="closed"):
        _ = made.pool


class FakeDevice(Device):
    def __init__(self, kind: str, free: int) -> None:
        self.torch_device = torch.device(kind)
        self._free = free

    def free_bytes(self) -> int:
        return self._free


def test_default_sizes() -> None:
    gib = 2**30
    assert pool_bytes(FakeDevice("cpu", 8 * gib), None, gib) == 2 * gib
    assert pool_bytes(FakeDevice("cpu", 100 * gib), None, gib) == 4 * gib
    assert pool_bytes(FakeDevice("cuda", 100 * gib), None, 3 * gib) == 87 * gib
    assert pool_bytes(FakeDevice("cuda", gib), None, 3 * gib) == 0
    assert pool_bytes(FakeDevice("cuda", gib), 1000, 3 * gib) == 1000
    with pytest.raises(ConfigError, match="2048 MiB does not fit: 1024 MiB"):
        pool_bytes(FakeDevice("cuda", gib), 2 * gib, 0)


def test_a_share_of_the_whole_gpu_is_less_what_the_process_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    card = FakeDevice("cuda", 50 * gib)
    monkeypatch.setattr(card, "share_bytes", lambda share: int(share * 80 * gib) - 20 * gib)
    assert pool_bytes(card, None, 3 * gib, 5 * gib, share=0.5) == 12 * gib
    assert pool_bytes(card, None, 3 * gib, share=0.25) == 0
    assert pool_bytes(card, gib, 3 * gib, share=0.5) == gib
    with pytest.raises(ConfigError, match=r"5\.222e\+04 MiB does not fit"):
        pool_bytes(card, None, gib, share=0.9)
    assert pool_bytes(FakeDevice("cpu", 8 * gib), None, gib, share=0.9) == 2 * gib


def test_too_few_pages() -> None:
    assert pool_pages(4 * 1024, 1024) == 4
    with pytest.raises(ConfigError, match=r"holds 3 pages.*at least 4") as raised:
        pool_pages(4 * 2**20 - 1, 2**20)
    assert "1 MiB" in str(raised.value)
    assert "4 MiB" in str(raised.value)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_is_taken_as_pages_are_written_and_given_back() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    mib = 2**20
    before = resident_bytes()
    made = arena(num_pages=256 * mib // PAGE.page_bytes)
    assert resident_bytes() - before < 32 * mib
    assert made.pool.data_ptr() % 64 == 0
    made.pool[: made.num_pages // 4].fill_(1.0)
    assert resident_bytes() - before > 60 * mib
    made.close()
    gc.collect()
    assert resident_bytes() - before < 32 * mib
