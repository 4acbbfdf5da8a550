"""From a step's rows to what a forward pass and the sampler read, on the host.

Owns the order of the batch: rows of one adapter side by side, the base model's first, decoding rows of an
adapter before its prompt chunks. Works with numpy; nothing here loops over tokens. Does not send anything to a
device and does not run anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from manylora.executor.sampler import SampledRow
from manylora.executor.sequences import SequenceTable
from manylora.executor.tables import AdapterTables
from manylora.kernels.ops import AttentionRows, LoraSegments
from manylora.kernels.shapes import AdapterGeometry
from manylora.protocol import StepRow
from manylora.types import BASE


@dataclasses.dataclass(frozen=True, slots=True)
class StepInputs:
    """One step of T tokens, M of whose rows draw.

    ``token_ids`` int64 [T]: a negative one, -i, is entry i of the device's late tokens. ``positions``, ``slots``
    int64 [T]; ``sample_index`` int64 [M]: the tokens whose logits are wanted; ``late_index`` int64 [M]: the
    entries of the late tokens where the draws go. ``sampled[i]`` draws from row i of the logits, for the step's
    row ``sampled_rows[i]``. ``lora`` is the same object as in the step before where nothing has changed.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    sample_index: np.ndarray
    late_index: np.ndarray
    attention: AttentionRows
    lora: LoraSegments | None
    sampled: list[SampledRow]
    sampled_rows: list[int]


class InputBuilder:
    """Builds one step's inputs at a time."""

    def __init__(self, sequences: SequenceTable, tables: AdapterTables, geometry: AdapterGeometry) -> None:
        self._sequences = sequences
        self._tables = tables
        self._page_tokens = geometry.page.page_tokens
        self._lora_key: tuple[int, bytes, bytes, bytes] | None = None
        self._lora: LoraSegments | None = None

    def build(self, rows: Sequence[StepRow]) -> StepInputs:
        """Inputs for rows (at least one) whose sequences and page tables are up to date.

        Raises KeyError where a sequence is unknown or its adapter not resident, ValueError where a row computes
        tokens that do not exist.
        """
        table, page_tokens = self._sequences, self._page_tokens
        slots = np.array(table.slots(rows), dtype=np.int64)
        starts = np.array([row.start for row in rows], dtype=np.int64)
        counts = np.array([row.num_tokens for row in rows], dtype=np.int64)
        if (starts + counts > table.lengths[slots]).any():
            raise ValueError("a row computes tokens that its sequence does not have")
        adapters = table.adapters[slots]
        order = np.lexsort((counts > 1, adapters))
        slots, starts, counts, adapters = slots[order], starts[order], counts[order], adapters[order]
        ends = np.cumsum(counts)
        first = ends - counts

        num_tokens = int(ends[-1])
        of_row = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(num_tokens) + np.repeat(starts - first, counts)
        token_slots = slots[of_row]
        pages = table.pages[token_slots, positions // page_tokens].astype(np.int64)

        # In batch order: drawn[i] is the row of the step whose last token's logits become row i.
        in_order = order.tolist()
        drawn = [(index, where) for where, index in enumerate(in_order) if rows[index].num_samples]
        drawing = np.array([where for _, where in drawn], dtype=np.int64)

        kv_len = starts + counts
        width = -(-int(kv_len.max()) // page_tokens)
        return StepInputs(
            token_ids=table.tokens[token_slots, positions].astype(np.int64),
            positions=positions,
            slots=pages * page_tokens + positions % page_tokens,
            sample_index=(ends - 1)[drawing],
            late_index=(slots + 1)[drawing],
            attention=AttentionRows(
                query_start=np.concatenate((first[:1], ends)).astype(np.int32),
                kv_len=kv_len.astype(np.int32),
                page_table=table.pages[slots, :width],
            ),
            lora=self._segments(adapters, first, ends),
            sampled=[table.sampled_row(rows[index]) for index, _ in drawn],
            sampled_rows=[index for index, _ in drawn],
        )

    def _segments(self, adapters: np.ndarray, first: np.ndarray, ends: np.ndarray) -> LoraSegments | None:
        """The runs of equal ``adapters`` among sorted rows, the base model's left out."""
        edges = np.flatnonzero(np.diff(adapters, prepend=BASE))
        if len(edges) == 0:
            return None
        start = first[edges]
        length = (np.append(start[1:], ends[-1]) - start).astype(np.int32)
        rows = self._tables.rows(adapters[edges].tolist())
        key = (self._tables.version, start.tobytes(), length.tobytes(), rows.tobytes())
        if key != self._lora_key:
            records, scales = self._tables.entries(rows)
            self._lora = LoraSegments(start.astype(np.int32), length, records, scales, self._tables.cells)
            self._lora_key = key
        return self._lora
