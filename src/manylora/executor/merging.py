"""Merges adapters into the base's weights, and switches from one merged adapter to the next.

Owns the order in which weights are rewritten, and the rule that half-written weights never serve. A switch
ends with the adapter merged, or with the weights as they were loaded, or the device counts as broken. With a
copy of the pristine weights on the device, a switch is one pass, issued like a step. With a copy on the host,
a switch runs beside the step loop: first the rows that differ are restored, then the adapter is merged into
them. Does not choose adapters, and builds no batches.

With several ranks, a switch fails on all ranks or on none, and each rank merges its part of the weights. With
sharded adapters, a rank has some inputs of every A and some outputs of every B. Its part of a column linear's
update B^T A needs all inputs of A, and its part of a row linear's needs all outputs of B. These are gathered
from all ranks, one group of projections at a time. With replicated adapters, a rank already has all it needs.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from manylora.adapters.pack import cell_offsets, layout_for
from manylora.config.declaring import ConfigError
from manylora.devices.device import Device, Elapsed
from manylora.devices.peers import Peers
from manylora.executor.forward import Forward
from manylora.executor.tables import AdapterTables
from manylora.kernels.ops import AdaptedLinear, MergedLayer, MergePlan, Weight, of_adapters
from manylora.kernels.shapes import AdapterGeometry, Projection, RankPlace
from manylora.memory.budget import in_mib
from manylora.memory.copier import TRANSFER_BYTES, Copier, one_line
from manylora.memory.pool import shared_memory
from manylora.models.layers import RankedLinear
from manylora.models.share import LinearShare
from manylora.protocol import commands, events
from manylora.types import BASE, AdapterId, first_line

_log = logging.getLogger(__name__)


class MergedWeights:
    """The weights of a decoder's linears, into which adapters are merged in place. Used by the step loop's
    thread."""

    def __init__(
        self,
        forward: Forward,
        pristine: DevicePristine | HostPristine,
        tables: AdapterTables,
        copier: Copier,
        ranked: RankedMerging | None = None,
    ) -> None:
        """Start with no adapter merged. ``pristine``: the copy of the weights of the decoder's linears, in
        their order. ``ranked``: given where the decoder is one rank's share."""
        self._linears = forward.decoder.linears
        self._ops = forward.decoder.ops
        self._pristine = pristine
        self._arena = forward.arena
        self._tables = tables
        self._geometry = geometry = forward.geometry
        self._ranked = ranked
        self._of_weights = geometry if ranked is None else ranked.geometry
        self._device = forward.device
        self._copier = copier
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="manylora-merge")
        self._merged: AdapterId = BASE
        self._may_name: AdapterId | None = BASE  # the adapter that steps may name as merged; None: any
        self._differs = np.zeros(len(geometry.projections), bool)  # projections that may not be pristine
        self._beside: tuple[AdapterId, Future[str]] | None = None
        self._broken = ""
        self._closing = False

    # ------------------------------------------------------------ the step loop's side

    def settle(self) -> AdapterId:
        """Wait for a switch that runs beside the step loop, and return the merged adapter (BASE: none).
        Raises RuntimeError where the weights are lost."""
        if self._beside is not None:
            adapter, switching = self._beside
            self._beside = None
            self._note(adapter, switching.result())
        if self._broken:
            raise RuntimeError(f"the base's weights are lost: {self._broken}")
        return self._merged

    def check(self, named: AdapterId) -> None:
        """Check the merged adapter that a step names. Raises ValueError where it is not the last switch's.
        After a failed switch, steps may name any adapter."""
        if self._may_name not in (None, named):
            raise ValueError(f"the step names adapter {named} as merged, the last switch {self._may_name}")

    def switch(self, command: commands.SetMerged, report: Callable[[events.SwitchDone], None]) -> None:
        """Carry out SetMerged after all work issued so far. ``report`` is called once, from another thread.
        Raises RuntimeError where the weights are lost."""
        self.settle()
        elapsed, pristine, failed = self._device.measure(), self._pristine, ""
        if command.adapter != BASE and command.adapter not in self._tables:
            failed = f"adapter {command.adapter} is not resident"
        failed = self._agreed(failed)
        rows = self._rows(BASE if failed else command.adapter)
        if isinstance(pristine, HostPristine):
            args = pristine, command, rows, failed, self._device.issued(), elapsed, report
            self._beside = command.adapter, self._thread.submit(self._switch_beside, *args)
            return
        write = functools.partial(self._write, rows, pristine)
        failed = self._tried(command, failed, write, lambda: self._write(self._rows(BASE), pristine))
        self._note(command.adapter, failed)
        self._thread.submit(self._answer, command, elapsed(), failed, report)
        self.settle()

    def close(self) -> None:
        """Stop a switch under way, answer it, and free the copy. Afterwards the weights are undefined.
        Idempotent."""
        self._closing = True
        if isinstance(self._pristine, HostPristine):
            self._pristine.close()
        self._thread.shutdown(wait=True)
        self._pristine.close()

    def _tried(
        self, command: commands.SetMerged, failed: str, write: Callable[[], None], restore: Callable[[], None]
    ) -> str:
        """Call ``write``; where it fails, here or on another rank, call ``restore``. Return the first error,
        ``failed`` from before the call included, or an empty text."""
        wrong = ""
        try:
            write()
        except Exception as error:
            if not self._closing:
                _log.error("adapter %d could not be merged", command.adapter, exc_info=error)
            wrong = one_line(error)
        wrong = self._agreed(wrong)
        if wrong:
            try:
                restore()
            except Exception as lost:
                self._broken = one_line(lost)
        return failed or wrong

    def _agreed(self, failed: str) -> str:
        """Return this rank's error, else that another rank failed, else an empty text."""
        return failed if self._ranked is None else self._ranked.agree(failed)

    def _note(self, adapter: AdapterId, failed: str) -> None:
        self._merged, self._may_name = (BASE, None) if failed else (adapter, adapter)

    # ------------------------------------------------------------ beside the step loop

    def _switch_beside(
        self,
        pristine: HostPristine,
        command: commands.SetMerged,
        rows: MergeRows,
        failed: str,
        issued: object,
        elapsed: Elapsed,
        report: Callable[[events.SwitchDone], None],
    ) -> str:
        """Carry out the whole switch on a thread of its own, while no step runs. Return the first error, with
        ``failed`` from before it included, or an empty text."""

        def write() -> None:
            self._bring_back(pristine, issued)
            self._write(rows, None)
            elapsed()()

        failed = self._tried(
            command, failed, write, lambda: self._bring_back(pristine, self._device.issued())
        )
        self._answer(command, elapsed(), failed, report)
        return failed

    def _bring_back(self, pristine: HostPristine, issued: object) -> None:
        """Restore every row that may differ from the pristine one, from the host's copy."""
        rows = []
        for number, linear in enumerate(self._linears):
            group = linear.group
            for place, projection in enumerate(group.projections):
                if self._differs[self._of_weights.projections.index(projection)]:
                    rows.append(WeightRows(number, group.offsets[place], group.offsets[place + 1]))
        pristine.restore(rows, issued, self._copier)
        self._differs = np.zeros_like(self._differs)

    def _answer(
        self,
        command: commands.SetMerged,
        wait: Callable[[], float],
        failed: str,
        report: Callable[[events.SwitchDone], None],
    ) -> None:
        seconds = 0.0
        try:
            seconds = wait()
        except Exception as error:
            # The device reports a failure late and does not name the operation, so the weights count as lost.
            failed = self._broken = one_line(error)
        report(events.SwitchDone(command.switch, not failed, seconds, failed))

    # ------------------------------------------------------------ the weights

    def _rows(self, adapter: AdapterId) -> MergeRows:
        """Return the plan to merge the adapter, which is resident, and the pool with its cells. For BASE the
        plan wants no projection."""
        count = len(self._geometry.projections)
        records = np.zeros((count, 3), np.int64)
        scales = np.zeros((count, self._geometry.page.layers), np.float32)
        if adapter != BASE:
            (records,), (scales,) = self._tables.entries(self._tables.rows([adapter]))
        self._tables.send()
        plan = MergePlan(records[:, 2] > 0, records, scales, self._tables.cells, self._geometry)
        pool = self._arena.pool
        return MergeRows(plan, pool) if self._ranked is None else self._ranked.rows(plan, pool)

    def _write(self, rows: MergeRows, pristine: DevicePristine | None) -> None:
        """Issue a pass that merges the plan's adapter and restores other projections that differ. With
        ``pristine`` None, the weights are pristine already and are read in place."""
        plan, pool = rows
        adapted, self._differs = plan.wanted, plan.wanted | self._differs
        plan = dataclasses.replace(plan, wanted=self._differs)
        with torch.inference_mode():
            for group in self._of_weights.groups:
                numbered = [(n, linear) for n, linear in enumerate(self._linears) if linear.group == group]
                if not plan.parts(group, 0):
                    continue
                with contextlib.ExitStack() as stack:
                    layers = []
                    for number, linear in numbered:
                        data = stack.enter_context(linear.weight.rewriting())
                        source = data if pristine is None else pristine[number]
                        layers.append(MergedLayer(linear.layer, data, source))
                    self._ops.merge_linears(layers, pool, group, plan)
        self._differs = adapted


