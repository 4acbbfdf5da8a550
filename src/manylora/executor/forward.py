"""One step's work on the device, from numbers and plans to logits and the most likely tokens.

Owns the device's pending tokens: those that have been sampled and that the next step may read before the host
knows them. The same function runs eagerly and under capture. Does not know rows, sequences or sampling parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from manylora.devices.device import Device
from manylora.executor.batch import PENDING_ENTRIES, StepInputs
from manylora.executor.cold_rows import ColdRows
from manylora.executor.sampling import LOGITS_AT_A_TIME, Best, RankedSampling, greedy, score
from manylora.kernels.ops import LoraSegments, LoraStep, SampledRows, StepBatch
from manylora.kernels.shapes import AdapterGeometry
from manylora.memory.pool import Arena
from manylora.models.model import Model

NARROWED = 64
"""So many tokens that draw nothing make it worth a gather to spare them the last layer's products."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Numbers:
    """The device's copies of what ``StepInputs`` calls by the same names."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    sample_index: torch.Tensor
    pending_index: torch.Tensor


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Outputs:
    """Of the M rows that draw: ``logits`` float32 [M, V] (of a rank: of its own tokens), ``best``: the most
    likely tokens of these rows or of more, ``last`` int64 [M]: the token that stands before,
    ``pending_index`` int64 [M]. ``scores``: of the tokens that are scored, as ``score`` gives them."""

    logits: torch.Tensor
    best: Best
    last: torch.Tensor
    pending_index: torch.Tensor
    scores: torch.Tensor | None = None

    def first(self, count: int) -> Outputs:
        """The outputs of the first ``count`` rows only, but for ``best`` and ``scores``."""
        if count == len(self.logits):
            return self
        rows = self.logits[:count], self.best, self.last[:count], self.pending_index[:count]
        return Outputs(*rows, self.scores)


class Scored(NamedTuple):
    """Tokens whose logits tell of prompts, some at a time: rows of the batch and targets int64 [K], on the device,
    and the rows' plan at the head. ``width``: of ``ScoredTokens``."""

    parts: list[tuple[torch.Tensor, torch.Tensor, Any | None]]
    width: int


class Forward:
    """Runs the decoder on one device. ``pending`` int64 [PENDING_ENTRIES]: the pending tokens."""

    def __init__(
        self,
        decoder: Model,
        arena: Arena,
        geometry: AdapterGeometry,
        device: Device,
        ranked: RankedSampling | None = None,
    ) -> None:
        """``ranked``: where the decoder is one rank's share of a model."""
        self.decoder = decoder
        self.ranked = ranked
        self._greedy = greedy if ranked is None else ranked.greedy
        self._score = score if ranked is None else ranked.score
        self.arena = arena
        self.geometry = geometry
        self.device = device
        self.pending = device.zeros((PENDING_ENTRIES,), torch.int64)

    def compute(
        self,
        numbers: Numbers,
        attention: Any,
        lora: Any | None,
        has_pending: bool = True,
        sampled: SampledRows | None = None,
        before_layer: Callable[[int], None] | None = None,
        cold: ColdRows | None = None,
        scored: Scored | None = None,
        head: Any | None = None,
    ) -> Outputs:
        """The step, given its plans; the most likely tokens become pending tokens. Does not wait for the device.

        Without ``has_pending`` no token id may be negative. With ``scored`` there is no ``sampled``.
        """
        token_ids = numbers.token_ids
        if has_pending:
            known = self.pending[(-token_ids).clamp_(min=0)]
            token_ids = torch.where(token_ids < 0, known, token_ids)
        batch = StepBatch(
            token_ids=token_ids,
            positions=numbers.positions,
            slots=numbers.slots,
            sample_index=numbers.sample_index,
            attention=attention,
            lora=lora,
            head=head,
            sampled=sampled,
            before_layer=before_layer,
            cold=cold,
        )
        scores = None
        if scored is None:
            logits = self.decoder.forward(batch, self.arena.pool)
        else:
            x, residual = self.decoder.body(batch, self.arena.pool)
            logits = self.decoder.logits(x, residual, numbers.sample_index, LoraStep(self.arena.pool, head))
            scores = torch.cat([
                self._score(
                    self.decoder.logits(x, residual, rows, LoraStep(self.arena.pool, plan)), targets, scored.width
                )
                for rows, targets, plan in scored.parts
            ])  # fmt: skip
        best = self._greedy(logits)
        self.redraw(numbers.pending_index, best.tokens)
        return Outputs(logits, best, token_ids[numbers.sample_index], numbers.pending_index, scores)

    def close(self) -> None:
        """Idempotent."""
        self.decoder.ops.close()

    def redraw(self, pending_index: torch.Tensor, tokens: torch.Tensor) -> None:
        """These were sampled, whatever was most likely."""
        self.pending.index_copy_(0, pending_index, tokens)


