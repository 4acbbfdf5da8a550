"""Tiny random models of every family, saved as transformers 5 saves them or rewritten as 4 did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from manylora_lab.bench.reference import ReferenceOps

from manylora.models.decoder import Decoder
from manylora.models.load import load_model

VOCAB = 97
MAX_POSITIONS = 64

_COMMON = {"vocab_size": VOCAB, "num_hidden_layers": 3, "num_attention_heads": 6}
_ROTARY = _COMMON | {
    "hidden_size": 60,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 44,
    "max_position_embeddings": MAX_POSITIONS,
}
_OPT = _COMMON | {"hidden_size": 60, "ffn_dim": 44, "max_position_embeddings": MAX_POSITIONS}


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **settings}}


_LLAMA3 = _rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=16)
_YARN_MSCALE = _rope(
    "yarn",
    factor=4.0,
    original_max_position_embeddings=16,
    mscale=0.7,
    mscale_all_dim=0.4,
    beta_fast=20,
    beta_slow=2,
    truncate=False,
)
_GEMMA = _ROTARY | {"sliding_window": 5, "query_pre_attn_scalar": 24}
_CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 7.0}
_SLIDING = {"use_sliding_window": True, "sliding_window": 5}

MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, _ROTARY),
    "llama-tied": (transformers.LlamaConfig, _ROTARY | {"tie_word_embeddings": True}),
    "llama-bias": (transformers.LlamaConfig, _ROTARY | {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": (transformers.LlamaConfig, _ROTARY | _rope("linear", factor=2.5)),
    "llama-llama3": (transformers.LlamaConfig, _ROTARY | _LLAMA3),
    "llama-yarn": (transformers.LlamaConfig, _ROTARY | _YARN_MSCALE),
    "mistral": (transformers.MistralConfig, _ROTARY | {"sliding_window": None}),
    "mistral-window": (transformers.MistralConfig, _ROTARY | {"sliding_window": 5}),
    "qwen2": (transformers.Qwen2Config, _ROTARY | {"tie_word_embeddings": True}),
    "qwen2-window": (transformers.Qwen2Config, _ROTARY | _SLIDING | {"max_window_layers": 1}),
    "qwen2-yarn": (transformers.Qwen2Config, _ROTARY | _YARN),
    "qwen3": (transformers.Qwen3Config, _ROTARY),
    "qwen3-window": (
        transformers.Qwen3Config,
        _ROTARY
        | _SLIDING
        | {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "attention_bias": True,
        },
    ),
    "gemma2": (transformers.Gemma2Config, _GEMMA | _CAPS),
    "gemma3": (transformers.Gemma3TextConfig, _GEMMA | {"sliding_window_pattern": 2}),
    "gemma3-linear": (
        transformers.Gemma3TextConfig,
        _GEMMA
        | {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "final_logit_softcapping": 9.0,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
            },
        },
    ),
    "opt": (transformers.OPTConfig, _OPT),
    "opt-untied": (transformers.OPTConfig, _OPT | {"tie_word_embeddings": False}),
    "opt-350m": (transformers.OPTConfig, _OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 28}),
    "opt-no-final-norm": (transformers.OPTConfig, _OPT | {"_remove_final_layer_norm": True}),
    "galactica": (
        transformers.OPTConfig,
        _OPT | {"activation_function": "gelu", "enable_bias": False, "layer_norm_elementwise_affine": False},
    ),
}


def make_model(name: str) -> Any:
    """The random transformers model of that name, float32, every tensor random (norms and biases too)."""
    config_class, settings = MODELS[name]
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**settings), dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0 if parameter_name.endswith("weight") else 0.0, 0.3)
            else:
                parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
    return model.eval()


def rewrite_as_layout_4(folder: Path) -> None:
    """Rewrite config.json from transformers 5's spelling to 4's."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw["torch_dtype"] = raw.pop("dtype")
    rope = raw.pop("rope_parameters", None)
    if rope is not None:
        if "full_attention" in rope:
            raw["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            rope = rope["full_attention"]
            if raw.get("_sliding_window_pattern") == 2:
                raw["sliding_window_pattern"] = raw.pop("_sliding_window_pattern")
                del raw["layer_types"]
        raw["rope_theta"] = rope.pop("rope_theta")
        kind = rope.pop("rope_type")
        raw["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
        if raw.get("max_window_layers") == 1:
            del raw["layer_types"]  # early transformers 4 knew max_window_layers only
    path.write_text(json.dumps(raw))


def edit_json(path: Path, **changes: Any) -> None:
    """Set fields of a JSON file; the value ``...`` removes the field."""
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in raw.items() if value is not ...}))


def load(folder: Path, **options: Any) -> Decoder:
    """Our decoder of the folder, float32 on the CPU with the reference operations."""
    usual: dict[str, Any] = {"dtype": torch.float32, "load_format": "auto", "max_positions": MAX_POSITIONS}
    return load_model(folder, ops=ReferenceOps(), device=torch.device("cpu"), **(usual | options))
