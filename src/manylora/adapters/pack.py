"""Packs an adapter's weights into pages: which row goes where, and the bytes of each page.

Owns the order of rows inside an adapter: projection by projection in table order, all rows of A, then all
rows of B transposed. A layer's rows are in its own slabs. The model's rows follow them, spread over the slabs
of all layers. Owns the proof that the files have not changed since they were inspected. Does not know where
pages are or how they get to a device. It fills the caller's page images in place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from manylora.adapters import loops
from manylora.adapters.files import (
    FilesChanged,
    adapter_files,
    adapters_fault,
    read_tensors,
    sampled_digest,
    stamp_of,
)
from manylora.adapters.peft import IGNORED_TENSORS, AdapterSpec, Side
from manylora.kernels.shapes import AdapterGeometry
from manylora.protocol.executor import AdapterError
from manylora.tensorfile import DTYPE_BYTES, StoredTensor, fill, reason

_Kept = TypeVar("_Kept")


@dataclasses.dataclass(frozen=True)
class Helpers:
    """``count`` threads of a pool that help the calling thread, which never waits for a helper that is busy
    elsewhere."""

    threads: Executor | None = None
    count: int = 0


NO_HELPERS = Helpers()


def run_all(
    jobs: Iterable[Callable[[_Kept], None]], helpers: Helpers, new_scratch: Callable[[], _Kept]
) -> None:
    """Run all jobs, each on one thread, with the scratch memory that its thread keeps from job to job.

    Raises a job's error only when no job is running any more, because the memory that jobs write may be
    reused then.
    """
    left = iter(jobs)

    def work() -> None:
        scratch = new_scratch()
        for job in left:  # shared by all threads: each job goes to the first thread that is free
            try:
                job(scratch)
            except BaseException:
                for _ in left:  # used up, so that no thread begins another job
                    pass
                raise

    helping: list[Future[None]] = []
    try:
        if helpers.threads is not None:
            helping.extend(helpers.threads.submit(work) for _ in range(helpers.count))
        work()
    finally:
        helping = [helper for helper in helping if not helper.cancel()]
        wait(helping)
    for helper in helping:
        helper.result()


_JOB_BYTES = 2**21
"""The bytes of one job: one matrix in some layers. They stay in the processor's cache between two passes, and
take under a millisecond, so that all threads end together."""

_MOST_JOBS = 128
"""Above about this number, jobs become larger instead. Each job begins in the interpreter, which one thread
holds at a time."""

_CHUNK_ELEMENTS = 2**19
"""The elements that are read at a time where weights are verified."""

_STORED = {"F64": loops.F64, "F32": loops.F32, "F16": loops.F16, "BF16": loops.BF16}
_KEPT = {torch.float32: loops.F32, torch.float16: loops.F16, torch.bfloat16: loops.BF16}
_TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BITS = {4: np.dtype(np.uint32), 2: np.dtype(np.uint16)}
"""The types of the arrays that hold weights, by the bytes of an element."""


@dataclasses.dataclass(frozen=True, eq=False)
class AdapterLayout:
    """One packing for all layers; see LoraSegments for how kernels read it.

    ``records`` int64 [P, 3]: (first A cell, first B cell, rank), cells counted from the adapter's first; all
    0 where the rank is 0. ``scales`` float32 [P, L]. ``num_cells``: cells of the layers' rows, in each
    layer's slabs. ``num_across``: cells of the model's rows, which follow in the table, spread over the
    layers' slabs.
    """

    num_cells: int
    num_pages: int
    records: np.ndarray
    scales: np.ndarray
    num_across: int = 0

    @functools.cached_property
    def shifted(self) -> np.ndarray:
        """int64 [P, 3]: 1 where an entry of ``records`` is a cell number, which needs an offset in a shared
        table; else 0."""
        found = np.zeros_like(self.records)
        found[self.records[:, 2] > 0, :2] = 1
        return found


def layout_of(spec: AdapterSpec, geometry: AdapterGeometry) -> AdapterLayout:
    """Lay out an adapter's rows. Each projection takes its largest rank over the layers."""
    ranks = [max(ranks) for ranks in spec.ranks]
    return layout_for(ranks, np.array(spec.scales, dtype=np.float32), geometry)


