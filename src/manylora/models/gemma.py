"""Reads the config.json of Gemma 2 and of Gemma 3's text models.

Both have four norms a layer, whose weights are stored minus 1, and a scaled embedding. Some of their layers
have a sliding window. Gemma 2 caps attention scores and logits softly. Gemma 3 normalises q and k head by
head, and its layers with a window have their own rope.
"""

from __future__ import annotations

import dataclasses

from manylora.models.fields import Fields
from manylora.models.rotary_families import NAMES, Defaults, read_rotary, rope_of, windows_of
from manylora.models.spec import Biases, ModelConfig, RopeConfig

_NAMES = dataclasses.replace(
    NAMES,
    attention_after="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_after="post_feedforward_layernorm",
)
_FULL, _SLIDING = "full_attention", "sliding_attention"


_DEFAULTS = Defaults(
    vocab_size=256000,
    intermediate_size=9216,
    max_position_embeddings=8192,
    hidden_size=2304,
    num_layers=26,
    num_heads=8,
    num_kv_heads=4,
    head_dim=256,
    tie_embeddings=True,
    activations={"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "silu": "silu", "relu": "relu"},
    eos_ids=(1,),
    bos_id=2,
)


def read_gemma2(fields: Fields) -> ModelConfig:
    """Read Gemma 2's config: by default every second layer has a window. Raises ModelError."""
    config = _read(fields, _DEFAULTS, pattern=2)
    return dataclasses.replace(
        config,
        score_cap=fields.positive_or_none("attn_logit_softcapping", 50.0),
        logit_cap=fields.positive_or_none("final_logit_softcapping", 30.0),
    )


def read_gemma3(fields: Fields) -> ModelConfig:
    """Read a Gemma 3 text model's config: by default, five layers of six have a window. Raises ModelError."""
    if "attn_logit_softcapping" in fields:
        fields.fail("attn_logit_softcapping is only supported as null: transformers does not apply it")
    defaults = dataclasses.replace(_DEFAULTS, vocab_size=262208, max_position_embeddings=131072)
    config = _read(
        fields,
        defaults,
        pattern=fields.integer("sliding_window_pattern", 6),
        ropes=_read_ropes(fields, defaults),
        has_head_norm=True,
    )
    return dataclasses.replace(config, logit_cap=fields.positive_or_none("final_logit_softcapping", None))


def _read(
    fields: Fields,
    defaults: Defaults,
    *,
    pattern: int,
    ropes: tuple[RopeConfig, RopeConfig] | None = None,
    has_head_norm: bool = False,
) -> ModelConfig:
    """Read the settings that Gemma 2 and 3 share. Raises ModelError for settings that cannot be served.

    ``pattern``: where layer_types is absent, each ``pattern``-th layer has no window and all others have one.
    """
    if "use_bidirectional_attention" in fields and fields.flag("use_bidirectional_attention", False):
        fields.fail("use_bidirectional_attention is not supported")
    num_layers = fields.integer("num_hidden_layers", defaults.num_layers)
    kinds = fields.texts_or_none("layer_types")
    if kinds is None:
        kinds = tuple(_FULL if number % pattern == 0 else _SLIDING for number in range(1, num_layers + 1))
    bias = fields.flag("attention_bias", False)
    config = read_rotary(
        fields,
        defaults,
        names=_NAMES,
        activation_field="hidden_activation",
        windows=windows_of(fields, kinds, num_layers, fields.integer_or_none("sliding_window", 4096)),
        ropes=ropes,
        biases=Biases(bias, bias),
        has_head_norm=has_head_norm,
    )
    return dataclasses.replace(
        config,
        norm_offset=1.0,
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        embedding_scale=config.hidden_size**0.5,
    )


def _read_ropes(fields: Fields, defaults: Defaults) -> tuple[RopeConfig, RopeConfig]:
    """Read Gemma 3's two ropes, for layers without and with a window. Raises ModelError."""
    empty = Fields({}, fields.origin)
    max_positions = fields.integer("max_position_embeddings", defaults.max_position_embeddings)
    # transformers 5 nests the settings by layer type; rope_scaling of 4 is only for layers without a window.
    nested = fields.object_or_none("rope_parameters") or empty
    of_full = fields.object_or_none("rope_scaling") or nested.object_or_none(_FULL) or empty
    of_local = nested.object_or_none(_SLIDING) or empty
    theta = fields.positive_or_none("rope_theta", 1e6) or 1e6
    local_theta = fields.positive_or_none("rope_local_base_freq", 1e4) or 1e4
    for rope in (of_full, of_local):
        if rope.text("rope_type", rope.text("type", "default")) == "longrope":
            fields.fail("rope type 'longrope' is not supported in this family")
    head_dim = 0  # only longrope reads it
    return (
        rope_of(of_full, fields, max_positions, head_dim, theta),
        rope_of(of_local, fields, max_positions, head_dim, local_theta),
    )
