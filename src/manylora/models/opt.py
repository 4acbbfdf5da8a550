"""Reads the config.json of OPT: learned positions, LayerNorm, biases and a plain MLP.

opt-350m has its norms after attention and MLP, and projects its embeddings.

Galactica is published under the same architecture name, with GELU and no biases.
"""

from __future__ import annotations

from typing import cast

from manylora.kernels.shapes import Activation
from manylora.models.fields import Fields
from manylora.models.spec import Biases, ModelConfig, TensorNames, dense_layer

_NAMES = TensorNames(
    body="model.decoder.",
    final_norm="final_layer_norm",
    attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    attention_out="self_attn.out_proj",
    mlp_in=("fc1",),
    mlp_out="fc2",
)
_POSITION_OFFSET = 2
"""OPT's table of learned positions starts with two rows that no position uses."""

_LAYER_NORM_EPS = 1e-5
"""torch's default, which OPT's config cannot change."""


def read(fields: Fields) -> ModelConfig:
    """Read an OPT model's config.json. Raises ModelError for settings that cannot be served."""
    hidden_size = fields.integer("hidden_size", 768)
    num_heads = fields.integer("num_attention_heads", 12)
    num_layers = fields.integer("num_hidden_layers", 12)
    inner = fields.integer("ffn_dim", 3072)
    if hidden_size % num_heads:
        fields.fail(f"hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({num_heads})")
    activation = fields.text("activation_function", "relu")
    if activation not in ("relu", "gelu"):
        fields.fail(f"activation_function {activation!r} is not supported (supported: relu, gelu)")
    bias = fields.flag("enable_bias", True)
    norm_before = fields.flag("do_layer_norm_before", True)
    layer = dense_layer(
        _NAMES,
        hidden=hidden_size,
        queries=hidden_size,
        keys=hidden_size,
        inner=inner,
        activation=cast(Activation, activation),
        biases=Biases(bias, bias, bias),
    )
    return ModelConfig(
        names=_NAMES,
        vocab_size=fields.integer("vocab_size", 50272),
        hidden_size=hidden_size,
        embedding_size=fields.integer_or_none("word_embed_proj_dim", None) or hidden_size,
        intermediate_size=inner,
        layers=(layer,) * num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        attention_scale=(hidden_size // num_heads) ** -0.5,
        max_position_embeddings=fields.integer("max_position_embeddings", 2048),
        rope=None,
        norm="layer",
        norm_eps=_LAYER_NORM_EPS,
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        norm_before=norm_before,
        norm_affine=fields.flag("layer_norm_elementwise_affine", True),
        final_norm=norm_before and not fields.flag("_remove_final_layer_norm", False),
        position_offset=_POSITION_OFFSET,
        eos_ids=fields.token_ids("eos_token_id", (2,)),
        bos_id=fields.integer_or_none("bos_token_id", 2, minimum=0),
    )
