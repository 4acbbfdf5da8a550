"""Tiny random base models and PEFT adapters on disk: every family, and every shape of adapter that is served.

Weights are large enough that logits lie well apart and that each adapter changes what is generated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.tiny import MODELS

LORA_STD = 0.3
WEIGHTS_FILE = "adapter_model.safetensors"

_LONG = {"vocab_size": 131, "max_position_embeddings": 160}
_ODD = {
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "hidden_size": 35,
    "head_dim": 6,
    "intermediate_size": 51,
}
_MAIN = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 48,
    "head_dim": 12,
    "intermediate_size": 60,
}

FAMILIES: dict[str, tuple[type, dict[str, Any]]] = MODELS | {
    "llama-main": (transformers.LlamaConfig, _LONG | _MAIN),
    "llama-one-kv-head": (transformers.LlamaConfig, _LONG | _ODD | {"num_key_value_heads": 1}),
    "llama-no-gqa": (transformers.LlamaConfig, _LONG | _ODD | {"num_key_value_heads": 5}),
    "mistral-window-main": (transformers.MistralConfig, _LONG | _MAIN | {"sliding_window": 11}),
}

OF_RANKS: dict[str, tuple[type, dict[str, Any]]] = {
    f"ranks-{heads}-{kv_heads}": (
        transformers.LlamaConfig,
        _LONG
        | {
            "num_hidden_layers": 2,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "hidden_size": 48,
            "head_dim": 6,
            "intermediate_size": 58,
            "attention_bias": True,
            "mlp_bias": True,
        },
    )
    for heads, kv_heads in ((8, 1), (8, 2), (8, 4), (8, 8), (12, 1), (12, 2), (12, 4), (12, 12))
}
"""For engines of several ranks, which heads must come out even among. With biases, and sizes that do not."""

_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5],
    "long_factor": [1.5, 2.0, 4.0, 9.0, 14.0, 20.0],
    "original_max_position_embeddings": 32,
}


def _scaled(config_class: type, **rope: Any) -> tuple[type, dict[str, Any]]:
    parameters = {"rope_theta": 500.0, **rope}
    return config_class, _LONG | _MAIN | {"max_position_embeddings": 64, "rope_parameters": parameters}


SCALED: dict[str, tuple[type, dict[str, Any]]] = {
    "yarn": _scaled(
        transformers.Qwen2Config, rope_type="yarn", factor=4.0, original_max_position_embeddings=64
    ),
    "linear": _scaled(transformers.LlamaConfig, rope_type="linear", factor=4.0),
    "dynamic": _scaled(transformers.LlamaConfig, rope_type="dynamic", factor=4.0),
    "longrope": _scaled(transformers.LlamaConfig, **_LONGROPE),
    "longrope-factor": _scaled(transformers.MistralConfig, **_LONGROPE, attention_factor=1.3, factor=4.0),
}
"""Rotary positions that are scaled for contexts longer than those of the training."""

_WITH_EVERY_KIND = (
    *OF_RANKS,
    "llama-main",
    "llama-bias",
    "mistral-window",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "opt",
    "opt-350m",
)
"""At least one of every architecture; for the other spellings of their configs a few adapters do."""


@dataclasses.dataclass(frozen=True)
class Modules:
    """How a family names its projections."""

    attention: tuple[str, ...]
    mlp: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        return self.attention + self.mlp


_GATED = Modules(("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj"))
_OPT = Modules(("q_proj", "k_proj", "v_proj", "out_proj"), ("fc1", "fc2"))


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A base model's folder, its adapters' folders by name, and the bytes that one token of KV takes."""

    folder: Path
    adapters: dict[str, Path]
    vocab_size: int
    token_bytes: int


