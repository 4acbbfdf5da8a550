"""What those that run a model ask of it, whatever it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from manylora.kernels.ops import AdaptedLinear, LoraStep, Ops, StepBatch, Summands
from manylora.models.spec import ModelConfig


class Model(Protocol):
    """A base model ready to run on one device; ``decoder.Decoder`` is the one that there is.

    Everything runs on a flat batch of many sequences' tokens, and under ``torch.inference_mode``.
    """

    @property
    def config(self) -> ModelConfig:
        """The whole model's, also of one rank's share."""

    @property
    def ops(self) -> Ops:
        """The operations, which whoever holds the model closes."""

    @property
    def layer_prefix(self) -> str:
        """What comes before a layer's number in a module's path: adapters' files name their targets by it."""

    @property
    def linears(self) -> Sequence[AdaptedLinear]:
        """The layers' linears that adapters may be on, and may be merged into, layer by layer."""

    def rehearsal(self) -> Model:
        """A smaller model by which the same kernels are compiled."""

    def forward(self, batch: StepBatch, pool: torch.Tensor) -> torch.Tensor:
        """float32 logits ``[M, vocab]`` of the tokens at ``batch.sample_index``; otherwise as ``body``."""

    def body(self, batch: StepBatch, pool: torch.Tensor) -> tuple[Summands, torch.Tensor | None]:
        """What the layers give of the batch's tokens, for ``logits``; with ``batch.sampled``, of those at
        ``batch.sample_index`` alone. Writes the batch's keys and values into ``pool``."""

    def logits(
        self, x: Summands, residual: torch.Tensor | None, rows: torch.Tensor | None, lora: LoraStep
    ) -> torch.Tensor:
        """float32 logits ``[M, vocab]`` of these rows, int64 [M], of what ``body`` gave; None: of all. ``lora``:
        of these rows at the head."""
