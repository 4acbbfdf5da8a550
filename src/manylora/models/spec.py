"""What the rest of the room says about a model: plain frozen data, no torch, no files.

Owns ``ModelConfig``, which describes every supported decoder by its parts (which norm, rotary or learned
positions, and layer by layer which linears ...), so that building and running a model needs no case for a family.
Does not know how any family spells these things in its config.json: that is the family's own file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from manylora.kernels.shapes import Activation, PageShape, Projection, ProjectionGroup, distinct_groups


class ModelError(ValueError):
    """A model folder that cannot be served; the message is one line for the operator."""


RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


Cut = Literal["column", "row"]
Heads = Literal["query", "key"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position settings; fields that the kind does not use keep their defaults.

    ``factor=None`` (yarn, longrope) means max_position_embeddings / original_max_positions. ``short_factors``,
    ``long_factors``: longrope's, for contexts of up to ``original_max_positions`` and for longer ones.
    """

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float | None = None
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class TensorNames:
    """Where a family's checkpoint keeps its tensors.

    ``body`` prefixes everything but lm_head; the rest are modules of the body or of one decoder layer, which
    lies at ``layer_prefix`` + its number. ``mlp_in`` is (gate, up) in a gated MLP, else the one first linear.
    """

    body: str
    final_norm: str
    attention_norm: str
    mlp_norm: str
    attention_out: str
    mlp_in: tuple[str, ...]
    mlp_out: str
    attention_after: str | None = None
    """A norm of what attention adds to the stream; ``mlp_after``: of what the MLP adds. None: there is none."""
    mlp_after: str | None = None
    qkv: tuple[str, str, str] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    embedding: str = "embed_tokens"
    positions: str = "embed_positions"
    project_in: str = "project_in"
    project_out: str = "project_out"
    head: str = "lm_head"

    @property
    def layer_prefix(self) -> str:
        return f"{self.body}layers."


@dataclasses.dataclass(frozen=True)
class LinearSpec:
    """Projections side by side, which one product computes; all of them have biases or none has.

    ``cut``: what ranks have parts of: "column": of the outputs; "row": of the inputs. ``heads``: which heads those
    features are of, by projection (of a row linear, once); none: they are cut anywhere.
    """

    group: ProjectionGroup
    has_bias: bool = False
    cut: Cut = "column"
    heads: tuple[Heads, ...] = ()


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """``qkv``: of q, k and v. ``window``: how many latest positions a query sees (None: all). ``has_head_norm``: q
    and k are normalised head by head. ``rope``: where it is not the model's."""

    qkv: LinearSpec
    out: LinearSpec
    window: int | None = None
    has_head_norm: bool = False
    rope: RopeConfig | None = None


@dataclasses.dataclass(frozen=True)
class MlpSpec:
    """``is_gated``: ``first`` is gate and up, else the one first linear."""

    first: LinearSpec
    second: LinearSpec
    activation: Activation
    is_gated: bool


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One decoder layer. Groups of one name are equal in all layers of a model."""

    attention: AttentionSpec
    mlp: MlpSpec

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """What LoRA may adapt, in order of use."""
        return self.attention.qkv, self.attention.out, self.mlp.first, self.mlp.second

    @property
    def groups(self) -> tuple[ProjectionGroup, ...]:
        """Of its linears."""
        return tuple(linear.group for linear in self.linears)

    def with_linears(self, change: Callable[[LinearSpec], LinearSpec]) -> LayerSpec:
        """The layer with each linear changed so."""
        attention, mlp = self.attention, self.mlp
        return LayerSpec(
            dataclasses.replace(attention, qkv=change(attention.qkv), out=change(attention.out)),
            dataclasses.replace(mlp, first=change(mlp.first), second=change(mlp.second)),
        )

    def with_window(self, window: int | None, rope: RopeConfig | None = None) -> LayerSpec:
        """The layer with this window and, if it is not the model's, this rope."""
        attention = dataclasses.replace(self.attention, window=window, rope=rope)
        return dataclasses.replace(self, attention=attention)


