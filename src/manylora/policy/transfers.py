"""What is on its way: copies between the tiers and reads of adapters, from the decision to the end.

A copy's part may outlive what its node wanted: when the node goes another way meanwhile, the part owns the pages
that the copy still touches, and gives them up when it ends. Does not know why anything moves.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator

from manylora.policy.tree import Node
from manylora.protocol import ReadAdapter, SwapPages
from manylora.types import AdapterId, CopyId, PageId

MOST_PAGES_A_COPY = 64
"""A longer queue is cut, so that what arrived first can be used while the rest is on its way."""


@dataclasses.dataclass(eq=False, slots=True)
class Move:
    """One node's part of a copy. It owns what its node has let go of meanwhile, until the copy has ended."""

    node: Node
    to_device: bool
    pages: tuple[PageId, ...]
    host_pages: tuple[PageId, ...]
    owns_pages: bool = False
    owns_host_pages: bool = False
    copy: CopyId | None = None
    """The copy that it is a part of, once that has started."""


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """An adapter's read in flight; ``to_device``: it goes there at once, since the host has no room."""

    node: Node
    to_device: bool


class Transfers:
    """Parts of copies by node, copies by number, reads by adapter."""

    def __init__(self, num_groups: int = 0) -> None:
        """``num_groups``: of layers, in which copies to the device land that steps may await; 0: none does."""
        self._num_groups = num_groups
        self.pages_coming = 0
        """Device pages that copies in flight, or queued, write."""
        self._queued: list[Move] = []
        self._copies: dict[CopyId, list[Move]] = {}
        self._num_copies = 0
        self._current: dict[Node, Move] = {}
        self._num_moves: collections.Counter[AdapterId] = collections.Counter()
        self._reads: dict[AdapterId, Read] = {}

    # ------------------------------------------------------------ copies

    def queue(self, node: Node, to_device: bool) -> None:
        """The node's pages are to be copied by the next ``flush``."""
        move = Move(node, to_device, node.pages, node.host_pages)
        self._current[node] = move
        self._queued.append(move)
        self._num_moves[node.adapter] += 1
        if to_device:
            self.pages_coming += len(node.pages)

    def current(self, node: Node) -> Move | None:
        """The node's newest part of a copy that has not ended, if the node still goes its way."""
        return self._current.get(node)

    def disown(self, node: Node) -> Move | None:
        """The node goes another way; returns its part, to be told what it owns from now on."""
        return self._current.pop(node, None)

    def flush(self) -> list[SwapPages]:
        """Start what is queued: what leaves first; adapters one by one, KV in batches."""
        if not self._queued:
            return []
        queued, self._queued = self._queued, []
        started = []
        for to_device in (False, True):
            batch: list[Move] = []
            for move in queued:
                if move.to_device is not to_device:
                    continue
                if move.node.is_adapter:
                    started.append(self._start([move], move.node.adapter))
                else:
                    batch.append(move)
            for first in range(0, len(batch), MOST_PAGES_A_COPY):
                started.append(self._start(batch[first : first + MOST_PAGES_A_COPY], None))
        return started

    def _start(self, moves: list[Move], adapter: AdapterId | None) -> SwapPages:
        self._num_copies += 1
        self._copies[self._num_copies] = moves
        to_device = moves[0].to_device
        pairs = tuple(
            (host, page) if to_device else (page, host)
            for move in moves
            for page, host in zip(move.pages, move.host_pages, strict=True)
        )
        groups = self._num_groups if to_device else 0
        for move in moves:
            move.copy = self._num_copies
        return SwapPages(self._num_copies, to_device, pairs, adapter, groups)

    def copy_ended(self, copy: CopyId) -> list[Move]:
        """The copy's parts, in order, none of a copy that is not known; each is to be ended by ``end``."""
        return self._copies.pop(copy, [])

    def end(self, move: Move) -> bool:
        """The part is over; whether its node still goes its way, which the end of an earlier part may have
        changed."""
        node = move.node
        self._num_moves[node.adapter] -= 1
        if move.to_device:
            self.pages_coming -= len(move.pages)
        if self._current.get(node) is not move:
            return False
        del self._current[node]
        return True

    def moves(self) -> Iterator[Move]:
        """Every part that is queued or in flight; for gauges and invariant checks."""
        yield from self._queued
        for moves in self._copies.values():
            yield from moves

    # ------------------------------------------------------------ reads

    def read(self, node: Node, to_device: bool) -> ReadAdapter:
        """Start to read an adapter into the pages that its node has in that tier."""
        self._reads[node.adapter] = Read(node, to_device)
        if to_device:
            return ReadAdapter(node.adapter, node.pages, "device")
        return ReadAdapter(node.adapter, node.host_pages, "host")

    def read_ended(self, adapter: AdapterId) -> Read:
        """The adapter's read is over."""
        return self._reads.pop(adapter)

    @property
    def is_lane_busy(self) -> bool:
        """Whether anything is on its way to the device."""
        return bool(self.pages_coming or self._reads)

    # ------------------------------------------------------------ adapters' ends

    def is_copied(self, adapter: AdapterId) -> bool:
        """Whether a part of a copy has not ended, of the adapter or of KV under it."""
        return self._num_moves[adapter] > 0

    def is_read(self, adapter: AdapterId) -> bool:
        """Whether a read of the adapter has not ended."""
        return adapter in self._reads

    def forget(self, adapter: AdapterId) -> None:
        """The adapter is served no more, and nothing concerns it."""
        del self._num_moves[adapter]
