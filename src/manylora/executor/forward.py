"""One step's work on the device, from numbers and plans to logits and the most likely tokens.

Owns the device's pending tokens: those that have been sampled and that the next step may read before the host
knows them. The same function runs eagerly and under capture. Does not know rows, sequences or sampling parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from manylora.devices.device import Device
from manylora.executor.batch import PENDING_ENTRIES, StepInputs
from manylora.executor.cold_rows import ColdRows
from manylora.executor.sampling import LOGITS_AT_A_TIME, Best, RankedSampling, greedy, score
from manylora.kernels.ops import LoraSegments, SampledRows, StepBatch, Summands
from manylora.kernels.shapes import AdapterGeometry
from manylora.memory.pool import Arena
from manylora.models.decoder import Decoder

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


class Forward:
    """Runs the decoder on one device. ``pending`` int64 [PENDING_ENTRIES]: the pending tokens."""

    def __init__(
        self,
        decoder: Decoder,
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
        scored: tuple[torch.Tensor, int] | None = None,
    ) -> Outputs:
        """The step, given its plans; the most likely tokens become pending tokens. Does not wait for the device.

        Without ``has_pending`` no token id may be negative. ``scored``: the ``tokens`` of ``ScoredTokens``, on the
        device, and their ``width``; there is no ``sampled`` then.
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
            sampled=sampled,
            before_layer=before_layer,
            cold=cold,
        )
        scores = None
        if scored is None:
            logits = self.decoder.forward(batch, self.arena.pool)
        else:
            x, residual = self.decoder.body(batch, self.arena.pool)
            logits = self.decoder.logits(x, residual, numbers.sample_index)
            scores = self._scores(x, residual, *scored)
        best = self._greedy(logits)
        self.redraw(numbers.pending_index, best.tokens)
        return Outputs(logits, best, token_ids[numbers.sample_index], numbers.pending_index, scores)

    def _scores(
        self, x: Summands, residual: torch.Tensor | None, tokens: torch.Tensor, width: int
    ) -> torch.Tensor:
        size = max(1, LOGITS_AT_A_TIME // self.decoder.config.vocab_size)
        found = []
        for first in range(0, tokens.shape[1], size):
            rows, targets = tokens[:, first : first + size]
            found.append(self._score(self.decoder.logits(x, residual, rows), targets, width))
        return torch.cat(found)

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
        asked = inputs.scored
        scored = None if asked is None else (self._device.upload(asked.tokens), asked.width)
        if inputs.lora is not self._segments:
            self._segments, self._lora = inputs.lora, None
            if inputs.lora is not None:
                self._lora = ops.plan_lora(inputs.lora, self._geometry, device)
        attention = ops.plan_attention(inputs.attention, self._geometry.page, device)
        has_pending = bool((inputs.token_ids < 0).any())
        lora, sampled = self._lora, None
        if cold is None:
            sampled = self._sampled_rows(inputs)
        else:
            lora = None if cold.others is None else ops.plan_lora(cold.others, self._geometry, device)
        plans = attention, lora, has_pending, sampled, before_layer, cold
        return self._forward.compute(numbers, *plans, scored)

    def _sampled_rows(self, inputs: StepInputs) -> SampledRows | None:
        """None where too few tokens would be spared the last layer's products, or no row draws."""
        drawing = len(inputs.sample_index)
        if drawing == 0 or inputs.scored is not None or len(inputs.token_ids) - drawing < NARROWED:
            return None
        segments = None if inputs.lora is None else inputs.lora.of_tokens(inputs.sample_index)
        if segments is None:
            return SampledRows(None)
        ops = self._forward.decoder.ops
        return SampledRows(ops.plan_lora(segments, self._geometry, self._device.torch_device))
