"""What is merged into the base's weights, and the way from one state to the next.

Owns the order in which weights are rewritten, and that none serves which is half done: a switch ends with the
adapter merged, or with the weights as they were loaded, or the device counts as broken. With a copy of the
pristine weights on the device a switch is one pass, issued like a step. With one on the host it goes on beside
the step loop: first what differs comes back, then the adapter is merged over it. Does not choose adapters, and
builds no batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from manylora.devices.device import Device, Elapsed
from manylora.executor.ranked_merging import MergeRows, RankedMerging
from manylora.executor.tables import AdapterTables
from manylora.kernels.ops import MergedLayer, MergePlan
from manylora.kernels.shapes import AdapterGeometry
from manylora.memory.arena import Arena
from manylora.memory.copier import Copier, one_line
from manylora.memory.pristine import DevicePristine, HostPristine, WeightRows
from manylora.models.decoder import Decoder
from manylora.protocol import SetMerged, SwitchDone
from manylora.types import BASE, AdapterId

_log = logging.getLogger(__name__)


class MergedWeights:
    """Merges adapters into the weights of a decoder's linears, in place. Used by the step loop's thread."""

    def __init__(
        self,
        decoder: Decoder,
        pristine: DevicePristine | HostPristine,
        arena: Arena,
        tables: AdapterTables,
        geometry: AdapterGeometry,
        device: Device,
        copier: Copier,
        ranked: RankedMerging | None = None,
    ) -> None:
        """``pristine``: of the weights of ``decoder.linears``, in their order. ``ranked``: where the decoder is
        one rank's share."""
        self._linears = decoder.linears
        self._ops = decoder.ops
        self._pristine = pristine
        self._arena = arena
        self._tables = tables
        self._geometry = geometry
        self._ranked = ranked
        self._of_weights = geometry if ranked is None else ranked.geometry
        self._device = device
        self._copier = copier
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="manylora-merge")
        self._merged: AdapterId = BASE
        self._may_name: AdapterId | None = BASE  # None: any
        self._differs = np.zeros(len(geometry.projections), bool)  # projections that may not be pristine
        self._beside: tuple[AdapterId, Future[str]] | None = None
        self._broken = ""
        self._closing = False

    # ------------------------------------------------------------ the step loop's side

    def settle(self) -> AdapterId:
        """What is merged, once no switch goes on beside the step loop: waits for it. Raises RuntimeError where the
        weights are lost."""
        if self._beside is not None:
            adapter, switching = self._beside
            self._beside = None
            self._note(adapter, switching.result())
        if self._broken:
            raise RuntimeError(f"the base's weights are lost: {self._broken}")
        return self._merged

    def check(self, named: AdapterId) -> None:
        """Raises ValueError where a step names another adapter than the last switch did. After a switch that
        failed steps may name any."""
        if self._may_name not in (None, named):
            raise ValueError(f"the step names adapter {named} as merged, the last switch {self._may_name}")

    def switch(self, command: SetMerged, tell: Callable[[SwitchDone], None]) -> None:
        """Carry out SetMerged after all that was issued. ``tell`` is called once, from another thread. Raises
        RuntimeError where the weights are lost."""
        self.settle()
        elapsed, pristine, failed = self._device.measure(), self._pristine, ""
        if command.adapter != BASE and command.adapter not in self._tables:
            failed = f"adapter {command.adapter} is not resident"
        failed = self._agreed(failed)
        rows = self._rows(BASE if failed else command.adapter)
        if isinstance(pristine, HostPristine):
            args = pristine, command, rows, failed, self._device.issued(), elapsed, tell
            self._beside = command.adapter, self._thread.submit(self._switch_beside, *args)
            return
        failed = self._tried(
            command,
            failed,
            lambda: self._write(rows, pristine),
            lambda: self._write(self._rows(BASE), pristine),
        )
        self._note(command.adapter, failed)
        self._thread.submit(self._answer, command, elapsed(), failed, tell)
        self.settle()

    def close(self) -> None:
        """Break off what goes on, answer it, free the copy. The weights mean nothing then. Idempotent."""
        self._closing = True
        if isinstance(self._pristine, HostPristine):
            self._pristine.close()
        self._thread.shutdown(wait=True)
        self._pristine.close()

    def _tried(
        self, command: SetMerged, failed: str, write: Callable[[], None], restore: Callable[[], None]
    ) -> str:
        """Write, and restore where that fails, here or on another rank. What went wrong, before it or in it."""
        wrong = ""
        try:
            write()
        except Exception as error:
            wrong = self._failed(command, error)
            self._restore(restore)
        found = self._agreed(wrong)
        if found and not wrong:
            self._restore(restore)
        return failed or found

    def _restore(self, restore: Callable[[], None]) -> None:
        try:
            restore()
        except Exception as lost:
            self._broken = one_line(lost)

    def _agreed(self, failed: str) -> str:
        """What went wrong here, or on another rank."""
        return failed if self._ranked is None else self._ranked.agree(failed)

    def _note(self, adapter: AdapterId, failed: str) -> None:
        self._merged, self._may_name = (BASE, None) if failed else (adapter, adapter)

    # ------------------------------------------------------------ beside it

    def _switch_beside(
        self,
        pristine: HostPristine,
        command: SetMerged,
        rows: MergeRows,
        failed: str,
        issued: object,
        elapsed: Elapsed,
        tell: Callable[[SwitchDone], None],
    ) -> str:
        """The whole switch, on a thread of its own: no step runs meanwhile. What went wrong, before it or in
        it."""

        def write() -> None:
            self._bring_back(pristine, issued)
            self._write(rows, None)
            elapsed()()

        failed = self._tried(
            command, failed, write, lambda: self._bring_back(pristine, self._device.issued())
        )
        self._answer(command, elapsed(), failed, tell)
        return failed

    def _bring_back(self, pristine: HostPristine, issued: object) -> None:
        """Every row that may differ from the pristine one, from the host's copy."""
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
        command: SetMerged,
        wait: Callable[[], float],
        failed: str,
        tell: Callable[[SwitchDone], None],
    ) -> None:
        seconds = 0.0
        try:
            seconds = wait()
        except Exception as error:
            # The device says late that it failed, and not where.
            failed = self._broken = one_line(error)
        tell(SwitchDone(command.switch, not failed, seconds, failed))

    # ------------------------------------------------------------ the weights

    def _rows(self, adapter: AdapterId) -> MergeRows:
        """Of the adapter, which is resident; the base's are none."""
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
        """Issue a pass of the plan, which restores what else differs. None: the weights are pristine as they
        are."""
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

    def _failed(self, command: SetMerged, error: Exception) -> str:
        if not self._closing:
            _log.error("adapter %d could not be merged", command.adapter, exc_info=error)
        return one_line(error)
