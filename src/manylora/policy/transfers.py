"""Copies between the tiers and reads of adapters, from the decision to the end.

A node may change its state while a copy of it is in flight. Its part of the copy then owns the pages that the
copy still touches, and releases them at its end. Does not know why anything moves.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator

from manylora.policy.tree import Node
from manylora.protocol import commands
from manylora.types import AdapterId, CopyId, PageId

MOST_PAGES_A_COPY = 64
"""The most pages of one copy, so that the first can be used while the others are on their way."""


@dataclasses.dataclass(eq=False, slots=True)
class Move:
    """One node's part of a copy. It owns the pages that its node has given up meanwhile, until the copy has
    ended."""

    node: Node
    to_device: bool
    pages: tuple[PageId, ...]
    host_pages: tuple[PageId, ...]
    owns_pages: bool = False
    owns_host_pages: bool = False
    copy: CopyId | None = None
    """The number of its copy, once that has started."""


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """An adapter's read in flight; ``to_device``: directly there, since the host has no room."""

    node: Node
    to_device: bool


class Transfers:
    """The parts of copies by node, copies by number, reads by adapter."""

    def __init__(self, num_groups: int = 0) -> None:
        """``num_groups``: groups of layers in which copies to the device land, if steps may await copies; else
        0."""
        self._num_groups = num_groups
        self.pages_loading_now = 0
        """Device pages that copies, queued or in flight, write."""
        self._queued: list[Move] = []
        self._copies: dict[CopyId, list[Move]] = {}
        self._num_copies = 0
        self._current: dict[Node, Move] = {}
        self._num_moves: collections.Counter[AdapterId] = collections.Counter()
        self._reads: dict[AdapterId, Read] = {}

    # ------------------------------------------------------------ copies

    def queue(self, node: Node, to_device: bool) -> None:
        """Queue a copy of the node's pages for the next ``flush``."""
        move = Move(node, to_device, node.pages, node.host_pages)
        self._current[node] = move
        self._queued.append(move)
        self._num_moves[node.adapter] += 1
        if to_device:
            self.pages_loading_now += len(node.pages)

    def current(self, node: Node) -> Move | None:
        """Return the node's part of a copy in flight that the node has not disowned, if any."""
        return self._current.get(node)

    def disown(self, node: Node) -> Move | None:
        """Detach the node from its part, and return that; the caller sets which pages it owns."""
        return self._current.pop(node, None)

    def flush(self) -> list[commands.SwapPages]:
        """Start the queued copies: to the host first; adapters one by one, KV in batches."""
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

    def _start(self, moves: list[Move], adapter: AdapterId | None) -> commands.SwapPages:
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
        return commands.SwapPages(self._num_copies, to_device, pairs, adapter, groups)

    def copy_ended(self, copy: CopyId) -> list[Move]:
        """Return the copy's parts in order, none if it is unknown; the caller ends each by ``end``."""
        return self._copies.pop(copy, [])

    def end(self, move: Move) -> bool:
        """End a part; return whether its node has not disowned it, which may happen as an earlier part ends."""
        node = move.node
        self._num_moves[node.adapter] -= 1
        if move.to_device:
            self.pages_loading_now -= len(move.pages)
        if self._current.get(node) is not move:
            return False
        del self._current[node]
        return True

    def moves(self) -> Iterator[Move]:
        """Yield every part that is queued or in flight."""
        yield from self._queued
        for moves in self._copies.values():
            yield from moves

    # ------------------------------------------------------------ reads

    def read(self, node: Node, to_device: bool) -> commands.ReadAdapter:
        """Return the command to read an adapter into its node's pages in one tier."""
        self._reads[node.adapter] = Read(node, to_device)
        if to_device:
            return commands.ReadAdapter(node.adapter, node.pages, "device")
        return commands.ReadAdapter(node.adapter, node.host_pages, "host")

    def read_ended(self, adapter: AdapterId) -> Read:
        """End the read of an adapter."""
        return self._reads.pop(adapter)

    @property
    def is_lane_busy(self) -> bool:
        """Whether a copy to the device, or a read, is in flight or queued."""
        return bool(self.pages_loading_now or self._reads)

    # ------------------------------------------------------------ adapters' ends

    def is_copied(self, adapter: AdapterId) -> bool:
        """Return whether a copy of the adapter, or of KV under it, has not ended."""
        return self._num_moves[adapter] > 0

    def is_read(self, adapter: AdapterId) -> bool:
        """Return whether a read of the adapter has not ended."""
        return adapter in self._reads

    def forget(self, adapter: AdapterId) -> None:
        """Drop the account of an adapter that is served no more."""
        del self._num_moves[adapter]
