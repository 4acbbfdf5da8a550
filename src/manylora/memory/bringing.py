"""Makes copies in groups of layers with one kernel, where operations have such a kernel.

The step loop's thread launches it, so that no other thread competes with that one. Owns the kernel's tables,
the numbers of copies, and the choice of copies for the kernel. Other copies land whole (``copier``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from manylora.devices.device import CopyLane, Device, Tensors
from manylora.devices.staging import StagingBuffer, seen_by
from manylora.kernels.ops import BRING_PROGRAMS, MOST_WORDS, Ops, bring_table, table_words
from manylora.memory.gates import CopyGate, LandedWords
from manylora.memory.pool import Arena, HostPool
from manylora.types import PageId

_WORD = 8

_TABLES = 4
"""The number of tables. With this many copies in flight, the next copy waits for the first one's table."""

_log = logging.getLogger(__name__)


def bringer_of(ops: Ops, arena: Arena, host: HostPool, device: Device, num_groups: int) -> Bringer | None:
    """Return a compiled Bringer, with which steps await copies in ``num_groups`` groups of layers. None where
    operations have no such kernel, the host pool is empty, or a slab is not a whole number of words."""
    if not ops.brings or host.num_pages == 0 or host.shape.slab_bytes % _WORD:
        return None
    return Bringer(ops, arena, host, device, num_groups)


class Bringer:
    """A maker of copies by one kernel. Used by the step loop's thread.

    A launch takes the host a tenth of a millisecond, more after a pause, and a cold request waits for it. So
    the launch is captured once for each of a few tables, which keep their addresses, and replayed.
    """

    def __init__(self, ops: Ops, arena: Arena, host: HostPool, device: Device, num_groups: int) -> None:
        self.words = LandedWords(host.shape.layers, num_groups, device)
        self._ops = ops
        self._arena = arena
        self._host = host
        self._device = device
        self._target = arena.run(0, arena.num_pages).view(torch.int64)
        self._scratch = device.zeros((BRING_PROGRAMS, MOST_WORDS), torch.int64)
        self._done = device.zeros((len(self.words.groups),), torch.int32)
        self._tables = [StagingBuffer(device.torch_device) for _ in range(_TABLES)]
        self._turn = 0
        self._source: torch.Tensor | None = None
        self._starts: dict[int, Callable[[], None]] = {}  # by the table's place
        slab_words = host.shape.slab_bytes // _WORD
        self._groups = [(first * slab_words, (end - first) * slab_words) for first, end in self.words.groups]
        self._num_copies = 0
        # Compiles the kernel, by an empty copy from memory that need not be the pool's.
        table, was_issued = _staged(self._tables[0], _NOTHING).lend()
        self._launch(self._scratch.view(-1), table)
        was_issued()

    def can_bring(self, pairs: Sequence[tuple[PageId, PageId]]) -> bool:
        """Return whether the kernel can make this copy: the source pages are pinned, and there are not too
        many."""
        return (
            table_words(len(self.words.groups), len(pairs)) <= MOST_WORDS
            and max(pairs, default=(0, 0))[0] < self._host.pages_pinned
        )

    def bring(self, lane: CopyLane, pairs: Sequence[tuple[PageId, PageId]], gate: CopyGate) -> None:
        """Copy (source, destination) pages group by group, and open the gate. Steps with gates on the device
        see each group as it lands; other steps see the whole copy at its end. Raises IndexError where there
        is no such page, and RuntimeError where the launch fails."""
        check_pages([source for source, _ in pairs], self._host.num_pages)
        check_pages([target for _, target in pairs], self._arena.num_pages)
        words = self._host.shape.page_bytes // _WORD
        targets, sources = [target * words for _, target in pairs], [source * words for source, _ in pairs]
        turn = self._turn = (self._turn + 1) % _TABLES
        start = self._starts.get(turn)
        if start is None:
            start = self._starts[turn] = self._captured(self._tables[turn])
        self._num_copies += 1
        _staged(self._tables[turn], bring_table(self._num_copies, self._groups, targets, sources))
        lane.launch(start)
        gate.open(lane.landing(), self._num_copies)

    def _captured(self, staged: StagingBuffer) -> Callable[[], None]:
        """Return a function that launches a copy by this table, whatever the table holds at that time."""
        table, was_issued = _staged(staged, _NOTHING).lend()
        if self._source is None:
            pool = self._host.run(0, self._host.num_pages)
            self._source = seen_by(self._device.torch_device, pool).view(torch.int64)
        source = self._source

        def launch() -> Tensors:
            self._launch(source, table)
            return ()

        try:
            replay = self._device.capture(launch)
        except RuntimeError as error:
            _log.warning("copies in layer groups are launched one by one: %s", error)
            replay = launch
        was_issued()

        def start() -> None:
            replay()
            was_issued()

        return start

    def _launch(self, source: torch.Tensor, table: torch.Tensor) -> None:
        self._ops.bring_groups(self._target, source, table, self._scratch, self.words.words, self._done)


_NOTHING = bring_table(0, (), (), ())


def _staged(buffer: StagingBuffer, table: Sequence[int]) -> StagingBuffer:
    """Write ``table`` into the buffer, at its unchanging address, once the device has read the previous
    contents."""
    buffer.hold(MOST_WORDS, torch.int64).numbers[: len(table)] = table
    return buffer


def check_pages(pages: Sequence[PageId], num_pages: int) -> None:
    """Raise IndexError where there is no such page."""
    if pages and not 0 <= min(pages) <= max(pages) < num_pages:
        raise IndexError(f"page {max(pages)} is not one of {num_pages}")
