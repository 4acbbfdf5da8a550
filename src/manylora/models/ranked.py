"""The parts of a decoder of which each of N ranks has a share, and which exchange with the others' (S-LoRA §6).

Each takes the place of a part of ``layers``: what runs between them does not know of ranks. Owns when ranks
exchange: once after each row linear and once after the embedding; and, where adapters are sharded, once for
each group of projections between shrink and expand, whatever the number of adapters. What a row linear's
adapters give is added before the sum that the base needs anyway.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.nn import functional

from manylora.devices.peers import Peers
from manylora.kernels.ops import StepBatch, Summands
from manylora.models.layers import Embedding, LoraLinear, Step
from manylora.models.share import LinearShare


@dataclasses.dataclass(frozen=True, eq=False)
class RankedLinear(LoraLinear):
    """A rank's share of a fused linear: ``weight`` ``[sum(own out), own in]``."""

    share: LinearShare
    is_sharded: bool
    peers: Peers

    def __call__(self, x: torch.Tensor, step: Step) -> Summands:
        """As LoraLinear. Of a row linear the whole sum, on every rank, in one."""
        if self.share.kind == "column" and not self.is_sharded:
            return self._summands(x, step)
        y = self._adapted(x, step)
        if self.share.kind == "row":
            self.peers.add_up(y, "base")
        return Summands(y)

    def gated(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        ops, plan = step.ops, step.batch.lora
        if plan is not None and self.is_sharded:
            return ops.silu_mul(self._adapted(x, step))
        lies = step.pool, self.layer, self.share.adapted
        return ops.lora_gated(x, self.weight, self.bias, *lies, plan)

    def _summands(self, x: torch.Tensor, step: Step) -> Summands:
        """Where adapters need no exchange."""
        lies = step.pool, self.layer, self.share.adapted
        return step.ops.lora_summands(x, self.weight, self.bias, *lies, step.batch.lora)

    def _adapted(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        ops, plan, share = step.ops, step.batch.lora, self.share
        if plan is None or not self.is_sharded:
            return self._summands(x, step).whole
        # The product is what runs beside: exchanges keep to one stream, in the one order of all ranks.
        side = ops.lora_side(plan)
        side.fork()
        shrunk = ops.lora_shrink(_columns(x, share.read), step.pool, self.layer, share.adapted, plan)
        with side.use():
            y = ops.linear(x, self.weight, self.bias)
        # None where no adapter of the batch is on these projections, which all ranks see alike.
        if shrunk.values.numel():
            self.peers.add_up(shrunk.values, "lora")
        side.join()
        ops.lora_expand(_columns(y, share.added), shrunk, step.pool, self.layer, share.adapted, plan)
        return y


@dataclasses.dataclass(frozen=True, eq=False)
class RankedEmbedding(Embedding):
    """``tokens``: those of the ids ``vocab``."""

    vocab: range
    peers: Peers

    def looked_up(self, batch: StepBatch) -> torch.Tensor:
        ids = batch.token_ids - self.vocab.start
        is_other = (ids < 0) | (ids >= len(self.vocab))
        x = functional.embedding(ids.masked_fill(is_other, 0), self.tokens.data)
        x = x.masked_fill_(is_other[:, None], 0.0)
        self.peers.add_up(x, "base")  # exact: all but one are 0
        return x


def _columns(x: torch.Tensor, columns: range) -> torch.Tensor:
    return x if len(columns) == x.shape[1] else x[:, columns.start : columns.stop]
