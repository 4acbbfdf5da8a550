"""Packed pages read back as kernels read them: the same A and B, and PEFT's own delta."""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from manylora.adapters.files import CONFIG_NAME, WEIGHTS_NAME, FilesChanged
from manylora.adapters.pack import cell_offsets, layout_for, layout_of, load_into
from manylora.kernels.shapes import AdapterGeometry, PageShape, Projection, ProjectionGroup, adapter_geometry
from manylora.protocol.executor import AdapterError
from tests.adapters.tiny import (
    LAYERS,
    PREFIX,
    edit_tensors,
    geometry,
    inspect,
    llama_groups,
    make,
    pack,
)

KINDS: dict[str, dict[str, Any]] = {
    "list": {"r": 4, "lora_alpha": 12},
    "few": {"target_modules": ["q_proj", "down_proj"], "r": 3},
    "full name": {"target_modules": ["model.layers.1.mlp.up_proj"], "r": 2},
    "regex": {"target_modules": r".*layers\.[02]\.(self_attn|mlp)\.(q|k|up)_proj", "r": 5},
    "all-linear": {"target_modules": "all-linear", "r": 6},
    "excluded": {"target_modules": "all-linear", "exclude_modules": ["k_proj"]},
    "rslora": {"r": 7, "lora_alpha": 16, "use_rslora": True},
    "rank_pattern": {
        "r": 4,
        "rank_pattern": {r"layers\.0\..*q_proj": 9, "q_proj": 2, "model.layers.2.mlp.down_proj": 1},
        "alpha_pattern": {"down_proj": 3, r".*\.v_proj": 40, "layers.1.self_attn.q_proj": 5.5},
    },
    "rslora with patterns": {
        "use_rslora": True,
        "rank_pattern": {"o_proj": 16},
        "alpha_pattern": {"o_proj": 1},
    },
    "some layers": {"layers_to_transform": [0, 2], "r": 4},
    "one layer": {"layers_to_transform": 1, "layers_pattern": "layers", "r": 4},
    "velora": {"r": 4, "velora_config": {"num_groups": 8}},
    "gaussian": {"init_lora_weights": "gaussian", "ensure_weight_tying": False},
    "mica": {"init_lora_weights": "mica", "r": 4},
    "orthogonal": {"init_lora_weights": "orthogonal", "r": 4},
}


@pytest.mark.parametrize("kind", KINDS)
def test_packed_adapters_give_pefts_delta(kind: str, tmp_path: Path) -> None:
    model = make(tmp_path, **KINDS[kind])
    shape = geometry()
    spec = inspect(tmp_path)
    packed = pack(spec, shape)
    modules = dict(model.named_modules())
    adapted = 0
    for layer in range(LAYERS):
        for index, projection in enumerate(shape.projections):
            module = modules[f"base_model.model.{PREFIX}.{layer}.{projection.module}"]
            rank, scale = spec.ranks[index][layer], packed.layout.scales[index, layer]
            a, b = packed.factor(index, layer, "A"), packed.factor(index, layer, "B")
            assert not a[rank:].any()
            assert not b[rank:].any()
            if not hasattr(module, "lora_A"):
                assert (rank, scale) == (0, 0)
                continue
            adapted += 1
            assert torch.equal(a[:rank], module.lora_A["default"].weight)
            assert torch.equal(b[:rank], module.lora_B["default"].weight.T)
            assert scale == pytest.approx(module.scaling["default"], rel=1e-7)
            expected = module.get_delta_weight("default").T
            torch.testing.assert_close(a.T @ b * scale, expected, rtol=1e-5, atol=1e-5)
    assert adapted == sum(rank > 0 for row in spec.ranks for rank in row) > 0


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pool", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_dtype_converts_as_torch_does(stored: torch.dtype, pool: torch.dtype, tmp_path: Path) -> None:
    make(tmp_path, r=5)
    edit_tensors(tmp_path, lambda tensors: {name: t.to(stored) * 1.1 for name, t in tensors.items()})
    shape = geometry(itemsize=pool.itemsize)
    spec = inspect(tmp_path, shape)
    packed = pack(spec, shape, pool)
    tensors = load_file(tmp_path / WEIGHTS_NAME)
    for index, projection in enumerate(shape.projections):
        for layer in range(LAYERS):
            a = tensors[spec.tensor_name(layer, projection, "A")]
            b = tensors[spec.tensor_name(layer, projection, "B")]
            assert torch.equal(packed.factor(index, layer, "A"), a.to(pool))
            assert torch.equal(packed.factor(index, layer, "B"), b.T.to(pool))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("side", ["A", "B"])
