"""Computes a step on the device, from numbers and plans to logits and the most likely tokens.

Owns the device's pending tokens: tokens that a step has sampled, and that the next step may read before the
host knows them. ``Forward.compute`` runs eagerly as well as under capture. The module does not know rows,
sequences or sampling parameters.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from manylora.devices.device import Device
from manylora.executor.batch import PENDING_ENTRIES, Layout, StepInputs
from manylora.executor.cold_rows import ColdRows
from manylora.executor.parts import StepParts
from manylora.executor.sampling import LOGITS_AT_A_TIME, Best, RankedSampling, greedy, score
from manylora.kernels.ops import LoraSegments, LoraStep, SampledRows, StepBatch
from manylora.kernels.shapes import AdapterGeometry
from manylora.memory.pool import Arena
from manylora.models.model import Model

NARROWED = 64
"""The fewest tokens without a draw that the last layer leaves out. For fewer tokens, the gather costs more
than the products that it saves."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Numbers:
    """The device's copies of the arrays that have the same names in ``StepInputs`` and ``Layout``."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    sample_index: torch.Tensor
    pending_index: torch.Tensor


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Outputs:
    """The results of a step's M rows that draw.

    ``logits`` float32 [M, V]; a rank has the columns of its own tokens. ``best``: the most likely tokens of
    these rows, and perhaps of further rows. ``last`` int64 [M]: the token before each draw. ``pending_index``
    int64 [M]: as in ``Layout``. ``scores``: the scores of the scored tokens, as ``score`` returns them.
    """

    logits: torch.Tensor
    best: Best
    last: torch.Tensor
    pending_index: torch.Tensor
    scores: torch.Tensor | None = None


class Scored(NamedTuple):
    """The prompt tokens whose logits score the next token, in parts of K tokens. The parts' logits are
    computed one after the other, to save memory. A part has the tokens' places in the batch and the next
    tokens, each int64 [K] on the device, and the LoRA plan at the output head. ``width``: as in
    ``ScoredTokens``."""

    parts: list[tuple[torch.Tensor, torch.Tensor, Any | None]]
    width: int


class Forward:
    """A decoder on one device, with the sampling of most likely tokens. It keeps the last LoRA plan of eager
    steps, because segments seldom change. ``pending`` int64 [PENDING_ENTRIES]: the pending tokens. ``parts``:
    the threads that compute eager steps in parts, if any."""

    def __init__(
        self,
        decoder: Model,
        arena: Arena,
        geometry: AdapterGeometry,
        device: Device,
        ranked: RankedSampling | None = None,
    ) -> None:
        """Set up the pending tokens. ``ranked``: given where the decoder is one rank's share of a model."""
        self.decoder = decoder
        self.ranked = ranked
        self._greedy, self._score = (greedy, score) if ranked is None else (ranked.greedy, ranked.score)
        self.arena = arena
        self.geometry = geometry
        self.device = device
        self.pending = device.zeros((PENDING_ENTRIES,), torch.int64)
        self.parts: StepParts | None = None
        self._lora: dict[int, tuple[LoraSegments | None, Any | None]] = {}  # by a part's place in its step

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
        """Compute a step with its plans, and store the most likely tokens as pending tokens.

        Does not wait for the device. Without ``has_pending``, no token id may be negative. With ``scored``,
        ``sampled`` must be None. The plans, ``before_layer`` and ``cold``: as in StepBatch.
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
            last = self.decoder.body(batch, self.arena.pool)
            logits = self.decoder.logits(last, numbers.sample_index, LoraStep(self.arena.pool, head))
            scores = torch.cat([
                self._score(
                    self.decoder.logits(last, rows, LoraStep(self.arena.pool, plan)), targets, scored.width
                )
                for rows, targets, plan in scored.parts
            ])  # fmt: skip
        best = self._greedy(logits)
        self.redraw(numbers.pending_index, best.tokens)
        return Outputs(logits, best, token_ids[numbers.sample_index], numbers.pending_index, scores)

    def close(self) -> None:
        """End the work of the decoder's operations beside the steps. May be called again."""
        if self.parts is not None:
            self.parts.close()
        self.decoder.ops.close()

    def redraw(self, pending_index: torch.Tensor, tokens: torch.Tensor) -> None:
        """Replace pending tokens by sampled ones, int64, at the entries ``pending_index``."""
        self.pending.index_copy_(0, pending_index, tokens)

    # ------------------------------------------------------------ eager steps

    def run(self, inputs: StepInputs, cold: ColdRows | None = None) -> Outputs:
        """Run a step eagerly, in parts where that pays: send its inputs to the device, make its plans, and
        compute it. ``cold``: as in StepBatch."""
        parts = [inputs] if self.parts is None or cold is not None else self.parts.cut(inputs)
        if self.parts is None or len(parts) == 1:
            return self._run(0, inputs, cold)
        return _joined(
            self.parts.run([functools.partial(self._run, *part, None) for part in enumerate(parts)])
        )

    def _run(self, place: int, inputs: StepInputs, cold: ColdRows | None) -> Outputs:
        layout = inputs.layout
        of_rows = layout.sample_index, layout.pending_index
        arrays = inputs.token_ids, inputs.positions, inputs.slots, *of_rows
        packed = self.device.upload(np.concatenate(arrays))
        numbers = Numbers(*torch.split(packed, [len(array) for array in arrays]))
        geometry, device = self.geometry, self.device.torch_device
        attention = self.decoder.ops.plan_attention(inputs.attention, geometry.page, device)
        if cold is not None:
            lora, sampled = self._plan(cold.others, geometry.of_layers), None
        else:
            segments, lora = self._lora.get(place, (None, None))
            if layout.lora is not segments:
                lora = self._plan(layout.lora, geometry.of_layers)
                self._lora[place] = layout.lora, lora
            sampled = self._sampled_rows(inputs)
        plans = attention, lora, bool((inputs.token_ids < 0).any()), sampled
        scored, head = self._scored(inputs), self._head_plan(layout, layout.sample_index)
        return self.compute(numbers, *plans, cold=cold, scored=scored, head=head)

    def _plan(self, segments: LoraSegments | None, geometry: AdapterGeometry) -> Any | None:
        """Return the LoRA plan of these segments; None where there are none."""
        if segments is None:
            return None
        return self.decoder.ops.plan_lora(segments, geometry, self.device.torch_device)

    def _head_plan(self, layout: Layout, tokens: np.ndarray) -> Any | None:
        """Return the LoRA plan of these tokens, ascending, at the output head. Return None where no adapter
        changes the head for them."""
        segments = None if layout.head is None else layout.head.of_tokens(tokens)
        return self._plan(segments, self.geometry.of_model)

    def _scored(self, inputs: StepInputs) -> Scored | None:
        asked = inputs.scored
        if asked is None:
            return None
        tokens, parts = self.device.upload(asked.tokens), []
        size = max(1, LOGITS_AT_A_TIME // self.decoder.config.vocab_size)
        for first in range(0, tokens.shape[1], size):
            part = slice(first, first + size)
            rows, targets = tokens[:, part]
            parts.append((rows, targets, self._head_plan(inputs.layout, asked.tokens[0, part])))
        return Scored(parts, asked.width)

    def _sampled_rows(self, inputs: StepInputs) -> SampledRows | None:
        """Return the rows to which the last layer is narrowed. Return None where that saves too few tokens,
        where no row draws, or where tokens are scored."""
        lora, drawing = inputs.layout.lora, len(inputs.layout.sample_index)
        if drawing == 0 or inputs.scored is not None or len(inputs.token_ids) - drawing < NARROWED:
            return None
        segments = None if lora is None else lora.of_tokens(inputs.layout.sample_index)
        return SampledRows(self._plan(segments, self.geometry.of_layers))


def _joined(parts: Sequence[Outputs]) -> Outputs:
    """Join the outputs of a step's parts."""
    logits = torch.cat([part.logits for part in parts])
    best = Best.within(torch.zeros(2 * len(logits), dtype=torch.int64))
    torch.cat([part.best.tokens for part in parts], out=best.tokens)
    torch.cat([part.best.values for part in parts], out=best.values)
    last = torch.cat([part.last for part in parts])
    return Outputs(logits, best, last, torch.cat([part.pending_index for part in parts]))
