"""Llama 2 and 3.x, and the many models published under its architecture name."""

from __future__ import annotations

from manylora.models.fields import Fields
from manylora.models.rotary import Defaults, read_rotary
from manylora.models.spec import ModelConfig

_DEFAULTS = Defaults(
    vocab_size=32000, intermediate_size=11008, max_position_embeddings=2048, eos_ids=(2,), bos_id=1
)


def read(fields: Fields) -> ModelConfig:
    """What config.json says of such a model. Raises ModelError for settings that cannot be served."""
    bias = fields.flag("attention_bias", False)
    return read_rotary(
        fields,
        "llama",
        "LlamaForCausalLM",
        _DEFAULTS,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )
