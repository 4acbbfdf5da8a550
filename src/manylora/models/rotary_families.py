"""Reads the config.json of the families with rotary positions, RMSNorm and a gated MLP.

Owns their defaults, the two on-disk spellings of rope, and Qwen's choice of sliding-window layers.
transformers 4 writes rope_theta and rope_scaling, transformers 5 rope_parameters. Computes no rope table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import cast, get_args

from manylora.kernels.shapes import Activation
from manylora.models.fields import Fields
from manylora.models.spec import Biases, ModelConfig, RopeConfig, RopeKind, TensorNames, dense_layer

NAMES = TensorNames(
    body="model.",
    final_norm="norm",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    attention_out="self_attn.o_proj",
    mlp_in=("mlp.gate_proj", "mlp.up_proj"),
    mlp_out="mlp.down_proj",
)


@dataclasses.dataclass(frozen=True)
class Defaults:
    """The values that transformers' config class of a family fills in for missing fields.

    ``num_kv_heads=None`` means as many as heads, ``head_dim=None`` means hidden_size / heads. ``activations``
    maps the supported activation names of config.json to ours, the default first.
    """

    vocab_size: int
    intermediate_size: int
    max_position_embeddings: int
    hidden_size: int = 4096
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int | None = None
    head_dim: int | None = None
    tie_embeddings: bool = False
    activations: Mapping[str, Activation] = dataclasses.field(
        default_factory=lambda: {"silu": "silu", "swish": "silu"}
    )
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None


def read_rotary(
    fields: Fields,
    defaults: Defaults,
    *,
    biases: Biases,
    names: TensorNames = NAMES,
    activation_field: str = "hidden_act",
    windows: tuple[int | None, ...] | None = None,
    ropes: tuple[RopeConfig, RopeConfig | None] | None = None,
    has_head_norm: bool = False,
) -> ModelConfig:
    """Read the settings that these families share. Raises ModelError for settings that cannot be served.

    ``windows``: each layer's sliding window in tokens; None: no layer has one. ``ropes``: the model's rope,
    and that of layers with a window where it differs; None: one rope for all layers, read from ``fields``.
    """
    hidden_size = fields.integer("hidden_size", defaults.hidden_size)
    num_heads = fields.integer("num_attention_heads", defaults.num_heads)
    num_layers = fields.integer("num_hidden_layers", defaults.num_layers)
    inner = fields.integer("intermediate_size", defaults.intermediate_size)
    num_kv_heads = fields.integer_or_none("num_key_value_heads", defaults.num_kv_heads) or num_heads
    max_positions = fields.integer("max_position_embeddings", defaults.max_position_embeddings)
    activation = fields.text(activation_field, next(iter(defaults.activations)))
    if activation not in defaults.activations:
        supported = ", ".join(defaults.activations)
        fields.fail(f"{activation_field} {activation!r} is not supported (supported: {supported})")
    head_dim = read_head_dim(fields, hidden_size, num_heads, num_kv_heads, defaults.head_dim)
    layer = dense_layer(
        names,
        hidden=hidden_size,
        queries=num_heads * head_dim,
        keys=num_kv_heads * head_dim,
        inner=inner,
        activation=defaults.activations[activation],
        biases=biases,
        has_head_norm=has_head_norm,
    )
    rope, of_windows = ropes or (read_rope(fields, max_positions, head_dim), None)
    return ModelConfig(
        names=names,
        vocab_size=fields.integer("vocab_size", defaults.vocab_size),
        hidden_size=hidden_size,
        embedding_size=hidden_size,
        intermediate_size=inner,
        layers=tuple(
            layer.with_window(window, None if window is None else of_windows)
            for window in windows or (None,) * num_layers
        ),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        max_position_embeddings=max_positions,
        rope=rope,
        norm="rms",
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_embeddings=fields.flag("tie_word_embeddings", defaults.tie_embeddings),
        eos_ids=fields.token_ids("eos_token_id", defaults.eos_ids),
        bos_id=fields.integer_or_none("bos_token_id", defaults.bos_id, minimum=0),
    )


def read_head_dim(
    fields: Fields, hidden_size: int, num_heads: int, num_kv_heads: int, default: int | None
) -> int:
    """Return the size of a head.

    Raises ModelError where the heads cannot be divided among the KV heads, hidden_size cannot be divided
    among the heads, or the size is odd.
    """
    if num_heads % num_kv_heads:
        fields.fail(
            f"num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})"
        )
    head_dim = fields.integer_or_none("head_dim", default)
    if head_dim is None:
        if hidden_size % num_heads:
            fields.fail(
                f"hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({num_heads}) "
                "where head_dim is not given"
            )
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        fields.fail(f"head_dim must be even for rotary positions, got {head_dim}")
    return head_dim


def read_rope(fields: Fields, max_positions: int, head_dim: int) -> RopeConfig:
    """Read the rope settings in either spelling, with transformers' precedence. Raises ModelError."""
    empty = Fields({}, fields.origin)
    rope = fields.object_or_none("rope_scaling") or fields.object_or_none("rope_parameters") or empty
    if nested := rope.objects():
        rope.fail(f"settings by layer type ({', '.join(nested)}) are not supported")
    theta = fields.number("rope_theta", 10000.0) if "rope_theta" in fields else 10000.0
    return rope_of(rope, fields, max_positions, head_dim, theta)


