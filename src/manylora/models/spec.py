"""What the rest of the room says about a model: plain frozen data, no torch, no files.

Owns ``ModelConfig``, which describes every supported decoder by its parts (which norm, gated or plain MLP,
rotary or learned positions ...), so that building and running a model needs no case for a family. Does not
know how any family spells these things in its config.json: that is the family's own file.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from manylora.kernels.shapes import PageShape

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position settings; fields that the kind does not use keep their defaults.

    ``factor=None`` (yarn only) means max_position_embeddings / original_max_positions.
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
class ModelConfig:
    """One decoder, described by its parts.

    ``windows``: per layer, how many latest positions a query sees (None: all).
    ``rope``: None where positions are learned; their table then starts with ``position_offset`` unused rows.
    ``embedding_size`` differs from ``hidden_size`` only where the embeddings are projected (opt-350m).
    ``norm_before``: norms before attention and MLP, rather than after each residual sum.
    ``dtype``: the checkpoint's own, a torch dtype's name.
    """

    family: str
    architecture: str
    names: TensorNames
    vocab_size: int
    hidden_size: int
    embedding_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    windows: tuple[int | None, ...]
    rope: RopeConfig | None
    norm: Literal["rms", "layer"]
    norm_eps: float
    activation: Literal["silu", "relu", "gelu"]
    tie_embeddings: bool
    gated_mlp: bool = True
    norm_before: bool = True
    norm_affine: bool = True
    final_norm: bool = True
    qk_norm: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    position_offset: int = 0
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    dtype: str = "float32"

    def page_shape(self, page_tokens: int, itemsize: int) -> PageShape:
        """One page of this model's KV; ``itemsize`` is the pool dtype's, in bytes."""
        return PageShape(
            layers=self.num_layers,
            page_tokens=page_tokens,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            itemsize=itemsize,
        )