ELSEWHERE = "it failed on another rank"


class MergeRows(NamedTuple):
    """A plan, and the pool that holds its cells."""

    plan: MergePlan
    pool: torch.Tensor


class RankedMerging:
    """The exchanges by which several ranks merge an adapter. ``geometry``: that of adapters divided among
    ranks as the linears are, in pages of the pool's shape. Used by one thread at a time; every rank makes the
    same calls in the same order."""

    def __init__(self, peers: Peers, geometry: AdapterGeometry, linears: Sequence[AdaptedLinear]) -> None:
        self.geometry = geometry
        self._peers = peers
        self._dtype = linears[0].weight.data.dtype
        ranked = [linear for linear in linears if isinstance(linear, RankedLinear)]
        sharded = {linear.share.adapted: linear.share for linear in ranked if linear.is_sharded}
        self._sharded = tuple(sharded.values())

    def agree(self, failed: str) -> str:
        """Exchange errors with all ranks. Return this rank's error, else ELSEWHERE where another rank failed,
        else an empty text."""
        flag = torch.tensor([bool(failed)])
        found = self._peers.gather(flag, "merging")
        return failed or (ELSEWHERE if any(map(bool, found)) else "")

    def rows(self, plan: MergePlan, pool: torch.Tensor) -> MergeRows:
        """Return the plan's adapter in the form that this rank's part of the weights needs. The given plan's
        cells are in ``pool``. Sharded linears take rows that are gathered from all ranks into a new pool."""
        if not self._sharded or not plan.records[:, 2].any():
            return MergeRows(dataclasses.replace(plan, geometry=self.geometry), pool)
        layout = layout_for(plan.records[:, 2].tolist(), plan.scales, self.geometry)
        target = pool.new_zeros((layout.num_pages, *pool.shape[1:]))
        offsets = cell_offsets(layout, self.geometry, range(layout.num_pages))
        cells = torch.from_numpy(offsets).to(plan.cells.device)
        whole = MergePlan(plan.wanted, layout.records, plan.scales, cells, self.geometry)
        for share in self._sharded:
            self._gather(share, _Rows(plan, pool, self._dtype), _Rows(whole, target, self._dtype))
        return MergeRows(whole, target)

    def _gather(self, share: LinearShare, own: _Rows, whole: _Rows) -> None:
        """Gather one group of projections from all ranks into ``whole``. This concerns the side (A or B) that
        is divided among ranks differently from the linear; the other side is copied from ``own``."""
        pairs = list(zip(share.adapted.projections, share.group.projections, strict=True))
        pairs = [(part, linear) for part, linear in pairs if own.rank(part)]
        if not pairs:
            return
        side = 0 if share.kind == "column" else 1
        length = share.group.in_features if side == 0 else share.group.projections[0].out_features
        widths = [len(RankPlace(rank, self._peers.count).cut(length)) for rank in range(self._peers.count)]
        mine = torch.cat([own.read(part, side) for part, _ in pairs])
        mine = functional.pad(mine, (0, max(widths) - mine.shape[2]))
        parts = self._peers.gather(mine, "merging")
        rows = torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], dim=2)
        ranks = [own.rank(part) for part, _ in pairs]
        for (part, linear), gathered in zip(pairs, torch.split(rows, ranks), strict=True):
            whole.write(linear, side, gathered)
            whole.write(linear, 1 - side, own.read(part, 1 - side))


