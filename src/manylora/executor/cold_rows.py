"""Rows of a step whose adapters' products the CPU computes, since the adapters are still on their way (CaraServe
§4).

Owns what the workers are told of a step: which tokens are whose, and in which order their products come, and how
what they find gets into the rows. The base's part of these rows runs with that of all others. Does not know why a
row is cold.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from manylora.adapters.pack import AdapterLayout
from manylora.assist.board import BoardShape
from manylora.assist.orders import LentPool, Product, ProductPart
from manylora.assist.workers import HandedStep, Workers, WorkersFailed
from manylora.config import MOST_CPU_TOKENS, num_cores
from manylora.devices.device import Device
from manylora.executor.inputs import StepInputs
from manylora.executor.queued import DeviceHandover
from manylora.kernels.expanding import matrix, pieces_of
from manylora.kernels.ops import LoraSegments
from manylora.kernels.shapes import AdapterGeometry, Projection, ProjectionGroup
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

    ``first_layer``: from there on the device serves; 0 where no worker took the step. ``shrinks_only``: before it
    the device expands what the CPU has shrunk.
    """

    def __init__(self, late_s: float = GATE_LATE_S) -> None:
        self.adapters: dict[AdapterId, ColdAdapter] = {}
        self.first_layer = 0
        self.shrinks_only = False
        self.stall_s = 0.0
        """How long the thread has waited at gates, and it or the device for the CPU."""
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
        """Each adapter once. Raises ValueError where one is served in another way than the others."""
        if self.adapters and (self.first_layer, self.shrinks_only) != (first_layer, rows.shrinks_only):
            raise ValueError("the CPU serves all cold adapters of a step in one way, up to one layer")
        self.adapters[adapter] = ColdAdapter(layout, offsets, gate, rows)
        self.first_layer, self.shrinks_only = first_layer, rows.shrinks_only

    def begin(
        self,
        workers: Workers | None,
        handover: DeviceHandover | None,
        inputs: StepInputs,
        geometry: AdapterGeometry,
        device: Device,
    ) -> ColdRows | None:
        """Hand the step over to the workers; None where none takes it. ``handover``: where the device posts and
        takes."""
        segments, names = inputs.lora, inputs.lora_adapters
        chosen = [place for place, name in enumerate(names) if name in self.adapters]
        if workers is not None and segments is not None and chosen:
            adapters = [self.adapters[names[place]] for place in chosen]
            kind = ShrunkRows if self.shrinks_only else ColdRows
            rows = kind(segments, chosen, adapters, self.first_layer, geometry, device, handover)
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
        """Before the first operation of a layer: pass the groups that begin with it and bring what the device
        reads."""
        is_served = layer < self.first_layer
        if is_served and not self.shrinks_only:
            return
        for adapter in self.adapters.values():
            gate = adapter.gate
            needed = gate.groups[: gate.num_ahead or None] if is_served else gate.groups
            for number, (first, _) in enumerate(needed):
                if first != layer:
                    continue
                began = time.monotonic()
                if self._until is None:
                    self._until = began + self._late_s
                if not gate.pass_group(number, self._until):
                    self._late.update(adapter.rows.sequences)
                self.stall_s += time.monotonic() - began

    @contextlib.contextmanager
    def launching(self, workers: Workers | None) -> Iterator[None]:
        """Around the step's launch; one that fails has ended."""
        try:
            yield
        except BaseException:
            self._launched()
            self.end(workers)
            raise
        self._launched()

    def _launched(self) -> None:
        if self._rows is not None:
            self._rows.launched()

    def end(self, workers: Workers | None) -> None:
        """Wait until the device has taken what the CPU found."""
        if self._rows is None or workers is None:
            return
        self.cpu_s, waited_s = self._rows.end(workers)
        self.stall_s += waited_s
        if self._rows.has_failed:
            for adapter in self.adapters.values():
                self._late.update(adapter.rows.sequences)

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

    shrinks_only = False

    def __init__(
        self,
        segments: LoraSegments,
        chosen: list[int],
        adapters: Sequence[ColdAdapter],
        num_layers: int,
        geometry: AdapterGeometry,
        device: Device,
        handover: DeviceHandover | None = None,
    ) -> None:
        """``chosen``: the segments of the adapters, in their order."""
        self.num_layers = num_layers
        self.others = _without(segments, chosen)
        self.lora: Any | None = None
        self.has_failed = False
        self._adapters = adapters
        self._geometry = geometry
        self._segments, self._chosen = segments, chosen
        self._handover = handover
        self._step: HandedStep | None = None
        self._taken: tuple[Callable[[], bool], Callable[[], np.ndarray]] | None = None
        starts, lengths = segments.start[chosen].tolist(), segments.length[chosen].tolist()
        self._lengths: list[int] = lengths
        self.num_tokens = sum(lengths)
        places = np.concatenate([np.arange(start, start + length) for start, length in zip(starts, lengths)])
        self._rows = device.upload(places.astype(np.int64))
        self._products = self._describe()
        self._jobs = self._in_order()

    def begin(self, workers: Workers) -> bool:
        """Hand the step over; False where no worker takes it, or there is no room for so many rows."""
        if self._handover is not None and self._handover.is_busy:
            return False
        products = list(self._products.values())
        widest = max((product.width for product in products), default=0)
        if self.num_tokens > workers.shape.num_tokens or widest > workers.shape.out_features:
            return False
        cells = [adapter.offsets for adapter in self._adapters]
        self._step = workers.begin(self._lengths, self._jobs, products, cells, shrinks_only=self.shrinks_only)
        if self._step is None:
            return False
        if self._handover is not None:
            given = [worker.number for worker in self._step.given]
            self._handover.begin(self._step.job, len(self._jobs), given)
        return True

    # ------------------------------------------------------------ as the decoder goes

    def post(self, x: torch.Tensor, layer: int, group: ProjectionGroup) -> bool:
        """Show the workers what they need of x ``[T, in]``; False where no adapter of theirs is on this group."""
        if self.has_failed or self._step is None or group.name not in self._products:
            return False
        rows = x.index_select(0, self._rows)
        if self._handover is not None:
            self._step.job += 1
            self._handover.post(rows, self._step.job)
            return True
        target = self._step.rows(self.num_tokens, group.in_features)
        target[:] = as_numbers(rows.cpu())
        self._step.post()
        return True

    def add(self, y: torch.Tensor, pool: torch.Tensor, layer: int, group: ProjectionGroup) -> None:
        """Add what they have computed to y ``[T, sum(out)]``. Where they fail the rows are worth nothing."""
        assert self._step is not None
        width = self._products[group.name].width
        if self._handover is not None:
            found = self._handover.take(self.num_tokens, width, self._step.job)
            self._add(y, found, pool, layer, group)
            return
        try:
            results = self._step.take(self.num_tokens, width)
        except WorkersFailed:
            self.has_failed = True
            return
        # A copy: the next job's results go where these lie.
        self._add(y, torch.from_numpy(results.copy()).to(y.device), pool, layer, group)

    def _add(
        self, y: torch.Tensor, found: torch.Tensor, pool: torch.Tensor, layer: int, group: ProjectionGroup
    ) -> None:
        y.index_add_(0, self._rows, found.to(y.dtype))

    def launched(self) -> None:
        """All of the step has been, or it has failed."""
        assert self._step is not None
        if self._handover is not None:
            self._taken = self._handover.issued()
            return
        self._step.end()
        self._seconds = self._step.busy_s(), self._step.waited_s

    def end(self, workers: Workers) -> tuple[float, float]:
        """Wait until all has been taken: seconds that the workers computed, and that the step waited for them."""
        if self._handover is None or self._step is None or self._taken is None:
            return self._seconds
        has_passed, told = self._taken
        is_well = self._step.wait(has_passed)
        waited_ns, is_late = told().tolist()
        self.has_failed = not is_well or bool(is_late)
        seconds = self._step.busy_s(), waited_ns / 1e9
        if self.has_failed:
            workers.failed(self._step)
        else:
            self._step.end()
        self._handover.end()
        return seconds

    # ------------------------------------------------------------ what the workers are told

    def _describe(self) -> dict[str, Product]:
        """By the name of the group; those that none of the adapters is on are left out."""
        found: dict[str, Product] = {}
        first = 0
        for group in self._geometry.groups:
            parts: list[ProductPart] = []
            column = 0
            for index, projection in enumerate(group.projections, first):
                records = [tuple(adapter.layout.records[index].tolist()) for adapter in self._adapters]
                width = self._width(projection, [rank for _, _, rank in records])
                scales = [adapter.layout.scales[index].tolist() for adapter in self._adapters]
                parts.append(ProductPart(column, width, records, scales))
                column += width
            first += len(group.projections)
            if any(rank for part in parts for _, _, rank in part.records):
                found[group.name] = Product(group.in_features, column, parts)
        return found

    def _width(self, projection: Projection, ranks: list[int]) -> int:
        """Columns of a projection's results, of adapters with these ranks."""
        return projection.out_features

    def _in_order(self) -> list[tuple[int, int]]:
        """(layer, place of the product) as the decoder comes to them."""
        places = {name: place for place, name in enumerate(self._products)}
        return [
            (layer, places[group.name])
            for layer in range(self.num_layers)
            for group in self._geometry.layers[layer]
            if group.name in places
        ]


