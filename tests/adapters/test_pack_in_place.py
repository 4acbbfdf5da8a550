"""Packing straight into given pages: the same bytes as page images handed over, whatever lay there before."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from manylora.adapters import pack as pack_module
from manylora.adapters.pack import layout_of, load_adapter, load_into
from manylora.kernels.shapes import AdapterGeometry
from tests.adapters.tiny import edit_tensors, geometry, inspect, make


def handed_over(folder: Path, shape: AdapterGeometry, dtype: torch.dtype) -> torch.Tensor:
    spec = inspect(folder, shape)
    layout = layout_of(spec, shape)
    images: list[torch.Tensor] = []
    load_adapter(spec, layout, shape, dtype, lambda number, image: images.append(image.clone()))
    return torch.stack(images)


@pytest.fixture(params=[0, 4], ids=["alone", "threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[Executor | None]:
    if not request.param:
        yield None
        return
    with ThreadPoolExecutor(request.param) as threads:
        yield threads


def in_place(
    folder: Path, shape: AdapterGeometry, dtype: torch.dtype, threads: Executor | None
) -> torch.Tensor:
    spec = inspect(folder, shape)
    layout = layout_of(spec, shape)
    sizes = (layout.num_pages, shape.page.layers, shape.page.slab_elements)
    pool = torch.full(sizes, float("nan"), dtype=dtype)
    pages = list(reversed(pool.unbind()))
    load_into(spec, layout, shape, dtype, pages, lambda: None, threads)
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
    monkeypatch: pytest.MonkeyPatch,
    threads: Executor | None,
) -> None:
    make(tmp_path, **settings)
    shape = geometry(page_tokens=page_tokens)
    monkeypatch.setattr(pack_module, "WINDOW_BYTES", 3 * shape.page.page_bytes)
    monkeypatch.setattr(pack_module, "_TILE_ELEMENTS", 40)
    expected = handed_over(tmp_path, shape, torch.float32)
    assert bool(torch.isfinite(expected).all())
    assert torch.equal(in_place(tmp_path, shape, torch.float32, threads), expected)


def test_converted_weights(tmp_path: Path, threads: Executor | None) -> None:
    make(tmp_path, r=5)
    edit_tensors(tmp_path, lambda tensors: {name: t.to(torch.float16) for name, t in tensors.items()})
    shape = geometry(itemsize=2)
    expected = handed_over(tmp_path, shape, torch.bfloat16)
    assert torch.equal(in_place(tmp_path, shape, torch.bfloat16, threads), expected)


def test_no_part_runs_on_after_a_failure(tmp_path: Path) -> None:
    make(tmp_path, r=5)
    shape = geometry()
    spec = inspect(tmp_path, shape)
    layout = layout_of(spec, shape)
    pages = [torch.zeros(shape.page.layers, shape.page.slab_elements) for _ in range(layout.num_pages)]
    begun = []

    def check() -> None:
        begun.append(len(begun))
        if len(begun) == 1:
            raise KeyError("enough")

    with ThreadPoolExecutor(2) as threads:
        with pytest.raises(KeyError, match="enough"):
            load_into(spec, layout, shape, torch.float32, pages, check, threads)
        assert threads._work_queue.empty()
        before = torch.stack(pages)
    assert len(begun) == 2 * len(shape.projections)
    assert torch.equal(torch.stack(pages), before)


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