def write_checkpoint(
    folder: Path, family: str, adapters: Mapping[str, Mapping[str, Any]] | None = None
) -> Checkpoint:
    """Save the family's model and adapters (default: one of every kind, or of some) below ``folder``."""
    model = _random_model(family)
    model.save_pretrained(folder / "model")
    config = model.config
    if adapters is None:
        adapters = every_kind(family) if family in _WITH_EVERY_KIND else _some_kinds(family)
    paths = write_adapters(folder, model, adapters)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    token_bytes = config.num_hidden_layers * 2 * kv_heads * head_dim * 4
    return Checkpoint(folder / "model", paths, config.vocab_size, token_bytes)


def every_kind(family: str) -> dict[str, dict[str, Any]]:
    """LoraConfig settings by adapter name; ``dtype`` is that of the file."""
    modules = _OPT if MODELS.get(family, (None,))[0] is transformers.OPTConfig else _GATED
    first, last = modules.attention[0], modules.mlp[-1]
    kinds: dict[str, dict[str, Any]] = {
        "everything": {"r": 8, "target_modules": modules.all},
        "q-and-v": {"r": 3, "target_modules": ("q_proj", "v_proj"), "lora_alpha": 9},
        "only-mlp": {"r": 5, "target_modules": modules.mlp},
        "rslora": {"r": 16, "target_modules": modules.all, "use_rslora": True, "lora_alpha": 5},
        "patterns": {
            "r": 4,
            "target_modules": modules.all,
            "rank_pattern": {first: 2, rf"layers.1.*{last}": 11},
            "alpha_pattern": {rf"(?i:\b{first.upper()})": 7, last: 3.5},
        },
        "one-layer": {"r": 6, "target_modules": modules.all, "layers_to_transform": [1], "lora_alpha": 18},
        "regex": {
            "r": 7,
            "target_modules": rf"(?!vision).*layers\.[01]\..*\b({first}|{last})",
            "lora_alpha": 14,
        },
        "all-linear": {"r": 1, "target_modules": "all-linear", "lora_alpha": 3},
        "float16": {"r": 9, "target_modules": (first, last), "lora_alpha": 18, "dtype": torch.float16},
    }
    if family == "opt-350m":
        # There it includes project_in and project_out, outside the decoder's layers.
        del kinds["all-linear"]
    return kinds


def _some_kinds(family: str) -> dict[str, dict[str, Any]]:
    kinds = every_kind(family)
    return {name: kinds[name] for name in ("everything", "only-mlp", "rslora", "one-layer")}


def write_adapters(
    folder: Path, base: Any, kinds: Mapping[str, Mapping[str, Any]], seed: int = 1
) -> dict[str, Path]:
    """Save random adapters of ``base``, which gets adapted by it, each in its own folder below ``folder``."""
    dtypes, adapted = {}, None
    for name, kind in kinds.items():
        settings = dict(kind)
        dtypes[name] = settings.pop("dtype", torch.float32)
        config = _lora_config(**settings)
        if adapted is None:
            adapted = peft.get_peft_model(base, config, adapter_name=name)
        else:
            adapted.add_adapter(name, config)
    assert adapted is not None
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * LORA_STD)
    adapted.save_pretrained(
        folder, save_embedding_layers=False
    )  # else the head's base is saved beside its LoRA
    paths = {name: folder / name for name in kinds}
    for name, dtype in dtypes.items():
        if dtype is not torch.float32:
            _convert(paths[name] / WEIGHTS_FILE, dtype)
    return paths


def _lora_config(target_modules: str | Sequence[str], **settings: Any) -> peft.LoraConfig:
    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    return peft.LoraConfig(target_modules=targets, task_type="CAUSAL_LM", **settings)


def _convert(path: Path, dtype: torch.dtype) -> None:
    save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path)


def _random_model(family: str) -> Any:
    """float32, every tensor random (norms and biases too)."""
    config_class, settings = (FAMILIES | OF_RANKS | SCALED)[family]
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**settings), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0 if name.endswith("weight") else 0.0, 0.2)
            elif name.endswith("embed_tokens.weight"):
                # Gemma's is scaled: larger, tied to the head, it would only repeat the last token.
                parameter.normal_(0.0, 1.0 / getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0))
            else:
                parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
    return model.eval()
