"""Keeps the tables by which kernels find resident adapters in the pool (``LoraSegments``).

Owns the cell table on the device, which all adapters and steps share, and each adapter's records and scales
on the host. Does not read weights and does not choose pages.
"""

from __future__ import annotations

import bisect
import dataclasses

import numpy as np
import torch

from manylora.adapters.pack import AdapterLayout
from manylora.devices.device import Device
from manylora.kernels.shapes import AdapterGeometry
from manylora.types import BASE, AdapterId

_FIRST_CELLS = 4096
_FIRST_ROWS = 16


class RangeAllocator:
    """A first-fit allocator of ranges in ``[0, capacity)``. Freed ranges join their free neighbours."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free: list[tuple[int, int]] = [(0, capacity)] if capacity else []  # (start, end), ascending

    def take(self, length: int) -> int | None:
        """Take a range of this length (at least 1) and return its start. Return None where no free range is
        long enough."""
        for index, (start, end) in enumerate(self._free):
            if end - start >= length:
                if end - start == length:
                    del self._free[index]
                else:
                    self._free[index] = (start + length, end)
                return start
        return None

    def give(self, start: int, length: int) -> None:
        """Free the range ``[start, start + length)``."""
        end = start + length
        index = bisect.bisect(self._free, (start, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == start:
            start = self._free.pop(index - 1)[0]
            index -= 1
        self._free.insert(index, (start, end))

    def grow(self, capacity: int) -> None:
        """Raise the capacity. The new range ``[self.capacity, capacity)`` is free."""
        old, self.capacity = self.capacity, capacity
        self.give(old, capacity - old)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Held:
    """An adapter's entry: its row in records and scales, its first cell in the cell table, and the adapter's
    layout and ``cell_offsets``."""

    row: int
    first: int
    layout: AdapterLayout
    offsets: np.ndarray


class AdapterTables:
    """The entries of resident adapters. Used by the step loop's thread only.

    Writes to the device are ordered with its steps. The cells of new entries reach the device with ``send``,
    which must be called before a step reads ``cells``. While an adapter is merged into the base's weights
    (``merged``; BASE: none), only its own rows may run, and they need no entry. ``version`` changes whenever
    an entry or the merged adapter changes. Results that were computed from an older version are invalid.
    """

    def __init__(self, device: Device, geometry: AdapterGeometry) -> None:
        self._device = device
        self._ranges = RangeAllocator(_FIRST_CELLS)
        self._held: dict[AdapterId, _Held] = {}
        self._free_rows: list[int] = []
        num_projections = len(geometry.projections)
        self._records = np.zeros((0, num_projections, 3), dtype=np.int64)
        self._scales = np.zeros((0, num_projections, geometry.page.layers), dtype=np.float32)
        self.cells = torch.zeros(_FIRST_CELLS, dtype=torch.int64, device=device.torch_device)
        self._unsent: dict[int, _Held] = {}  # entries whose cells are not on the device, by row
        self.merged: AdapterId = BASE
        self.version = 0
        self._is_fixed = False

    def __contains__(self, adapter: AdapterId) -> bool:
        return adapter in self._held

    def put(self, adapter: AdapterId, layout: AdapterLayout, offsets: np.ndarray) -> None:
        """Add an adapter's entry, in place of its old one. ``offsets``: the ``cell_offsets`` of its pages."""
        self.drop(adapter)
        first = self._take_cells(len(offsets)) if len(offsets) else 0
        self._held[adapter] = self._written(_Held(self._take_row(), first, layout, offsets))

    def drop(self, adapter: AdapterId) -> None:
        """Remove an adapter's entry; unknown adapters are ignored. A later ``put`` may reuse the cells. Where
        the adapter is merged, record that none is."""
        if adapter == self.merged:
            self.merge(BASE)
        held = self._held.pop(adapter, None)
        if held is not None:
            self._free_rows.append(held.row)
            self._unsent.pop(held.row, None)
            if len(held.offsets):
                self._ranges.give(held.first, len(held.offsets))
            self.version += 1

    def merge(self, adapter: AdapterId) -> None:
        """Record that this resident adapter is merged from now on; BASE: none is."""
        if adapter != self.merged:
            self.merged = adapter
            self.version += 1

    def rows(self, adapters: list[AdapterId]) -> np.ndarray:
        """Return the adapters' rows, int64 [S], for ``entries``. Raises KeyError for an adapter that is not
        resident."""
        return np.array([self._held[adapter].row for adapter in adapters], dtype=np.int64)

    def entries(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return copies of the rows' records, int64 [S, P, 3] with positions in ``cells``, and scales,
        float32 [S, P, L]."""
        return self._records[rows], self._scales[rows]

    def send(self) -> None:
        """Write the cells of entries that were added or moved to ``cells`` on the device."""
        for row, held in list(self._unsent.items()):
            self._device.send(held.offsets, self.cells[held.first : held.first + len(held.offsets)])
            del self._unsent[row]

    def close(self) -> None:
        """Free the cell table, tens of MiB for a large pool. The tables must not be used afterwards."""
        self.cells = self.cells.new_zeros(0)
        self._unsent = {}

    def reserve(self, num_cells: int) -> None:
        """Lengthen the cell table to at least ``num_cells``. It does not move again until more cells are
        needed."""
        if num_cells > self._ranges.capacity:
            cells = self.cells.new_zeros(num_cells)
            cells[: len(self.cells)].copy_(self.cells)
            self.cells = cells
            self._ranges.grow(num_cells)

    def fix(self, num_cells: int) -> None:
        """Reserve ``num_cells`` for good: the cell table never moves afterwards. It must have room for the
        cells of all adapters that are resident at one time. Called before the first entry."""
        self.reserve(num_cells)
        self._is_fixed = True

    def _written(self, held: _Held) -> _Held:
        """Write the entry's records and scales, mark its cells as unsent, and return the entry."""
        if len(held.offsets):
            self._unsent[held.row] = held
        self._records[held.row] = held.layout.records + held.first * held.layout.shifted
        self._scales[held.row] = held.layout.scales
        self.version += 1
        return held

    def _take_cells(self, count: int) -> int:
        first = self._ranges.take(count)
        while first is None:
            if self._is_fixed:
                self._close_up(count)
            else:
                self.reserve(2 * self._ranges.capacity)
            first = self._ranges.take(count)
        return first

    def _close_up(self, count: int) -> None:
        """Move all entries to the start of the table, so that the free cells are one range. Raises
        RuntimeError where that range has fewer than ``count`` cells. Steps that were issued before still read
        the old table."""
        capacity, end = self._ranges.capacity, 0
        for adapter, held in self._held.items():
            if held.first != end:
                self._held[adapter] = self._written(dataclasses.replace(held, first=end))
            end += len(held.offsets)
        self._ranges = RangeAllocator(capacity)
        if end:
            self._ranges.take(end)
        if capacity - end < count:
            raise RuntimeError(f"the table of {capacity} cells has no room for {count} more")

    def _take_row(self) -> int:
        if not self._free_rows:
            old = len(self._records)
            new = max(_FIRST_ROWS, 2 * old)
            self._records = _lengthened(self._records, new)
            self._scales = _lengthened(self._scales, new)
            self._free_rows.extend(range(new - 1, old - 1, -1))
        return self._free_rows.pop()


def _lengthened(array: np.ndarray, length: int) -> np.ndarray:
    longer = np.zeros((length, *array.shape[1:]), dtype=array.dtype)
    longer[: len(array)] = array
    return longer
