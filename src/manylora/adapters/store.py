"""The adapter store: packed adapters on disk, so that an adapter that has been read once is read faster.

A cache and nothing more: whatever is wrong with a file, the adapter's own files are read as without it. What an
adapter is, its inspection says; a packed file is taken only where it says of itself what would be written for just
this adapter, its files as they are now, this model and this packing. Owns no thread.
"""

from __future__ import annotations

import hashlib
import logging
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from manylora.adapters.faults import FilesChanged
from manylora.adapters.jobs import NO_HELPERS, Helpers, Stages, run_all
from manylora.adapters.pack import AdapterLayout, WritePage, WritePart, layout_of, load_adapter
from manylora.adapters.packedfile import (
    RUN_BYTES,
    PackedFileReader,
    PackedFileWriter,
    PackedRun,
    PackedShape,
    Unusable,
    read_identity,
)
from manylora.adapters.packedidentity import identity_of, is_outdated, packing_fingerprint
from manylora.adapters.peft import AdapterSpec
from manylora.adapters.sourcestamp import SourceStamp, source_stamps, unsettled_s
from manylora.adapters.storefolder import NoRoom, StoreFolder
from manylora.kernels.shapes import AdapterGeometry
from manylora.protocol import AdapterError

_log = logging.getLogger(__name__)

_POLL_S = 0.05
_LEAST_BYTES = 2**20
"""Of a file, for one thread."""
_PART_BYTES = 2**20
"""Read at a time where a device waits for the first layers."""
_WINDOW_BYTES, _WINDOW_PARTS = 8 * 2**20, 8
"""What goes on to a device is read so many bytes at a time: a part for each of some threads, which is still in a
cache when it is handed over."""


class StoreCounts(NamedTuple):
    """Reads that found a packed file, reads that did not, and bytes that the store's files take."""

    hits: int = 0
    misses: int = 0
    num_bytes: int = 0


