"""Implements the parts of decoders: linears with LoRA, norms, attention, MLPs, and two kinds of layers.

Each part holds its tensors and runs on a flat batch ``[T, features]`` of many sequences' tokens, without
padding. The parts call the ops for LoRA and attention. They know no model families, checkpoints or
scheduling.

The parts named Ranked hold one rank's share and exchange with the other ranks (S-LoRA §6): once after each
row linear and once after the embedding. If adapters are sharded, they also exchange once for each group of
projections between shrink and expand, whatever the number of adapters. A row linear adds its adapters'
results before the sum over the ranks, which the base needs anyway.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional

from manylora.devices.peers import Peers
from manylora.kernels.ops import (
    ACTIVATIONS,
    AdaptedLinear,
    HeadNorm,
    LoraSite,
    LoraStep,
    Ops,
    Rotary,
    Scores,
    StepBatch,
    Summands,
    Weight,
)
from manylora.kernels.shapes import Activation
from manylora.models.share import LinearShare


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """The inputs of all parts in one forward pass. Valid for that pass only."""

    ops: Ops
    batch: StepBatch
    pool: torch.Tensor

    @functools.cached_property
    def lora(self) -> LoraStep:
        return LoraStep(self.pool, self.batch.lora)

    def of_sampled(self) -> Step:
        """Return the step for parts that run on the rows of ``batch.sample_index`` alone."""
        sampled = self.batch.sampled
        batch = dataclasses.replace(self.batch, lora=None if sampled is None else sampled.lora)
        return Step(self.ops, batch, self.pool)


class LoraLinear(AdaptedLinear):
    """A fused linear, weight ``[sum(out), in]``, that adds each token's own adapter to its product."""

    def __call__(self, x: torch.Tensor, step: Step) -> Summands:
        """Map x ``[T, in]`` to summands ``[T, sum(out)]``, both contiguous."""
        cold = step.batch.cold
        has_posted = cold is not None and cold.post(x, self.group)
        y = step.ops.lora_summands(x, self, step.lora)
        if cold is not None and has_posted:
            cold.add(y.product, self.group)
        return y

    def gated(self, x: torch.Tensor, step: Step, activation: Activation) -> torch.Tensor:
        """Return activation(gate) * up, ``[T, I]``, of a linear whose result is gate and up side by side."""
        if step.batch.cold is not None:
            return step.ops.gate_mul(self(x, step).whole, activation)
        return step.ops.lora_gated(x, self, step.lora, activation)


class Stream(NamedTuple):
    """The value ``[T, hidden]`` that runs through the layers: x + residual, or x where residual is None."""

    x: Summands
    residual: torch.Tensor | None = None

    @property
    def whole(self) -> torch.Tensor:
        return self.x.whole if self.residual is None else self.x.whole + self.residual

    def of(self, rows: torch.Tensor) -> Stream:
        """Return the stream of these rows, int64 [M]."""
        return Stream(self.x.of(rows), None if self.residual is None else self.residual[rows])


