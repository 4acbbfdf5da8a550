"""A tiny Llama, its adapter geometry, adapters that PEFT made and saved, and a reader of packed pages."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from manylora.adapters.files import CONFIG_NAME, WEIGHTS_NAME
from manylora.adapters.pack import AdapterLayout, cell_offsets, layout_of, load_into
from manylora.adapters.peft import AdapterSpec, inspect_adapter
from manylora.kernels.shapes import (
    AdapterGeometry,
    PageShape,
    Projection,
    ProjectionGroup,
    adapter_geometry,
)

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 112, 3, 4, 2, 16
PREFIX = "model.layers"
ALL_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def llama_groups(hidden: int, query: int, kv: int, inner: int) -> tuple[ProjectionGroup, ...]:
    def attention(name: str, inputs: int, outputs: int) -> Projection:
        return Projection(f"self_attn.{name}_proj", inputs, outputs)

    def mlp(name: str, inputs: int, outputs: int) -> Projection:
        return Projection(f"mlp.{name}_proj", inputs, outputs)

    qkv = (attention("q", hidden, query), attention("k", hidden, kv), attention("v", hidden, kv))
    return (
        ProjectionGroup("qkv", qkv),
        ProjectionGroup("o", (attention("o", query, hidden),)),
        ProjectionGroup("gate_up", (mlp("gate", hidden, inner), mlp("up", hidden, inner))),
        ProjectionGroup("down", (mlp("down", inner, hidden),)),
    )


def geometry(itemsize: int = 4, page_tokens: int = 8, layers: int = LAYERS) -> AdapterGeometry:
    page = PageShape(layers, page_tokens, KV_HEADS, HEAD_DIM, itemsize)
    groups = llama_groups(HIDDEN, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, INNER)
    return adapter_geometry(page, [groups] * page.layers)


def base_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
    )
    return LlamaForCausalLM(config)


def make(folder: Path, **settings: Any) -> peft.PeftModel:
    """Save an adapter that PEFT made, all its LoRA weights random; returns the model that holds it."""
    config = peft.LoraConfig(**{"target_modules": ALL_MODULES, "task_type": "CAUSAL_LM", **settings})
    model = peft.get_peft_model(base_model(), config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return model


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / CONFIG_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder: Path, change: Any) -> None:
    """``change`` takes and returns the dict of tensors."""
    tensors = load_file(folder / WEIGHTS_NAME)
    save_file({name: t.contiguous() for name, t in change(dict(tensors)).items()}, folder / WEIGHTS_NAME)


def inspect(folder: Path, shape: AdapterGeometry | None = None, max_rank: int | None = None) -> AdapterSpec:
    return inspect_adapter(folder, shape or geometry(), PREFIX, max_rank)


@dataclasses.dataclass
class Packed:
    """A flat pool that holds an adapter at scattered pages, and the means to read it as kernels do."""

    pool: torch.Tensor
    layout: AdapterLayout
    geometry: AdapterGeometry
    cells: np.ndarray

    def factor(self, index: int, layer: int, side: str) -> torch.Tensor:
        """[rank, length]: a projection's A, or its B transposed, through records and cells."""
        projection = self.geometry.projections[index]
        length = projection.in_features if side == "A" else projection.out_features
        first_a, first_b, rank = self.layout.records[index].tolist()
        first, per_row = (first_a if side == "A" else first_b), self.geometry.cells(length)
        starts = self.cells[first : first + rank * per_row] + layer * self.geometry.slab_elements
        within = torch.arange(self.geometry.cell_elements)
        return self.pool[torch.from_numpy(starts)[:, None] + within].view(rank, per_row * len(within))[
            :, :length
        ]


def load(spec: AdapterSpec, shape: AdapterGeometry, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The adapter's page images, [pages, layers, slab_elements]."""
    layout = layout_of(spec, shape)
    images = torch.zeros((layout.num_pages, shape.page.layers, shape.page.slab_elements), dtype=dtype)
    load_into(spec, layout, shape, dtype, images.unbind(), lambda: None)
    return images


def pack(spec: AdapterSpec, shape: AdapterGeometry, dtype: torch.dtype = torch.float32) -> Packed:
    layout = layout_of(spec, shape)
    num_pages = 2 * layout.num_pages + 3
    pages = np.random.default_rng(0).permutation(num_pages)[: layout.num_pages].tolist()
    pool = torch.full((num_pages, shape.page.page_elements), float("nan"), dtype=dtype)
    pool[pages] = load(spec, shape, dtype).view(len(pages), -1)
    assert pool[pages].isfinite().all()
    return Packed(pool.view(-1), layout, shape, cell_offsets(layout, shape, pages))
