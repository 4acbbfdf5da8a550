"""Copies between the tiers and reads of adapters, from the decision to the end.

A node may change its state while a copy of it is in flight. Its part of the copy then owns the pages that the
copy still touches, until the copy has ended. Does not know why anything moves.
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


class Transfers:
    """The parts of copies by node, copies by number, reads by adapter."""

    def __init__(self, num_groups: int = 0) -> None:
        """``num_groups``: groups of layers in which copies to the device land, if steps may await copies; else
        0."""
        self._num_groups = num_groups
        self.pages_loading_now = 0
        """Device pages that copies, queued or in flight, write."""
        self.copies: dict[CopyId, list[Move]] = {}
        """The parts of each copy in flight. At its end the caller takes them, and ends each by ``end``."""
        self.current: dict[Node, Move] = {}
        """The part of each node in a copy, queued or in flight, unless the node has disowned it. Whoever takes a
        part out here sets which pages it owns from then on."""
        self.num_moves = collections.Counter[AdapterId]()
        """The parts that have not ended, by adapter: of itself, or of KV under it."""
        self.reads: dict[AdapterId, tuple[Node, bool]] = {}
        """The reads in flight, each with whether it goes to the device, since the host has no room."""
        self._queued: list[Move] = []
        self._num_copies = 0

    # ------------------------------------------------------------ copies

    def queue(self, node: Node, to_device: bool) -> None:
        """Queue a copy of the node's pages for the next ``flush``."""
        move = Move(node, to_device, node.pages, node.host_pages)
        self.current[node] = move
        self._queued.append(move)
        self.num_moves[node.adapter] += 1
        if to_device:
            self.pages_loading_now += len(node.pages)

    def flush(self) -> list[commands.SwapPages]:
        """Start the queued copies: to the host first; adapters one by one, KV in batches."""
        if not self._queued:
            return []
        queued, self._queued = self._queued, []
        started = []
        for to_device in (False, True):
            moves = [move for move in queued if move.to_device is to_device]
            started += [self._start([move], move.node.adapter) for move in moves if move.node.is_adapter]
            kv = [move for move in moves if not move.node.is_adapter]
            for first in range(0, len(kv), MOST_PAGES_A_COPY):
                started.append(self._start(kv[first : first + MOST_PAGES_A_COPY], None))
        return started

    def _start(self, moves: list[Move], adapter: AdapterId | None) -> commands.SwapPages:
        self._num_copies += 1
        self.copies[self._num_copies] = moves
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

    def end(self, move: Move) -> bool:
        """End a part; return whether its node has not disowned it, which may happen as an earlier part ends."""
        node = move.node
        self.num_moves[node.adapter] -= 1
        if move.to_device:
            self.pages_loading_now -= len(move.pages)
        if self.current.get(node) is not move:
            return False
        del self.current[node]
        return True

    def moves(self) -> Iterator[Move]:
        """Yield every part that is queued or in flight."""
        yield from self._queued
        for moves in self.copies.values():
            yield from moves

    # ------------------------------------------------------------ reads

    def read(self, node: Node, to_device: bool) -> commands.ReadAdapter:
        """Return the command to read an adapter into its node's pages in one tier."""
        self.reads[node.adapter] = node, to_device
        if to_device:
            return commands.ReadAdapter(node.adapter, node.pages, "device")
        return commands.ReadAdapter(node.adapter, node.host_pages, "host")

    @property
    def is_lane_busy(self) -> bool:
        """Whether a copy to the device, or a read, is in flight or queued."""
        return bool(self.pages_loading_now or self.reads)
