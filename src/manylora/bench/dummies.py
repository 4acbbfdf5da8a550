"""Models and adapters of a shape without a checkpoint: config.json for dummy weights, random adapters on disk."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from manylora.sim.shapes import ModelShape

DEMO = ModelShape("demo", 4, 256, 8, 2, 32, 704, 4096, itemsize=4, is_tied=True)
"""The sizes of the demo model that a checkout has in ``demo/model``, for a CPU."""

_MODULES = {
    "q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn",
    "gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp",
}  # fmt: skip
_DTYPES = {2: "float16", 4: "float32"}


def dtype_name(shape: ModelShape) -> str:
    """By the shape's bytes of a number."""
    return _DTYPES[shape.itemsize]


def write_model(folder: Path, shape: ModelShape, max_positions: int) -> Path:
    """A Llama's config.json, which is all that dummy weights need; returns the folder, which is made."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": dtype_name(shape),
        "tie_word_embeddings": shape.is_tied, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_size": shape.hidden, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "intermediate_size": shape.intermediate, "vocab_size": shape.vocab,
        "max_position_embeddings": max_positions,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_adapters(folder: Path, shape: ModelShape, rank: int, count: int) -> dict[str, str]:
    """Folders of ``adapter-0`` to ``adapter-{count - 1}`` by name, on all linear modules. They share one file of
    weights on disk, but nothing in an engine, which does not know that they are equal."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(shape.layers):
        for module, (inputs, outputs) in shape.modules.items():
            stem = f"base_model.model.model.layers.{layer}.{_MODULES[module]}.{module}"
            for side, sizes in (("A", (rank, inputs)), ("B", (outputs, rank))):
                values = torch.empty(sizes, dtype=getattr(torch, dtype_name(shape)))
                tensors[f"{stem}.lora_{side}.weight"] = values.uniform_(-0.02, 0.02, generator=generator)
    weights = folder / "weights.safetensors"
    save_file(tensors, weights)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(shape.modules)}
    paths = {}
    for number in range(count):
        own = folder / f"adapter-{number}"
        own.mkdir()
        (own / "adapter_config.json").write_text(json.dumps(config))
        (own / "adapter_model.safetensors").symlink_to(weights)
        paths[own.name] = str(own)
    return paths
