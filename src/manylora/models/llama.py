"""Llama 2 and 3.x, and the many models published under its architecture name."""

from __future__ import annotations

import dataclasses

from manylora.models.fields import Fields
from manylora.models.rotary import Defaults, read_rotary
from manylora.models.spec import Family, ModelConfig

_DEFAULTS = Defaults(
    vocab_size=32000, intermediate_size=11008, max_position_embeddings=2048, eos_ids=(2,), bos_id=1
)


def _read(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    return dataclasses.replace(
        read_rotary(fields, "llama", "LlamaForCausalLM", _DEFAULTS),
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


FAMILY = Family(name="llama", architectures=("LlamaForCausalLM",), read=_read)
