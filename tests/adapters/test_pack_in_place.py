"""Packing into given pages: the same bytes with any threads, whatever lay there before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from manylora.adapters import pack as pack_module
from manylora.adapters.pack import NO_HELPERS, Helpers, layout_of, load_into, run_all
from manylora.kernels.shapes import AdapterGeometry
from tests.adapters.tiny import edit_tensors, geometry, inspect, load, make


@pytest.fixture(params=[0, 4], ids=["alone", "threads"])
def helpers(request: pytest.FixtureRequest) -> Iterator[Helpers]:
    if not request.param:
        yield NO_HELPERS
        return
    with ThreadPoolExecutor(request.param) as threads:
        yield Helpers(threads, request.param)


def in_place(folder: Path, shape: AdapterGeometry, dtype: torch.dtype, helpers: Helpers) -> torch.Tensor:
    spec = inspect(folder, shape)
    layout = layout_of(spec, shape)
    sizes = (layout.num_pages, shape.page.layers, shape.page.slab_elements)
    pool = torch.full(sizes, float("nan"), dtype=dtype)
    pages = list(reversed(pool.unbind()))
    load_into(spec, layout, shape, dtype, pages, lambda: None, helpers)
    return torch.stack(pages)


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
@pytest.mark.parametrize(
    "settings",
    [
        {"r": 11, "rank_pattern": {r"layers\.1\..*": 3, "o_proj": 17}},
        {"r": 4, "layers_to_transform": [0, 2]},
        {"r": 1, "target_modules": ["down_proj"]},
    ],
    ids=["ranks", "layers", "one"],
)
def test_the_bytes_are_the_same(
    settings: dict[str, object],
    page_tokens: int,
    tmp_path: Path,
    helpers: Helpers,
) -> None:
    make(tmp_path, **settings)
    shape = geometry(page_tokens=page_tokens)
    expected = load(inspect(tmp_path, shape), shape)
    assert bool(torch.isfinite(expected).all())
    assert torch.equal(in_place(tmp_path, shape, torch.float32, helpers), expected)


def test_converted_weights(tmp_path: Path, helpers: Helpers) -> None:
    make(tmp_path, r=5)
    edit_tensors(tmp_path, lambda tensors: {name: t.to(torch.float16) for name, t in tensors.items()})
    shape = geometry(itemsize=2)
    expected = load(inspect(tmp_path, shape), shape, torch.bfloat16)
    assert torch.equal(in_place(tmp_path, shape, torch.bfloat16, helpers), expected)


@pytest.mark.parametrize("helper_fails", [False, True])
def test_nobody_runs_on_after_a_failure(
    helper_fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, r=5)
    shape = geometry()
    spec = inspect(tmp_path, shape)
    layout = layout_of(spec, shape)
    pages = [torch.zeros(shape.page.layers, shape.page.slab_elements) for _ in range(layout.num_pages)]
    caller, both = threading.current_thread(), threading.Barrier(2)
    went_on, taken = [], threading.Event()

    class Jobs:
        """Tells when all have been taken: by the one that failed, so that nobody begins another."""

        def __init__(self, jobs: list[Any]) -> None:
            self.jobs = iter(jobs)

        def __iter__(self) -> Jobs:
            return self

        def __next__(self) -> Any:
            for job in self.jobs:
                return job
            taken.set()
            raise StopIteration

    monkeypatch.setattr(pack_module, "run_all", lambda jobs, helpers, new: run_all(Jobs(jobs), helpers, new))

    def check() -> None:
        both.wait(timeout=60)  # breaks for a second job of the one that goes on
        if (threading.current_thread() is not caller) == helper_fails:
            raise KeyError("enough")
        assert taken.wait(60)
        went_on.append(threading.current_thread())

    with ThreadPoolExecutor(1) as threads:
        with pytest.raises(KeyError, match="enough"):
            load_into(spec, layout, shape, torch.float32, pages, check, Helpers(threads, 1))
        assert len(went_on) == 1
        before = torch.stack(pages)
        threads.submit(lambda: None).result()
    assert torch.equal(torch.stack(pages), before)


def test_busy_helpers_are_not_awaited(tmp_path: Path) -> None:
    make(tmp_path, r=5)
    shape = geometry()
    expected = load(inspect(tmp_path, shape), shape)
    leave = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        busy = threads.submit(leave.wait, 60)
        assert torch.equal(in_place(tmp_path, shape, torch.float32, Helpers(threads, 1)), expected)
        assert not busy.done()
        leave.set()


def test_it_breaks_off_and_counts_pages(tmp_path: Path) -> None:
    make(tmp_path, r=5)
    shape = geometry()
    spec = inspect(tmp_path, shape)
    layout = layout_of(spec, shape)
    pages = [torch.zeros(shape.page.layers, shape.page.slab_elements) for _ in range(layout.num_pages)]
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        load_into(spec, layout, shape, torch.float32, pages, check)
    assert calls == 3
    with pytest.raises(ValueError, match="pages"):
        load_into(spec, layout, shape, torch.float32, pages[1:], lambda: None)
    with pytest.raises(ValueError, match="4-byte"):
        load_into(spec, layout, shape, torch.bfloat16, pages, lambda: None)
