"""Reads adapters' files: headers on the caller's thread, to check them, and weights beside the step loop.

Owns the adapters' specs and layouts, which are shared with other threads without a lock: setting or reading
one entry of a dict relies on the GIL. Owns the threads that read weights, and the one answer that each read
gets. Does not touch the adapter tables: it only reports which adapters have landed on the device.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from manylora.adapters import loops, pack
from manylora.adapters.files import FilesChanged
from manylora.adapters.peft import AdapterSpec
from manylora.adapters.registry import Registry
from manylora.devices.device import Device
from manylora.kernels.shapes import AdapterGeometry
from manylora.memory.copier import one_line
from manylora.memory.pool import Arena, HostPool
from manylora.protocol import commands, events
from manylora.protocol.executor import AdapterChecked, AdapterError
from manylora.types import AdapterId, PageId

_log = logging.getLogger(__name__)


class Inspections:
    """The inspected adapters, with their specs and layouts, and the checks of adapters' files. ``geometry``
    determines how many pages an adapter takes."""

    def __init__(
        self, registry: Registry, geometry: AdapterGeometry, dtype: torch.dtype, max_rank: int | None
    ) -> None:
        self._registry = registry
        self._geometry = geometry
        self._dtype = dtype
        self._max_rank = max_rank
        self._known: dict[AdapterId, tuple[AdapterSpec, pack.AdapterLayout]] = {}
        # Layouts by ranks and scales, since most adapters share a layout.
        self._layouts: weakref.WeakValueDictionary[object, pack.AdapterLayout] = weakref.WeakValueDictionary()

    def spec(self, adapter: AdapterId) -> AdapterSpec:
        """Return the adapter's spec. Raises AdapterError where the adapter is not known."""
        return self._known_of(adapter)[0]

    def layout(self, adapter: AdapterId) -> pack.AdapterLayout:
        """Return the ``layout_of`` the adapter's spec. Raises AdapterError where the adapter is not known."""
        return self._known_of(adapter)[1]

    def _known_of(self, adapter: AdapterId) -> tuple[AdapterSpec, pack.AdapterLayout]:
        known = self._known.get(adapter)
        if known is None:
            raise AdapterError("the adapter is not known")
        return known

    def learn(self, adapter: AdapterId, spec: AdapterSpec) -> None:
        """Record the spec of an adapter that was inspected here or in another process. May be called from any
        thread."""
        self._known[adapter] = spec, self._layout_of(spec)

    def _layout_of(self, spec: AdapterSpec) -> pack.AdapterLayout:
        shape = spec.ranks, spec.scales
        layout = self._layouts.get(shape)
        if layout is None:
            layout = self._layouts[shape] = pack.layout_of(spec, self._geometry)
        return layout

    def forget(self, adapter: AdapterId) -> None:
        self._known.pop(adapter, None)

    def inspect(self, command: commands.InspectAdapter) -> AdapterChecked:
        """Carry out InspectAdapter: check the adapter's headers and record its spec. Return the answer; a
        failed check is an answer too."""

        def inspect() -> AdapterSpec:
            spec = self._registry.inspect(Path(command.path), self._max_rank)
            self.learn(command.adapter, spec)
            for warning in spec.warnings:
                _log.warning("adapter in %s: %s", spec.path, warning)
            return spec

        return self._checked(command.adapter, inspect)

    def verify(self, command: commands.VerifyAdapter) -> AdapterChecked:
        """Carry out VerifyAdapter: read and check all weights of a known adapter, and return the answer."""

        def verify() -> AdapterSpec:
            spec = self.spec(command.adapter)
            pack.verify_weights(spec, self._geometry, self._dtype)
            return spec

        return self._checked(command.adapter, verify)

    def _checked(self, adapter: AdapterId, check: Callable[[], AdapterSpec]) -> AdapterChecked:
        """Return an answer with the spec that ``check`` finds, or with the reason why it failed."""
        try:
            spec = check()
            return AdapterChecked(adapter, True, self._layout_of(spec).num_pages, spec.rank)
        except AdapterError as error:
            return AdapterChecked(adapter, False, error=str(error), status=error.status)
        except Exception as error:
            _log.exception("checking adapter %d failed", adapter)
            return AdapterChecked(adapter, False, error=one_line(error), status=503)


