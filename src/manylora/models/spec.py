"""Describes a model as plain frozen data, without torch or files.

Owns ``ModelConfig``, which describes every supported decoder by its parts: its norm, rotary or learned
positions, the linears of each layer and so on. So the code that builds and runs a model needs no case for any
family. Does not know how a family writes these settings in its config.json: the family's own module does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

from manylora.kernels.shapes import Activation, PageShape, Projection, ProjectionGroup, distinct_groups


class ModelError(ValueError):
    """The error of a model folder that cannot be served. The message is one line for the operator."""


RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


Cut = Literal["column", "row"]
Heads = Literal["query", "key"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """The settings of rotary positions. Fields that the kind does not use keep their defaults.

    ``factor=None`` (yarn, longrope) means max_position_embeddings / original_max_positions. Longrope uses
    ``short_factors`` for contexts of up to ``original_max_positions`` and ``long_factors`` for longer ones.
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
    """The names of a family's tensors in a checkpoint.

    ``body`` is the prefix of every name but lm_head's. The other fields name modules of the body, or of a
    decoder layer, whose prefix is ``layer_prefix`` + its number. ``mlp_in`` is (gate, up) in a gated MLP,
    else the one first linear.
    """

    body: str
    final_norm: str
    attention_norm: str
    mlp_norm: str
    attention_out: str
    mlp_in: tuple[str, ...]
    mlp_out: str
    attention_after: str | None = None
    """The norm of attention's output, before the residual sum (None: no norm). ``mlp_after``: the MLP's."""
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
        """The start of a module's path, up to the layer's number ("model.layers."). Adapters' files name
        their targets with it."""
        return f"{self.body}layers."


@dataclasses.dataclass(frozen=True)
class LinearSpec:
    """Projections side by side, computed as one product. Either all have biases or none has.

    ``cut``: whether ranks divide the outputs ("column") or the inputs ("row"). ``heads``: the kind of heads
    that own these features, for each projection (once for a row linear); empty: the features are cut
    anywhere.
    """

    group: ProjectionGroup
    has_bias: bool = False
    cut: Cut = "column"
    heads: tuple[Heads, ...] = ()


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """The attention of one layer.

    ``qkv``: the linear of q, k and v. ``window``: how many of the latest positions a query sees (None: all).
    ``has_head_norm``: whether q and k are normalised head by head. ``rope``: the layer's own; None: the
    model's.
    """

    qkv: LinearSpec
    out: LinearSpec
    window: int | None = None
    has_head_norm: bool = False
    rope: RopeConfig | None = None


@dataclasses.dataclass(frozen=True)
class MlpSpec:
    """The MLP of one layer. ``first`` is gate and up where ``is_gated``, else the one first linear."""

    first: LinearSpec
    second: LinearSpec
    activation: Activation
    is_gated: bool


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One decoder layer. In all layers of a model, groups with the same name are equal."""

    attention: AttentionSpec
    mlp: MlpSpec

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """The linears that LoRA may adapt, in order of use."""
        return self.attention.qkv, self.attention.out, self.mlp.first, self.mlp.second

    @property
    def groups(self) -> tuple[ProjectionGroup, ...]:
        """The groups of its linears, in the same order."""
        return tuple(linear.group for linear in self.linears)

    def with_linears(self, change: Callable[[LinearSpec], LinearSpec]) -> LayerSpec:
        """Return the layer with ``change`` applied to each linear."""
        attention, mlp = self.attention, self.mlp
        return LayerSpec(
            dataclasses.replace(attention, qkv=change(attention.qkv), out=change(attention.out)),
            dataclasses.replace(mlp, first=change(mlp.first), second=change(mlp.second)),
        )

    def with_window(self, window: int | None, rope: RopeConfig | None = None) -> LayerSpec:
        """Return the layer with this window and this rope. ``rope=None`` means the model's."""
        attention = dataclasses.replace(self.attention, window=window, rope=rope)
        return dataclasses.replace(self, attention=attention)


class Biases(NamedTuple):
    """Which linears of a layer have biases: the one of q, k and v, attention's output, the MLP's."""

    qkv: bool = False
    out: bool = False
    mlp: bool = False


