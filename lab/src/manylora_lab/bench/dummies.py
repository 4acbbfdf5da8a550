"""Models of a shape without a checkpoint: config.json, which is all that dummy weights need."""

from __future__ import annotations

import json
from pathlib import Path

from manylora_lab.pricing.shapes import ModelShape

DEMO = ModelShape("demo", 4, 256, 8, 2, 32, 704, 4096, itemsize=4, is_tied=True)
"""The sizes of the demo model that a checkout has in ``demo/model``, for a CPU."""

_DTYPES = {2: "float16", 4: "float32"}


def dtype_name(shape: ModelShape) -> str:
    """The dtype by the shape's bytes of a number."""
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
