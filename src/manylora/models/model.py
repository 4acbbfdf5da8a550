"""Declares the base model as the executor uses it, whatever the model is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from manylora.kernels.ops import AdaptedLinear, LoraStep, Ops, StepBatch
from manylora.models.layers import Stream
from manylora.models.spec import ModelConfig


class Model(Protocol):
    """A base model ready to run on one device. ``decoder.Decoder`` is the only implementation.

    A batch is flat: the tokens of many sequences, without padding. All calls run under
    ``torch.inference_mode``.
    """

    @property
    def config(self) -> ModelConfig:
        """The configuration of the whole model, even where this is one rank's share of it."""

    @property
    def ops(self) -> Ops:
        """The device's operations. The model's owner closes them."""

    @property
    def linears(self) -> Sequence[AdaptedLinear]:
        """The layers' linears, layer by layer. Adapters may change them, and one may be merged into them."""

    def rehearsal(self) -> Model:
        """Return a smaller model, with which the same kernels are compiled as with this one."""

    def forward(self, batch: StepBatch, pool: torch.Tensor) -> torch.Tensor:
        """Run ``body``, and return float32 logits ``[M, vocab]`` of the tokens at ``batch.sample_index``. A
        rank returns the columns of its own part of the vocabulary."""

    def body(self, batch: StepBatch, pool: torch.Tensor) -> Stream:
        """Run the layers, and return the last one's result for ``logits``.

        It has a row for each of the batch's tokens, or, with ``batch.sampled``, for each token at
        ``batch.sample_index``. Writes the batch's keys and values into ``pool``, and changes nothing else.
        """

    def logits(self, last: Stream, rows: torch.Tensor | None, lora: LoraStep) -> torch.Tensor:
        """Return float32 logits ``[M, vocab]`` of ``rows``, int64 [M], of the result of ``body``; None: of
        all rows. ``lora``: these rows' LoRA at the output head."""