class Norm(Protocol):
    """A norm, fused with the residual sum before it."""

    def __call__(self, stream: Stream, ops: Ops) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm(x + residual), x + residual). May reuse the memory of both."""


@dataclasses.dataclass(frozen=True, eq=False)
class RmsNorm:
    """An RMSNorm, which the ops compute."""

    weight: torch.Tensor
    eps: float

    def __call__(self, stream: Stream, ops: Ops) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = stream
        if residual is None:
            whole = x.whole
            return ops.rms_norm(whole, self.weight, self.eps), whole
        return ops.add_rms_norm(x, residual, self.weight, self.eps)


@dataclasses.dataclass(frozen=True, eq=False)
class LayerNorm:
    """A layer norm. ``weight`` and ``bias`` are None where the model has none."""

    size: int
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float

    def __call__(self, stream: Stream, ops: Ops) -> tuple[torch.Tensor, torch.Tensor]:
        total = stream.whole
        return functional.layer_norm(total, (self.size,), self.weight, self.bias, self.eps), total


@dataclasses.dataclass(frozen=True, eq=False)
class Attention:
    """The attention of a layer, with the linears before it (``qkv``, one product) and after it (``out``).

    ``head_norm`` requires ``rope``. ``rope`` None: q and k are not rotated.
    """

    qkv: LoraLinear
    out: LoraLinear
    head_norm: HeadNorm | None
    rope: Rotary | None
    head_dim: int
    scores: Scores

    def mixed(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Store k and v in the pool, and attend over the rows' pages. Return the heads' results side by side,
        ``[T, heads * head_dim]``, to which ``out`` has not been applied."""
        sizes = [p.out_features for p in self.qkv.group.projections]
        # q, k and v are views of one [T, q + k + v] tensor, so their rows are strided and need no copy.
        qkv = self.qkv(x, step)
        product = qkv.whole if self.rope is None else qkv.product
        parts = product.split_with_sizes(sizes, dim=-1)
        q, k, v = (part.view(-1, part.shape[-1] // self.head_dim, self.head_dim) for part in parts)
        layer, batch = self.qkv.layer, step.batch
        if self.rope is None:
            step.ops.write_kv(step.pool, layer, k, v, batch.slots)
        else:
            places = batch.positions, batch.slots
            q = step.ops.rotate_and_store(
                q, k, v, step.pool, layer, self.rope, *places, self.head_norm, qkv.adapted
            )
        return step.ops.attention(q, step.pool, layer, batch.attention, self.scores)


@dataclasses.dataclass(frozen=True, eq=False)
class Mlp:
    """An MLP that computes second(activation(first(x))). Where it ``is_gated``, ``first`` returns gate and up
    side by side, and the MLP computes second(activation(gate) * up)."""

    first: LoraLinear
    second: LoraLinear
    activation: Activation
    is_gated: bool

    def __call__(self, x: torch.Tensor, step: Step) -> Summands:
        if self.is_gated:
            return self.second(self.first.gated(x, step, self.activation), step)
        return self.second(ACTIVATIONS[self.activation](self.first(x, step).whole), step)


@dataclasses.dataclass(frozen=True, eq=False)
class Layer(abc.ABC):
    """One decoder layer."""

    attention: Attention
    attention_norm: Norm
    mlp: Mlp
    mlp_norm: Norm

    @property
    def linears(self) -> tuple[LoraLinear, ...]:
        """The layer's linears that adapters may change, in order of use."""
        return self.attention.qkv, self.attention.out, self.mlp.first, self.mlp.second

    @abc.abstractmethod
    def __call__(self, stream: Stream, step: Step, rows: torch.Tensor | None = None) -> Stream:
        """Return the next stream. May reuse the memory of this one.

        ``rows``: ``batch.sample_index`` where only these rows ``[M, hidden]`` are wanted (``batch.sampled``).
        """


@dataclasses.dataclass(frozen=True, eq=False)
class PreNormLayer(Layer):
    """A layer with norms before attention and MLP. Each residual sum is fused into the norm that follows it.

    ``attention_after``, ``mlp_after``: norms of the results of attention and MLP, before these are added to
    the stream; given where the model has them (Gemma).
    """

    attention_after: Norm | None = None
    mlp_after: Norm | None = None

    def __call__(self, stream: Stream, step: Step, rows: torch.Tensor | None = None) -> Stream:
        normal, residual = self.attention_norm(stream, step.ops)
        mixed = self.attention.mixed(normal, step)
        if rows is not None:
            mixed, residual, step = mixed[rows], residual[rows], step.of_sampled()
        more = _normal(self.attention_after, self.attention.out(mixed, step), step.ops)
        normal, residual = self.mlp_norm(Stream(more, residual), step.ops)
        return Stream(_normal(self.mlp_after, self.mlp(normal, step), step.ops), residual)


def _normal(norm: Norm | None, x: Summands, ops: Ops) -> Summands:
    return x if norm is None else Summands(norm(Stream(x), ops)[0])


class PostNormLayer(Layer):
    """A layer with a norm after each residual sum (opt-350m). The stream is the norm's output, so there is no
    residual to pass on."""

    def __call__(self, stream: Stream, step: Step, rows: torch.Tensor | None = None) -> Stream:
        normal = stream.whole
        mixed = self.attention.mixed(normal, step)
        if rows is not None:
            mixed, normal, step = mixed[rows], normal[rows], step.of_sampled()
        normal, _ = self.attention_norm(Stream(self.attention.out(mixed, step), normal), step.ops)
        normal, _ = self.mlp_norm(Stream(self.mlp(normal, step), normal), step.ops)
        return Stream(Summands(normal))


@dataclasses.dataclass(frozen=True, eq=False)
class Embedding:
    """The embedding of tokens: ``tokens`` ``[vocab, embedding]``. Some models also have ``project``
    ``[hidden, embedding]``, and learned ``positions`` ``[max_positions, hidden]``, whose row p is for
    position p."""

    tokens: Weight
    project: Weight | None
    positions: torch.Tensor | None
    scale: float
    """The factor of the tokens' rows; 1: none."""

    def __call__(self, batch: StepBatch) -> torch.Tensor:
        x = self.looked_up(batch)
        if self.scale != 1.0:
            x = x.mul_(self.scale)
        if self.project is not None:
            x = functional.linear(x, self.project.data)
        if self.positions is not None:
            x = x + functional.embedding(batch.positions, self.positions)
        return x

    def looked_up(self, batch: StepBatch) -> torch.Tensor:
        """Return the rows of the batch's tokens, ``[T, embedding]``."""
        return functional.embedding(batch.token_ids, self.tokens.data)


@dataclasses.dataclass(frozen=True, eq=False)
class Head:
    """The output head, which maps the stream to logits. ``project`` ``[embedding, hidden]``. ``linear``
    ``[vocab, embedding]``: adapters may change it.
    ``soft_cap``: a logit l becomes soft_cap * tanh(l / soft_cap); None: no cap."""

    norm: Norm | None
    project: Weight | None
    linear: AdaptedLinear
    soft_cap: float | None

    def __call__(self, stream: Stream, ops: Ops, lora: LoraStep) -> torch.Tensor:
        """Return float32 logits ``[M, vocab]`` of rows ``[M, hidden]``. ``lora``: these rows' LoRA at the
        head."""
        last = stream.whole if self.norm is None else self.norm(stream, ops)[0]
        if self.project is not None:
            last = functional.linear(last, self.project.data)
        logits = ops.lora_summands(last, self.linear, lora).whole.float()
        if self.soft_cap is not None:
            logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        return logits


@dataclasses.dataclass(frozen=True, eq=False)
class RankedLinear(LoraLinear):
    """One rank's share of a fused linear, with ``weight`` ``[sum(own out), own in]``."""

    share: LinearShare
    is_sharded: bool
    peers: Peers

    def __call__(self, x: torch.Tensor, step: Step) -> Summands:
        """Map x as LoraLinear does. A row linear returns the ranks' sum on every rank, in ``product``
        alone."""
        if self.share.kind == "column" and not self.is_sharded:
            return step.ops.lora_summands(x, self, step.lora)
        y = self._adapted(x, step)
        if self.share.kind == "row":
            self.peers.add_up(y, "base")
        return Summands(y)

    def gated(self, x: torch.Tensor, step: Step, activation: Activation) -> torch.Tensor:
        if step.batch.lora is not None and self.is_sharded:
            return step.ops.gate_mul(self._adapted(x, step), activation)
        return step.ops.lora_gated(x, self, step.lora, activation)

    @functools.cached_property
    def _site(self) -> LoraSite:
        """The place of the adapters, with their widths on this rank. Only sharded adapters have other widths
        than the linear."""
        return LoraSite(self.share.adapted, self.layer)

    def _adapted(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        ops, plan, share = step.ops, step.batch.lora, self.share
        if plan is None or not self.is_sharded:
            return ops.lora_summands(x, self, step.lora).whole
        # The product, not the exchange, runs on the side: all ranks must issue exchanges on one stream, in
        # one order.
        side = ops.lora_side(plan)
        side.fork()
        shrunk = ops.lora_shrink(_columns(x, share.read), self._site, step.lora)
        with side.use():
            y = ops.linear(x, self.weight, self.bias)
        # Where no adapter of the batch changes these projections, all ranks alike have no values.
        if shrunk.values.numel():
            self.peers.add_up(shrunk.values, "lora")
        side.join()
        ops.lora_expand(_columns(y, share.added), shrunk, self._site, step.lora)
        return y


@dataclasses.dataclass(frozen=True, eq=False)
class RankedEmbedding(Embedding):
    """One rank's share of an embedding: ``tokens`` has the rows of the ids ``vocab``."""

    vocab: range
    peers: Peers

    def looked_up(self, batch: StepBatch) -> torch.Tensor:
        ids = batch.token_ids - self.vocab.start
        is_other = (ids < 0) | (ids >= len(self.vocab))
        x = functional.embedding(ids.masked_fill(is_other, 0), self.tokens.data)
        x = x.masked_fill_(is_other[:, None], 0.0)
        self.peers.add_up(x, "base")  # exact, since all summands but one are 0
        return x


def _columns(x: torch.Tensor, columns: range) -> torch.Tensor:
    return x if len(columns) == x.shape[1] else x[:, columns.start : columns.stop]