class ShrunkRows(ColdRows):
    """The same where the workers compute x A alone, which the device expands by B from its own pool."""

    shrinks_only = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._pieces: dict[tuple[int, int], torch.Tensor] = {}  # of B, by adapter and projection

    def _width(self, projection: Projection, ranks: list[int]) -> int:
        return max(ranks)

    def _add(
        self, y: torch.Tensor, found: torch.Tensor, pool: torch.Tensor, layer: int, group: ProjectionGroup
    ) -> None:
        first = self._geometry.projections.index(group.projections[0])
        begin = 0
        for place, length in enumerate(self._lengths):
            rows, shrunk = self._rows[begin : begin + length], found[begin : begin + length]
            begin += length
            for number, part in enumerate(self._products[group.name].parts):
                rank = part.records[place][2]
                if rank == 0:
                    continue
                b = self._matrix(pool, y.dtype, layer, place, first + number)
                own = shrunk[:, part.first_column : part.first_column + rank] * part.scales[place][layer]
                columns = y[:, group.offsets[number] : group.offsets[number + 1]]
                columns.index_add_(0, rows, (own @ b).to(y.dtype))

    def _matrix(
        self, pool: torch.Tensor, dtype: torch.dtype, layer: int, place: int, index: int
    ) -> torch.Tensor:
        """float32 B ``[rank, out]`` of an adapter's projection."""
        geometry, segments = self._geometry, self._segments
        _, first_b, rank = segments.records[self._chosen[place], index].tolist()
        elements = geometry.projections[index].out_features
        if (place, index) not in self._pieces:
            pieces = pieces_of(segments.cells, first_b, rank, elements, geometry)
            self._pieces[place, index] = pieces
        return matrix(pool, dtype, self._pieces[place, index], layer, rank, elements, geometry)


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