def rope_of(
    rope: Fields, fields: Fields, max_positions: int, head_dim: int, default_theta: float
) -> RopeConfig:
    """Read the rope settings of the object ``rope`` in the config.json ``fields``. Raises ModelError.

    ``max_positions``: the model's own, in tokens. ``default_theta``: used where ``rope`` names no theta.
    """
    kind = rope.text("rope_type", rope.text("type", "default"))
    supported = get_args(RopeKind)
    if kind not in supported:
        rope.fail(f"rope type {kind!r} is not supported (supported: {', '.join(supported)})")
    for place in (rope, fields):
        if place.number_or_none("partial_rotary_factor") not in (None, 1):
            place.fail("partial_rotary_factor is only supported as 1")
    theta = rope.number("rope_theta", default_theta) if "rope_theta" in rope else default_theta
    if theta <= 1:
        (rope if "rope_theta" in rope else fields).fail(f"rope_theta must be above 1, got {theta!r}")
    config = RopeConfig(kind=cast(RopeKind, kind), theta=theta)
    if kind == "default":
        return config
    if kind in ("linear", "dynamic"):
        return dataclasses.replace(config, factor=rope.positive("factor"))
    place = fields if "original_max_position_embeddings" in fields else rope
    original = place.integer("original_max_position_embeddings", max_positions)
    config = dataclasses.replace(config, original_max_positions=original)
    if kind == "llama3":
        return _read_llama3(rope, config)
    config = dataclasses.replace(
        config,
        factor=rope.positive("factor") if "factor" in rope else None,
        attention_factor=rope.number_or_none("attention_factor"),
    )
    if kind == "longrope":
        short, long = (rope.numbers(name, head_dim // 2) for name in ("short_factor", "long_factor"))
        return dataclasses.replace(config, short_factors=short, long_factors=long)
    return dataclasses.replace(
        config,
        beta_fast=rope.number_or_none("beta_fast") or 32.0,
        beta_slow=rope.number_or_none("beta_slow") or 1.0,
        mscale=rope.number_or_none("mscale"),
        mscale_all_dim=rope.number_or_none("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )


def _read_llama3(rope: Fields, config: RopeConfig) -> RopeConfig:
    low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
    if high <= low:
        rope.fail(f"high_freq_factor ({high}) must be above low_freq_factor ({low})")
    return dataclasses.replace(
        config, factor=rope.positive("factor"), low_freq_factor=low, high_freq_factor=high
    )


def _qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    """Read the layers' sliding windows of Qwen 2 and 3. Raises ModelError.

    They are off unless use_sliding_window is set. Then layer_types chooses the layers; without it, the layers
    from max_window_layers on have the window.
    """
    window, num_layers = None, fields.integer("num_hidden_layers", 32)
    if fields.flag("use_sliding_window", False):
        window = fields.integer_or_none("sliding_window", 4096)
    kinds = fields.texts_or_none("layer_types")
    if kinds is None:
        first = fields.integer("max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return windows_of(fields, kinds, num_layers, window)


def windows_of(
    fields: Fields, kinds: tuple[str, ...], num_layers: int, window: int | None
) -> tuple[int | None, ...]:
    """Return each layer's window: ``window`` where its kind is sliding_attention, else None.

    Raises ModelError where ``kinds`` has the wrong length or an unknown kind, or where a window is missing.
    """
    if len(kinds) != num_layers:
        fields.fail(f"layer_types names {len(kinds)} layers, num_hidden_layers is {num_layers}")
    for kind in sorted(set(kinds)):
        if kind not in ("full_attention", "sliding_attention"):
            fields.fail(
                f"layer type {kind!r} is not supported (supported: full_attention, sliding_attention)"
            )
    if window is None and "sliding_attention" in kinds:
        fields.fail("layer_types has sliding_attention, but no sliding window is in use")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def read_llama(fields: Fields) -> ModelConfig:
    """Read Llama 2 and 3.x, and the many models published as LlamaForCausalLM. Raises ModelError."""
    bias = fields.flag("attention_bias", False)
    defaults = Defaults(
        vocab_size=32000, intermediate_size=11008, max_position_embeddings=2048, eos_ids=(2,), bos_id=1
    )
    return read_rotary(fields, defaults, biases=Biases(bias, bias, fields.flag("mlp_bias", False)))


def read_mistral(fields: Fields) -> ModelConfig:
    """Read Mistral: all layers have one sliding window unless the config sets null. Raises ModelError."""
    defaults = Defaults(
        vocab_size=32000,
        intermediate_size=14336,
        max_position_embeddings=4096 * 32,
        num_kv_heads=8,
        eos_ids=(2,),
        bos_id=1,
    )
    windows = (fields.integer_or_none("sliding_window", 4096),) * fields.integer("num_hidden_layers", 32)
    return read_rotary(fields, defaults, biases=Biases(), windows=windows)


_QWEN = Defaults(vocab_size=151936, intermediate_size=22016, max_position_embeddings=32768, num_kv_heads=32)


def read_qwen2(fields: Fields) -> ModelConfig:
    """Read Qwen2 and Qwen2.5: q, k, v have biases, and later layers may have windows. Raises ModelError."""
    return read_rotary(fields, _QWEN, biases=Biases(qkv=True), windows=_qwen_windows(fields))


def read_qwen3(fields: Fields) -> ModelConfig:
    """Read Qwen3 (dense): q and k are normalised head by head before rope. Raises ModelError."""
    bias = fields.flag("attention_bias", False)
    return read_rotary(
        fields,
        dataclasses.replace(_QWEN, head_dim=128),
        biases=Biases(bias, bias),
        windows=_qwen_windows(fields),
        has_head_norm=True,
    )