READERS = 2
"""The number of simultaneous reads: one waits for its file while the other packs. More would take cores from
the steps."""

_MOST_HELPERS = 7
"""The most threads that help a read. The packing loops run without the interpreter's lock, so they gain from
more threads."""


class Landed(NamedTuple):
    """An adapter whose weights are in its device pages. ``offsets``: the ``cell_offsets`` of these pages."""

    adapter: AdapterId
    layout: pack.AdapterLayout
    offsets: np.ndarray


class _Closing(Exception):
    """The error that stops a read because the reader is being closed."""


class AdapterReader:
    """A reader of adapters' weights in the background. ``start`` and ``close`` belong to the step loop's
    thread."""

    def __init__(
        self,
        arena: Arena,
        host: HostPool,
        geometry: AdapterGeometry,
        device: Device,
        landed: Callable[[Landed], None],
    ) -> None:
        """Start the threads. ``landed`` is called on a reading thread, before the ``done`` of a read into
        device pages."""
        loops.prepare()
        self._arena = arena
        self._host = host
        self._geometry = geometry
        self._device = device
        self._lane, self._copying = device.copy_lane(), threading.Lock()
        self._note_landed = landed
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="manylora-adapter-read")
        # Half of the cores are left for the steps and for other processes.
        count = min((os.cpu_count() or 1) // 2 - READERS, _MOST_HELPERS)
        self._helpers = pack.NO_HELPERS
        if count > 0:
            self._helpers = pack.Helpers(ThreadPoolExecutor(count, "manylora-adapter-part"), count)
        self._closing = False

    def start(
        self, spec: AdapterSpec, command: commands.ReadAdapter, done: Callable[[events.AdapterRead], None]
    ) -> None:
        """Read the adapter into the command's pages. ``done`` is called once, with the answer, on a reading
        thread. Raises RuntimeError after ``close``; then ``done`` is not called."""
        self._threads.submit(self._run, spec, command, self._device.issued(), done)

    def close(self) -> None:
        """Stop reads under way, answer every read that is left, and end the threads. Idempotent."""
        self._closing = True
        self._threads.shutdown(wait=True)
        if self._helpers.threads is not None:
            self._helpers.threads.shutdown(wait=True)

    def _run(
        self,
        spec: AdapterSpec,
        command: commands.ReadAdapter,
        issued: object,
        done: Callable[[events.AdapterRead], None],
    ) -> None:
        began = time.perf_counter()
        error, is_at_fault = "", False
        try:
            self._read(spec, command, issued)
        except _Closing:
            error = "the engine is closing"
        except AdapterError as failure:
            error = str(failure)
            is_at_fault = not isinstance(failure, FilesChanged)
            _log.warning("adapter %d could not be read: %s", command.adapter, error)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            _log.exception("reading adapter %d failed", command.adapter)
        read_s = time.perf_counter() - began
        done(events.AdapterRead(command.adapter, not error, error, read_s, is_at_fault))

    def _read(self, spec: AdapterSpec, command: commands.ReadAdapter, issued: object) -> None:
        layout = pack.layout_of(spec, self._geometry)
        self._check_open()
        landed = None
        if command.tier == "host":
            pages = [self._host.page(page) for page in command.pages]
        else:
            landed = Landed(command.adapter, layout, pack.cell_offsets(layout, self._geometry, command.pages))
            sizes = layout.num_pages, self._arena.shape.layers, self._arena.shape.slab_elements
            pages = list(torch.empty(sizes, dtype=self._arena.dtype))
        pack.load_into(spec, layout, self._geometry, self._host.dtype, pages, self._check_open, self._helpers)
        if landed is not None:
            self._copy(pages, command.pages, issued)
            self._note_landed(landed)

    def _copy(self, images: Sequence[torch.Tensor], pages: Sequence[PageId], issued: object) -> None:
        """Copy page images to the device's pages, after the work that ``issued`` marks."""
        with self._copying:
            self._lane.begin(issued)
            try:
                for image, page in zip(images, pages):
                    self._check_open()
                    self._lane.copy(self._arena.page(page), image)
            finally:
                # Also after a failure: the pages get new owners, whose data a late copy must not overwrite.
                self._lane.end()()

    def _check_open(self) -> None:
        if self._closing:
            raise _Closing
