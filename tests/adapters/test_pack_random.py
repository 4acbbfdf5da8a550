"""Pages of random adapters against a plain reference: any ranks, dtypes, cells, pages, and helping threads."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from manylora.adapters import pack as pack_module
from manylora.adapters.files import CONFIG_NAME, WEIGHTS_NAME
from manylora.adapters.pack import NO_HELPERS, Helpers, cell_offsets, layout_of, load_into
from manylora.adapters.peft import AdapterSpec
from manylora.kernels.shapes import AdapterCut, AdapterGeometry, Projection, ProjectionGroup
from manylora.protocol.executor import AdapterError
from tests.adapters.tiny import HIDDEN, PREFIX, geometry, inspect, load

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def random_geometry(random: np.random.Generator, itemsize: int, has_model: bool = True) -> AdapterGeometry:
    shape = geometry(itemsize=itemsize, page_tokens=int(random.choice([1, 2, 5, 16])))
    # 48 divides no row, nor the slab of a page: rows with something behind them, slabs with a rest.
    layers = shape.layers
    if random.random() < 0.5:  # one that lacks some groups, one whose last is wider than the others'
        wide = ProjectionGroup("wide_down", (Projection("mlp.down_proj", 200, HIDDEN),))
        layers = (shape.groups, shape.groups[:2], (*shape.groups[:3], wide))
    model: tuple[ProjectionGroup, ...] = ()
    if has_model:
        model = (ProjectionGroup("head", (Projection("lm_head", HIDDEN, int(random.integers(30, 300))),)),)
    cell_elements = int(random.choice([8, 16, 48, 64]))
    return dataclasses.replace(shape, layers=layers, cell_elements=cell_elements, model=model)


def write_random(folder: Path, shape: AdapterGeometry, random: np.random.Generator) -> None:
    """An adapter on some modules; each has its own rank, each tensor its own dtype."""
    generator = torch.Generator().manual_seed(int(random.integers(2**31)))
    tensors, ranks = {}, {}
    most = int(random.choice([1, 4, 40]))
    for layer, groups in enumerate((*shape.layers, shape.model)):
        for projection in (p for group in groups for p in group.projections):
            if random.random() < 0.3 and (layer, projection) != (0, shape.projections[0]):
                continue
            rank = int(random.choice([most, int(random.integers(1, most + 1))]))
            prefix = f"{PREFIX}.{layer}." if layer < len(shape.layers) else ""
            name = f"{prefix}{projection.module}"
            ranks[name] = rank
            for side, sizes in (
                ("A", (rank, projection.in_features)),
                ("B", (projection.out_features, rank)),
            ):
                values = torch.randn(sizes, generator=generator)
                dtype = DTYPES[int(random.integers(3))]
                tensors[f"base_model.model.{name}.lora_{side}.weight"] = values.to(dtype)
    save_file(tensors, folder / WEIGHTS_NAME)
    modules = sorted({projection.module.rpartition(".")[2] for projection in shape.projections})
    settings = {
        "peft_type": "LORA",
        "r": 1,
        "lora_alpha": 1,
        "target_modules": modules,
        "rank_pattern": ranks,
    }
    (folder / CONFIG_NAME).write_text(json.dumps(settings))


def plain_pages(spec: AdapterSpec, shape: AdapterGeometry, dtype: torch.dtype) -> torch.Tensor:
    """[pages, layers, slab_elements], one cell after the other."""
    layout = layout_of(spec, shape)
    tensors = load_file(Path(spec.path) / WEIGHTS_NAME)
    pages = torch.zeros(layout.num_pages, shape.page.layers, shape.page.slab_elements, dtype=dtype)
    flat, size = pages.view(-1), shape.cell_elements
    starts = cell_offsets(layout, shape, range(layout.num_pages)).tolist()
    for index, ((first_a, first_b, *_), ranks) in enumerate(zip(layout.records.tolist(), spec.ranks)):
        cut = shape.cut(index)
        for layer, rank in enumerate(ranks):
            if not rank:
                continue
            place = layer if index < shape.num_layer_projections else None
            a = tensors[spec.tensor_name(place, cut.whole, "A")][:, cut.a_columns]
            b = tensors[spec.tensor_name(place, cut.whole, "B")][cut.b_rows].T
            for first, matrix in ((first_a, a), (first_b, b)):
                cell = first
                for row in matrix.to(dtype):
                    for piece in row.split(size):
                        at = starts[cell] + layer * shape.slab_elements
                        flat[at : at + len(piece)] = piece
                        cell += 1
    return pages


def bits(pages: torch.Tensor) -> torch.Tensor:
    return pages.view(torch.int32 if pages.dtype == torch.float32 else torch.int16)


def some(random: np.random.Generator, length: int) -> range:
    first = int(random.integers(length))
    return range(first, int(random.integers(first, length)) + 1)


def random_cut(shape: AdapterGeometry, random: np.random.Generator) -> AdapterGeometry:
    """A rank's part of these projections, in pages of which another rank's part may need more."""
    cuts = {
        p: AdapterCut(p, some(random, p.in_features), some(random, p.out_features)) for p in shape.projections
    }

    def of(group: ProjectionGroup) -> ProjectionGroup:
        cut = [cuts[p] for p in group.projections]
        projections = (Projection(c.whole.module, len(c.a_columns), len(c.b_rows)) for c in cut)
        return ProjectionGroup(group.name, tuple(projections))

    layers = tuple(tuple(map(of, groups)) for groups in shape.layers)
    widest = None if random.random() < 0.3 else shape
    return dataclasses.replace(shape, layers=layers, widest=widest, cuts=tuple(cuts.values()))


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("seed", range(24))
def test_pages_are_those_of_the_reference(
    seed: int, is_cut: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(seed)
    dtype = DTYPES[seed % 3]
    shape = random_geometry(random, dtype.itemsize, has_model=not is_cut)
    write_random(tmp_path, shape, random)
    spec = inspect(tmp_path, shape)
    if is_cut:
        shape = random_cut(shape, random)
    layout = layout_of(spec, shape)
    monkeypatch.setattr(pack_module, "_JOB_BYTES", int(random.choice([1, 4000, 2**20])))
    expected = plain_pages(spec, shape, dtype)
    pages = list(torch.full_like(expected, float("nan")).unbind())
    count = int(random.integers(0, 4))
    with ThreadPoolExecutor(max(1, count)) as threads:
        helpers = Helpers(threads, count) if count else NO_HELPERS
        load_into(spec, layout, shape, dtype, pages, lambda: None, helpers)
    assert torch.equal(bits(torch.stack(pages)), bits(expected))


@pytest.mark.parametrize("seed", range(12))
def test_the_value_that_is_not_finite_is_found(seed: int, tmp_path: Path) -> None:
    random = np.random.default_rng(seed)
    shape = random_geometry(random, 2)
    write_random(tmp_path, shape, random)
    tensors = load_file(tmp_path / WEIGHTS_NAME)
    name = str(random.choice(sorted(tensors)))
    flat = tensors[name].view(-1)
    kind = ("nan", "inf", "-inf", "1e38", "-1e38")[seed % 5]
    flat[int(random.integers(len(flat)))] = float(kind)  # 1e38 is infinity in float16
    save_file(tensors, tmp_path / WEIGHTS_NAME)
    spec = inspect(tmp_path, shape)
    is_stored = bool(torch.isfinite(flat).all())
    with pytest.raises(AdapterError, match=name) as refused:
        load(spec, shape, torch.float16)
    assert ("too large" if is_stored else "NaN or infinity") in str(refused.value)
