"""Copies in layer groups by one kernel, where operations have one: launched by the step loop's thread, so that no
other works beside it.

Owns the kernel's tables and which copies it is for. Others, and what a device without such a kernel copies, are
the lane's thread's (``copier``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from manylora.devices.device import CopyLane, Device
from manylora.devices.staging import StagingBuffer, moves_by_kernel, seen_by, upload_buffers
from manylora.kernels.bring_table import MOST_WORDS, NUM_PROGRAMS, BroughtGroup, bring_table, table_words
from manylora.memory.arena import Arena
from manylora.memory.gates import CopyGate, LandedWords, LayerGroups
from manylora.memory.host import HostPool
from manylora.types import PageId

BY_KERNEL = True
"""Whether copies are brought by a kernel where they can be. Off only to measure what that is worth."""

MOST_BYTES = 384 * 2**20
"""A larger copy takes longer than its step, and a copy engine moves a few percent more a second."""

_WORD = 8


@runtime_checkable
class _BringsGroups(Protocol):
    def bring_groups(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        table: torch.Tensor,
        scratch: torch.Tensor,
        words: torch.Tensor,
        done: torch.Tensor,
    ) -> None:
        """See ``kernels.triton.bringing``."""


def bringer_of(
    ops: object, words: LandedWords, arena: Arena, host: HostPool, device: Device
) -> Bringer | None:
    """None where operations have no such kernel, or the device's kernels do not read pinned memory."""
    if not isinstance(ops, _BringsGroups) or not moves_by_kernel(device.torch_device):
        return None
    if host.num_pages == 0 or host.shape.slab_bytes % _WORD:
        return None
    bringer = Bringer(ops, words, arena, host, device)
    bringer.compile()
    return bringer


class Bringer:
    """Used by the step loop's thread."""

    def __init__(
        self, ops: _BringsGroups, words: LandedWords, arena: Arena, host: HostPool, device: Device
    ) -> None:
        self._ops = ops
        self._words = words
        self._arena = arena
        self._host = host
        self._device = device.torch_device
        self._target = arena.run(0, arena.num_pages).view(torch.int64)
        self._words_of = words.words.unbind(1)
        self._scratch = device.zeros((NUM_PROGRAMS, MOST_WORDS), torch.int64)
        self._done = device.zeros((len(words.groups),), torch.int32)
        self._source: torch.Tensor | None = None
        self._brought: dict[LayerGroups, list[BroughtGroup]] = {}

    def compile(self) -> None:
        """Before the first copy: one of nothing, from memory that need not be the pool's."""
        nothing = np.zeros(0, dtype=np.int64)
        self._launch(self._scratch.view(-1), self._staged(bring_table(0, (), nothing, nothing)), order=0)

    def can_bring(self, pairs: Sequence[tuple[PageId, PageId]], gate: CopyGate) -> bool:
        """Of pinned pages, not too many, in no more groups than there are words for."""
        return (
            BY_KERNEL
            and table_words(len(gate.groups), len(pairs)) <= MOST_WORDS
            and len(pairs) * self._host.shape.page_bytes <= MOST_BYTES
            and gate.num_ahead == 0
            and len(gate.groups) <= len(self._words.groups)
            and max(pairs, default=(0, 0))[0] < self._host.pages_pinned
        )

    def bring(self, lane: CopyLane, pairs: Sequence[tuple[PageId, PageId]], gate: CopyGate) -> None:
        """Copy (source, destination) pages group by group, and open the gate: for steps whose gates are on the
        device each group as it lands, for others all of them once the whole copy has. Raises IndexError where
        there is no such page, RuntimeError."""
        groups = self._brought.get(gate.groups)
        if groups is None:
            groups = self._brought[gate.groups] = self._described(gate.groups)
        pages = np.array(pairs, dtype=np.int64).T
        check_pages(pages[0], self._host.num_pages)
        check_pages(pages[1], self._arena.num_pages)
        sources, targets = pages * (self._host.shape.page_bytes // _WORD)
        staged = self._staged(bring_table(gate.number, groups, targets, sources))
        if self._source is None:
            self._source = seen_by(self._device, self._host.run(0, self._host.num_pages)).view(torch.int64)
        source = self._source
        lane.launch(lambda: self._launch(source, staged, gate.order))
        gate.open(lane.landing(), len(gate.groups))

    def _described(self, groups: LayerGroups) -> list[BroughtGroup]:
        slab_words = self._host.shape.slab_bytes // _WORD
        found = []
        for first, end in groups:
            marked = self._words.of_layers((first, end))
            length = (end - first) * slab_words
            found.append(BroughtGroup(first * slab_words, length, marked.start, len(marked)))
        return found

    def _staged(self, table: np.ndarray) -> StagingBuffer:
        stage = upload_buffers(self._device).hold(len(table), torch.int64)
        stage.numbers[:] = table
        return stage

    def _launch(self, source: torch.Tensor, staged: StagingBuffer, order: int) -> None:
        table, was_issued = staged.lend()
        self._ops.bring_groups(self._target, source, table, self._scratch, self._words_of[order], self._done)
        was_issued()


def check_pages(pages: np.ndarray, num_pages: int) -> None:
    """Raises IndexError where there is no such page."""
    if len(pages) and not 0 <= pages.min() <= pages.max() < num_pages:
        raise IndexError(f"page {pages.max()} is not one of {num_pages}")