def layout_for(ranks: Sequence[int], scales: np.ndarray, geometry: AdapterGeometry) -> AdapterLayout:
    """Lay out an adapter that has one rank for each projection; ``scales`` float32 [P, L]."""
    records = np.zeros((len(geometry.projections), 3), dtype=np.int64)
    num_cells = end = 0
    for index, (rank, projection) in enumerate(zip(ranks, geometry.projections, strict=True)):
        if rank:
            first_b = end + rank * geometry.cells(projection.in_features)
            records[index] = end, first_b, rank
            end = first_b + rank * geometry.cells(projection.out_features)
        if index < geometry.num_layer_projections:
            num_cells = end
    num_across = end - num_cells
    num_pages = -(-(num_cells - (-num_across // geometry.page.layers)) // geometry.cells_per_page)
    if geometry.widest is not None:
        num_pages = layout_for(ranks, scales, geometry.widest).num_pages
    return AdapterLayout(num_cells, num_pages, records, scales, num_across)


def pretended_layout(rank: int, geometry: AdapterGeometry) -> AdapterLayout:
    """Lay out an adapter of this rank and of scale 0 on all projections of the layers, which changes
    nothing."""
    scales = np.zeros((len(geometry.projections), geometry.page.layers), np.float32)
    ranks = [rank if index < geometry.num_layer_projections else 0 for index in range(len(scales))]
    return layout_for(ranks, scales, geometry)


def cell_offsets(layout: AdapterLayout, geometry: AdapterGeometry, pages: Sequence[int]) -> np.ndarray:
    """Return int64 [num_cells + num_across]: where each cell's layer 0 begins in the pool, and then where
    each cell of the model's rows begins, in adapter elements. Raises ValueError where the number of ``pages``
    is not the layout's."""
    if len(pages) != layout.num_pages:
        raise ValueError(f"the adapter takes {layout.num_pages} pages, got {len(pages)}")
    return _table(layout, geometry, np.array(pages, dtype=np.int64) * geometry.page_elements)


def _table(layout: AdapterLayout, geometry: AdapterGeometry, begins: np.ndarray) -> np.ndarray:
    """Return ``cell_offsets`` for pages that begin at the elements ``begins``."""
    inside = np.arange(0, geometry.cells_per_page * geometry.cell_elements, geometry.cell_elements)
    cells: np.ndarray = np.add.outer(begins, inside).reshape(-1)
    if not layout.num_across:
        return cells[: layout.num_cells]
    slabs = np.arange(geometry.page.layers) * geometry.slab_elements
    across = np.add.outer(cells[layout.num_cells :], slabs).reshape(-1)[: layout.num_across]
    return np.concatenate((cells[: layout.num_cells], across))


def load_into(
    spec: AdapterSpec,
    layout: AdapterLayout,
    geometry: AdapterGeometry,
    dtype: torch.dtype,
    pages: Sequence[torch.Tensor],
    check: Callable[[], None],
    helpers: Helpers = NO_HELPERS,
) -> None:
    """Fill ``pages`` in place with the weights as ``dtype``: ``pages[n]`` ``[layers, slab_elements]``, on the
    CPU, contiguous.

    Reads each tensor once, and writes every byte of the pages, whatever they held. Any of the threads calls
    ``check`` now and then; it may raise to stop the loading. No helper works on the pages after the call. A
    file that changes during the call is noticed only at the end. Raises AdapterError where the files changed
    since they were inspected or a weight is not finite; the caller must then discard the pages. Raises
    ValueError where the number of ``pages`` is not the layout's, or where ``dtype`` has another size than the
    geometry's elements.
    """
    if len(pages) != layout.num_pages:
        raise ValueError(f"the adapter takes {layout.num_pages} pages, got {len(pages)}")
    if dtype.itemsize != geometry.itemsize:
        raise ValueError(f"adapters of {geometry.itemsize}-byte elements cannot be {dtype}")
    with _open_weights(spec, geometry) as weights:
        _Loader(layout, geometry, dtype, weights).fill(pages, check, helpers)


def verify_weights(spec: AdapterSpec, geometry: AdapterGeometry, dtype: torch.dtype) -> None:
    """Raise AdapterError where a weight cannot be read or is not finite, in the file or as ``dtype``.

    Reads each tensor once, and holds 8 MiB however large the tensors are.
    """
    scratch = _Scratch().words(_CHUNK_ELEMENTS)
    with adapters_fault(), _open_weights(spec, geometry) as weights:
        for name, stored in weights.tensors.values():
            begin, kind, count = stored.begin, _STORED[stored.dtype], stored.shape[0] * stored.shape[1]
            if not loops.are_finite(weights.file.fileno(), begin, count, kind, _KEPT[dtype], scratch):
                raise _why_not(weights.file, name, stored, dtype)


# ---------------------------------------------------------------- the files


class _Weights(NamedTuple):
    """The open file, and the name and place of each of the adapter's tensors, by projection, layer and
    side."""

    file: FileIO
    tensors: dict[tuple[int, int, Side], tuple[str, StoredTensor]]


@contextmanager
def _open_weights(spec: AdapterSpec, geometry: AdapterGeometry) -> Iterator[_Weights]:
    """Open the weights' file and find the adapter's tensors in it. Raises FilesChanged, on leaving too: bytes
    replaced during reading are not the version that was inspected. Raises AdapterError for a file that cannot
    be read."""
    config_path, weights_path = _unchanged_files(spec)
    try:
        header = read_tensors(weights_path)
        digest = sampled_digest(config_path, weights_path, header)
        file = open(weights_path, "rb", buffering=0)  # noqa: SIM115  (closed below, where other errors are handled)
    except OSError as error:
        raise AdapterError(f"cannot read {weights_path.name}: {reason(error)}") from error
    except AdapterError:
        _unchanged_files(spec)
        raise
    with file:
        if digest != spec.digest:
            raise FilesChanged("the adapter's files have changed since it was added; add it again")
        yield _Weights(file, _named(spec, geometry, header))
    _unchanged_files(spec)
    if sampled_digest(config_path, weights_path, header) != spec.digest:
        raise FilesChanged("the adapter's files have changed since it was added; add it again")


def _named(
    spec: AdapterSpec, geometry: AdapterGeometry, header: dict[str, StoredTensor]
) -> dict[tuple[int, int, Side], tuple[str, StoredTensor]]:
    """Find the tensors of ``spec`` in the header. Raises FilesChanged where the header does not hold exactly
    these."""
    found: dict[tuple[int, int, Side], tuple[str, StoredTensor]] = {}
    sides: tuple[Side, Side] = ("A", "B")
    for index, (projection, ranks) in enumerate(zip(geometry.wholes, spec.ranks, strict=True)):
        for layer, rank in enumerate(ranks):
            for side in sides if rank else ():
                name = spec.tensor_name(
                    layer if index < geometry.num_layer_projections else None, projection, side
                )
                stored = header.get(name)
                shape = (rank, projection.in_features) if side == "A" else (projection.out_features, rank)
                if stored is None or stored.shape != shape:
                    raise FilesChanged(f"tensor {name} is no longer what inspecting the adapter found")
                found[index, layer, side] = name, stored
    if len(found) != sum(not name.endswith(IGNORED_TENSORS) for name in header):
        raise FilesChanged("the adapter holds tensors that inspecting it did not find")
    return found


def _unchanged_files(spec: AdapterSpec) -> tuple[Path, Path]:
    """Return the paths of the configuration and the weights. Raises FilesChanged where they are not the files
    that were inspected."""
    try:
        paths = adapter_files(Path(spec.path))
        stamps = [stamp_of(path) for path in paths]
    except AdapterError as error:
        raise FilesChanged(f"{error}; it was there when the adapter was added") from error
    for path, stamp, inspected in zip(paths, stamps, (spec.config, spec.weights)):
        if stamp != inspected:
            raise FilesChanged(f"{path.name} has changed since the adapter was added; add it again")
    return paths


def _why_not(file: FileIO, name: str, stored: StoredTensor, dtype: torch.dtype) -> AdapterError:
    """Find out why ``loops`` could not read a tensor, and return the reason as an error."""
    source, largest = _TORCH[stored.dtype], 0.0
    try:
        for first in range(0, stored.size_bytes, _CHUNK_ELEMENTS * source.itemsize):
            data = bytearray(min(_CHUNK_ELEMENTS * source.itemsize, stored.size_bytes - first))
            if not fill(file.fileno(), memoryview(data), stored.begin + first):
                return FilesChanged(f"the file ended inside tensor {name}: it was changed while being read")
            values = torch.frombuffer(data, dtype=source).double()
            if not values.isfinite().all():
                return AdapterError(f"tensor {name} holds NaN or infinity")
            largest = max(largest, float(values.abs().max()))
    except OSError as error:
        return AdapterError(f"cannot read tensor {name}: {reason(error)}")
    if largest > torch.finfo(dtype).max:
        return AdapterError(f"tensor {name} holds a value too large for {dtype}")
    return FilesChanged("the file was changed while being read")


# ---------------------------------------------------------------- the pages


class _Block(NamedTuple):
    """The part of a matrix (A, or B transposed) in one page: whole rows end to end, or a part of one row.

    ``values``: bit patterns [layers, rows, length], a view of the page, for the matrix's rows from ``row`` on
    and its columns from ``column`` on.
    """

    row: int
    column: int
    values: np.ndarray


class _Scratch:
    """Memory that one thread uses again and again, because the system would have to map fresh arrays of this
    size each time."""

    def __init__(self) -> None:
        self._words = np.empty(0, dtype=np.uint64)

    def words(self, num_elements: int) -> np.ndarray:
        """Return the scratch that ``loops`` needs for ``num_elements``. It may hold anything, and is valid
        until the next call."""
        size = loops.SCRATCH_WORDS * num_elements + 2
        if len(self._words) < size:
            self._words = np.empty(size, dtype=np.uint64)
        return self._words[:size]


class _Loader:
    """A filler of page images: projection by projection, first A and then B, layer by layer. It works on bit
    patterns with ``loops``, since it runs beside the step loop, where torch's copies of this size would wake
    a second team of threads."""

    def __init__(
        self, layout: AdapterLayout, geometry: AdapterGeometry, dtype: torch.dtype, weights: _Weights
    ) -> None:
        self._layout = layout
        self._geometry = geometry
        self._dtype = dtype
        self._weights = weights

    def fill(self, pages: Sequence[torch.Tensor], check: Callable[[], None], helpers: Helpers) -> None:
        """Write every byte of the adapter's pages."""
        bits, page = _BITS[self._dtype.itemsize], self._geometry.page
        images = [image.view(torch.uint8).numpy().view(bits) for image in pages]
        job_bytes = max(_JOB_BYTES, len(images) * page.page_bytes // _MOST_JOBS)
        jobs: list[Callable[[_Scratch], None]] = []
        for index, side, layer_bytes, blocks in self._sides(images):
            for layers in self._runs(index, side, max(1, job_bytes // layer_bytes)):
                jobs.append(functools.partial(self._add, index, side, layers, blocks, check))
        per_page, size = self._geometry.cells_per_page, self._geometry.cell_elements
        for number, image in enumerate(images):
            used = max(0, min(per_page, self._layout.num_cells - number * per_page))
            jobs.append(functools.partial(_clear, image[:, used * size :]))
        run_all(jobs, helpers, _Scratch)
        if self._layout.num_across:
            # These cells are zero: the jobs above have cleared all cells after the layers' rows.
            run_all(self._across(images, job_bytes, check), helpers, _Scratch)

    def _sides(self, images: Sequence[np.ndarray]) -> Iterator[tuple[int, Side, int, list[_Block]]]:
        """Yield each A and B of the layers that has rows: its projection, its side, its bytes in a layer, and
        its blocks."""
        for index in range(self._geometry.num_layer_projections):
            for side, first, rank, length in self._matrices(index):
                if blocks := self._blocks(images, first, rank, length):
                    yield index, side, rank * length * self._dtype.itemsize, blocks

    def _matrices(self, index: int) -> Iterator[tuple[Side, int, int, int]]:
        """Yield a projection's A and B: the side, its first cell in the adapter's table, its rows, and their
        length."""
        projection = self._geometry.projections[index]
        first_a, first_b, rank = self._layout.records[index].tolist()
        yield "A", first_a, rank, projection.in_features
        yield "B", first_b, rank, projection.out_features

    def _blocks(self, images: Sequence[np.ndarray], first_cell: int, rank: int, length: int) -> list[_Block]:
        """Return the blocks of ``rank`` rows from ``first_cell`` on, and zero the cells' bytes past the rows'
        ends."""
        per_page, size = self._geometry.cells_per_page, self._geometry.cell_elements
        cells = self._geometry.cells(length)
        blocks = []
        for number, image in enumerate(images):
            begin = max(0, number * per_page - first_cell)
            end = min(rank * cells, (number + 1) * per_page - first_cell)
            while begin < end:
                row, cell = divmod(begin, cells)
                rows = 1 if cell else max(1, (end - begin) // cells)
                width = min(cells - cell, end - begin)
                at = (first_cell + begin - number * per_page) * size
                slabs = image[:, at : at + rows * width * size].reshape(len(image), rows, width * size)
                slabs[:, :, length - cell * size :] = 0
                blocks.append(_Block(row, cell * size, slabs[:, :, : length - cell * size]))
                begin += rows * width
        return blocks

    def _runs(self, index: int, side: Side, most_layers: int) -> Iterator[range]:
        """Cut the layers into runs of one rank and one stored type, each of at most ``most_layers``."""
        found = [
            self._weights.tensors.get((index, layer, side)) for layer in range(self._geometry.page.layers)
        ]
        forms = [each and (each[1].shape, each[1].dtype) for each in found]
        begin = 0
        for layer in range(1, len(forms) + 1):
            if layer == len(forms) or forms[layer] != forms[begin] or layer - begin == most_layers:
                yield range(begin, layer)
                begin = layer

    def _add(
        self,
        index: int,
        side: Side,
        layers: range,
        blocks: Sequence[_Block],
        check: Callable[[], None],
        scratch: _Scratch,
    ) -> None:
        """Write one projection's A or B in these layers, all of which have the same rank and type."""
        check()
        found = [self._weights.tensors.get((index, layer, side)) for layer in layers]
        tensors = [each for each in found if each is not None]  # all layers have a tensor, or none has
        rank = tensors[0][1].shape[0 if side == "A" else 1] if tensors else 0
        parts = []
        for row, column, values in blocks:
            chosen = values[layers.start : layers.stop]
            present = max(0, rank - row)
            chosen[:, present:] = 0  # rows that only layers of a larger rank use
            if present:
                _, rows, length = chosen[:, :present].shape
                parts.append((chosen.ctypes.data, row, column, rows, length, chosen.strides[1]))
        if parts:
            cut, layer_bytes = self._geometry.cut(index), blocks[0].values.strides[0]
            columns = cut.a_columns if side == "A" else cut.b_rows
            self._fill(side, tensors, np.array(parts), layer_bytes, columns, scratch)

    def _fill(
        self,
        side: Side,
        tensors: Sequence[tuple[str, StoredTensor]],
        parts: np.ndarray,
        layer_bytes: int,
        columns: range,
        scratch: _Scratch,
    ) -> None:
        """Fill ``parts`` of one layer for each of the tensors. Raises AdapterError where that fails.

        ``parts``: places to fill, in the loops' form. They need only these ``columns`` of the tensors (for B,
        rows), and count from the first of these.
        """
        _, (dtype, (_, width), *_) = tensors[0]
        begins = np.array([stored.begin for _, stored in tensors])
        file, kinds = self._weights.file.fileno(), (_STORED[dtype], _KEPT[self._dtype])
        if side == "A":
            parts[:, 2] += columns.start
            held = scratch.words(int(parts[:, 4].max()))
            failed = loops.read_rows(file, begins, width, parts, layer_bytes, *kinds, held)
        else:
            begins += columns.start * width * DTYPE_BYTES[dtype]
            held = scratch.words(len(columns) * width)
            failed = loops.read_transposed(file, begins, width, len(columns), parts, layer_bytes, *kinds, held)
        if failed >= 0:
            raise _why_not(self._weights.file, *tensors[failed], self._dtype)

    # ------------------------------------------------------------ the model's rows

    def _across(
        self, images: Sequence[np.ndarray], job_bytes: int, check: Callable[[], None]
    ) -> list[Callable[[_Scratch], None]]:
        """Return jobs that fill the model's rows. The images' cells of these rows must be zero, since the jobs
        do not write behind a row's end."""
        geometry, itemsize = self._geometry, self._dtype.itemsize
        begins = np.array([image.ctypes.data // itemsize for image in images])
        cells, size = itemsize * _table(self._layout, geometry, begins), geometry.cell_elements
        jobs: list[Callable[[_Scratch], None]] = []
        for index in range(geometry.num_layer_projections, len(geometry.projections)):
            for side, first, rank, length in self._matrices(index):
                per_row = geometry.cells(length)
                step = max(1, job_bytes // max(1, rank * size * itemsize))
                places = cells[first : first + rank * per_row]
                row, cell = np.divmod(np.arange(len(places)), per_row)
                for begin in range(0, per_row, step):
                    columns = range(begin * size, min((begin + step) * size, length))
                    chosen = np.flatnonzero(cell // step == begin // step)
                    column = cell[chosen] * size - columns.start
                    lengths = np.minimum(size, len(columns) - column)
                    words = places[chosen], row[chosen], column, 1, lengths, size * itemsize
                    parts = np.stack(np.broadcast_arrays(*words), axis=1)
                    if len(parts):
                        jobs.append(functools.partial(self._add_across, index, side, parts, columns, check))
        return jobs

    def _add_across(
        self,
        index: int,
        side: Side,
        parts: np.ndarray,
        columns: range,
        check: Callable[[], None],
        scratch: _Scratch,
    ) -> None:
        check()
        self._fill(side, [self._weights.tensors[index, 0, side]], parts, 0, columns, scratch)


def _clear(values: np.ndarray, _: _Scratch) -> None:
    values[:] = 0
