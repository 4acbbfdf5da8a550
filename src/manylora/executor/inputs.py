"""From a step's rows to what a forward pass and the sampler read.

Owns the order of the batch: rows of one adapter side by side, the base model's first, decoding rows of an
adapter before its prompt chunks. Works with numpy on the host and hands the device one array; nothing here
loops over tokens. Does not run anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from manylora.devices.device import Device
from manylora.executor.sampler import SampledRow
from manylora.executor.sequences import SequenceTable
from manylora.executor.tables import AdapterTables
from manylora.kernels.ops import AttentionRows, LoraSegments, Ops, StepBatch
from manylora.kernels.shapes import AdapterGeometry
from manylora.protocol import StepRow
from manylora.types import BASE


@dataclasses.dataclass(frozen=True)
class StepInputs:
    """``sampled[i]`` draws from row i of the logits, for the step's row ``sampled_rows[i]``."""

    batch: StepBatch
    sampled: list[SampledRow]
    sampled_rows: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class _Segments:
    """Runs of tokens with one adapter: start, length int32 [S]; rows int64 [S] of the adapter tables."""

    start: np.ndarray
    length: np.ndarray
    rows: np.ndarray


class InputBuilder:
    """Builds one step's inputs at a time."""

    def __init__(
        self,
        sequences: SequenceTable,
        tables: AdapterTables,
        geometry: AdapterGeometry,
        ops: Ops,
        device: Device,
    ) -> None:
        self._sequences = sequences
        self._tables = tables
        self._geometry = geometry
        self._ops = ops
        self._device = device
        self._lora_key: tuple[int, bytes, bytes, bytes] | None = None
        self._lora_plan: Any | None = None

    def build(self, rows: Sequence[StepRow]) -> StepInputs:
        """Inputs for rows (at least one) whose sequences and page tables are up to date.

        Raises KeyError where a sequence is unknown or its adapter not resident.
        """
        table, page_tokens = self._sequences, self._geometry.page.page_tokens
        slots = np.array(table.slots(rows), dtype=np.int64)
        starts = np.array([row.start for row in rows], dtype=np.int64)
        counts = np.array([row.num_tokens for row in rows], dtype=np.int64)
        adapters = table.adapters[slots]
        order = np.lexsort((counts > 1, adapters))
        slots, starts, counts, adapters = slots[order], starts[order], counts[order], adapters[order]
        ends = np.cumsum(counts)
        first = ends - counts

        num_tokens = int(ends[-1])
        of_row = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(num_tokens) + np.repeat(starts - first, counts)
        token_slots = slots[of_row]
        token_ids = table.tokens[token_slots, positions]
        pages = table.pages[token_slots, positions // page_tokens].astype(np.int64)
        places = pages * page_tokens + positions % page_tokens

        # In batch order: drawn[i] is the row of the step whose last token's logits become row i.
        in_order = order.tolist()
        drawn = [(index, where) for where, index in enumerate(in_order) if rows[index].num_samples]
        last_tokens = (ends - 1)[[where for _, where in drawn]] if drawn else ends[:0]

        kv_len = starts + counts
        width = -(-int(kv_len.max()) // page_tokens)
        attention_rows = AttentionRows(
            query_start=np.concatenate((first[:1], ends)).astype(np.int32),
            kv_len=kv_len.astype(np.int32),
            page_table=table.pages[slots, :width],
        )
        tensors = self._upload(token_ids, positions, places, last_tokens)
        torch_device = self._device.torch_device
        batch = StepBatch(
            token_ids=tensors[0],
            positions=tensors[1],
            slots=tensors[2],
            sample_index=tensors[3],
            attention=self._ops.plan_attention(attention_rows, self._geometry.page, torch_device),
            lora=self._plan_lora(self._segments(adapters, first, ends)),
        )
        return StepInputs(
            batch=batch,
            sampled=[table.sampled_row(rows[index]) for index, _ in drawn],
            sampled_rows=[index for index, _ in drawn],
        )

    def _upload(self, *arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
        """The arrays as int64 tensors on the device, by one transfer."""
        packed = self._device.upload(np.concatenate(arrays, dtype=np.int64))
        return torch.split(packed, [len(array) for array in arrays])

    def _segments(self, adapters: np.ndarray, first: np.ndarray, ends: np.ndarray) -> _Segments | None:
        """The runs of equal ``adapters`` among sorted rows, the base model's left out."""
        edges = np.flatnonzero(np.diff(adapters, prepend=BASE))
        if len(edges) == 0:
            return None
        start = first[edges]
        length = np.append(start[1:], ends[-1]) - start
        rows = self._tables.rows(adapters[edges].tolist())
        return _Segments(start.astype(np.int32), length.astype(np.int32), rows)

    def _plan_lora(self, segments: _Segments | None) -> Any | None:
        """The segments' plan; the last one where nothing has changed, as between most decoding steps."""
        if segments is None:
            return None
        key = (
            self._tables.version,
            segments.start.tobytes(),
            segments.length.tobytes(),
            segments.rows.tobytes(),
        )
        if key != self._lora_key:
            records, scales = self._tables.entries(segments.rows)
            described = LoraSegments(segments.start, segments.length, records, scales, self._tables.cells)
            self._lora_plan = self._ops.plan_lora(described, self._geometry, self._device.torch_device)
            self._lora_key = key
        return self._lora_plan