class EagerSteps:
    """Steps launched one operation after another. Remembers the LoRA plan, which seldom changes."""

    def __init__(self, forward: Forward, geometry: AdapterGeometry, device: Device) -> None:
        self._forward = forward
        self._geometry = geometry
        self._device = device
        self._segments: LoraSegments | None = None
        self._lora: Any | None = None

    def run(
        self,
        inputs: StepInputs,
        before_layer: Callable[[int], None] | None = None,
        cold: ColdRows | None = None,
    ) -> Outputs:
        """``before_layer``, ``cold``: see StepBatch."""
        ops, device = self._forward.decoder.ops, self._device.torch_device
        arrays = (
            inputs.token_ids, inputs.positions, inputs.slots, inputs.sample_index, inputs.pending_index,
        )  # fmt: skip
        packed = self._device.upload(np.concatenate(arrays))
        numbers = Numbers(*torch.split(packed, [len(array) for array in arrays]))
        if inputs.lora is not self._segments:
            self._segments, self._lora = inputs.lora, None
            if inputs.lora is not None:
                self._lora = ops.plan_lora(inputs.lora, self._geometry.of_layers, device)
        attention = ops.plan_attention(inputs.attention, self._geometry.page, device)
        has_pending = bool((inputs.token_ids < 0).any())
        lora, sampled = self._lora, None
        if cold is None:
            sampled = self._sampled_rows(inputs)
        else:
            others, geometry = cold.others, self._geometry.of_layers
            lora = None if others is None else ops.plan_lora(others, geometry, device)
        plans = attention, lora, has_pending, sampled, before_layer, cold
        head = self._head_plan(inputs, inputs.sample_index)
        return self._forward.compute(numbers, *plans, self._scored(inputs), head)

    def _head_plan(self, inputs: StepInputs, tokens: np.ndarray) -> Any | None:
        """Of these tokens, ascending; None where no adapter changes the head for them."""
        segments = None if inputs.head is None else inputs.head.of_tokens(tokens)
        if segments is None:
            return None
        ops, geometry = self._forward.decoder.ops, self._geometry.of_model
        return ops.plan_lora(segments, geometry, self._device.torch_device)

    def _scored(self, inputs: StepInputs) -> Scored | None:
        asked = inputs.scored
        if asked is None:
            return None
        tokens, parts = self._device.upload(asked.tokens), []
        size = max(1, LOGITS_AT_A_TIME // self._forward.decoder.config.vocab_size)
        for first in range(0, tokens.shape[1], size):
            rows, targets = tokens[:, first : first + size]
            parts.append((rows, targets, self._head_plan(inputs, asked.tokens[0, first : first + size])))
        return Scored(parts, asked.width)

    def _sampled_rows(self, inputs: StepInputs) -> SampledRows | None:
        """None where too few tokens would be spared the last layer's products, or no row draws."""
        drawing = len(inputs.sample_index)
        if drawing == 0 or inputs.scored is not None or len(inputs.token_ids) - drawing < NARROWED:
            return None
        segments = None if inputs.lora is None else inputs.lora.of_tokens(inputs.sample_index)
        if segments is None:
            return SampledRows(None)
        ops = self._forward.decoder.ops
        return SampledRows(ops.plan_lora(segments, self._geometry.of_layers, self._device.torch_device))