class AdapterStore:
    """Thread-safe."""

    def __init__(self, folder: StoreFolder, geometry: AdapterGeometry, dtype: torch.dtype) -> None:
        """``dtype``: of the pools. The store closes ``folder``."""
        self._folder = folder
        self._geometry = geometry
        self._dtype = dtype
        self._packing = packing_fingerprint(geometry, dtype)
        self._lock = threading.Lock()
        self._hits = self._misses = 0
        self._named: set[str] = set()  # files that the log has named
        self._cannot_write = self._had_no_room = False

    def counts(self) -> StoreCounts:
        return StoreCounts(self._hits, self._misses, self._folder.held_bytes)

    def close(self) -> None:
        """With no read and no write on its way. Idempotent."""
        self._folder.close()

    # ------------------------------------------------------------ reading

    def read_into(
        self,
        spec: AdapterSpec,
        layout: AdapterLayout,
        pages: Sequence[torch.Tensor],
        check: Callable[[], None],
        helpers: Helpers = NO_HELPERS,
        arrived: Callable[[int], None] | None = None,
    ) -> bool:
        """What ``load_into`` does, from a packed file. False: there is none to go by; the pages may hold anything.
        ``arrived``: is told that so many bytes of every page are there, and sound.

        Raises FilesChanged, as reading the adapter's own files would, ValueError for another number of pages, and
        what ``check`` raises.
        """
        if len(pages) != layout.num_pages:
            raise ValueError(f"the adapter takes {layout.num_pages} pages, got {len(pages)}")

        def read(file: PackedFileReader) -> None:
            images = [_bytes_of(page) for page in pages]
            if arrived is None:
                _fill_evenly(file, images, check, helpers)
                return
            # No smaller though others wait for the first layers: threads that share the interpreter wait for each
            # other at every run.
            run_bytes = min(RUN_BYTES, self._geometry.page.page_bytes // 2)
            _fill(file, 0, images, check, helpers, run_bytes, arrived)

        return self._read(spec, layout, read)

    def read(
        self,
        spec: AdapterSpec,
        layout: AdapterLayout,
        write_page: WritePage,
        check: Callable[[], None],
        helpers: Helpers = NO_HELPERS,
    ) -> bool:
        """What ``load_adapter`` does, from a packed file; see ``read_into``. Hands over only what is sound."""
        page = self._geometry.page

        def read(file: PackedFileReader) -> None:
            count = max(1, min(_WINDOW_BYTES // page.page_bytes, layout.num_pages))
            # At a boundary of the system's pages, for direct reads.
            memory = np.frombuffer(mmap.mmap(-1, count * page.page_bytes), np.uint8)
            window = memory.reshape(count, page.page_bytes)
            images = torch.from_numpy(memory).view(self._dtype).view(count, page.layers, -1)
            for first in range(0, layout.num_pages, count):
                num_pages = min(count, layout.num_pages - first)
                _fill(file, first, list(window[:num_pages]), check, helpers, _WINDOW_BYTES // _WINDOW_PARTS)
                for number in range(num_pages):
                    write_page(first + number, images[number])

        return self._read(spec, layout, read)

    def read_parts(
        self,
        spec: AdapterSpec,
        layout: AdapterLayout,
        write: WritePart,
        arrived: Callable[[int], None],
        check: Callable[[], None],
        helpers: Helpers = NO_HELPERS,
    ) -> bool:
        """What ``load_parts`` does, from a packed file, in parts of its own; see ``read``."""
        page = self._geometry.page

        def read(file: PackedFileReader) -> None:
            runs = file.shape.runs(_PART_BYTES)
            size = runs[0].end - runs[0].begin
            count = max(1, min(_WINDOW_BYTES // size, layout.num_pages))
            window = np.frombuffer(mmap.mmap(-1, count * size), np.uint8)
            targets = window.reshape(count, size)
            for first in range(0, len(runs), layout.num_pages):
                part = runs[first : first + layout.num_pages]
                for at in range(0, layout.num_pages, count):
                    chosen = part[at : at + count]
                    jobs = [
                        partial(_read_runs, file, [run], [target[: run.end - run.begin]], check)
                        for run, target in zip(chosen, targets)
                    ]
                    run_all(jobs, helpers, lambda: None)
                    for run, target in zip(chosen, targets):
                        write(run.page, run.begin, target[: run.end - run.begin])
                arrived(part[0].end)
            assert part[0].end == page.page_bytes

        return self._read(spec, layout, read)

    def _read(
        self, spec: AdapterSpec, layout: AdapterLayout, read: Callable[[PackedFileReader], None]
    ) -> bool:
        name = self._name(spec)
        is_hit = False
        try:
            with self._opened(spec, layout) as file:
                read(file)
            is_hit = True
        except FilesChanged:
            self._remove(name)  # of an adapter that is not there any more
            raise
        except FileNotFoundError:
            pass
        except (Unusable, OSError) as error:
            self._say_once(name, spec, error)
            self._remove(name)  # it is written anew
        with self._lock:
            self._hits += is_hit
            self._misses += not is_hit
        return is_hit

    @contextmanager
    def _opened(self, spec: AdapterSpec, layout: AdapterLayout) -> Iterator[PackedFileReader]:
        """Raises FileNotFoundError, Unusable, FilesChanged and OSError."""
        shape = self._shape(spec, layout, source_stamps(spec))
        with self._folder.opened(self._name(spec)) as (file, direct):
            yield PackedFileReader(shape, file, direct)
            self._folder.note_use(file)

    def _say_once(self, name: str, spec: AdapterSpec, error: Exception) -> None:
        with self._lock:
            is_new = name not in self._named
            self._named.add(name)
        if is_new:
            _log.warning(
                "the packed file %s of %s is not used (%s): the adapter's own files are read",
                name,
                spec.path,
                getattr(error, "strerror", None) or error,
            )

    # ------------------------------------------------------------ writing

    def write(self, spec: AdapterSpec, check: Callable[[], None]) -> None:
        """Pack the adapter once more, into a file, unless there is one. Takes as long as reading it on one thread.

        ``check`` is called now and then, and may raise to break off. Nothing else is raised: what is not kept is
        read from its own files again. Where the folder cannot be written, or has no room, the log says so once.
        """
        try:
            self._write(spec, check)
        except (AdapterError, NoRoom) as error:
            is_new = isinstance(error, NoRoom) and not self._had_no_room
            self._had_no_room |= is_new
            level = logging.WARNING if is_new else logging.INFO
            _log.log(level, "the adapter in %s is not kept in the store: %s", spec.path, error)
        except OSError as error:
            if not self._cannot_write:
                reason = error.strerror or error
                _log.warning("the adapter store %s cannot be written: %s", self._folder.path, reason)
            self._cannot_write = True

    def _write(self, spec: AdapterSpec, check: Callable[[], None]) -> None:
        layout = layout_of(spec, self._geometry)
        stamps = source_stamps(spec)
        if self._is_there(spec, layout):
            return
        while left_s := unsettled_s(stamps):
            if left_s == math.inf:
                raise FilesChanged("its files are from the future")
            check()
            time.sleep(min(left_s, _POLL_S))
        shape = self._shape(spec, layout, stamps)
        if not self._folder.has_room(shape.file_bytes):
            self._remove_stale(check)
        with self._folder.created(self._name(spec), shape.file_bytes, check) as file:
            writer = PackedFileWriter(shape, file)

            def write_page(number: int, image: torch.Tensor) -> None:
                check()
                writer.write_page(number, _bytes_of(image))

            load_adapter(spec, layout, self._geometry, self._dtype, write_page)
            if source_stamps(spec) != stamps:
                raise FilesChanged("its files were replaced while they were read")
            writer.finish()
        self._cannot_write = self._had_no_room = False

    def _is_there(self, spec: AdapterSpec, layout: AdapterLayout) -> bool:
        """Whether a file says that it is this adapter's, such as one of another server on the same store."""
        try:
            with self._opened(spec, layout):
                return True
        except (Unusable, OSError):
            return False

    def tidy(self, check: Callable[[], None]) -> None:
        """Remove what is too much, and what cannot be used any more: of adapters that are gone or were replaced.

        Raises what ``check`` raises, and nothing else.
        """
        try:
            self._remove_stale(check)
            self._folder.shrink(check)
        except OSError as error:
            _log.warning("the adapter store %s cannot be tidied: %s", self._folder.path, error)

    def _remove_stale(self, check: Callable[[], None]) -> None:
        for name in self._folder.names():
            check()
            try:
                with self._folder.opened(name) as (file, _):
                    is_stale = is_outdated(read_identity(file))
            except Unusable:
                is_stale = True
            except OSError:  # gone meanwhile, or no file of ours
                continue
            if is_stale:
                self._remove(name)

    def _remove(self, name: str) -> None:
        try:
            self._folder.remove(name)
        except OSError as error:
            _log.info("the packed file %s cannot be removed: %s", name, error)

    # ------------------------------------------------------------ names

    def _name(self, spec: AdapterSpec) -> str:
        """One for each adapter folder and model: what was replaced is replaced here, too."""
        told = f"{self._packing}\0".encode() + os.fsencode(spec.path)
        return hashlib.blake2b(told, digest_size=16).hexdigest()

    def _shape(
        self, spec: AdapterSpec, layout: AdapterLayout, stamps: tuple[SourceStamp, SourceStamp]
    ) -> PackedShape:
        identity = identity_of(spec, layout.num_pages, stamps, self._packing)
        return PackedShape(identity, layout.num_pages, self._geometry.page)


def _read_runs(
    file: PackedFileReader,
    runs: Sequence[PackedRun],
    targets: Sequence[np.ndarray],
    check: Callable[[], None],
    _: None,
) -> None:
    check()
    file.read(runs, targets)


def _fill_evenly(
    file: PackedFileReader, pages: Sequence[np.ndarray], check: Callable[[], None], helpers: Helpers
) -> None:
    """Read all page images into bytes, an even part of the file for each thread at a time, so that all end
    together: in parts of a page each some would have one more than the others."""
    shape = file.shape
    num_bytes = shape.num_pages * shape.page.page_bytes
    threads = 1 + (helpers.count if helpers.threads is not None else 0)
    count = threads * -(-num_bytes // (threads * RUN_BYTES))
    jobs = [
        partial(_read_runs, file, runs, [pages[run.page][run.begin : run.end] for run in runs], check)
        for runs in shape.spans(min(count, -(-num_bytes // _LEAST_BYTES)))
    ]
    run_all(jobs, helpers, lambda: None)


def _fill(
    file: PackedFileReader,
    first_page: int,
    pages: Sequence[np.ndarray],
    check: Callable[[], None],
    helpers: Helpers,
    run_bytes: int,
    arrived: Callable[[int], None] | None = None,
) -> None:
    """Read page images from ``first_page`` on into bytes, their first layers first, so many bytes of a page at a
    time. ``arrived``: see ``read_into``."""
    runs = file.shape.runs(run_bytes)
    mine = [run for run in runs if first_page <= run.page < first_page + len(pages)]
    ends = sorted({run.end for run in mine})
    stages = Stages[None](lambda count: None if arrived is None else arrived(ends[count - 1]))
    jobs = [
        stages.job(
            ends.index(run.end),
            partial(_read_runs, file, [run], [pages[run.page - first_page][run.begin : run.end]], check),
        )
        for run in mine
    ]
    run_all(jobs, helpers, lambda: None)


def _bytes_of(page: torch.Tensor) -> np.ndarray:
    return np.asarray(page.view(torch.uint8).numpy()).reshape(-1)
