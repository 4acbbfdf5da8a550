"""What one decoder layer takes in a decode step, with LoRA or without, for a model shape with dummy weights."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from manylora.kernels.ops import Ops, StepBatch, Summands
from manylora.kernels.select import ops_for
from manylora.kernels.shapes import PageShape, adapter_geometry
from manylora.models.decoder import Decoder
from manylora.models.layers import Step, Stream
from manylora.models.load import load_model
from manylora_lab.bench.dummies import dtype_name, write_model
from manylora_lab.bench.kernels.pool import (
    PAGE_TOKENS,
    cells_for,
    pages_of,
    random_pool,
    scattered_rows,
    segments_for,
)
from manylora_lab.bench.kernels.timing import medians
from manylora_lab.pricing.shapes import ModelShape


@dataclasses.dataclass(frozen=True, slots=True)
class LayerCase:
    """A decoding batch: ``counts[m]`` rows of adapter m, each with ``context`` positions, its own included."""

    context: int
    counts: tuple[int, ...]

    @property
    def num_pages(self) -> int:
        """Of KV."""
        return sum(self.counts) * pages_of(self.context)


class LayerRig:
    """``num_layers`` layers, a pool for the largest of ``cases``, adapters of ``rank`` on all linear modules; none
    where that is 0.

    What the pool holds is random: reading costs the same.
    """

    def __init__(
        self, shape: ModelShape, device: str, rank: int, num_layers: int, cases: Sequence[LayerCase]
    ) -> None:
        torch.manual_seed(0)
        self.device = torch.device(device)
        self.dtype = getattr(torch, dtype_name(shape))
        self.rank = rank
        self.hidden = shape.hidden
        self.ops = ops_for(self.device)
        longest = max(case.context for case in cases)
        self.decoder = self._decoder(dataclasses.replace(shape, layers=num_layers), longest)
        self.page: PageShape = self.decoder.config.page_shape(PAGE_TOKENS, self.dtype.itemsize)
        self.geometry = adapter_geometry(self.page, self.decoder.config.layer_groups)
        cells = max(cells_for(self.geometry, [rank] * len(case.counts)) for case in cases)
        # The first pages are the adapters'; no KV is written there.
        self.adapter_pages = -(-cells // self.geometry.cells_per_page)
        num_pages = self.adapter_pages + max(case.num_pages for case in cases)
        self.pool = random_pool(self.page, num_pages, self.dtype, self.device)

    def _decoder(self, shape: ModelShape, longest: int) -> Decoder:
        with tempfile.TemporaryDirectory() as scratch:
            folder = write_model(Path(scratch) / shape.name, shape, longest)
            return load_model(
                folder, ops=self.ops, device=self.device, dtype=self.dtype, load_format="dummy",
                max_positions=longest,
            )  # fmt: skip

    def seconds(self, steps: Sequence[Callable[[], object]], repeats: int) -> list[float]:
        """Of one layer of each: medians of repeats that take turns."""
        with torch.inference_mode():
            found = medians(self.device, steps, repeats)
        return [total / len(self.decoder.layers) for total in found]

    def step(self, case: LayerCase, ops: Ops | None = None) -> Callable[[], torch.Tensor]:
        """One call runs all layers on the batch, whose plans are made here. ``ops``: others than serve."""
        ops = ops or self.ops
        with torch.inference_mode():
            step = Step(ops, self._batch(case, ops), self.pool)
        hidden = torch.randn(sum(case.counts), self.hidden, device=self.device).to(self.dtype)

        def run() -> torch.Tensor:
            # Layers may work in place.
            stream = Stream(Summands(hidden.clone()))
            for layer in self.decoder.layers:
                stream = layer(stream, step)
            return stream.whole

        return run

    def _batch(self, case: LayerCase, ops: Ops) -> StepBatch:
        rows = sum(case.counts)
        attention = scattered_rows(((1, case.context),) * rows, np.arange(self.adapter_pages, len(self.pool)))
        last = case.context - 1
        slots = torch.from_numpy(attention.page_table[:, last // PAGE_TOKENS].astype(np.int64) * PAGE_TOKENS)
        ranks = [self.rank] * len(case.counts)
        segments = segments_for(self.geometry, list(case.counts), ranks, self.adapter_pages, self.device)
        return StepBatch(
            token_ids=torch.zeros(rows, dtype=torch.int64, device=self.device),
            positions=torch.full((rows,), last, dtype=torch.int64, device=self.device),
            slots=(slots + last % PAGE_TOKENS).to(self.device),
            sample_index=torch.arange(rows, device=self.device),
            attention=ops.plan_attention(attention, self.page, self.device),
            lora=ops.plan_lora(segments, self.geometry, self.device) if self.rank else None,
        )