class _Rows:
    """Access to the rows of a plan's adapter in all layers, ``[rank, L, length]`` for side 0 (A) or side 1
    (B)."""

    def __init__(self, plan: MergePlan, pool: torch.Tensor, dtype: torch.dtype) -> None:
        self._plan = plan
        self._geometry = geometry = plan.geometry
        num_cells, size = geometry.cells_per_page, geometry.cell_elements
        slabs = of_adapters(pool, dtype).view(len(pool), geometry.page.layers, geometry.slab_elements)
        self._cells = torch.unflatten(slabs[:, :, : num_cells * size], 2, (num_cells, size))

    def rank(self, projection: Projection) -> int:
        return int(self._plan.records[self._place(projection), 2])

    def read(self, projection: Projection, side: int) -> torch.Tensor:
        rank, length = self.rank(projection), _length(projection, side)
        cells = torch.unflatten(self._cells[self._where(projection, side)], 0, (rank, -1))
        return cells.transpose(1, 2).flatten(2)[:, :, :length]

    def write(self, projection: Projection, side: int, rows: torch.Tensor) -> None:
        num_cells, size = self._geometry.cells(rows.shape[2]), self._geometry.cell_elements
        padded = functional.pad(rows, (0, num_cells * size - rows.shape[2]))
        cells = torch.unflatten(padded, 2, (num_cells, size)).transpose(1, 2).flatten(0, 1)
        self._cells[self._where(projection, side)] = cells

    def _place(self, projection: Projection) -> int:
        return self._geometry.projections.index(projection)

    def _where(self, projection: Projection, side: int) -> tuple[torch.Tensor, slice, torch.Tensor]:
        """Return the index of the rows' cells in ``_cells``, in order: pages, all layers, places in the
        page."""
        first = int(self._plan.records[self._place(projection), side])
        count = self.rank(projection) * self._geometry.cells(_length(projection, side))
        offsets = self._plan.cells[first : first + count]
        within = offsets % self._geometry.page_elements
        return offsets // self._geometry.page_elements, slice(None), within // self._geometry.cell_elements


