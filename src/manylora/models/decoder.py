"""Runs a whole decoder, and composes it from a config and a source of weights.

Owns the order of the parts. Does not know where weights come from (``weights``), or what pages, adapters and
requests are: the caller of ``forward`` passes all of these in the batch and the pool.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from manylora.devices.peers import Peers
from manylora.kernels.ops import (
    AdaptedLinear,
    HeadNorm,
    LoraStep,
    Ops,
    Rotary,
    Scores,
    StepBatch,
    Summands,
    Weight,
)
from manylora.models.layers import (
    Attention,
    Embedding,
    Head,
    Layer,
    LayerNorm,
    LoraLinear,
    Mlp,
    Norm,
    PostNormLayer,
    PreNormLayer,
    RankedEmbedding,
    RankedLinear,
    RmsNorm,
    Step,
    Stream,
)
from manylora.models.rope import rope_tables
from manylora.models.share import ModelShare
from manylora.models.spec import LayerSpec, LinearSpec, ModelConfig, RopeConfig
from manylora.models.weights import Part, Weights


@dataclasses.dataclass(frozen=True, eq=False)
class Decoder:
    """The implementation of ``Model``: an embedding, decoder layers and an output head, run in this order.

    Positions must be below the ``max_positions`` for which the decoder was built.
    """

    config: ModelConfig
    ops: Ops
    embedding: Embedding
    layers: tuple[Layer, ...]
    head: Head

    @property
    def linears(self) -> tuple[LoraLinear, ...]:
        return tuple(linear for layer in self.layers for linear in layer.linears)

    def rehearsal(self) -> Decoder:
        """Return a decoder with some of the layers, which together compile every variant of the kernels: the
        first three, layer 16 (kernels may differ for multiples of 16), the last, and one with each window."""
        windows = {spec.attention.window: number for number, spec in enumerate(self.config.layers)}
        last = len(self.layers) - 1
        chosen = sorted({number for number in (0, 1, 2, 16, last) if number <= last} | set(windows.values()))
        return dataclasses.replace(self, layers=tuple(self.layers[number] for number in chosen))

    def forward(self, batch: StepBatch, pool: torch.Tensor) -> torch.Tensor:
        last = self.body(batch, pool)
        # Rows are gathered before the final norm and the head, since prompts' other tokens need no logits.
        rows = None if batch.sampled is not None else batch.sample_index
        return self.logits(last, rows, LoraStep(pool, batch.head))

    def logits(self, last: Stream, rows: torch.Tensor | None, lora: LoraStep) -> torch.Tensor:
        return self.head(last if rows is None else last.of(rows), self.ops, lora)

    def body(self, batch: StepBatch, pool: torch.Tensor) -> Stream:
        step = Step(self.ops, batch, pool)
        stream = Stream(Summands(self.embedding(batch)))
        before_layer = batch.before_layer
        for number, layer in enumerate(self.layers[:-1]):
            if before_layer is not None:
                before_layer(number)
            stream = layer(stream, step)
        if before_layer is not None:
            before_layer(len(self.layers) - 1)
        return self.layers[-1](stream, step, None if batch.sampled is None else batch.sample_index)


@dataclasses.dataclass(frozen=True, eq=False)
class RankedModel:
    """One rank's share of a model, and its connection to the other ranks."""

    share: ModelShare
    peers: Peers


def build_decoder(
    config: ModelConfig,
    weights: Weights,
    ops: Ops,
    device: torch.device,
    max_positions: int,
    ranked: RankedModel | None = None,
) -> Decoder:
    """Compose the decoder. Take every tensor from ``weights`` once, in the order of the layers.

    ``config``: the whole model's. ``max_positions``: the longest context, which sizes the rotary tables.
    ``ranked``: given where only one rank's part of the model is built.
    """
    names = config.names
    ropes = {
        rope: Rotary(*rope_tables(config, max_positions, device, rope))
        for rope in {spec.attention.rope or config.rope for spec in config.layers}
        if rope is not None
    }
    vocab = None if ranked is None else ranked.share.vocab
    embedding = _embedding(config, weights, ranked)
    layers = tuple(
        _layer(config, spec, weights, layer, ropes, max_positions, ranked)
        for layer, spec in enumerate(config.layers)
    )
    norm = _norm(config, weights, f"{names.body}{names.final_norm}") if config.final_norm else None
    size, hidden = config.embedding_size, config.hidden_size
    project = None
    if size != hidden:
        project = _matrix(weights, Part(f"{names.body}{names.project_out}.weight", (size, hidden)))
    head = embedding.tokens
    if not config.tie_embeddings:
        head = _matrix(weights, Part(f"{names.head}.weight", (config.vocab_size, size), vocab))
    linear = AdaptedLinear(config.head_group, 0, head, None)
    return Decoder(config, ops, embedding, layers, Head(norm, project, linear, config.logit_cap))


