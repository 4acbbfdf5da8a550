"""Qwen3 (dense): q and k are normalised head by head before rope."""

from __future__ import annotations

from manylora.models.fields import Fields
from manylora.models.rotary import Defaults, qwen_windows, read_rotary
from manylora.models.spec import ModelConfig

_DEFAULTS = Defaults(
    vocab_size=151936,
    intermediate_size=22016,
    max_position_embeddings=32768,
    num_kv_heads=32,
    head_dim=128,
)


def read(fields: Fields) -> ModelConfig:
    """What config.json says of such a model. Raises ModelError for settings that cannot be served."""
    bias = fields.flag("attention_bias", False)
    return read_rotary(
        fields,
        "qwen3",
        "Qwen3ForCausalLM",
        _DEFAULTS,
        windows=qwen_windows(fields),
        qkv_bias=bias,
        out_bias=bias,
        has_head_norm=True,
    )