def dense_layer(
    names: TensorNames,
    *,
    hidden: int,
    queries: int,
    keys: int,
    inner: int,
    activation: Activation,
    biases: Biases,
    has_head_norm: bool = False,
) -> LayerSpec:
    """Build the layer of a dense model, in which every token passes through all linears.

    Sizes are in features. ``queries``, ``keys``: of all heads together; ``inner``: of the MLP, which is gated
    where ``names.mlp_in`` has two names.
    """
    is_gated = len(names.mlp_in) == 2
    sizes = (queries, keys, keys)
    qkv = tuple(Projection(module, hidden, size) for module, size in zip(names.qkv, sizes, strict=True))
    out = (Projection(names.attention_out, queries, hidden),)
    first = tuple(Projection(module, hidden, inner) for module in names.mlp_in)
    second = (Projection(names.mlp_out, inner, hidden),)
    return LayerSpec(
        AttentionSpec(
            LinearSpec(ProjectionGroup("qkv", qkv), biases.qkv, heads=("query", "key", "key")),
            LinearSpec(ProjectionGroup("o", out), biases.out, "row", ("query",)),
            has_head_norm=has_head_norm,
        ),
        MlpSpec(
            LinearSpec(ProjectionGroup("gate_up" if is_gated else "fc1", first), biases.mlp),
            LinearSpec(ProjectionGroup("down" if is_gated else "fc2", second), biases.mlp, "row"),
            activation,
            is_gated,
        ),
    )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One decoder, described by its parts.

    ``layers``: in order; they may differ, but all have the same heads. ``intermediate_size``: the widest
    MLP's. ``rope``: None where positions are learned; their table then starts with ``position_offset`` unused
    rows. ``embedding_size`` differs from ``hidden_size`` only where the embeddings are projected (opt-350m).
    ``norm_before``: whether norms precede attention and MLP, rather than follow each residual sum.
    ``norm_offset``: added to the norms' stored weights, in float32. ``attention_scale``: the factor of
    attention scores before the softmax, usually ``head_dim ** -0.5``. ``score_cap`` and ``logit_cap``: soft
    caps of scores and logits; a cap c turns s into ``c * tanh(s / c)``. ``embedding_scale``: the factor of
    token embeddings.
    ``dtype``: the checkpoint's, by its torch name.
    """

    names: TensorNames
    vocab_size: int
    hidden_size: int
    embedding_size: int
    intermediate_size: int
    layers: tuple[LayerSpec, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_scale: float
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
    score_cap: float | None = None
    logit_cap: float | None = None
    embedding_scale: float = 1.0
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    dtype: str = "float32"

    @property
    def context(self) -> int:
        """The longest context, in positions, unless the operator asks for a longer one."""
        rope = self.rope
        if rope is None or rope.kind != "yarn" or rope.factor is None:
            return self.max_position_embeddings
        return int(rope.original_max_positions * rope.factor)

    @property
    def longest_context(self) -> int:
        """The longest context, in positions, that the operator may ask for."""
        rope, scaled = self.rope, self.context
        if rope is not None and rope.kind == "linear" and rope.factor is not None:
            scaled = int(self.max_position_embeddings * rope.factor)
        return max(scaled, self.max_position_embeddings)

    @property
    def long_from(self) -> int | None:
        """The context length above which longrope uses its long factors, for all positions of the context.

        In positions; None for other ropes.
        """
        rope = self.rope
        return rope.original_max_positions if rope is not None and rope.kind == "longrope" else None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def groups(self) -> tuple[ProjectionGroup, ...]:
        """The groups of all layers, each once, in order of use."""
        return distinct_groups(self.layer_groups)

    @property
    def layer_groups(self) -> tuple[tuple[ProjectionGroup, ...], ...]:
        """Each layer's groups."""
        return tuple(layer.groups for layer in self.layers)

    @property
    def head_group(self) -> ProjectionGroup:
        """The output head, which adapters may change, in a group of its own."""
        return ProjectionGroup("head", (Projection(self.names.head, self.embedding_size, self.vocab_size),))

    def page_shape(self, page_tokens: int, itemsize: int) -> PageShape:
        """Return the shape of one page of this model's KV. ``itemsize``: bytes of an element of the pool."""
        return PageShape(
            layers=self.num_layers,
            page_tokens=page_tokens,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            itemsize=itemsize,
        )
