"""Brings adapters from their files into the pages of either tier, beside the step loop.

Owns the threads that read, and the one answer that each read gets. Does not touch the adapter tables: it
only tells what has landed on the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from manylora.adapters import read_loops
from manylora.adapters.faults import FilesChanged, WrongInspection
from manylora.adapters.jobs import NO_HELPERS, Helpers
from manylora.adapters.pack import AdapterLayout, cell_offsets, layout_of, load_adapter, load_into
from manylora.adapters.peft import AdapterSpec
from manylora.adapters.store import AdapterStore, StoreCounts
from manylora.devices.device import Device, PageWriter
from manylora.executor.keeper import Keeper
from manylora.kernels.shapes import AdapterGeometry
from manylora.memory.arena import Arena
from manylora.memory.host import HostPool
from manylora.protocol import AdapterError, AdapterRead, ReadAdapter
from manylora.types import AdapterId, PageId

READERS = 2
"""Reads at a time: one waits for its file while the other packs; more would take cores from the steps."""

_MOST_HELPERS = 7
"""Loops do not wait for the interpreter, so more threads take less time. Single calls, which serve until loops are
compiled, do: by them 80 MB take 33 ms alone, 20 with two or three helpers, 25 with six (16 cores)."""

_LEAST_STORE_HELPERS = 3
"""What has been packed takes few calls; one thread alone does not keep a disk busy."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class Landed:
    """An adapter whose weights lie in its device pages; ``offsets`` as ``cell_offsets`` gives them."""

    adapter: AdapterId
    layout: AdapterLayout
    offsets: np.ndarray

    @classmethod
    def at(
        cls, adapter: AdapterId, layout: AdapterLayout, geometry: AdapterGeometry, pages: Sequence[PageId]
    ) -> Landed:
        """Raises ValueError when the layout takes another number of pages."""
        return cls(adapter, layout, cell_offsets(layout, geometry, pages))


class _Closing(Exception):
    """The reader is being closed."""


def _prepare_loops() -> None:
    try:
        read_loops.prepare()
    except Exception:
        _log.exception("adapters are read without compiled loops, which takes longer")


class AdapterReader:
    """Reads in the background. ``start`` and ``close`` belong to the step loop's thread."""

    def __init__(
        self,
        arena: Arena,
        host: HostPool,
        geometry: AdapterGeometry,
        device: Device,
        landed: Callable[[Landed], None],
        inspect_again: Callable[[AdapterId, AdapterSpec, WrongInspection], AdapterSpec],
        store: AdapterStore | None = None,
    ) -> None:
        """``landed`` is called on a reading thread, before the ``done`` of a read into device pages.

        ``inspect_again`` is called there where the files are not what the spec says; it may raise AdapterError.
        ``store``: where packed adapters are kept, if anywhere. The reader closes it.
        """
        self._arena = arena
        self._host = host
        self._geometry = geometry
        self._device = device
        self._note_landed = landed
        self._inspect_again = inspect_again
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="manylora-adapter-read")
        self._helpers = self._store_helpers = NO_HELPERS
        # Half of the cores are left to the steps and to the other processes.
        cores = max(0, (os.cpu_count() or 1) // 2 - READERS)
        for_store = 0 if store is None else min(max(cores, _LEAST_STORE_HELPERS), _MOST_HELPERS)
        if count := max(for_store, min(cores, _MOST_HELPERS)):
            helping = ThreadPoolExecutor(count, thread_name_prefix="manylora-adapter-part")
            self._helpers = Helpers(helping, min(cores, _MOST_HELPERS))
            self._store_helpers = Helpers(helping, for_store)
        self._store = store
        self._keeper = None if store is None else Keeper(store)
        self._closing = False
        if not read_loops.are_ready():
            self._threads.submit(_prepare_loops)

    def start(
        self,
        spec: AdapterSpec | None,
        command: ReadAdapter,
        done: Callable[[AdapterRead], None],
    ) -> None:
        """Read into the command's pages; ``done`` is called once.

        ``spec`` None stands for an unknown adapter. Raises RuntimeError after ``close``; then ``done`` is not
        called.
        """
        writer = self._device.page_writer() if command.tier == "device" else None
        self._threads.submit(self._run, spec, command, writer, done)

    def close(self) -> None:
        """Break reads off, answer every one that is left, end the threads. Idempotent."""
        self._closing = True
        self._threads.shutdown(wait=True)
        if self._helpers.threads is not None:
            self._helpers.threads.shutdown(wait=True)
        if self._keeper is not None:
            self._keeper.close()
        if self._store is not None:
            self._store.close()

    def store_counts(self) -> StoreCounts:
        """From any thread."""
        return StoreCounts() if self._store is None else self._store.counts()

    def _run(
        self,
        spec: AdapterSpec | None,
        command: ReadAdapter,
        writer: PageWriter | None,
        done: Callable[[AdapterRead], None],
    ) -> None:
        began = time.perf_counter()
        error, is_at_fault, is_kept = "", False, False
        try:
            if spec is None:
                raise AdapterError("the adapter is not known")
            with contextlib.nullcontext() if self._keeper is None else self._keeper.reading():
                try:
                    is_kept = self._read(spec, command, writer)
                except WrongInspection as failure:  # raised before anything is written
                    spec = self._inspect_again(command.adapter, spec, failure)
                    is_kept = self._read(spec, command, writer)
            if not is_kept and self._keeper is not None:
                self._keeper.keep(spec)
        except _Closing:
            error = "the engine is closing"
        except AdapterError as failure:
            error = str(failure)
            is_at_fault = spec is not None and not isinstance(failure, FilesChanged)
            _log.warning("adapter %d could not be read: %s", command.adapter, error)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            _log.exception("reading adapter %d failed", command.adapter)
        read_s = time.perf_counter() - began
        done(AdapterRead(command.adapter, not error, error, read_s, is_at_fault, is_kept and not error))

    def _read(self, spec: AdapterSpec, command: ReadAdapter, writer: PageWriter | None) -> bool:
        """Whether the store had it."""
        layout = layout_of(spec, self._geometry)
        self._check_open()
        if writer is None:
            return self._read_to_host(spec, layout, command)
        landed = Landed.at(command.adapter, layout, self._geometry, command.pages)
        try:
            is_kept = self._read_to_device(spec, layout, command, writer)
        finally:
            # Also after a failure: the pages go to others, which a late write must not meet.
            writer.close()
        self._note_landed(landed)
        return is_kept

    def _read_to_device(
        self, spec: AdapterSpec, layout: AdapterLayout, command: ReadAdapter, writer: PageWriter
    ) -> bool:
        def write_page(number: int, image: torch.Tensor) -> None:
            self._check_open()
            writer.write(self._arena.page(command.pages[number]), image)

        store, helpers = self._store, self._store_helpers
        if store is not None and store.read(spec, layout, write_page, self._check_open, helpers):
            return True
        load_adapter(spec, layout, self._geometry, self._arena.dtype, write_page, self._helpers)
        return False

    def _read_to_host(self, spec: AdapterSpec, layout: AdapterLayout, command: ReadAdapter) -> bool:
        pages = [self._host.page(page) for page in command.pages]
        store, helpers, check = self._store, self._store_helpers, self._check_open
        if store is not None and store.read_into(spec, layout, pages, check, helpers):
            return True
        dtype = self._host.dtype
        load_into(spec, layout, self._geometry, dtype, pages, check, self._helpers)
        return False

    def _check_open(self) -> None:
        if self._closing:
            raise _Closing
