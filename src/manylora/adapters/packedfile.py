"""A packed adapter in a file: a header, then the adapter's page images byte for byte.

Owns the format, and that nothing in such a file is believed: the reader says what the header must be, and every
piece has a checksum. Does not know where files lie, nor what the images mean. No torch here.

The header takes whole blocks: ``_FIXED``, the identity, a checksum for each piece, zeros, and in its last bytes
a CRC-32 of all that. The images follow end to end. A piece is some layers of one page; pieces are numbered by
layers and then by pages, so that the first layers of all pages can be read first.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import mmap
import os
import struct
import zlib
from collections.abc import Sequence

import numpy as np

from manylora.adapters import read_loops
from manylora.adapters.checksum import CHECKSUM, MOST_BYTES, NUMBERS, checksum, checksums
from manylora.adapters.pagecache import cached_pages
from manylora.kernels.shapes import PageShape

FORMAT_VERSION = 1
"""Part of every header: raise it when the format changes."""

BLOCK_BYTES = 4096
"""Direct reads begin, end and land at multiples of this."""

_MAGIC = b"MLorPack"
_FIXED = struct.Struct("<8sIII")  # magic, format, bytes of the identity, pieces
_PIECE_BYTES = MOST_BYTES
RUN_BYTES = 12 * MOST_BYTES
"""The most that is read at a time: so much that threads seldom wait for each other."""

_CRC_BYTES = 4
_MOST_AT_ONCE = 1024
"""Buffers that the system takes in one call."""
_SYNC_BYTES = 16 * 2**20
_MOST_IDENTITY_BYTES = 2**20


class Unusable(Exception):
    """A packed file is not what it should be; the message says why, for the log."""


@dataclasses.dataclass(frozen=True, slots=True)
class PackedPiece:
    """Bytes ``[begin, end)`` of an adapter's page number ``page``, whose checksum is number ``number``."""

    number: int
    page: int
    begin: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class PackedRun:
    """Neighbouring pieces of a page, which are read together: their numbers, and the bytes that they are."""

    numbers: tuple[int, ...]
    page: int
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class PackedShape:
    """What a file with this identity and so many pages looks like."""

    identity: bytes
    num_pages: int
    page: PageShape

    @property
    def pieces(self) -> list[PackedPiece]:
        """In the order of their numbers."""
        bounds = self._bounds
        places = [(page, *part) for part in itertools.pairwise(bounds) for page in range(self.num_pages)]
        return [PackedPiece(number, *place) for number, place in enumerate(places)]

    def spans(self, count: int) -> list[list[PackedRun]]:
        """All pieces in the order of the file, in so many stretches of it, as even as can be: each one's runs."""
        bounds = self._bounds
        in_page = len(bounds) - 1
        total = self.num_pages * in_page
        edges = sorted({number * total // count for number in range(count + 1)})
        found = []
        for begin, end in itertools.pairwise(edges):
            runs = []
            for page in range(begin // in_page, -(-end // in_page)):
                first, last = max(begin - page * in_page, 0), min(end - page * in_page, in_page)
                numbers = tuple(part * self.num_pages + page for part in range(first, last))
                runs.append(PackedRun(numbers, page, bounds[first], bounds[last]))
            found.append(runs)
        return found

    @property
    def _bounds(self) -> list[int]:
        """Where the pieces of a page begin, and its end."""
        return [*range(0, self.page.page_bytes, self.piece_bytes), self.page.page_bytes]

    def runs(self, most_bytes: int) -> list[PackedRun]:
        """All pieces, those of the first layers first, so many bytes together, or one by one."""
        bounds = self._bounds
        count = max(1, most_bytes // self.piece_bytes)
        found = []
        for first in range(0, len(bounds) - 1, count):
            last = min(first + count, len(bounds) - 1)
            for page in range(self.num_pages):
                numbers = tuple(part * self.num_pages + page for part in range(first, last))
                found.append(PackedRun(numbers, page, bounds[first], bounds[last]))
        return found

    @property
    def piece_bytes(self) -> int:
        """Whole layers where these are not larger."""
        return _PIECE_BYTES // self.page.slab_bytes * self.page.slab_bytes or _PIECE_BYTES

    @property
    def num_pieces(self) -> int:
        return self.num_pages * -(-self.page.page_bytes // self.piece_bytes)

    @property
    def header_bytes(self) -> int:
        least = _FIXED.size + len(self.identity) + self.num_pieces * CHECKSUM.itemsize + _CRC_BYTES
        return -(-least // BLOCK_BYTES) * BLOCK_BYTES

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + self.num_pages * self.page.page_bytes

    def place(self, page: int, at: int) -> int:
        """Where in the file byte ``at`` of a page lies."""
        return self.header_bytes + page * self.page.page_bytes + at

    def header(self, sums: np.ndarray) -> bytes:
        """The header of a file whose pieces have these checksums."""
        fixed = _FIXED.pack(_MAGIC, FORMAT_VERSION, len(self.identity), self.num_pieces)
        said = (fixed + self.identity + sums.tobytes()).ljust(self.header_bytes - _CRC_BYTES, b"\0")
        return said + zlib.crc32(said).to_bytes(_CRC_BYTES, "little")

    def sums_in(self, header: bytes) -> np.ndarray:
        """The checksums in a header. Raises Unusable unless it is, but for these, the one that this shape has."""
        if len(header) != self.header_bytes:
            raise Unusable("it is cut short")
        sums = np.frombuffer(header, CHECKSUM, self.num_pieces, _FIXED.size + len(self.identity))
        if header != self.header(sums):
            raise Unusable("its header is damaged, or another adapter's, model's or version's")
        return sums


def read_identity(file: int) -> bytes:
    """What a file says of itself, whatever it is worth. Raises Unusable, and OSError."""
    start = os.pread(file, _FIXED.size, 0)
    if len(start) < _FIXED.size:
        raise Unusable("it is too short")
    magic, version, length, _ = _FIXED.unpack(start)
    if (magic, version) != (_MAGIC, FORMAT_VERSION) or length > _MOST_IDENTITY_BYTES:
        raise Unusable("it is no packed adapter of this version")
    return os.pread(file, length, _FIXED.size)


class PackedFileReader:
    """Reads runs of pieces of an open file, each from any thread."""

    def __init__(self, shape: PackedShape, file: int, direct: int | None) -> None:
        """``direct``: the same file opened for direct reads, where its file system has these. Neither is closed.

        Raises Unusable where the header or the size is not as ``shape`` has it, and OSError.
        """
        self.shape = shape
        self._file = file
        self._direct = direct
        if os.fstat(file).st_size != shape.file_bytes:
            raise Unusable("it is not as long as it should be")
        cached = None if direct is None else cached_pages(file)
        self._cached = None if cached is None or cached.all() else cached
        self._sums = shape.sums_in(os.pread(file, shape.header_bytes, 0)).tolist()

    def read(self, runs: Sequence[PackedRun], targets: Sequence[np.ndarray]) -> None:
        """Fill a target for each run, contiguous bytes, as long as that. In the file the runs follow each other.
        Raises Unusable, and OSError."""
        begin, left = self.shape.place(runs[0].page, runs[0].begin), list(targets)
        if self._cached is None and read_loops.are_ready() and self._read_by_loops(runs, targets, begin):
            return
        while left:
            count = self._read_some(left[:_MOST_AT_ONCE], begin)
            if not count:
                raise Unusable("it was cut short while it was read")
            begin += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]
        for run, target in zip(runs, targets, strict=True):
            if checksums(target, self.shape.piece_bytes) != [self._sums[number] for number in run.numbers]:
                raise Unusable("its contents are damaged")

    def _read_by_loops(self, runs: Sequence[PackedRun], targets: Sequence[np.ndarray], begin: int) -> bool:
        """All without the interpreter; False where that did not go well, for whatever reason."""
        places = np.array([(target.ctypes.data, len(target)) for target in targets])
        sums = np.array([self._sums[number] for run in runs for number in run.numbers], dtype=np.uint64)
        return read_loops.read_pieces(self._file, begin, places, self.shape.piece_bytes, NUMBERS, sums)

    def _read_some(self, targets: Sequence[np.ndarray], begin: int) -> int:
        """What the page cache has not is read past it: the pools hold adapters, so the page cache need not."""
        direct, end = self._direct, begin + sum(map(len, targets))
        buffers = [target.data for target in targets]
        if direct is not None and self._cached is not None and not begin % BLOCK_BYTES:
            pages = slice(begin // mmap.PAGESIZE, -(-end // mmap.PAGESIZE))
            is_aligned = not any((len(target) | target.ctypes.data) % BLOCK_BYTES for target in targets)
            if is_aligned and not self._cached[pages].all():
                try:
                    return os.preadv(direct, buffers, begin)
                except OSError as error:
                    if error.errno != errno.EINVAL:  # which says that it is not supported here
                        raise
                    self._direct = None
        return os.preadv(self._file, buffers, begin)


class PackedFileWriter:
    """Writes a file of this shape, page by page, on one thread. It is none before ``finish``."""

    def __init__(self, shape: PackedShape, file: int) -> None:
        self._shape = shape
        self._file = file
        self._unsynced = 0
        self._sums = np.zeros(shape.num_pieces, CHECKSUM)
        self._by_page: list[list[PackedPiece]] = [[] for _ in range(shape.num_pages)]
        for piece in shape.pieces:
            self._by_page[piece.page].append(piece)

    def write_page(self, page: int, image: np.ndarray) -> None:
        """Write one page's bytes; now and then wait for the disk, so that no end has much to wait for.

        Raises OSError.
        """
        for piece in self._by_page[page]:
            self._sums[piece.number] = checksum(image[piece.begin : piece.end])
        _write(self._file, image.data, self._shape.place(page, 0))
        self._unsynced += len(image)
        if self._unsynced >= _SYNC_BYTES:
            os.fsync(self._file)
            self._unsynced = 0

    def finish(self) -> None:
        """Every page is written. Raises OSError."""
        _write(self._file, memoryview(self._shape.header(self._sums)), 0)
        os.fsync(self._file)


def _write(file: int, data: memoryview, begin: int) -> None:
    while data:
        count = os.pwrite(file, data, begin)
        begin, data = begin + count, data[count:]
