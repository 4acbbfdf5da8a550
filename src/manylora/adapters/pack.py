"""An adapter's weights as pages: where each row goes, and the bytes of each page.

Owns the order of rows inside an adapter: projection by projection in table order, all rows of A, then all
rows of B transposed. Does not know where pages lie or how they get to a device: it fills page images, in place
where it is given them, else it hands them over.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from manylora.adapters import read_loops
from manylora.adapters.blocks import Block, Buffer, Matrices, fill_by_loops
from manylora.adapters.jobs import NO_HELPERS, Helpers, run_all
from manylora.adapters.peft import AdapterSpec, Side
from manylora.adapters.tensorfile import StoredTensor, read_into
from manylora.adapters.values import BITS, TORCH_DTYPES, all_finite, convert
from manylora.adapters.verify import why_not_finite
from manylora.adapters.weightsfile import AdapterWeights, open_weights
from manylora.kernels.shapes import AdapterGeometry
from manylora.protocol import AdapterError

PACKING_VERSION = 1
"""Raise it when the same weights give other page images: those that were kept are then packed anew."""

WINDOW_BYTES = 32 * 2**20
"""Pages are put together this many bytes at a time: enough that a matrix is read from its file only a few
times, little beside the pool."""

_TILE_ELEMENTS = 16384
"""What is transposed at a time: a line of the processor's cache is used up while it is there."""

_MOST_PLAIN_RANK = 16
"""A matrix of so few columns stays in the processor's cache as a whole."""

_MOST_DIRECT_RANK = 32
"""Larger matrices are transposed beside the pages first: a tile of theirs is so narrow that writing it to memory
outside the cache costs more than another copy (at rank 64 a quarter more, at 16 a tenth less)."""

_JOB_BYTES = 2**21
"""What a thread takes at a time, of one matrix in some layers: it stays in the processor's cache between two
uses, and takes under a millisecond, so that all threads end together."""

_MOST_JOBS = 128
"""About so many of loops, which are larger then: each job begins in the interpreter, of which there is one."""

WritePage = Callable[[int, torch.Tensor], None]
WritePart = Callable[[int, int, np.ndarray], None]
"""(page, first byte in it, contiguous bytes), which are valid during the call only."""


@dataclasses.dataclass(frozen=True, eq=False)
class AdapterLayout:
    """One packing for all layers; see LoraSegments for how kernels read it.

    ``records`` int64 [P, 4]: (first A cell, first B cell, rank, first row of the second scale), cells counted from
    the adapter's first; rank 0 rows are all 0. ``scales`` float32 [P, 2, L].
    """

    num_cells: int
    num_pages: int
    records: np.ndarray
    scales: np.ndarray

    @functools.cached_property
    def shifted(self) -> np.ndarray:
        """int64 [P, 4]: 1 where a number of ``records`` is a cell's, which lies elsewhere in a table, else 0."""
        found = np.zeros_like(self.records)
        found[self.records[:, 2] > 0, :2] = 1
        return found


def layout_of(spec: AdapterSpec, geometry: AdapterGeometry) -> AdapterLayout:
    """Where the adapter's rows go. A projection takes its largest rank over the layers."""
    ranks = [max(ranks) for ranks in spec.ranks]
    return layout_for(ranks, np.array(spec.scales, dtype=np.float32), geometry)