def _embedding(config: ModelConfig, weights: Weights, ranked: RankedModel | None) -> Embedding:
    names, size, hidden = config.names, config.embedding_size, config.hidden_size
    vocab = None if ranked is None else ranked.share.vocab
    tokens = _matrix(weights, Part(f"{names.body}{names.embedding}.weight", (config.vocab_size, size), vocab))
    project = positions = None
    if size != hidden:
        project = _matrix(weights, Part(f"{names.body}{names.project_in}.weight", (hidden, size)))
    if config.rope is None:
        rows = config.max_position_embeddings + config.position_offset
        table = weights.take(Part(f"{names.body}{names.positions}.weight", (rows, hidden)))
        positions = table[config.position_offset :]
    # transformers rounds the scale to the weights' dtype, too.
    scale = float(torch.tensor(config.embedding_scale, dtype=tokens.data.dtype))
    if ranked is not None:
        return RankedEmbedding(tokens, project, positions, scale, ranked.share.vocab, ranked.peers)
    return Embedding(tokens, project, positions, scale)


def _layer(
    config: ModelConfig,
    spec: LayerSpec,
    weights: Weights,
    layer: int,
    ropes: Mapping[RopeConfig, Rotary],
    max_positions: int,
    ranked: RankedModel | None,
) -> Layer:
    names = config.names
    prefix = f"{names.layer_prefix}{layer}."

    def linear(described: LinearSpec) -> LoraLinear:
        return _linear(described, ranked, weights, prefix, layer)

    head_norm = None
    qkv = linear(spec.attention.qkv)
    if spec.attention.has_head_norm:
        head_norm = HeadNorm(
            _norm_weight(config, weights, f"{prefix}{names.query_norm}", config.head_dim),
            _norm_weight(config, weights, f"{prefix}{names.key_norm}", config.head_dim),
            config.norm_eps,
        )
    rope, window = spec.attention.rope or config.rope, spec.attention.window
    if window is not None and window >= max_positions:
        window = None  # it hides nothing, so the kernels need not test it
    attention = Attention(
        qkv=qkv,
        out=linear(spec.attention.out),
        head_norm=head_norm,
        rope=None if rope is None else ropes[rope],
        head_dim=config.head_dim,
        scores=Scores(config.attention_scale, window, config.score_cap),
    )
    first, second = linear(spec.mlp.first), linear(spec.mlp.second)
    mlp = Mlp(first, second, spec.mlp.activation, spec.mlp.is_gated)

    def norm(name: str) -> Norm:
        return _norm(config, weights, f"{prefix}{name}")

    parts = attention, norm(names.attention_norm), mlp, norm(names.mlp_norm)
    if not config.norm_before:
        return PostNormLayer(*parts)
    after = [None if name is None else norm(name) for name in (names.attention_after, names.mlp_after)]
    return PreNormLayer(*parts, *after)


def _linear(
    spec: LinearSpec, ranked: RankedModel | None, weights: Weights, prefix: str, layer: int
) -> LoraLinear:
    share = None if ranked is None else ranked.share.linear(spec)
    rows = [None] * len(spec.group.projections) if share is None else share.outputs
    columns = None if share is None or share.kind == "column" else share.inputs
    projections = list(zip(spec.group.projections, rows, strict=True))
    matrices = (
        Part(f"{prefix}{p.module}.weight", (p.out_features, p.in_features), r, columns)
        for p, r in projections
    )
    weight = _matrix(weights, *matrices)
    bias = None
    # The ranks add up the results of a row linear, so only the first rank adds the bias.
    if spec.has_bias and (columns is None or ranked is None or ranked.share.place.rank == 0):
        bias = weights.take(*(Part(f"{prefix}{p.module}.bias", (p.out_features,), r) for p, r in projections))
    if ranked is None or share is None:
        return LoraLinear(spec.group, layer, weight, bias)
    return RankedLinear(share.group, layer, weight, bias, share, ranked.share.is_sharded, ranked.peers)


def _matrix(weights: Weights, *parts: Part) -> Weight:
    return Weight(weights.take(*parts))


def _norm(config: ModelConfig, weights: Weights, name: str) -> Norm:
    shape = (config.hidden_size,)
    if not config.norm_affine:
        return LayerNorm(config.hidden_size, None, None, config.norm_eps)
    weight = _norm_weight(config, weights, name, config.hidden_size)
    if config.norm == "rms":
        return RmsNorm(weight, config.norm_eps)
    return LayerNorm(config.hidden_size, weight, weights.take(Part(f"{name}.bias", shape)), config.norm_eps)


def _norm_weight(config: ModelConfig, weights: Weights, name: str, size: int) -> torch.Tensor:
    weight = weights.take(Part(f"{name}.weight", (size,)))
    return weight if config.norm_offset == 0 else weight.float() + config.norm_offset
