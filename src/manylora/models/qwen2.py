"""Qwen2 and Qwen2.5: Llama's layers with q, k, v biases; later layers may slide."""

from __future__ import annotations

from manylora.models.fields import Fields
from manylora.models.rotary import Defaults, qwen_windows, read_rotary
from manylora.models.spec import ModelConfig

_DEFAULTS = Defaults(
    vocab_size=151936, intermediate_size=22016, max_position_embeddings=32768, num_kv_heads=32
)


def read(fields: Fields) -> ModelConfig:
    """What config.json says of such a model. Raises ModelError for settings that cannot be served."""
    windows = qwen_windows(fields)
    return read_rotary(fields, "qwen2", "Qwen2ForCausalLM", _DEFAULTS, windows=windows, qkv_bias=True)
