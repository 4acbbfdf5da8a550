"""Captured steps of one of several ranks: all ranks capture the same ones, or stop capturing together.

A captured step is padded, so its exchanges are of other sizes than an eager one's: a rank that replayed where
another ran eagerly would exchange with it what does not fit. So all is captured before serving, in one order, and
a bucket is kept where every rank has captured it; later a step's bucket follows from the step alone. Between two
buckets ranks ask each other; in a bucket they cannot, since they wait in each other's exchanges there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from manylora.devices.device import Tensors
from manylora.devices.peers import Exchange, Peers
from manylora.executor.graphs import Bucket, Captured, Prepared, Progress, StepGraphs
from manylora.types import first_line

ELSEWHERE = "another rank could not capture more"


class CapturingFailed(Exception):
    """A rank has failed where the others wait for it."""


class RankedGraphs(StepGraphs):
    """StepGraphs of a rank. The table of cells must stay where it is (``AdapterTables.fix``)."""

    def __init__(self, *args: Any, peers: Peers) -> None:
        """As StepGraphs."""
        super().__init__(*args)
        self._peers = peers

    def capture_all(self, progress: Progress | None = None) -> None:
        """As StepGraphs; nothing is captured afterwards. Raises CapturingFailed."""
        super().capture_all(progress)
        self.is_full = True

    def _capture(self, bucket: Bucket) -> Captured:
        """As StepGraphs; RuntimeError on all ranks alike."""
        prepared: Prepared | None = None
        why = ELSEWHERE
        try:
            prepared = self._with_room(bucket)
        except RuntimeError as error:
            why = first_line(error)
        if not self._all(prepared is not None) or prepared is None:
            raise RuntimeError(why)

        exchanges: list[Exchange] = []
        num_runs = 0

        def run() -> Tensors:
            nonlocal num_runs
            with self._peers.listed(exchanges):
                tensors = prepared.run()
            num_runs += 1
            return tensors

        replay: Callable[[], Tensors] | None = None
        try:
            replay = self._device.capture(run)
        except RuntimeError as error:
            why = first_line(error)
            if not num_runs:
                raise CapturingFailed(
                    f"a step could not be run to be captured, and --cuda-graphs auto does without: {why}"
                ) from error
        if not self._all(replay is not None) or replay is None:
            raise RuntimeError(why)
        made = replay

        def noted() -> Tensors:
            try:
                return made()
            finally:
                self._peers.note_all(exchanges)

        return self._replaying(prepared, noted)

    def _all(self, can: bool) -> bool:
        """Whether this holds on every rank."""
        found = self._peers.gather(torch.tensor([int(can)], dtype=torch.int64), "start")
        return all(bool(one.item()) for one in found)