def test_weights_that_are_not_finite_are_refused_by_name(value: float, side: str, tmp_path: Path) -> None:
    make(tmp_path, r=2)
    name = f"base_model.model.model.layers.1.mlp.up_proj.lora_{side}.weight"

    def invalidate(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors[name][1, 1] = value
        return tensors

    edit_tensors(tmp_path, invalidate)
    with pytest.raises(AdapterError, match=f"{name} holds NaN or infinity"):
        pack(inspect(tmp_path), geometry())


def test_a_value_that_the_pool_cannot_hold_is_refused(tmp_path: Path) -> None:
    make(tmp_path, r=2)
    edit_tensors(tmp_path, lambda tensors: {name: t * 1e6 for name, t in tensors.items()})
    with pytest.raises(AdapterError, match=r"too large for torch\.float16"):
        pack(inspect(tmp_path, geometry(itemsize=2)), geometry(itemsize=2), torch.float16)
    pack(inspect(tmp_path, geometry(itemsize=2)), geometry(itemsize=2), torch.bfloat16)


def test_files_changed_since_inspection_are_refused(tmp_path: Path) -> None:
    make(tmp_path, r=2)
    spec = inspect(tmp_path)
    for name in (WEIGHTS_NAME, CONFIG_NAME):
        before = os.stat(tmp_path / name)
        os.utime(tmp_path / name, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
        with pytest.raises(AdapterError, match="has changed"):
            pack(spec, geometry())
        os.utime(tmp_path / name, ns=(before.st_atime_ns, before.st_mtime_ns))
    pack(spec, geometry())


@pytest.mark.parametrize("name", [WEIGHTS_NAME, CONFIG_NAME])
def test_files_of_the_same_size_and_time_are_told_apart(name: str, tmp_path: Path) -> None:
    make(tmp_path, r=2)
    spec = inspect(tmp_path)
    stamps, data = os.stat(tmp_path / name), (tmp_path / name).read_bytes()

    def replace(replacement: bytes) -> None:
        """By a file of its own, as unpacking an archive does."""
        (tmp_path / "new").write_bytes(replacement)
        os.utime(tmp_path / "new", ns=(stamps.st_atime_ns, stamps.st_mtime_ns))
        os.replace(tmp_path / "new", tmp_path / name)

    begin = (
        8 + int.from_bytes(data[:8], "little") if name == WEIGHTS_NAME else data.index(b'"lora_alpha": ') + 14
    )
    replace(data[:begin] + bytes(byte ^ 1 for byte in data[begin:-1]) + data[-1:])
    with pytest.raises(FilesChanged, match="add it again"):
        pack(spec, geometry())
    replace(data)  # the same again: another inode, another time of change
    pack(spec, geometry())


def test_a_file_cut_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    make(tmp_path, r=8)
    shape = geometry(page_tokens=1)
    spec = inspect(tmp_path)
    layout = layout_of(spec, shape)
    pages = torch.zeros((layout.num_pages, shape.page.layers, shape.page.slab_elements)).unbind()
    calls = itertools.count()

    def check() -> None:
        if next(calls) == 3:
            os.truncate(tmp_path / WEIGHTS_NAME, spec.weights.size_bytes // 2)

    with pytest.raises(AdapterError, match="changed"):
        load_into(spec, layout, shape, torch.float32, pages, check)


def test_offsets_need_the_right_number_of_pages(tmp_path: Path) -> None:
    make(tmp_path, r=2)
    layout = layout_of(inspect(tmp_path), geometry())
    with pytest.raises(ValueError, match="pages"):
        cell_offsets(layout, geometry(), range(layout.num_pages + 1))


MODELS = {
    "Llama-2-7B": (32, 4096, 32, 32, 128, 11008),
    "Llama-2-13B": (40, 5120, 40, 40, 128, 13824),
    "Llama-2-70B": (80, 8192, 64, 8, 128, 28672),
    "Llama-3-8B": (32, 4096, 32, 8, 128, 14336),
    "Qwen2.5-0.5B": (24, 896, 14, 2, 64, 4864),
    "Qwen2.5-7B": (28, 3584, 28, 4, 128, 18944),
    "Mistral-7B": (32, 4096, 32, 8, 128, 14336),
}


def model_geometry(
    model: str, page_tokens: int, itemsize: int, adapter_itemsize: int | None = None
) -> AdapterGeometry:
    layers, hidden, heads, kv_heads, head_dim, inner = MODELS[model]
    page = PageShape(layers, page_tokens, kv_heads, head_dim, itemsize)
    groups = llama_groups(hidden, heads * head_dim, kv_heads * head_dim, inner)
    return adapter_geometry(page, [groups] * layers, adapter_itemsize)


@pytest.mark.parametrize("itemsizes", [(2, 2), (4, 4), (1, 2), (2, 4), (4, 2)])
@pytest.mark.parametrize("model", MODELS)
def test_cells_begin_at_aligned_elements_inside_their_pages(model: str, itemsizes: tuple[int, int]) -> None:
    """Also where keys and values have another element size than adapters."""
    shape = model_geometry(model, 16, *itemsizes)
    ranks = [0, 5, 0, 0, 3, 0, 1]
    layout = layout_for(ranks, np.ones((7, shape.page.layers), np.float32), shape)
    pages = np.random.default_rng(0).permutation(1000)[: layout.num_pages]
    offsets = cell_offsets(layout, shape, pages.tolist())
    assert shape.alignment * shape.itemsize % 16 == 0
    for layer in (0, shape.page.layers - 1):
        begins = offsets + layer * shape.slab_elements
        assert (begins % shape.alignment == 0).all()
        page, within = np.divmod(begins, shape.page_elements)
        assert (page == pages[np.arange(layout.num_cells) // shape.cells_per_page]).all()
        in_slab = within - layer * shape.slab_elements
        assert (in_slab >= 0).all()
        assert (in_slab + shape.cell_elements <= shape.slab_elements).all()
    assert len(set(offsets.tolist())) == layout.num_cells


@pytest.mark.parametrize("ranks", [[0] * 7 + [3], [0, 5, 0, 0, 3, 0, 1, 16]])
def test_rows_of_the_model_lie_across_the_layers(ranks: list[int]) -> None:
    """Each entry inside its page and its slab, none twice, and no page more than the cells of all slabs take."""
    layers = model_geometry("Llama-3-8B", 16, 2)
    head = Projection("lm_head", 4096, 128_256)
    shape = dataclasses.replace(layers, model=(ProjectionGroup("head", (head,)),))
    layout = layout_for(ranks, np.ones((8, 32), np.float32), shape)
    of_layers = layout_for(ranks[:7], np.ones((7, 32), np.float32), layers)
    assert (layout.records[:7] == of_layers.records).all()
    assert layout.num_cells == of_layers.num_cells
    assert layout.num_across == ranks[7] * (shape.cells(4096) + shape.cells(128_256))
    cells = layout.num_cells + -(-layout.num_across // 32)
    assert layout.num_pages == -(-cells // shape.cells_per_page)
    pages = np.random.default_rng(0).permutation(1000)[: layout.num_pages]
    offsets = cell_offsets(layout, shape, pages.tolist())
    page, within = np.divmod(offsets, shape.page_elements)
    slab, inside = np.divmod(within, shape.slab_elements)
    assert (offsets % shape.alignment == 0).all()
    assert (inside + shape.cell_elements <= shape.slab_elements).all()
    cell = np.argsort(pages)[np.searchsorted(np.sort(pages), page)] * shape.cells_per_page
    cell += inside // shape.cell_elements
    entry = np.arange(layout.num_across)
    assert (slab[: layout.num_cells] == 0).all()
    assert (slab[layout.num_cells :] == entry % 32).all()
    assert (cell[: layout.num_cells] == np.arange(layout.num_cells)).all()
    assert (cell[layout.num_cells :] == layout.num_cells + entry // 32).all()
    assert len(set(offsets.tolist())) == len(offsets) == layout.num_cells + layout.num_across


def test_geometries_that_cannot_be_are_refused() -> None:
    page = PageShape(layers=2, page_tokens=1, kv_heads=1, head_dim=9, itemsize=1)
    with pytest.raises(ValueError, match="18 bytes are no whole numbers of adapter elements of 4 bytes"):
        AdapterGeometry(page, ((), ()), 4, 4)
    with pytest.raises(ValueError, match="1 layers are described, a page has 2"):
        AdapterGeometry(page, ((),), 4, 1)
    narrow, wide = Projection("down", 8, 4), Projection("down", 12, 4)
    for others in (ProjectionGroup("a", (wide,)), ProjectionGroup("b", (narrow,))):
        with pytest.raises(ValueError, match="share a name or a projection"):
            AdapterGeometry(page, ((ProjectionGroup("a", (narrow,)),), (others,)), 4, 1)


@pytest.mark.parametrize("page_tokens", [16, 32])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_little_of_a_page_is_wasted(model: str, page_tokens: int, itemsize: int) -> None:
    shape = model_geometry(model, page_tokens, itemsize)
    for rank in (8, 16, 64):
        cells = sum(
            rank * (shape.cells(p.in_features) + shape.cells(p.out_features)) for p in shape.projections
        )
        held = sum(rank * (p.in_features + p.out_features) for p in shape.projections)
        pages = cells / shape.cells_per_page
        assert 1 - held / (pages * shape.page.slab_elements) < 0.05
    assert shape.cell_elements * itemsize % 16 == 0
