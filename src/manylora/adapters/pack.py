"""An adapter's weights as pages: where each row goes, and the bytes of each page.

Owns the order of rows inside an adapter: projection by projection in table order, all rows of A, then all
rows of B transposed. Does not know where pages lie or how they get to a device: it hands over page images.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manylora.adapters.peft import AdapterSpec, Side, adapter_files
from manylora.adapters.tensorfile import StoredTensor, read_header, read_into, stamp_of
from manylora.kernels.shapes import AdapterGeometry, Projection
from manylora.protocol import AdapterError

WINDOW_BYTES = 32 * 2**20
"""Pages are put together this many bytes at a time: enough that a matrix is read from its file only a few
times, little beside the pool."""

_TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_SERIAL_ELEMENTS = 16384
"""torch copies so few elements in the calling thread."""


@dataclasses.dataclass(frozen=True)
class _BitPattern:
    """``magnitude`` masks the sign off; magnitudes from ``infinity`` on are infinity and NaN."""

    unsigned: np.dtype[Any]
    magnitude: int
    infinity: int


_BITS = {
    torch.float32: _BitPattern(np.dtype(np.uint32), 0x7FFFFFFF, 0x7F800000),
    torch.float16: _BitPattern(np.dtype(np.uint16), 0x7FFF, 0x7C00),
    torch.bfloat16: _BitPattern(np.dtype(np.uint16), 0x7FFF, 0x7F80),
}

WritePage = Callable[[int, torch.Tensor], None]


@dataclasses.dataclass(frozen=True, eq=False)
class AdapterLayout:
    """One packing for all layers; see LoraSegments for how kernels read it.

    ``records`` int64 [P, 3]: (first A cell, first B cell, rank), cells counted from the adapter's first;
    rank 0 rows are all 0. ``scales`` float32 [P, L].
    """

    num_cells: int
    num_pages: int
    records: np.ndarray
    scales: np.ndarray


def layout_of(spec: AdapterSpec, geometry: AdapterGeometry) -> AdapterLayout:
    """Where the adapter's rows go. A projection takes its largest rank over the layers."""
    records = np.zeros((len(geometry.projections), 3), dtype=np.int64)
    num_cells = 0
    for index, projection in enumerate(geometry.projections):
        rank = max(spec.ranks[index])
        if rank:
            first_b = num_cells + rank * geometry.cells(projection.in_features)
            records[index] = num_cells, first_b, rank
            num_cells = first_b + rank * geometry.cells(projection.out_features)
    return AdapterLayout(
        num_cells=num_cells,
        num_pages=-(-num_cells // geometry.cells_per_page),
        records=records,
        scales=np.array(spec.scales, dtype=np.float32),
    )


def cell_offsets(layout: AdapterLayout, geometry: AdapterGeometry, pages: Sequence[int]) -> np.ndarray:
    """int64 [num_cells]: the element of the flat pool where each cell's layer 0 begins."""
    if len(pages) != layout.num_pages:
        raise ValueError(f"the adapter takes {layout.num_pages} pages, got {len(pages)}")
    cells = np.arange(layout.num_cells, dtype=np.int64)
    page, cell = np.divmod(cells, geometry.cells_per_page)
    starts = np.asarray(pages, dtype=np.int64) * geometry.page.page_elements
    return np.asarray(starts[page] + cell * geometry.cell_elements)


def load_adapter(
    spec: AdapterSpec,
    layout: AdapterLayout,
    geometry: AdapterGeometry,
    dtype: torch.dtype,
    write_page: WritePage,
) -> None:
    """Read the weights, convert them to ``dtype`` and hand over page images in order.

    ``write_page(n, image)``: image ``[layers, slab_elements]`` of the adapter's page n, on the CPU; bytes
    that hold no row are zero. It is valid during the call only. Holds about WINDOW_BYTES and one
    tensor at a time. Raises AdapterError when the files changed since they were inspected or a weight is not
    finite; pages written before that are to be thrown away.
    """
    if dtype.itemsize != geometry.page.itemsize:
        raise ValueError(f"pages of {geometry.page.itemsize}-byte elements cannot hold {dtype}")
    config_path, weights_path = adapter_files(Path(spec.path))
    _check_unchanged(spec, config_path, weights_path)
    tensors = read_header(weights_path)
    try:
        with open(weights_path, "rb", buffering=0) as file:
            loader = _Loader(spec, layout, geometry, dtype, write_page, tensors, file)
            for index in range(len(geometry.projections)):
                loader.add(index, "A")
                loader.add(index, "B")
            loader.finish()
    except OSError as error:
        raise AdapterError(f"cannot read {weights_path.name}: {error.strerror or error}") from error
    # Once more: bytes replaced while they were read must not be served as the version that was inspected.
    _check_unchanged(spec, config_path, weights_path)


def _check_unchanged(spec: AdapterSpec, config_path: Path, weights_path: Path) -> None:
    for path, stamp in ((config_path, spec.config), (weights_path, spec.weights)):
        if stamp_of(path) != stamp:
            raise AdapterError(f"{path} has changed since the adapter was added; add it again")


class _Loader:
    """Appends rows, all layers alike, to a window of whole pages; hands full pages over.

    Works on bit patterns with numpy: it runs beside the step loop, and torch's copies of this size would wake
    a second team of compute threads. ``window`` [layers, cells, cell_elements]: the cells of the pages being
    put together and, past them, room for the row that does not end inside them.
    """

    def __init__(
        self,
        spec: AdapterSpec,
        layout: AdapterLayout,
        geometry: AdapterGeometry,
        dtype: torch.dtype,
        write_page: WritePage,
        tensors: dict[str, StoredTensor],
        file: FileIO,
    ) -> None:
        self.spec = spec
        self.geometry = geometry
        self.dtype = dtype
        self.write_page = write_page
        self.tensors = tensors
        self.file = file
        longest = max(max(p.in_features, p.out_features) for p in geometry.projections)
        pages = max(1, min(WINDOW_BYTES // geometry.page.page_bytes, layout.num_pages))
        self.full = pages * geometry.cells_per_page
        self.capacity = self.full + geometry.cells(longest)
        layers, cell = geometry.page.layers, geometry.cell_elements
        bits = _BITS[dtype].unsigned
        self.window = np.zeros((layers, self.capacity, cell), dtype=bits)
        self.image = np.zeros((layers, geometry.page.slab_elements), dtype=bits)
        self.buffer = np.empty(max((t.size_bytes for t in tensors.values()), default=0), dtype=np.uint8)
        self.used = 0
        self.next_page = 0

    def add(self, index: int, side: Side) -> None:
        """Append the rows of one projection's A or B, as many at a time as the window has room for."""
        projection, ranks = self.geometry.projections[index], self.spec.ranks[index]
        length = projection.in_features if side == "A" else projection.out_features
        cells = self.geometry.cells(length)
        row = 0
        while row < max(ranks):
            count = min(max(ranks) - row, (self.capacity - self.used) // cells)
            rows = slice(self.used, self.used + count * cells)
            for layer, rank in enumerate(ranks):
                present = min(rank - row, count)
                if present > 0:
                    target = self.window[layer, rows].reshape(count, -1)[:present, :length]
                    target[:] = self._rows(projection, layer, rank, side, slice(row, row + present))
            row += count
            self.used += count * cells
            if self.used >= self.full:
                self._flush(self.full)

    def finish(self) -> None:
        """Hand over the last, partly filled pages."""
        if self.used:
            self._flush(self.used)

    def _rows(self, projection: Projection, layer: int, rank: int, side: Side, rows: slice) -> np.ndarray:
        """Rows of a layer's A, or of its B transposed: [rows, length], valid until the next call."""
        name = self.spec.tensor_name(layer, projection, side)
        stored = self.tensors.get(name)
        shape = (rank, projection.in_features) if side == "A" else (projection.out_features, rank)
        if stored is None or stored.shape != shape:
            raise AdapterError(f"tensor {name} is no longer what it was when the adapter was added")
        if side == "B":
            return self._read(name, stored, 0, stored.size_bytes).reshape(shape)[:, rows].T
        row_bytes = stored.size_bytes // rank
        part = self._read(name, stored, rows.start * row_bytes, (rows.stop - rows.start) * row_bytes)
        return part.reshape(-1, projection.in_features)

    def _read(self, name: str, stored: StoredTensor, begin: int, size_bytes: int) -> np.ndarray:
        """A flat part of a tensor as bit patterns of the pool's dtype."""
        part = self.buffer[:size_bytes]
        read_into(self.file, stored.begin + begin, part.data, name)
        source = _TORCH_DTYPES[stored.dtype]
        if not _all_finite(part, source):
            raise AdapterError(f"tensor {name} holds NaN or infinity")
        if source == self.dtype:
            return part.view(_BITS[source].unsigned)
        converted = _converted(part, source, self.dtype)
        if not _all_finite(converted, self.dtype):
            raise AdapterError(f"tensor {name} holds a value too large for {self.dtype}")
        return converted

    def _flush(self, cells: int) -> None:
        """Hand over the pages of the first ``cells`` cells and move what lies past them to the front."""
        per_page = self.geometry.cells_per_page
        filled = self.image[:, : per_page * self.geometry.cell_elements]
        for first in range(0, cells, per_page):
            page = self.window[:, first : first + per_page]
            filled[:] = page.reshape(len(page), -1)
            self.write_page(self.next_page, torch.from_numpy(self.image).view(self.dtype))
            self.next_page += 1
        rest = self.window[:, cells : self.used].copy()
        self.window.fill(0)
        self.used = rest.shape[1]
        self.window[:, : self.used] = rest


def _all_finite(values: np.ndarray, dtype: torch.dtype) -> bool:
    bits = _BITS[dtype]
    magnitudes = np.bitwise_and(values.view(bits.unsigned), bits.magnitude)
    return int(magnitudes.max(initial=0)) < bits.infinity


def _converted(values: np.ndarray, source: torch.dtype, target: torch.dtype) -> np.ndarray:
    """Bit patterns of ``values`` in the target dtype, rounded to nearest."""
    old = torch.from_numpy(values).view(source)
    new = torch.empty(len(old), dtype=target)
    for begin in range(0, len(old), _SERIAL_ELEMENTS):
        new[begin : begin + _SERIAL_ELEMENTS].copy_(old[begin : begin + _SERIAL_ELEMENTS])
    return np.asarray(new.view(torch.uint8).numpy().view(_BITS[target].unsigned))
