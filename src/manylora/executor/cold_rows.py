"""Rows of a step whose adapters' products the CPU computes, since the adapters are still on their way (CaraServe
§4).

Owns what the workers are told of a step: which tokens are whose, and in which order their products come. The
base's part of these rows runs with that of all others. Does not know why a row is cold.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from manylora.adapters.pack import AdapterLayout
from manylora.assist.board import BoardShape
from manylora.assist.orders import LentPool, Product, ProductPart
from manylora.assist.workers import HandedStep, Workers, WorkersFailed
from manylora.config import MOST_CPU_TOKENS, num_cores
from manylora.kernels.ops import LoraSegments
from manylora.kernels.shapes import AdapterGeometry, ProjectionGroup
from manylora.memory.gates import LATE_S as GATE_LATE_S
from manylora.memory.gates import Awaited, CopyGate
from manylora.memory.host import HostPool
from manylora.protocol import CpuRows, StepDone
from manylora.types import AdapterId, SequenceId

LATE_S = 10.0
"""How long a step waits for the workers, in all, before it goes on without."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ColdAdapter:
    """An adapter in the host's pool, ``offsets`` as ``cell_offsets`` gives them of its pages there; the gate of
    its copy, and which sequences' rows are its."""

    layout: AdapterLayout
    offsets: np.ndarray
    gate: CopyGate
    rows: CpuRows


class ColdStep:
    """The cold rows of one step by their adapters, and what has landed of these where the CPU does not serve.

    ``first_layer``: from there on the device serves; 0 where no worker took the step.
    """

    def __init__(self, late_s: float = GATE_LATE_S) -> None:
        self.adapters: dict[AdapterId, ColdAdapter] = {}
        self.first_layer = 0
        self.stall_s = 0.0
        """How long the thread has waited, at gates and for the CPU."""
        self.cpu_s = 0.0
        """How long the CPU computed, its busiest worker."""
        self._late_s = late_s
        self._until: float | None = None
        self._late: set[SequenceId] = set()
        self._rows: ColdRows | None = None

    def add(
        self,
        adapter: AdapterId,
        layout: AdapterLayout,
        offsets: np.ndarray,
        gate: CopyGate,
        rows: CpuRows,
        first_layer: int,
    ) -> None:
        """Each adapter once. Raises ValueError where one is served to another layer than the others."""
        self.adapters[adapter] = ColdAdapter(layout, offsets, gate, rows)
        if self.first_layer not in (0, first_layer):
            raise ValueError("the CPU serves all cold adapters of a step up to one layer")
        self.first_layer = first_layer

    def begin(
        self,
        workers: Workers | None,
        segments: LoraSegments | None,
        names: Sequence[AdapterId],
        geometry: AdapterGeometry,
        device: torch.device,
    ) -> ColdRows | None:
        """Hand the step over to the workers; None where none takes it. ``names``: adapters of the segments."""
        chosen = [place for place, name in enumerate(names) if name in self.adapters]
        if workers is not None and segments is not None and chosen:
            adapters = [self.adapters[names[place]] for place in chosen]
            rows = ColdRows(segments, chosen, adapters, self.first_layer, geometry, device)
            if rows.begin(workers):
                self._rows = rows
                return rows
        self.first_layer = 0
        return None

    def before_layer(self, awaited: Awaited | None) -> Callable[[int], None]:
        """For StepBatch, beside what the step ``awaited``."""

        def pass_layer(layer: int) -> None:
            self._pass(layer)
            if awaited is not None:
                awaited.layer(layer)

        return pass_layer

    def _pass(self, layer: int) -> None:
        """Before the first operation of a layer: pass the groups that begin with it, where the device serves."""
        if layer < self.first_layer:
            return
        for adapter in self.adapters.values():
            for number, (first, _) in enumerate(adapter.gate.groups):
                if first != layer:
                    continue
                began = time.monotonic()
                if self._until is None:
                    self._until = began + self._late_s
                if not adapter.gate.pass_group(number, self._until):
                    self._late.update(adapter.rows.sequences)
                self.stall_s += time.monotonic() - began

    def end(self) -> None:
        """The step has been issued, or has failed."""
        if self._rows is None:
            return
        if self._rows.has_failed:
            for adapter in self.adapters.values():
                self._late.update(adapter.rows.sequences)
        self.cpu_s, waited_s = self._rows.end()
        self.stall_s += waited_s

    def tell(self, done: StepDone, workers: Workers | None) -> None:
        """Add what became of these rows to what is told of the step."""
        done.spoilt = tuple(sorted({*done.spoilt, *self._late}))
        done.cpu_s = self.cpu_s
        done.cpu_workers = 0 if workers is None else workers.num_workers
        done.stall_s += self.stall_s


def start_workers(
    host: HostPool, geometry: AdapterGeometry, num_workers: int, cores_before: int = 0
) -> Workers:
    """Processes that read the host's pool, which is lent. Raises OSError where the system gives none.

    ``cores_before``: see ``ColdStartConfig``.
    """
    assert host.descriptor is not None
    groups = geometry.groups
    dtype = str(host.dtype).removeprefix("torch.")
    shape = BoardShape(
        num_workers,
        MOST_CPU_TOKENS,
        max(group.in_features for group in groups),
        max(group.offsets[-1] for group in groups),
        dtype,
    )
    place = LentPool(
        host.descriptor,
        host.num_pages * host.shape.page_bytes,
        geometry.slab_elements,
        geometry.cell_elements,
        geometry.alignment,
    )
    return Workers(shape, place, _cores(num_workers, cores_before), LATE_S)


