"""What inspecting adapters found, by adapter, and the checks that are asked for.

Owns the adapters' specs, and the layout that follows from each. They are shared with other threads without a lock:
setting or reading one entry of a dict relies on the GIL. Reads files on its caller's thread; knows no pages and no
device.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from pathlib import Path

import torch

from manylora.adapters.pack import AdapterLayout, layout_of, verify_weights
from manylora.adapters.peft import AdapterSpec
from manylora.adapters.registry import Registry
from manylora.kernels.shapes import AdapterGeometry
from manylora.memory.copier import one_line
from manylora.protocol import AdapterChecked, AdapterError, InspectAdapter, VerifyAdapter
from manylora.types import AdapterId

_log = logging.getLogger(__name__)


class Inspections:
    """``geometry`` says how many pages an adapter takes."""

    def __init__(
        self, registry: Registry, geometry: AdapterGeometry, dtype: torch.dtype, max_rank: int | None
    ) -> None:
        self._registry = registry
        self._geometry = geometry
        self._dtype = dtype
        self._max_rank = max_rank
        self._known: dict[AdapterId, tuple[AdapterSpec, AdapterLayout]] = {}
        # By ranks and scales: most adapters share one.
        self._layouts: weakref.WeakValueDictionary[object, AdapterLayout] = weakref.WeakValueDictionary()

    def find(self, adapter: AdapterId) -> AdapterSpec | None:
        known = self._known.get(adapter)
        return None if known is None else known[0]

    def spec(self, adapter: AdapterId) -> AdapterSpec:
        """Raises AdapterError where the adapter is not known."""
        return self._found_of(adapter)[0]

    def layout(self, adapter: AdapterId) -> AdapterLayout:
        """``layout_of`` its spec. Raises AdapterError where the adapter is not known."""
        return self._found_of(adapter)[1]

    def _found_of(self, adapter: AdapterId) -> tuple[AdapterSpec, AdapterLayout]:
        known = self._known.get(adapter)
        if known is None:
            raise AdapterError("the adapter is not known")
        return known

    def learn(self, adapter: AdapterId, spec: AdapterSpec) -> None:
        """Take over what inspecting an adapter found elsewhere. From any thread."""
        self._known[adapter] = spec, self._layout_of(spec)

    def _layout_of(self, spec: AdapterSpec) -> AdapterLayout:
        shape = spec.ranks, spec.scales
        layout = self._layouts.get(shape)
        if layout is None:
            layout = self._layouts[shape] = layout_of(spec, self._geometry)
        return layout

    def forget(self, adapter: AdapterId) -> None:
        self._known.pop(adapter, None)

    def inspect(self, command: InspectAdapter) -> AdapterChecked:
        """What it found is known afterwards."""

        def inspect() -> AdapterChecked:
            spec = self._registry.inspect(Path(command.path), self._max_rank)
            self.learn(command.adapter, spec)
            for warning in spec.warnings:
                _log.warning("adapter in %s: %s", spec.path, warning)
            return self._found(command.adapter, spec)

        return _checked(command.adapter, inspect)

    def verify(self, command: VerifyAdapter) -> AdapterChecked:
        """Reads all weights."""

        def verify() -> AdapterChecked:
            spec = self.spec(command.adapter)
            verify_weights(spec, self._geometry, self._dtype)
            return self._found(command.adapter, spec)

        return _checked(command.adapter, verify)

    def _found(self, adapter: AdapterId, spec: AdapterSpec) -> AdapterChecked:
        return AdapterChecked(adapter, True, self._layout_of(spec).num_pages, spec.rank)


def _checked(adapter: AdapterId, check: Callable[[], AdapterChecked]) -> AdapterChecked:
    """What ``check`` finds, or why it failed."""
    try:
        return check()
    except AdapterError as error:
        return AdapterChecked(adapter, False, error=str(error), status=error.status)
    except Exception as error:
        _log.exception("checking adapter %d failed", adapter)
        return AdapterChecked(adapter, False, error=one_line(error), status=503)
