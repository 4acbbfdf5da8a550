"""Gemma 2 and 3 (text): four norms a layer, their weights stored less 1; a scaled embedding; windows in some.

Gemma 2 caps scores and logits softly. Gemma 3 normalises heads, and its layers with a window have their own rope.
"""

from __future__ import annotations

import dataclasses
from typing import cast

from manylora.kernels.shapes import Activation
from manylora.models.fields import Fields
from manylora.models.rotary_families import NAMES, read_head_dim, read_rope, rope_of, windows_of
from manylora.models.spec import ModelConfig, RopeConfig, dense_layer

_NAMES = dataclasses.replace(
    NAMES,
    attention_after="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_after="post_feedforward_layernorm",
)
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "silu": "silu", "relu": "relu"}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_gemma2(fields: Fields) -> ModelConfig:
    """Read Gemma 2: every second layer has a window. Raises ModelError."""
    return _read(
        fields,
        "gemma2",
        "Gemma2ForCausalLM",
        vocab_size=256000,
        max_positions=8192,
        pattern=2,
        score_cap=fields.positive_or_none("attn_logit_softcapping", 50.0),
        logit_cap=fields.positive_or_none("final_logit_softcapping", 30.0),
    )


def read_gemma3(fields: Fields) -> ModelConfig:
    """Read the text models of Gemma 3: five layers of six have a window. Raises ModelError."""
    if "attn_logit_softcapping" in fields:
        fields.fail("attn_logit_softcapping is only supported as null: transformers does not apply it")
    return _read(
        fields,
        "gemma3_text",
        "Gemma3ForCausalLM",
        vocab_size=262208,
        max_positions=131072,
        pattern=fields.integer("sliding_window_pattern", 6),
        score_cap=None,
        logit_cap=fields.positive_or_none("final_logit_softcapping", None),
    )


def _read(
    fields: Fields,
    family: str,
    architecture: str,
    *,
    vocab_size: int,
    max_positions: int,
    pattern: int,
    score_cap: float | None,
    logit_cap: float | None,
) -> ModelConfig:
    """``pattern``: the last layer of so many has no window, unless layer_types says otherwise."""
    is_third = family == "gemma3_text"
    if "use_bidirectional_attention" in fields and fields.flag("use_bidirectional_attention", False):
        fields.fail("use_bidirectional_attention is not supported")
    activation = fields.text("hidden_activation", "gelu_pytorch_tanh")
    if activation not in _ACTIVATIONS:
        supported = ", ".join(_ACTIVATIONS)
        fields.fail(f"hidden_activation {activation!r} is not supported (supported: {supported})")
    hidden_size = fields.integer("hidden_size", 2304)
    num_heads = fields.integer("num_attention_heads", 8)
    num_kv_heads = fields.integer("num_key_value_heads", 4)
    inner = fields.integer("intermediate_size", 9216)
    max_positions = fields.integer("max_position_embeddings", max_positions)
    head_dim = read_head_dim(fields, hidden_size, num_heads, num_kv_heads, 256)
    bias = fields.flag("attention_bias", False)
    layer = dense_layer(
        _NAMES,
        hidden=hidden_size,
        queries=num_heads * head_dim,
        keys=num_kv_heads * head_dim,
        inner=inner,
        activation=cast(Activation, _ACTIVATIONS[activation]),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=False,
        has_head_norm=is_third,
    )
    rope, local = _read_ropes(fields, max_positions, head_dim, is_third)
    num_layers = fields.integer("num_hidden_layers", 26)
    kinds = fields.texts_or_none("layer_types")
    if kinds is None:
        kinds = tuple(_FULL if number % pattern == 0 else _SLIDING for number in range(1, num_layers + 1))
    windows = windows_of(fields, kinds, num_layers, fields.integer_or_none("sliding_window", 4096))
    return ModelConfig(
        family=family,
        architecture=architecture,
        names=_NAMES,
        vocab_size=fields.integer("vocab_size", vocab_size),
        hidden_size=hidden_size,
        embedding_size=hidden_size,
        intermediate_size=inner,
        layers=tuple(layer.with_window(w, None if w is None else local) for w in windows),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rope=rope,
        norm="rms",
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        norm_offset=1.0,
        own_attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        score_cap=score_cap,
        logit_cap=logit_cap,
        embedding_scale=hidden_size**0.5,
        eos_ids=fields.token_ids("eos_token_id", (1,)),
        bos_id=fields.integer_or_none("bos_token_id", 2, minimum=0),
    )


def _read_ropes(
    fields: Fields, max_positions: int, head_dim: int, is_third: bool
) -> tuple[RopeConfig, RopeConfig | None]:
    """(The model's, that of layers with a window if it is another.) Raises ModelError."""
    if not is_third:
        return read_rope(fields, max_positions, head_dim), None
    empty = Fields({}, fields.origin)
    # transformers 5 nests the settings by layer type; 4 has rope_scaling for layers without a window alone.
    nested = fields.object_or_none("rope_parameters") or empty
    of_full = fields.object_or_none("rope_scaling") or nested.object_or_none(_FULL) or empty
    of_local = nested.object_or_none(_SLIDING) or empty
    theta = fields.positive_or_none("rope_theta", 1e6) or 1e6
    local_theta = fields.positive_or_none("rope_local_base_freq", 1e4) or 1e4
    rope = rope_of(of_full, fields, max_positions, head_dim, theta)
    local = rope_of(of_local, fields, max_positions, head_dim, local_theta)
    for config in (rope, local):
        if config.kind == "longrope":
            fields.fail("rope type 'longrope' is not supported in this family")
    return rope, local