def dense_layer(
    names: TensorNames,
    *,
    hidden: int,
    queries: int,
    keys: int,
    inner: int,
    activation: Activation,
    qkv_bias: bool,
    out_bias: bool,
    mlp_bias: bool,
    has_head_norm: bool = False,
) -> LayerSpec:
    """A layer whose linears all see every token. ``queries``, ``keys``: features of all heads together; ``inner``:
    of the MLP, which is gated where ``names.mlp_in`` are two."""
    is_gated = len(names.mlp_in) == 2
    sizes = (queries, keys, keys)
    qkv = tuple(Projection(module, hidden, size) for module, size in zip(names.qkv, sizes, strict=True))
    out = (Projection(names.attention_out, queries, hidden),)
    first = tuple(Projection(module, hidden, inner) for module in names.mlp_in)
    second = (Projection(names.mlp_out, inner, hidden),)
    return LayerSpec(
        AttentionSpec(
            LinearSpec(ProjectionGroup("qkv", qkv), qkv_bias, heads=("query", "key", "key")),
            LinearSpec(ProjectionGroup("o", out), out_bias, "row", ("query",)),
            has_head_norm=has_head_norm,
        ),
        MlpSpec(
            LinearSpec(ProjectionGroup("gate_up" if is_gated else "fc1", first), mlp_bias),
            LinearSpec(ProjectionGroup("down" if is_gated else "fc2", second), mlp_bias, "row"),
            activation,
            is_gated,
        ),
    )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One decoder, described by its parts.

    ``layers``: in order; they may differ, but all have the same heads. ``intermediate_size``: the widest MLP's.
    ``rope``: None where positions are learned; their table then starts with ``position_offset`` unused rows.
    ``embedding_size`` differs from ``hidden_size`` only where the embeddings are projected (opt-350m).
    ``norm_before``: norms before attention and MLP, rather than after each residual sum. ``norm_offset``: added to
    the norms' stored weights, in float32.
    ``own_attention_scale``: where it is not ``head_dim ** -0.5``. ``score_cap``, ``logit_cap``: soft caps c, which
    turn s into ``c * tanh(s / c)``. ``embedding_scale``: times which a token's embedding enters the stream.
    ``dtype``: the checkpoint's own, a torch dtype's name.
    """

    family: str
    architecture: str
    names: TensorNames
    vocab_size: int
    hidden_size: int
    embedding_size: int
    intermediate_size: int
    layers: tuple[LayerSpec, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: RopeConfig | None
    norm: Literal["rms", "layer"]
    norm_eps: float
    tie_embeddings: bool
    norm_before: bool = True
    norm_affine: bool = True
    final_norm: bool = True
    position_offset: int = 0
    norm_offset: float = 0.0
    own_attention_scale: float | None = None
    score_cap: float | None = None
    logit_cap: float | None = None
    embedding_scale: float = 1.0
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    dtype: str = "float32"

    @property
    def attention_scale(self) -> float:
        """Times which scores are taken."""
        scale = self.own_attention_scale
        return float(self.head_dim**-0.5) if scale is None else scale

    @property
    def context(self) -> int:
        """Positions that a context may have unless more is asked for."""
        rope = self.rope
        if rope is None or rope.kind != "yarn" or rope.factor is None:
            return self.max_position_embeddings
        return int(rope.original_max_positions * rope.factor)

    @property
    def longest_context(self) -> int:
        """Positions that may be asked for."""
        rope, scaled = self.rope, self.context
        if rope is not None and rope.kind == "linear" and rope.factor is not None:
            scaled = int(self.max_position_embeddings * rope.factor)
        return max(scaled, self.max_position_embeddings)

    @property
    def long_from(self) -> int | None:
        """A context of more positions is computed with other factors, all of it; None: none is."""
        rope = self.rope
        return rope.original_max_positions if rope is not None and rope.kind == "longrope" else None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def groups(self) -> tuple[ProjectionGroup, ...]:
        """The groups that some layer has, each once, in order of use."""
        return distinct_groups(self.layer_groups)

    @property
    def layer_groups(self) -> tuple[tuple[ProjectionGroup, ...], ...]:
        """Each layer's groups."""
        return tuple(layer.groups for layer in self.layers)

    def page_shape(self, page_tokens: int, itemsize: int) -> PageShape:
        """One page of this model's KV; ``itemsize`` is the pool dtype's, in bytes."""
        return PageShape(
            layers=self.num_layers,
            page_tokens=page_tokens,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            itemsize=itemsize,
        )