def _length(projection: Projection, side: int) -> int:
    return projection.in_features if side == 0 else projection.out_features


_ALIGNMENT_BYTES = 64
_CHUNKS_AHEAD = 4
"""The most chunks requested beyond the one awaited. A later copy of pages waits for no more chunks than
these."""


class WeightRows(NamedTuple):
    """Rows ``[begin, end)`` of the weight with the number ``weight``."""

    weight: int
    begin: int
    end: int


def pristine_bytes(weights: Iterable[Weight]) -> int:
    """Return the bytes of a copy of the weights. Raises ConfigError where a weight is stored in a form into
    which no adapter can be merged."""
    total = 0
    for weight in weights:
        matrix = weight.plain()
        if matrix is None:
            raise ConfigError(
                "adapters cannot be merged into weights that are no plain matrices: serve it unmerged"
            )
        total += matrix.nbytes
    return total


class DevicePristine:
    """A copy of the pristine weights in the device's memory, beside the pool."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        """Copy the weights. Raises ConfigError where the device has no room."""
        try:
            self._copies = [weight.data.clone() for weight in weights]
        except (RuntimeError, MemoryError) as error:
            size = in_mib(pristine_bytes(weights))
            raise ConfigError(
                f"no memory for a copy of the base's weights of {size} on the device"
            ) from error

    def __getitem__(self, weight: int) -> torch.Tensor:
        """Return the weight as it was loaded, ``[out, in]``."""
        return self._copies[weight]

    def close(self) -> None:
        """Free the copy."""
        self._copies = []


class HostPristine:
    """A copy of the pristine weights in host memory, pinned where that makes copies faster, and a thread that
    restores weights from it."""

    def __init__(self, weights: Sequence[Weight], device: Device, chunk_bytes: int = TRANSFER_BYTES) -> None:
        """Take the memory, pin it and fill it. Raises ConfigError where the system refuses the memory or the
        pinning. ``chunk_bytes``: the largest transfer of a restore."""
        self._weights = list(weights)
        self._device = device
        self._chunk_bytes = chunk_bytes
        sizes = [-(-weight.data.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for weight in weights]
        memory = shared_memory(sum(sizes), "a copy of the base's weights")
        try:
            device.pin(memory)
        except RuntimeError as error:
            why = first_line(error)
            raise ConfigError(
                f"the system refuses to pin {in_mib(len(memory))} for a copy of the base's weights: {why}"
            ) from error
        self._memory: torch.Tensor | None = memory
        parts = torch.split(memory[: sum(sizes)], sizes)
        self._copies = [part[: weight.data.nbytes] for weight, part in zip(weights, parts)]
        for weight, copy in zip(weights, self._copies):
            copy.copy_(_as_bytes(weight.data))
        self._closing = threading.Event()
        self._waiting = device.copy_lane()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="manylora-restore")

    def restore(self, rows: Sequence[WeightRows], issued: object, copier: Copier) -> None:
        """Copy the pristine rows over the weights' own, after the work that ``issued`` marks. The copies keep
        the order of ``rows``, and take turns with copies of pages. Returns when all have landed. Raises the
        error of a copy, or RuntimeError after ``close`` or after the copier's ``close``."""
        self._thread.submit(self._restore, rows, issued, copier).result()

    def _restore(self, rows: Sequence[WeightRows], issued: object, copier: Copier) -> None:
        moving: collections.deque[Future[Callable[[], float]]] = collections.deque()
        # This lane waits, not the one shared with copies of pages, since those must wait for no step.
        self._waiting.begin(issued)
        self._waiting.end()()
        try:
            for number, begin, end in rows:
                weight, copy = self._weights[number], self._copies[number]
                with weight.rewriting() as data:
                    target, width = _as_bytes(data), data.nbytes // len(data)
                    for at in range(begin * width, end * width, self._chunk_bytes):
                        part = slice(at, min(at + self._chunk_bytes, end * width))
                        if self._closing.is_set():
                            raise RuntimeError("the engine is closing")
                        moving.append(copier.move(target[part], copy[part], issued))
                        if len(moving) > _CHUNKS_AHEAD:
                            moving.popleft().result()()
        finally:
            # Also after a failure: a late chunk must not overwrite later work.
            while moving:
                moving.popleft().result()()

    def close(self) -> None:
        """Stop a restore under way, end the thread, and free the memory. Idempotent."""
        self._closing.set()
        self._thread.shutdown(wait=True)
        memory, self._memory = self._memory, None
        self._copies = []
        if memory is not None:
            self._device.release(memory, "the copy of the base's weights")


Pristine = DevicePristine | HostPristine


def _as_bytes(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.view(-1).view(torch.uint8)
