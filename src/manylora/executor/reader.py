"""Brings adapters from their files into the pool, beside the step loop.

Owns the threads that read, and the one answer that each read gets. Does not touch the adapter tables: what
has landed waits until the step loop takes it.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from manylora.adapters.pack import AdapterLayout, cell_offsets, layout_of, load_adapter
from manylora.adapters.peft import AdapterSpec
from manylora.devices.device import Device, PageWriter
from manylora.kernels.shapes import AdapterGeometry
from manylora.memory.arena import Arena
from manylora.protocol import AdapterError, AdapterRead, ReadAdapter
from manylora.types import AdapterId

READERS = 2
"""Reads at a time: one waits for its file while the other packs; more would take cores from the steps."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class Landed:
    """An adapter whose weights lie in its pages; ``offsets`` as ``cell_offsets`` gives them."""

    adapter: AdapterId
    layout: AdapterLayout
    offsets: np.ndarray


class _Closing(Exception):
    """The reader is being closed."""


class AdapterReader:
    """Reads in the background. ``start``, ``take_landed`` and ``close`` belong to the step loop's thread."""

    def __init__(self, arena: Arena, geometry: AdapterGeometry, device: Device) -> None:
        self._arena = arena
        self._geometry = geometry
        self._device = device
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="manylora-adapter-read")
        self._landed: collections.deque[Landed] = collections.deque()
        self._closing = False

    def start(
        self, spec: AdapterSpec | None, command: ReadAdapter, done: Callable[[AdapterRead], None]
    ) -> None:
        """Read into the command's pages; ``done`` is called once, after ``take_landed`` would give it.

        ``spec`` None stands for an adapter that nobody knows. Raises RuntimeError after ``close``; then
        ``done`` is not called.
        """
        writer = self._device.page_writer()
        self._threads.submit(self._run, spec, command, writer, done)

    def take_landed(self) -> list[Landed]:
        """Adapters that have landed since the last call, in order."""
        landed = []
        while self._landed:
            landed.append(self._landed.popleft())
        return landed

    def close(self) -> None:
        """Break reads off, answer every one that is left, end the threads. Idempotent."""
        self._closing = True
        self._threads.shutdown(wait=True)

    def _run(
        self,
        spec: AdapterSpec | None,
        command: ReadAdapter,
        writer: PageWriter,
        done: Callable[[AdapterRead], None],
    ) -> None:
        began = time.perf_counter()
        error, is_at_fault = "", False
        try:
            if spec is None:
                raise AdapterError("the adapter is not known")
            self._landed.append(self._read(spec, command, writer))
        except _Closing:
            error = "the engine is closing"
        except AdapterError as failure:
            error, is_at_fault = str(failure), spec is not None
            _log.warning("adapter %d could not be read: %s", command.adapter, error)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            _log.exception("reading adapter %d failed", command.adapter)
        read_s = time.perf_counter() - began
        done(AdapterRead(command.adapter, not error, error, read_s, is_at_fault))

    def _read(self, spec: AdapterSpec, command: ReadAdapter, writer: PageWriter) -> Landed:
        layout = layout_of(spec, self._geometry)
        offsets = cell_offsets(layout, self._geometry, command.pages)

        def write_page(number: int, image: torch.Tensor) -> None:
            if self._closing:
                raise _Closing
            writer.write(self._arena.page(command.pages[number]), image)

        try:
            if self._closing:
                raise _Closing
            load_adapter(spec, layout, self._geometry, self._arena.dtype, write_page)
        finally:
            # Also after a failure: the pages go to others, which a late write must not meet.
            writer.close()
        return Landed(command.adapter, layout, offsets)
