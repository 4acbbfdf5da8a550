"""What cold rows read and is on its way to the device: by which copy it comes, and when that is expected to land.

Owns these expectations, which follow from what was commanded and answered. Commands nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from manylora.policy.cold_forecast import Landing
from manylora.policy.residency import Residency
from manylora.policy.sequences import Sequence
from manylora.policy.tree import LOADING, RESIDENT, Node, path_to
from manylora.protocol import SwapPages
from manylora.types import AdapterId, CopyId


@dataclasses.dataclass(slots=True)
class ComingCopy:
    """When a copy that was commanded at ``since_s`` is expected to land, and what it took, once that is known.
    ``adapter``: which one it brings."""

    landing: Landing
    adapter: AdapterId | None
    num_pages: int
    since_s: float
    took_s: float | None = None


class ComingCopies:
    """By number, until they are forgotten."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._copies: dict[CopyId, ComingCopy] = {}
        self._lane_free_s = 0.0  # when the last one that was answered had landed

    def __getitem__(self, copy: CopyId) -> ComingCopy:
        return self._copies[copy]

    def get(self, copy: CopyId) -> ComingCopy | None:
        """None where it is forgotten."""
        return self._copies.get(copy)

    def forget(self, copy: CopyId) -> None:
        """No step names it any more."""
        del self._copies[copy]

    # ------------------------------------------------------------ what is told

    def started(self, copies: Iterable[SwapPages], now: float) -> None:
        """These were commanded, after those before."""
        for command in copies:
            if command.to_device:
                landing = Landing(now, now)
                self._copies[command.copy] = ComingCopy(landing, command.adapter, len(command.pairs), now)
        self._expect()

    def _expect(self) -> None:
        """When those that are on their way land, one after another, by what is known now."""
        free_s = self._lane_free_s
        for copy in self._copies.values():
            if copy.took_s is None:
                begin_s = max(copy.since_s, free_s)
                free_s = begin_s + copy.num_pages * self._residency.rates.page_in_s
                copy.landing = dataclasses.replace(copy.landing, begin_s=begin_s, end_s=free_s)

    def ended(self, number: CopyId, seconds: float) -> bool:
        """It has been answered; False where it is forgotten."""
        copy = self._copies.get(number)
        if copy is None:
            return False
        copy.took_s = seconds
        self._lane_free_s = max(self._lane_free_s, copy.landing.begin_s + seconds)
        self._expect()
        return True

    # ------------------------------------------------------------ what comes by which

    def of_sequence(self, sequence: Sequence) -> list[CopyId] | None:
        """Those that bring what the sequence waits for; None where something does not come by a copy that is on
        its way."""
        assert sequence.node is not None
        found: dict[CopyId, None] = {}
        for node in (self._residency.tree.node(sequence.adapter), *path_to(sequence.node)):
            if node.residence is RESIDENT or node.has_landed:
                continue
            copy = self.of_node(node)
            if copy is None:
                return None
            found[copy] = None
        return list(found)

    def of_node(self, node: Node) -> CopyId | None:
        """The number of the copy that is on its way with a loading node."""
        if node.residence is not LOADING:
            return None
        move = self._residency.transfers.current(node)
        return move.copy if move is not None and move.to_device else None
