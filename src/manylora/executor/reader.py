"""Brings adapters from their files into the pages of either tier, beside the step loop.

Owns the threads that read, and the one answer that each read gets. Does not touch the adapter tables: it
only tells what has landed on the device.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from manylora.adapters import loops
from manylora.adapters.files import FilesChanged
from manylora.adapters.jobs import NO_HELPERS, Helpers
from manylora.adapters.pack import AdapterLayout, cell_offsets, layout_of, load_adapter, load_into
from manylora.adapters.peft import AdapterSpec
from manylora.devices.device import Device, PageWriter
from manylora.kernels.shapes import AdapterGeometry
from manylora.memory.arena import Arena
from manylora.memory.host import HostPool
from manylora.protocol import AdapterError, AdapterRead, ReadAdapter
from manylora.types import AdapterId, PageId

READERS = 2
"""Reads at a time: one waits for its file while the other packs; more would take cores from the steps."""

_MOST_HELPERS = 7
"""Loops do not wait for the interpreter, so more threads take less time."""

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


class AdapterReader:
    """Reads in the background. ``start`` and ``close`` belong to the step loop's thread."""

    def __init__(
        self,
        arena: Arena,
        host: HostPool,
        geometry: AdapterGeometry,
        device: Device,
        landed: Callable[[Landed], None],
    ) -> None:
        """``landed`` is called on a reading thread, before the ``done`` of a read into device pages."""
        loops.prepare()
        self._arena = arena
        self._host = host
        self._geometry = geometry
        self._device = device
        self._note_landed = landed
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="manylora-adapter-read")
        self._helpers = NO_HELPERS
        # Half of the cores are left to the steps and to the other processes.
        count = min((os.cpu_count() or 1) // 2 - READERS, _MOST_HELPERS)
        if count > 0:
            self._helpers = Helpers(
                ThreadPoolExecutor(count, thread_name_prefix="manylora-adapter-part"), count
            )
        self._closing = False

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

    def _run(
        self,
        spec: AdapterSpec | None,
        command: ReadAdapter,
        writer: PageWriter | None,
        done: Callable[[AdapterRead], None],
    ) -> None:
        began = time.perf_counter()
        error, is_at_fault = "", False
        try:
            if spec is None:
                raise AdapterError("the adapter is not known")
            self._read(spec, command, writer)
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
        done(AdapterRead(command.adapter, not error, error, read_s, is_at_fault))

    def _read(self, spec: AdapterSpec, command: ReadAdapter, writer: PageWriter | None) -> None:
        layout = layout_of(spec, self._geometry)
        self._check_open()
        if writer is None:
            pages = [self._host.page(page) for page in command.pages]
            load_into(spec, layout, self._geometry, self._host.dtype, pages, self._check_open, self._helpers)
            return
        landed = Landed.at(command.adapter, layout, self._geometry, command.pages)

        def write_page(number: int, image: torch.Tensor) -> None:
            self._check_open()
            writer.write(self._arena.page(command.pages[number]), image)

        try:
            load_adapter(spec, layout, self._geometry, self._arena.dtype, write_page, self._helpers)
        finally:
            # Also after a failure: the pages go to others, which a late write must not meet.
            writer.close()
        self._note_landed(landed)

    def _check_open(self) -> None:
        if self._closing:
            raise _Closing
