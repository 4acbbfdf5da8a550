"""An adapter's weights as pages: where each row goes, and the bytes of each page.

Owns the order of rows inside an adapter: projection by projection in table order, all rows of A, then all
rows of B transposed. Does not know where pages lie or how they get to a device: it fills page images, in place
where it is given them, else it hands them over.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, wait
from contextlib import contextmanager
from functools import partial
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

_TILE_ELEMENTS, _CHECKED_ELEMENTS = 16384, 65536
"""What is transposed, or checked, at a time: it stays in the processor's cache between two uses."""


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
    ranks = [max(ranks) for ranks in spec.ranks]
    return layout_for(ranks, np.array(spec.scales, dtype=np.float32), geometry)


def layout_for(ranks: Sequence[int], scales: np.ndarray, geometry: AdapterGeometry) -> AdapterLayout:
    """Of an adapter with one rank a projection; ``scales`` float32 [P, L]."""
    records = np.zeros((len(geometry.projections), 3), dtype=np.int64)
    num_cells = 0
    for index, (rank, projection) in enumerate(zip(ranks, geometry.projections, strict=True)):
        if rank:
            first_b = num_cells + rank * geometry.cells(projection.in_features)
            records[index] = num_cells, first_b, rank
            num_cells = first_b + rank * geometry.cells(projection.out_features)
    return AdapterLayout(
        num_cells=num_cells,
        num_pages=-(-num_cells // geometry.cells_per_page),
        records=records,
        scales=scales,
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
    page = geometry.page
    count = max(1, min(WINDOW_BYTES // page.page_bytes, layout.num_pages))
    with _open(spec, layout, geometry, dtype) as loader:
        window = torch.zeros((count, page.layers, page.slab_elements), dtype=dtype)
        for first in range(0, layout.num_pages, count):
            images = window[: layout.num_pages - first]
            loader.fill(first, images)
            for number, image in enumerate(images, first):
                write_page(number, image)


def load_into(
    spec: AdapterSpec,
    layout: AdapterLayout,
    geometry: AdapterGeometry,
    dtype: torch.dtype,
    pages: Sequence[torch.Tensor],
    check: Callable[[], None],
    threads: Executor | None = None,
) -> None:
    """Like ``load_adapter``, in place: ``pages[n]`` ``[layers, slab_elements]``, on the CPU, contiguous.

    Reads each tensor once. Every byte of the pages is written, whatever they held. ``check`` is called now
    and then and may raise to break off. ``threads``: for parts of the work, side by side; none of them runs on
    after the call.
    """
    if len(pages) != layout.num_pages:
        raise ValueError(f"the adapter takes {layout.num_pages} pages, got {len(pages)}")
    with _open(spec, layout, geometry, dtype) as loader:
        loader.fill(0, pages, check, threads)


@contextmanager
def _open(
    spec: AdapterSpec, layout: AdapterLayout, geometry: AdapterGeometry, dtype: torch.dtype
) -> Iterator[_Loader]:
    if dtype.itemsize != geometry.page.itemsize:
        raise ValueError(f"pages of {geometry.page.itemsize}-byte elements cannot hold {dtype}")
    config_path, weights_path = adapter_files(Path(spec.path))
    _check_unchanged(spec, config_path, weights_path)
    tensors = read_header(weights_path)
    try:
        with open(weights_path, "rb", buffering=0) as file:
            yield _Loader(spec, layout, geometry, dtype, tensors, file)
    except OSError as error:
        raise AdapterError(f"cannot read {weights_path.name}: {error.strerror or error}") from error
    # Once more: bytes replaced while they were read must not be served as the version that was inspected.
    _check_unchanged(spec, config_path, weights_path)


def _check_unchanged(spec: AdapterSpec, config_path: Path, weights_path: Path) -> None:
    for path, stamp in ((config_path, spec.config), (weights_path, spec.weights)):
        if stamp_of(path) != stamp:
            raise AdapterError(f"{path} has changed since the adapter was added; add it again")


class _Loader:
    """Fills page images, layer by layer of each projection's A and B.

    Works on bit patterns with numpy: it runs beside the step loop, and torch's copies of this size would wake
    a second team of compute threads.
    """

    def __init__(
        self,
        spec: AdapterSpec,
        layout: AdapterLayout,
        geometry: AdapterGeometry,
        dtype: torch.dtype,
        tensors: dict[str, StoredTensor],
        file: FileIO,
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.geometry = geometry
        self.dtype = dtype
        self.tensors = tensors
        self.file = file
        self.bits = _BITS[dtype].unsigned
        self.buffer_bytes = max((t.size_bytes for t in tensors.values()), default=0)

    def fill(
        self,
        first_page: int,
        pages: Iterable[torch.Tensor],
        check: Callable[[], None] = lambda: None,
        threads: Executor | None = None,
    ) -> None:
        """Write every byte of the adapter's pages from ``first_page`` on."""
        images = [page.view(torch.uint8).numpy().view(self.bits) for page in pages]
        per_page, size = self.geometry.cells_per_page, self.geometry.cell_elements
        begin = first_page * per_page
        end = min(begin + len(images) * per_page, self.layout.num_cells)
        jobs: list[Callable[[], None]] = []
        for index, projection in enumerate(self.geometry.projections):
            first_a, first_b, rank = self.layout.records[index].tolist()
            sides: tuple[tuple[Side, int, int], ...] = (
                ("A", first_a, projection.in_features),
                ("B", first_b, projection.out_features),
            )
            for side, first, length in sides:
                cells = self.geometry.cells(length)
                rows = range(max(0, (begin - first) // cells), min(rank, -(-(end - first) // cells)))
                if rows:
                    first_cell = first + rows.start * cells - begin
                    jobs.append(partial(self._add, images, index, side, length, rows, first_cell, check))
        _run_all(jobs, threads)
        for number, image in enumerate(images, first_page):
            used = min(per_page, self.layout.num_cells - number * per_page)
            image[:, used * size :] = 0

    def _add(
        self,
        images: list[np.ndarray],
        index: int,
        side: Side,
        length: int,
        rows: range,
        first_cell: int,
        check: Callable[[], None],
    ) -> None:
        """Write rows of one projection's A or B, all layers; cells before and past the images fall away."""
        check()
        buffer = np.empty(self.buffer_bytes, dtype=np.uint8)
        projection, ranks = self.geometry.projections[index], self.spec.ranks[index]
        per_page, size = self.geometry.cells_per_page, self.geometry.cell_elements
        cells = self.geometry.cells(length)
        block = np.zeros((len(rows), cells * size), dtype=self.bits)
        flat = block.reshape(-1)
        begin, end = max(0, first_cell), min(first_cell + len(rows) * cells, len(images) * per_page)
        cuts = [begin, *range((begin // per_page + 1) * per_page, end, per_page), end]
        for layer, rank in enumerate(ranks):
            present = min(rank, rows.stop) - rows.start
            if present > 0:
                self._rows(projection, layer, rank, side, rows.start, block[:present, :length], buffer)
            block[max(present, 0) :] = 0  # left from a layer of a larger rank
            for start, stop in itertools.pairwise(cuts):
                page, cell = divmod(start, per_page)
                target = images[page][layer, cell * size : (cell + stop - start) * size]
                target[:] = flat[(start - first_cell) * size : (stop - first_cell) * size]

    def _rows(
        self,
        projection: Projection,
        layer: int,
        rank: int,
        side: Side,
        first: int,
        target: np.ndarray,
        buffer: np.ndarray,
    ) -> None:
        """Read rows from ``first`` on of a layer's A, or of its B transposed: target [rows, length]."""
        name = self.spec.tensor_name(layer, projection, side)
        stored = self.tensors.get(name)
        shape = (rank, projection.in_features) if side == "A" else (projection.out_features, rank)
        if stored is None or stored.shape != shape:
            raise AdapterError(f"tensor {name} is no longer what it was when the adapter was added")
        if side == "A":
            row_bytes = stored.size_bytes // rank
            part = self._read(name, stored, first * row_bytes, buffer[: len(target) * row_bytes])
            target[:] = part.reshape(target.shape)
            return
        whole = self._read(name, stored, 0, buffer[: stored.size_bytes]).reshape(shape)[
            :, first : first + len(target)
        ]
        tile = max(1, _TILE_ELEMENTS // len(target))
        for at in range(0, len(whole), tile):
            target[:, at : at + tile] = whole[at : at + tile].T

    def _read(self, name: str, stored: StoredTensor, begin: int, part: np.ndarray) -> np.ndarray:
        """A flat part of a tensor, read into ``part``, as bit patterns of the pool's dtype."""
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


def _run_all(jobs: Sequence[Callable[[], None]], threads: Executor | None) -> None:
    """Run them all, and raise the first error only when none runs any more: pages may go to others then."""
    if threads is None:
        for job in jobs:
            job()
        return
    running = [threads.submit(job) for job in jobs]
    wait(running)
    for ended in running:
        ended.result()


def _all_finite(values: np.ndarray, dtype: torch.dtype) -> bool:
    bits = _BITS[dtype]
    patterns = values.view(bits.unsigned)
    for at in range(0, len(patterns), _CHECKED_ELEMENTS):
        magnitudes = np.bitwise_and(patterns[at : at + _CHECKED_ELEMENTS], bits.magnitude)
        if int(magnitudes.max()) >= bits.infinity:
            return False
    return True


def _converted(values: np.ndarray, source: torch.dtype, target: torch.dtype) -> np.ndarray:
    """Bit patterns of ``values`` in the target dtype, rounded to nearest."""
    old = torch.from_numpy(values).view(source)
    new = torch.empty(len(old), dtype=target)
    for begin in range(0, len(old), _SERIAL_ELEMENTS):
        new[begin : begin + _SERIAL_ELEMENTS].copy_(old[begin : begin + _SERIAL_ELEMENTS])
    return np.asarray(new.view(torch.uint8).numpy().view(_BITS[target].unsigned))