def layout_for(ranks: Sequence[int], scales: np.ndarray, geometry: AdapterGeometry) -> AdapterLayout:
    """The layout of an adapter with one rank a projection; ``scales`` float32 [P, L]. No row has the second."""
    records = np.zeros((len(geometry.projections), 4), dtype=np.int64)
    num_cells = 0
    for index, (rank, projection) in enumerate(zip(ranks, geometry.projections, strict=True)):
        if rank:
            first_b = num_cells + rank * geometry.cells(projection.in_features)
            records[index] = num_cells, first_b, rank, rank
            num_cells = first_b + rank * geometry.cells(projection.out_features)
    num_pages = -(-num_cells // geometry.cells_per_page)
    if geometry.widest is not None:
        num_pages = layout_for(ranks, scales, geometry.widest).num_pages
    return AdapterLayout(
        num_cells=num_cells,
        num_pages=num_pages,
        records=records,
        scales=np.stack((scales, np.zeros_like(scales)), axis=1),
    )


def pretended_layout(rank: int, geometry: AdapterGeometry) -> AdapterLayout:
    """Of an adapter of this rank and scale 0 on all projections, which changes nothing."""
    scales = np.zeros((len(geometry.projections), geometry.page.layers), np.float32)
    return layout_for([rank] * len(scales), scales, geometry)


def cell_offsets(layout: AdapterLayout, geometry: AdapterGeometry, pages: Sequence[int]) -> np.ndarray:
    """int64 [num_cells]: at how many adapter elements into the pool each cell's layer 0 begins."""
    if len(pages) != layout.num_pages:
        raise ValueError(f"the adapter takes {layout.num_pages} pages, got {len(pages)}")
    begins = np.array(pages, dtype=np.int64) * geometry.page_elements
    inside = np.arange(0, geometry.cells_per_page * geometry.cell_elements, geometry.cell_elements)
    return np.add.outer(begins, inside).reshape(-1)[: layout.num_cells]


def load_adapter(
    spec: AdapterSpec,
    layout: AdapterLayout,
    geometry: AdapterGeometry,
    dtype: torch.dtype,
    write_page: WritePage,
    helpers: Helpers = NO_HELPERS,
) -> None:
    """Read the weights, convert them to ``dtype`` and hand over page images in order.

    ``write_page(n, image)``: image ``[layers, slab_elements]`` of the adapter's page n, on the CPU; bytes
    that hold no row are zero. It is valid during the call only. Holds about WINDOW_BYTES and, for each thread, one
    tensor or some small ones. Raises AdapterError when the files changed since they were inspected or a weight is
    not finite; pages written before that are to be thrown away.
    """
    page = geometry.page
    count = max(1, min(WINDOW_BYTES // page.page_bytes, layout.num_pages))
    with _open(spec, layout, geometry, dtype) as loader:
        window = torch.zeros((count, page.layers, geometry.slab_elements), dtype=dtype)
        for first in range(0, layout.num_pages, count):
            images = window[: layout.num_pages - first]
            loader.fill(first, images, lambda: None, helpers)
            for number, image in enumerate(images, first):
                write_page(number, image)


def load_into(
    spec: AdapterSpec,
    layout: AdapterLayout,
    geometry: AdapterGeometry,
    dtype: torch.dtype,
    pages: Sequence[torch.Tensor],
    check: Callable[[], None],
    helpers: Helpers = NO_HELPERS,
) -> None:
    """Like ``load_adapter``, in place: ``pages[n]`` ``[layers, slab_elements]``, on the CPU, contiguous.

    Reads each tensor once. Every byte of the pages is written, whatever they held. ``check`` is called now
    and then, by any of the threads, and may raise to break off. No helper works on it after the call. A file that
    changes meanwhile is noticed at the end only.
    """
    if len(pages) != layout.num_pages:
        raise ValueError(f"the adapter takes {layout.num_pages} pages, got {len(pages)}")
    with _open(spec, layout, geometry, dtype) as loader:
        loader.fill(0, pages, check, helpers)


@contextmanager
def _open(
    spec: AdapterSpec, layout: AdapterLayout, geometry: AdapterGeometry, dtype: torch.dtype
) -> Iterator[_Loader]:
    if dtype.itemsize != geometry.itemsize:
        raise ValueError(f"adapters of {geometry.itemsize}-byte elements cannot be {dtype}")
    with open_weights(spec, geometry) as weights:
        yield _Loader(spec, layout, geometry, dtype, weights)


class _Scratch:
    def __init__(self) -> None:
        self.stored, self.matrices, self.turned = Buffer(), Buffer(), Buffer()
        self.words = Buffer()


_Job = Callable[[_Scratch], None]


class _Loader:
    """Fills page images, projection by projection, its A and then its B, layer by layer.

    Works on bit patterns with numpy: it runs beside the step loop, and torch's copies of this size would wake
    a second team of compute threads. Few calls on large arrays, which release the GIL: what Python does
    between them is all that threads cannot share.
    """

    def __init__(
        self,
        spec: AdapterSpec,
        layout: AdapterLayout,
        geometry: AdapterGeometry,
        dtype: torch.dtype,
        weights: AdapterWeights,
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.geometry = geometry
        self.dtype = dtype
        self.weights = weights
        self.bits = BITS[dtype].unsigned

    def fill(
        self,
        first_page: int,
        pages: Iterable[torch.Tensor],
        check: Callable[[], None],
        helpers: Helpers,
    ) -> None:
        """Write every byte of the adapter's pages from ``first_page`` on."""
        images = [page.view(torch.uint8).numpy().view(self.bits) for page in pages]
        layers = range(self.geometry.page.layers)
        per_page, size = self.geometry.cells_per_page, self.geometry.cell_elements
        job_bytes = _JOB_BYTES
        if read_loops.are_ready():
            job_bytes = max(job_bytes, len(images) * self.geometry.page.page_bytes // _MOST_JOBS)
        jobs: list[_Job] = []
        for index, side, layer_bytes, blocks in self._sides(images, first_page):
            for run in _runs(self.spec.ranks[index], max(1, job_bytes // layer_bytes), layers):
                jobs.append(functools.partial(self._add, index, side, run, blocks, check))
        for number, image in enumerate(images, first_page):
            used = max(0, min(per_page, self.layout.num_cells - number * per_page))
            jobs.append(functools.partial(_clear, image[:, used * size :]))
        run_all(jobs, helpers, _Scratch)

    def _sides(
        self, images: Sequence[np.ndarray], first_page: int
    ) -> Iterator[tuple[int, Side, int, list[Block]]]:
        """For each A and B that has a part in these images: its projection, its bytes in a layer, its parts."""
        for index, projection in enumerate(self.geometry.projections):
            first_a, first_b, rank, _ = self.layout.records[index].tolist()
            sides: tuple[tuple[Side, int, int], ...] = (
                ("A", first_a, projection.in_features),
                ("B", first_b, projection.out_features),
            )
            for side, first, length in sides:
                if blocks := self._blocks(images, first_page, first, rank, length):
                    yield index, side, rank * length * self.dtype.itemsize, blocks

    def _blocks(
        self, images: Sequence[np.ndarray], first_page: int, first_cell: int, rank: int, length: int
    ) -> list[Block]:
        """The parts in these images of ``rank`` rows that begin at ``first_cell``; zeroes what is behind rows."""
        per_page, size = self.geometry.cells_per_page, self.geometry.cell_elements
        cells = self.geometry.cells(length)
        blocks = []
        for number, image in enumerate(images, first_page):
            begin = max(0, number * per_page - first_cell)
            end = min(rank * cells, (number + 1) * per_page - first_cell)
            while begin < end:
                row, cell = divmod(begin, cells)
                rows = 1 if cell else max(1, (end - begin) // cells)
                width = min(cells - cell, end - begin)
                at = (first_cell + begin - number * per_page) * size
                slabs = image[:, at : at + rows * width * size].reshape(len(image), rows, width * size)
                slabs[:, :, length - cell * size :] = 0
                blocks.append(Block(row, cell * size, slabs[:, :, : length - cell * size]))
                begin += rows * width
        return blocks

    def _add(
        self,
        index: int,
        side: Side,
        layers: range,
        blocks: Sequence[Block],
        check: Callable[[], None],
        scratch: _Scratch,
    ) -> None:
        """Write these layers of one projection's A or B; all have the same rank."""
        check()
        rank = self.spec.ranks[index][layers[0]]
        parts = []
        for row, column, values in blocks:
            chosen = values[layers.start : layers.stop]
            present = max(0, rank - row)
            chosen[:, present:] = 0  # rows of other layers, whose rank is larger
            if present:
                parts.append(Block(row, column, chosen[:, :present]))
        if not parts:
            return
        tensors = [self.weights.tensor(index, layer, side) for layer in layers]
        cut = self.geometry.cut(index)
        stored_as = {TORCH_DTYPES[stored.dtype] for _, stored in tensors}
        if read_loops.are_ready() and len(stored_as) == 1:
            whole = Matrices(side, cut, next(iter(stored_as)), [stored for _, stored in tensors])
            if fill_by_loops(self.weights.file.fileno(), whole, parts, self.dtype, scratch.words):
                return
        if side == "A" and stored_as == {self.dtype}:
            for number, (name, stored) in enumerate(tensors):
                placed = [part._replace(values=part.values[number]) for part in parts]
                self._read_rows(name, stored, cut.a_columns, placed)
        else:
            wanted = (range(rank), cut.a_columns) if side == "A" else (cut.b_rows, range(rank))
            matrices = scratch.matrices.take((len(tensors), *map(len, wanted)), self.bits)
            for matrix, (name, stored) in zip(matrices, tensors):
                self._read_matrix(name, stored, wanted, matrix, scratch)
            if side == "B":
                matrices = matrices.transpose(0, 2, 1)
                if rank > _MOST_DIRECT_RANK:
                    turned = scratch.turned.take(matrices.shape, self.bits)
                    _copy_tiled(matrices, turned)
                    matrices = turned
            for row, column, values in parts:
                _, rows, length = values.shape
                _copy_tiled(matrices[:, row : row + rows, column : column + length], values)
        if not all(all_finite(part.values, self.dtype) for part in parts):
            raise AdapterError(self._why_not_finite(tensors))

    def _read_rows(self, name: str, stored: StoredTensor, columns: range, parts: Sequence[Block]) -> None:
        """Read rows of an A, which lie in the file as they do in pages, straight into their places."""
        width = stored.shape[1]
        if len(columns) < width:
            for row, column, values in parts:
                for number, target in enumerate(values, row):
                    at = number * width + columns.start + column
                    read_into(self.weights.file, stored.begin + at * self.bits.itemsize, [target.data], name)
            return
        targets = []
        for _, _, values in parts:
            targets += [values.data] if values.flags.c_contiguous else [row.data for row in values]
        skipped = parts[0].row * width + parts[0].column
        read_into(self.weights.file, stored.begin + skipped * self.bits.itemsize, targets, name)

    def _read_matrix(
        self,
        name: str,
        stored: StoredTensor,
        wanted: tuple[range, range],
        matrix: np.ndarray,
        scratch: _Scratch,
    ) -> None:
        """Read these rows and columns of a tensor into ``matrix``, converted to the pool's dtype."""
        source = TORCH_DTYPES[stored.dtype]
        values = matrix
        if source != self.dtype:
            values = scratch.stored.take(matrix.shape, BITS[source].unsigned)
        (rows, columns), width, size = wanted, stored.shape[1], values.itemsize
        if len(columns) == width:
            read_into(self.weights.file, stored.begin + rows.start * width * size, [values.data], name)
        else:
            for number, target in zip(rows, values):
                at = number * width + columns.start
                read_into(self.weights.file, stored.begin + at * size, [target.data], name)
        if source != self.dtype:
            convert(values, source, matrix, self.dtype)

    def _why_not_finite(self, tensors: Iterable[tuple[str, StoredTensor]]) -> str:
        """What is wrong with one of them."""
        reasons = (why_not_finite(self.weights.file, name, stored, self.dtype) for name, stored in tensors)
        return next(filter(None, reasons), "the file was changed while being read")


def _clear(values: np.ndarray, _: _Scratch) -> None:
    values[:] = 0


def _runs(ranks: Sequence[int], most_layers: int, layers: range) -> Iterator[range]:
    """The layers, cut into runs of one rank, none longer than ``most_layers``."""
    begin = layers.start
    for layer in range(begin + 1, layers.stop + 1):
        if layer == layers.stop or ranks[layer] != ranks[begin] or layer - begin == most_layers:
            yield range(begin, layer)
            begin = layer


def _copy_tiled(source: np.ndarray, target: np.ndarray) -> None:
    """Copy matrices [layers, rows, length]; the source may be a transposed view."""
    is_narrow = source.strides[-1] <= _MOST_PLAIN_RANK * source.itemsize
    tile = source.shape[2] if is_narrow else max(1, _TILE_ELEMENTS // source.shape[1])
    for at in range(0, source.shape[2], tile):
        target[:, :, at : at + tile] = source[:, :, at : at + tile]
