"""Mistral: Llama's layers, with one sliding window for all of them where the config sets it."""

from __future__ import annotations

from manylora.models.fields import Fields
from manylora.models.rotary import Defaults, num_layers_of, read_rotary
from manylora.models.spec import ModelConfig

_DEFAULTS = Defaults(
    vocab_size=32000,
    intermediate_size=14336,
    max_position_embeddings=4096 * 32,
    num_kv_heads=8,
    eos_ids=(2,),
    bos_id=1,
)


def read(fields: Fields) -> ModelConfig:
    """What config.json says of such a model. Raises ModelError for settings that cannot be served."""
    windows = (fields.integer_or_none("sliding_window", 4096),) * num_layers_of(fields)
    return read_rotary(fields, "mistral", "MistralForCausalLM", _DEFAULTS, windows=windows)