def _cores(num_workers: int, before: int) -> list[int]:
    """The last ones that this process may use, but for ``before``; none where that leaves no core for others."""
    end = num_cores() - before
    return sorted(os.sched_getaffinity(0))[end - num_workers : end] if end > num_workers else []


class ColdRows:
    """Of one step. Used by the step loop's thread, layer after layer, as the decoder comes to them.

    ``num_layers``: the first ones, which the CPU serves. ``others``: the segments of other rows in these, ``lora``
    their plan.
    """

    def __init__(
        self,
        segments: LoraSegments,
        chosen: list[int],
        adapters: Sequence[ColdAdapter],
        num_layers: int,
        geometry: AdapterGeometry,
        device: torch.device,
    ) -> None:
        """``chosen``: the segments of the adapters, in their order."""
        self.num_layers = num_layers
        self.others = _without(segments, chosen)
        self.lora: Any | None = None
        self.has_failed = False
        self._adapters = adapters
        self._geometry = geometry
        self._step: HandedStep | None = None
        starts, lengths = segments.start[chosen].tolist(), segments.length[chosen].tolist()
        self._lengths: list[int] = lengths
        self.num_tokens = sum(lengths)
        places = np.concatenate([np.arange(start, start + length) for start, length in zip(starts, lengths)])
        self._rows = torch.from_numpy(places.astype(np.int64)).to(device)
        self._products = self._describe()
        self._jobs = self._in_order()

    def begin(self, workers: Workers) -> bool:
        """Hand the step over; False where no worker takes it, or there is no room for so many rows."""
        if self.num_tokens > workers.shape.num_tokens:
            return False
        cells = [adapter.offsets for adapter in self._adapters]
        self._step = workers.begin(self._lengths, self._jobs, list(self._products.values()), cells)
        return self._step is not None

    # ------------------------------------------------------------ as the decoder goes

    def post(self, x: torch.Tensor, layer: int, group: ProjectionGroup) -> bool:
        """Show the workers what they need of x ``[T, in]``; False where no adapter of theirs is on this group."""
        if self.has_failed or self._step is None or group.name not in self._products:
            return False
        rows = x.index_select(0, self._rows).cpu()
        target = self._step.rows(self.num_tokens, group.in_features)
        target[:] = as_numbers(rows)
        self._step.post()
        return True

    def add(self, y: torch.Tensor, group: ProjectionGroup) -> None:
        """Add what they have computed to y ``[T, sum(out)]``. Where they fail the rows are worth nothing."""
        assert self._step is not None
        try:
            found = self._step.take(self.num_tokens, group.offsets[-1])
        except WorkersFailed:
            self.has_failed = True
            return
        # A copy: the next job's results go where these lie.
        results = torch.from_numpy(found.copy()).to(y.device, y.dtype)
        y.index_add_(0, self._rows, results)

    def end(self) -> tuple[float, float]:
        """The step has been issued, or has failed: seconds that the workers computed, and that it waited for
        them."""
        if self._step is None:
            return 0.0, 0.0
        self._step.end()
        return self._step.busy_s(), self._step.waited_s

    # ------------------------------------------------------------ what the workers are told

    def _describe(self) -> dict[str, Product]:
        """By the name of the group; those that none of the adapters is on are left out."""
        found: dict[str, Product] = {}
        first = 0
        for group in self._geometry.groups:
            parts = []
            for place, projection in enumerate(group.projections):
                index = first + place
                parts.append(
                    ProductPart(
                        group.offsets[place],
                        projection.out_features,
                        [tuple(adapter.layout.records[index, :3].tolist()) for adapter in self._adapters],
                        [adapter.layout.scales[index, 0].tolist() for adapter in self._adapters],
                    )
                )
            first += len(group.projections)
            if any(rank for part in parts for _, _, rank in part.records):
                found[group.name] = Product(group.in_features, group.offsets[-1], parts)
        return found

    def _in_order(self) -> list[tuple[int, int]]:
        """(layer, place of the product) as the decoder comes to them."""
        places = {name: place for place, name in enumerate(self._products)}
        return [
            (layer, places[group.name])
            for layer in range(self.num_layers)
            for group in self._geometry.layers[layer]
            if group.name in places
        ]


def _without(segments: LoraSegments, cold: list[int]) -> LoraSegments | None:
    kept = np.setdiff1d(np.arange(len(segments.start)), cold)
    if len(kept) == 0:
        return None
    return LoraSegments(
        segments.start[kept],
        segments.length[kept],
        segments.records[kept],
        segments.scales[kept],
        segments.cells,
    )


def as_numbers(rows: torch.Tensor) -> np.ndarray:
    """As the board has them."""
    if rows.dtype is torch.float32:
        return np.asarray(rows.numpy())
    return np.asarray(rows.view(torch.int16).numpy()).view(np.uint16)
